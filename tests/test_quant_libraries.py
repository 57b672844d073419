"""``quant`` on the quantisers of libraries, by their own formulas and by values that they made."""

from __future__ import annotations

import base64
from collections.abc import Callable

import pytest
import torch
from fake_quantisers import inputs, weight
from torch import Tensor

import attn_diag
from attn_diag.kernels.quantizers import parse_quantizer

Quantised = Callable[[Tensor], Tensor]

# Two rows of 64 numbers (torch.randn of a generator with seed 0, times 0.02) in fp32 and in BF16, and what libraries
# made of them on a CPU in groups of 64: bitsandbytes 0.50.2 (dequantize_4bit of quantize_4bit), HQQ 0.2.8.post1
# (Quantizer.quantize with axis=1, optimize=False; cpu; dequantize) and optimum-quanto 0.2.7 (quantize_weight with
# MaxOptimizer and qint4). Each with its declaration here, and as base64 of its bytes.
RECORDED: dict[str, tuple[str, str]] = {
    "w": (
        "",
        "JXW4vH3NvLwcOKS7ZCwOvH4NizzvwWI8JRrPu11HLb3CNNM7GfzOvG9d5TtL8Mk7IxQdOyLHyjwH+bY8ZA6iu2me3bxB7gq9Ga45PCcC"
        "gjxLOkQ8asn+vMW237tbzBc9dNJ1PBjbP7xLRmO7+3xwOz2i4zzX8wE9oQqbPF46irwUD0m8D6MlOr1wIbwUzaI7XBQQPO9WEzuP+VE8"
        "344QPGwZBruC1YE8Lda9uy2liTq3VCs8vpg8PeCp8LxG+wG94I5cvDIBjzzm6Kw8cxppO+Hzlru9XgC83QYyPDd8AbxpNxK8+8xzPIEy"
        "+Ty2sYs9ht76vGAzyrxnEhU9lLk0vP2HOrxmupY8Af+1PD1V0zwcL/K8xk5SPSoIG7wT6Ns7cXkFvdcjNLxqOx28U7wjvGbQrrz0q7Y8"
        "gGE4u8EDhDzwtPS68yFhPH9Zibx0n5U3me+JPEwVA7wyTqo8HrjqOxw4obtFnzw94iUavT1bgrqUNau8jbacvLPNLzphrmg8VdQGPZ7Z"
        "3rx80OE7qlkqPFgVVr2m+Qq9npSVu6d4tztg06E7/o3JOveD3Tv75RQ867oVPE7IjbxuAoA8XdiXvDNqj7sFe0e9RCS/uskvMrrxsp08"
        "tdTkO+v4lryvT5O6vAtMvNbzF7yybh099+cDvMZmIjuP1r48F0mXPGFL4zw=",
    ),
    "bitsandbytes nf4": (
        "nf4",
        "cfCevHHwnryugcu7roHLu5eFiTwd2TM8roHLuxeCQr3Y3rE7s6vcvNjesTvY3rE7AAAAALXRvDy10bw8roHLu7Or3LwFsxK9HdkzPJeF"
        "iTwd2TM8s6vcvK6By7tLMB09l4WJPIN+Tryugcu72N6xOyZC9jwmQvY8l4WJPHHwnryDfk68AAAAAIN+TrzY3rE7HdkzPAAAAAAd2TM8"
        "HdkzPAAAAACXhYk8roHLuwAAAAAd2TM8WfxJPbOr3LwFsxK9g35OvJeFiTy10bw82N6xO66By7uugcu7HdkzPK6By7uugcu7l4WJPCZC"
        "9jy2sYs9s6vcvLOr3LxLMB09g35OvEk6Hrwfr5A8grK8PIKyvDye0eC8WBVWPUk6HrxXzwk8FgsVvUk6HrxJOh68SToevC0XqbyCsrw8"
        "OvCbux+vkDwAAAAAFMFSPKGTc7wAAAAAH6+QPEk6HryCsrw8V88JPDrwm7tYFVY9FgsVvQAAAAAtF6m8LRepvAAAAAAUwVI81uTwPJ7R"
        "4LxXzwk8V88JPFgVVr0WCxW9OvCbu2hLiDtoS4g7AAAAAFfPCTxXzwk8V88JPKGTc7wfr5A8LRepvDrwm7tYFVa9AAAAAAAAAAAfr5A8"
        "V88JPC0XqbwAAAAAoZNzvEk6HrzmxRo9SToevGhLiDuCsrw8H6+QPNbk8Dw=",
    ),
    "bitsandbytes fp4": (
        "bnb-fp4",
        "SEK6vEhCurxIQrq5SEI6vLaxizxIQjo8SEI6vEhCOr1IQjo8SEK6vEhCOjxIQjo8SEK6OUhCujxIQro8SEK6uUhCury2sQu9SEI6PLax"
        "izxIQjo8trELvUhCOry2sQs9trGLPEhCOrxIQrq5SEK6OUhCujy2sQs9trGLPLaxi7xIQjq8SEK6OUhCOrxIQro5SEI6PEhCujlIQjo8"
        "SEI6PEhCurm2sYs8SEK6uUhCujlIQjo8SEI6PbaxC722sQu9SEI6vLaxizxIQro8SEK6OUhCurlIQjq8SEI6PEhCOrxIQjq8trGLPLax"
        "Cz22sYs9trELvUhCury2sQs9SEI6vFgVVrzmuI48WBXWPFgV1jxYFda8WBVWPea4DrzmuA485rgOvVgVVrzmuA685rgOvOa4jrxYFdY8"
        "5riOuea4jjzmuI65WBVWPOa4jrwAAAAA5riOPOa4DrzmuI485rgOPOa4DrxYFVY95rgOvea4jrnmuI685riOvOa4jjlYFVY85rgOPVgV"
        "1rzmuA485rgOPFgVVr3muA695rgOvOa4DjzmuA485riOOea4DjzmuA485rgOPOa4jrzmuI485riOvOa4jrlYFVa95riOuea4jrnmuI48"
        "5rgOPOa4jrzmuI65WBVWvOa4DrzmuA495rgOvOa4jjlYFdY85riOPFgV1jw=",
    ),
    "hqq": (
        "int4-asymmetric block=64 zero_point=float",
        "nn2lvJ59pbwtHrO7LR6zu5FJiDyRSYg8LR6zu11HLb0Q3Rc8qNjhvBDdFzwQ3Rc85Df5OpukxDybpMQ8LR6zu6jY4bzZGQ+9EN0XPJFJ"
        "iDwQ3Rc8qNjhvC0es7tXrR49kUmIPClFUrwtHrO75Df5OtJ/AD3SfwA9kUmIPJ59pbwpRVK85Df5OilFUrzkN/k6EN0XPOQ3+ToQ3Rc8"
        "EN0XPC0es7uRSYg8LR6zu+Q3+ToQ3Rc83No8PajY4bzZGQ+9KUVSvJFJiDybpMQ85Df5Oi0es7stHrO7EN0XPC0es7stHrO7kUmIPNJ/"
        "AD21sYs9qNjhvKjY4bxXrR49KUVSvMhOMbwksIk8BkbCPAZGwjyFNAG9x05SPchOMbyENCI8hTQBvchOMbzITjG8yE4xvCjTybwGRsI8"
        "CUaAuySwiTwJRoC7JLCJPEY9kbz+IkQ7JLCJPMhOMbwGRsI8hDQiPAlGgLvWAzY9dn8dvQlGgLtGPZG8Rj2RvP4iRDsksIk86Nv6PCjT"
        "ybyENCI8hDQiPFgVVr2FNAG9CUaAu/4iRDv+IkQ7/iJEO4Q0IjyENCI8hDQiPEY9kbwksIk8Rj2RvAlGgLtnyjm9CUaAuwlGgLsksIk8"
        "hDQiPEY9kbwJRoC7yE4xvMhOMbzluBk9yE4xvP4iRDsGRsI8JLCJPOjb+jw=",
    ),
    "quanto": (
        "int4-asymmetric block=64 zero_point=float",
        "nn2lvJ59pbwoHrO7KB6zu5JJiDySSYg8KB6zu11HLb0Q3Rc8p9jhvBDdFzwQ3Rc84Df5OpqkxDyapMQ8KB6zu6fY4bzYGQ+9EN0XPJJJ"
        "iDwQ3Rc8p9jhvCges7tXrR49kkmIPChFUrwoHrO74Df5OtN/AD3TfwA9kkmIPJ59pbwoRVK84Df5OihFUrzgN/k6EN0XPOA3+ToQ3Rc8"
        "EN0XPCges7uSSYg8KB6zu+A3+ToQ3Rc829o8PafY4bzYGQ+9KEVSvJJJiDyapMQ84Df5Oiges7soHrO7EN0XPCges7soHrO7kkmIPNN/"
        "AD22sYs9p9jhvKfY4bxXrR49KEVSvMxOMbwgsIk8BEbCPARGwjyGNAG9xk5SPcxOMbyANCI8hjQBvcxOMbzMTjG8zE4xvCnTybwERsI8"
        "EEaAuyCwiTwQRoC7ILCJPEg9kbzwIkQ7ILCJPMxOMbwERsI8gDQiPBBGgLvUAzY9dn8dvRBGgLtIPZG8SD2RvPAiRDsgsIk85Nv6PCnT"
        "ybyANCI8gDQiPFgVVr2GNAG9EEaAu/AiRDvwIkQ78CJEO4A0IjyANCI8gDQiPEg9kbwgsIk8SD2RvBBGgLtnyjm9EEaAuxBGgLsgsIk8"
        "gDQiPEg9kbwQRoC7zE4xvMxOMbzkuBk9zE4xvPAiRDsERsI8ILCJPOTb+jw=",
    ),
    "w bf16": (
        "",
        "uLy9vKS7DryLPGM8z7stvdM7z7zlO8o7HTvLPLc8orvevAu9OjyCPEQ8/7zguxg9djxAvGO7cDvkPAI9mzyKvEm8JjohvKM7EDwTO1I8"
        "ETwGu4I8vruKOis8PT3xvAK9XbyPPK08aTuXuwC8MjwBvBK8dDz5PIw9+7zKvBU9Nbw7vJc8tjzTPPK8Uj0bvNw7Bb00vB28JLyvvLc8"
        "OLuEPPW6YTyJvJY3ijwDvKo86zuhuz09Gr2Cuqu8nbwwOmk8Bz3fvOI7KjxWvQu9lru3O6I7yjreOxU8FjyOvIA8mLyPu0e9v7oyup48"
        "5TuXvJO6TLwYvB09BLwiO788lzzjPA==",
    ),
    "bitsandbytes nf4 bf16": (
        "nf4",
        "n7yfvMy7zLuKPDQ8zLtDvbI73byyO7I7AAC9PL08zLvdvBO9NDyKPDQ83bzMux49ijxPvMy7sjv3PPc8ijyfvE+8AABPvLI7NDwAADQ8"
        "NDwAAIo8zLsAADQ8Sj3dvBO9T7yKPL08sjvMu8y7NDzMu8y7ijz3PIw93bzdvB49T7wevJE8vTy9POG8Vj0evAo8Fb0evB68HrypvL08"
        "nLuRPAAAUzxzvAAAkTwevL08Cjycu1Y9Fb0AAKm8qbwAAFM88TzhvAo8CjxWvRW9nLuIO4g7AAAKPAo8CjxzvJE8qbycu1a9AAAAAJE8"
        "CjypvAAAc7wevBs9HryIO708kTzxPA==",
    ),
    "hqq bf16": (
        "int4-asymmetric block=64 zero_point=float scale=bf16",
        "pLykvK67rruKPIo8rrstvRs84bwbPBs8CDvHPMc8rrvhvA+9GzyKPBs84byuuyA9ijxQvK67CDsCPQI9ijykvFC8CDtQvAg7GzwIOxs8"
        "Gzyuu4o8rrsIOxs8Pj3hvA+9ULyKPMc8CDuuu667Gzyuu667ijwCPYw94bzhvCA9ULwxvIo8wjzCPAG9Uj0xvCI8Ab0xvDG8MbzJvMI8"
        "fruKPH67ijyRvEY7ijwxvMI8Ijx+uzY9Hb1+u5G8kbxGO4o8+zzJvCI8IjxWvQG9frtGO0Y7RjsiPCI8IjyRvIo8kbx+uzm9frt+u4o8"
        "IjyRvH67MbwxvBo9MbxGO8I8ijz7PA==",
    ),
    "quanto bf16": (
        "int4-asymmetric block=64 zero_point=float scale=bf16",
        "pbylvLC7sLuIPIg8sLstvRg84rwYPBg8ADvGPMY8sLvivA+9GDyIPBg84rywux89iDxSvLC7ADsBPQE9iDylvFK8ADtSvAA7GDwAO4g8"
        "GDywu4g8sLsAOxg8PT3ivA+9UryIPMY8ADuwu7C7GDywu1K8iDwBPYw94rzivB89UrwwvIg8wDzAPAG9Uj0wvCA8Ab0wvDC8MLzKvMA8"
        "gLuIPIC7iDySvEA7iDwwvMA8IDyAuzY9Hr2Au5K8krxAO4g8/DzKvCA8IDxWvQG9gLtAO0A7QDsgPCA8IDySvIg8kryAuzq9gLuAu4g8"
        "IDySvIC7MLwwvBo9MLxAO8A8iDz8PA==",
    ),
}


def groups(w: Tensor, size: int) -> Tensor:
    return w.reshape(len(w), -1, size)


def awq(w: Tensor, bits: int = 4, size: int = 32) -> Tensor:
    """AWQ's pseudo_quantize_tensor (github.com/mit-han-lab/llm-awq, awq/quantize/quantizer.py)."""
    x, most = groups(w, size), (1 << bits) - 1
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (high - low).clamp(min=1e-5) / most
    zero = (-torch.round(low / scale)).clamp_(0, most)
    return ((torch.clamp(torch.round(x / scale) + zero, 0, most) - zero) * scale).reshape(w.shape)


def compressed_asymmetric(w: Tensor, size: int = 32) -> Tensor:
    """compressed-tensors 0.20.1: calculate_qparams and _quantize_dequantize of W4A16_ASYM."""
    x = groups(w, size)
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / torch.tensor(15.0).to(w.dtype)
    zero = (-8 - low / scale).clamp(-8, 7).round().to(torch.int8)
    codes = (x / scale + zero.to(w.dtype)).clamp(-8, 7).round()
    return ((codes - zero.to(w.dtype)) * scale).reshape(w.shape)


def hqq(w: Tensor, bits: int = 4, size: int = 32) -> Tensor:
    """HQQ 0.2.8.post1: Quantizer.quantize(axis=1, optimize=False), moved to w's dtype, and dequantize."""
    x, most = groups(w, size).float(), (1 << bits) - 1
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = most / (high - low)
    zero = -low * scale
    codes = (x * scale + zero).round_().clamp_(0, most)
    return ((codes.to(w.dtype) - zero.to(w.dtype)) * (1.0 / scale).to(w.dtype)).reshape(w.shape)


def quanto(w: Tensor, bits: int = 4, size: int = 32) -> Tensor:
    """optimum-quanto 0.2.7: MaxOptimizer, quantize_affine and QBitsDequantizer."""
    x, most = groups(w, size), (1 << bits) - 1
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale, shift = (high - low) / most, -low
    codes = torch.clamp(torch.round((x + shift) / scale), min=0, max=most).to(torch.uint8)
    return (scale * codes - shift).reshape(w.shape)


def bitnet(w: Tensor) -> Tensor:
    """BitNet b1.58's weight_quant and straight-through sum (The Era of 1-bit LLMs: Training Tips, Code and FAQ)."""
    scale = 1.0 / w.abs().mean().clamp_(min=1e-5)
    quantised = (w * scale).round().clamp_(-1, 1) / scale
    return w + (quantised - w).detach()


def bitnet_activations(x: Tensor) -> Tensor:
    """Its activation_quant."""
    scale = 127.0 / x.abs().max(dim=-1, keepdim=True).values.clamp_(min=1e-5)
    return (x * scale).round().clamp_(-128, 127) / scale


def gptq(w: Tensor, size: int = 128, bits: int = 4) -> Tensor:
    """GPTQ's Quantizer.find_params with sym=True and its quantize (github.com/IST-DASLab/gptq, quant.py)."""
    x, most = groups(w, size).float(), (1 << bits) - 1
    high = x.abs().amax(-1, keepdim=True)
    scale, zero = (high + high) / most, (most + 1) / 2
    return (scale * (torch.clamp(torch.round(x / scale) + zero, 0, most) - zero)).reshape(w.shape).to(w.dtype)


def divided(target: float, low: int, high: int, size: int) -> Quantised:
    """compressed-tensors' symmetric integers, all in w's dtype."""

    def made(w: Tensor) -> Tensor:
        x = groups(w, size)
        scale = x.abs().amax(-1, keepdim=True) / torch.tensor(target).to(w.dtype)
        return ((x / scale).clamp(low, high).round() * scale).reshape(w.shape)

    return made


def nvfp4_in_bf16(w: Tensor) -> Tensor:
    """compressed-tensors 0.20.1 NVFP4A16 of a BF16 weight: the factor 2688 / amax and amax / 6 are BF16 numbers."""
    x = groups(w, 16)
    factor = (2688.0 / w.abs().amax()).float().reshape(1)  # without a dimension it would not make fp32 of BF16
    scale = (factor * (x.abs().amax(-1, keepdim=True) / torch.tensor(6.0).to(w.dtype))).to(torch.float8_e4m3fn)
    scale = scale.float() / factor
    codes = attn_diag.round_to((x / scale).clamp(-6, 6), "e2m1")
    return (codes * scale).to(w.dtype).reshape(w.shape)


ASYMMETRIC: dict[str, Callable[..., Tensor]] = {"awq": awq, "compressed-tensors": compressed_asymmetric}
REAL: dict[str, Callable[..., Tensor]] = {"hqq": hqq, "quanto": quanto}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ASYMMETRIC)
def test_a_zero_point_in_any_order_of_arithmetic(name: str, dtype: torch.dtype) -> None:
    w = weight(30).to(dtype)
    declared = "int4-asymmetric"
    if dtype != torch.float32:
        short = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        found = attn_diag.quant(w, declared, observed=ASYMMETRIC[name](w))
        assert f"but with scales and arithmetic in {short}" in found.headline
        assert str(found.next).endswith(f"--quantizer int4-asymmetric --set scale={short}")
        by = attn_diag.quantizer(declared, scale=short)
    else:
        by = attn_diag.quantizer(declared)
    found = attn_diag.quant(w, by, observed=ASYMMETRIC[name](w))
    assert (found.outcome, found.matches[0].equal) == ("pass", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("name", REAL)
def test_a_zero_point_that_is_no_integer(name: str, bits: int, dtype: torch.dtype) -> None:
    w = weight(31).to(dtype)
    values = REAL[name](w, bits)
    by = attn_diag.quantizer("int4-asymmetric", elements=f"int{bits}", zero_point="float")
    if dtype == torch.bfloat16:
        by = attn_diag.quantizer(by, scale="bf16")
    found = attn_diag.quant(w, by, observed=values)
    assert (found.outcome, found.matches[0].equal) == ("pass", 1)
    integer = attn_diag.quantizer("int4-asymmetric", elements=f"int{bits}")
    found = attn_diag.quant(w, integer, observed=values)
    assert found.outcome == "fail"
    if bits < 8 or dtype == torch.float32:
        assert "but with a zero point that is not rounded" in found.headline
        assert "--set zero_point=float" in str(found.next)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitnets_weights_are_ternary(dtype: torch.dtype) -> None:
    w = weight(32).to(dtype)
    declared = attn_diag.quantizer("ternary", **({} if dtype == torch.float32 else {"scale": "bf16"}))
    found = attn_diag.quant(w, declared, observed=bitnet(w))
    assert (found.outcome, found.matches[0].equal) == ("pass", 1)
    assert attn_diag.quant(w, observed=bitnet(w)).outcome == "pass"


def test_bitnets_gradient_passes_and_one_without_what_is_clipped_does_too() -> None:
    w, (x, dy) = weight(32), inputs()
    found = attn_diag.quant(w, "ternary", observed=bitnet, x=x, dy=dy)
    assert found.outcome == "pass"
    assert found.gradient is not None
    assert found.gradient.inner_right
    lost = attn_diag.quant(w, "ternary", observed=lambda t: bitnet(t) * 1.0 + 0 * t - (t - t.detach()) / 2, x=x, dy=dy)
    assert lost.outcome == "fail"


def test_a_mean_over_rows_is_not_bitnets() -> None:
    w = weight(32)
    scale = 1.0 / w.abs().mean(1, keepdim=True)
    found = attn_diag.quant(w, "ternary", observed=(w * scale).round().clamp(-1, 1) / scale)
    assert found.outcome == "fail"
    assert "but with blocks of 256: 100.00 %" in found.headline


def test_activations_by_their_factor_in_bf16() -> None:
    x = weight(33).bfloat16()
    found = attn_diag.quant(x, "int8", observed=bitnet_activations(x))
    assert "but with scales and arithmetic in bf16, times largest number over amax" in found.headline
    by = attn_diag.quantizer("int8", scale="bf16", narrow=False)
    found = attn_diag.quant(x, by, observed=bitnet_activations(x))
    assert (found.outcome, found.matches[0].equal) == ("pass", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_the_range_in_other_groups_is_named_through_its_ties(dtype: torch.dtype) -> None:
    """Of amax over 7.5 every amax is a tie: 0.2 % of the values."""
    w = weight(0, 64, 512).to(dtype)
    found = attn_diag.quant(w, attn_diag.quantizer("int4", block="128"), observed=gptq(w))
    assert found.outcome == "fail"
    assert "but with the rules of int4-half-range, blocks of 128" in found.headline


@pytest.mark.parametrize("bits", [3, 4])
def test_half_the_range_in_other_groups_and_in_bf16(bits: int) -> None:
    w = weight(0, 64, 512).bfloat16()
    half = 2.0 ** (bits - 1)
    declared = attn_diag.quantizer("int4", elements=f"int{bits}", block="128")
    values = divided(half - 0.5, int(-half), int(half) - 1, 128)(w)
    found = attn_diag.quant(w, declared, observed=values)
    assert found.outcome == "fail"
    assert "in bf16, dividing" in found.headline


def test_nvfp4_with_a_tensors_scale_in_bf16_is_named() -> None:
    w = weight(34, 128, 512).bfloat16()
    found = attn_diag.quant(w, "nvfp4", observed=nvfp4_in_bf16(w))
    assert "but with the scales of tensor and blocks made in bf16: 100.00 %" in found.headline


class TestGivenScales:
    def test_a_learned_scale_in_bf16_is_computed_in_bf16(self) -> None:
        w = weight(35).bfloat16()
        scale = (2 * w.abs().mean() / 7**0.5).bfloat16()
        values = (w / scale).clamp(-8, 7).round() * scale
        by = attn_diag.quantizer("int4", narrow=False, block="tensor")
        found = attn_diag.quant(w, by, observed=values, amax=7 * scale.double())
        assert (found.outcome, found.headline) == ("pass", f"the values are {by.name}'s, in bf16 arithmetic, dividing")

    def test_another_one_is_not(self) -> None:
        w = weight(35).bfloat16()
        scale = (2 * w.abs().mean() / 7**0.5).bfloat16()
        values = (w / scale).clamp(-8, 7).round() * scale
        by = attn_diag.quantizer("int4", narrow=False, block="tensor")
        assert not attn_diag.quant(w, by, observed=values, amax=7.1 * scale.double()).passed


class TestCodeBooks:
    @pytest.mark.parametrize("name", ["nf4", "bnb-fp4"])
    @pytest.mark.parametrize("block", ["64", "128"])
    def test_they_are_found(self, name: str, block: str) -> None:
        w = weight(36)
        by = attn_diag.quantizer(name, block=block)
        values = attn_diag.quantize(w, by).values
        assert attn_diag.quant(w, by, observed=values).matches[0].equal == 1
        found = attn_diag.quant(w, attn_diag.quantizer("int4", block=block), observed=values)
        assert f"but with the rules of {name}" in found.headline

    def test_a_block_of_another_scale_is_told(self) -> None:
        w = weight(36)
        values = attn_diag.quantize(w, "nf4").values
        values[3, :64] = attn_diag.quantize(w[3:4, :64] * 0.5, "nf4").values * 1.5
        found = attn_diag.quant(w, "nf4", observed=values)
        assert found.outcome == "fail"
        assert "row 3" in found.headline

    def test_its_gradient_is_judged(self) -> None:
        w, (x, dy) = weight(36), inputs()
        found = attn_diag.quant(w, "nf4", observed=lambda t: attn_diag.fake_quantize(t, "nf4"), x=x, dy=dy)
        assert found.outcome == "pass"
        wrong = attn_diag.quant(
            w, "nf4", observed=lambda t: attn_diag.fake_quantize(t, "nf4") + t - t.detach(), x=x, dy=dy
        )
        assert "its gradient is 1.98 times" in wrong.headline

    def test_no_other_rounding_of_one(self) -> None:
        with pytest.raises(attn_diag.InputError, match="nf4 is rounded to nearest"):
            attn_diag.quantizer("nf4", elements="nf4:down")


def recorded(name: str) -> Tensor:
    dtype = torch.bfloat16 if name.endswith("bf16") else torch.float32
    return torch.frombuffer(bytearray(base64.b64decode(RECORDED[name][1])), dtype=dtype).reshape(2, -1)


@pytest.mark.parametrize("name", [name for name in RECORDED if not name.startswith("w")])
def test_recorded_values_are_the_declarations(name: str) -> None:
    by = parse_quantizer(RECORDED[name][0])
    found = attn_diag.quant(recorded("w bf16" if name.endswith("bf16") else "w"), by, observed=recorded(name))
    assert (found.outcome, found.matches[0].equal) == ("pass", 1)


@pytest.mark.parametrize("changes", [{"zero_point": "half"}, {"zero_point": "float"}, {"scale_of": "median"}])
def test_what_cannot_be_says_so(changes: dict[str, str]) -> None:
    with pytest.raises(attn_diag.InputError, match=next(iter(changes))):
        attn_diag.quantizer("int4", **changes)
