"""Caches of integers with an FP16 scale for 32 of a row, as llama.cpp's CPU kernels hold and multiply them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_diag import inspect
from attn_diag.results.quality import QuantityVerdict

T, D = 192, 64


def q8_0(x: Tensor) -> Tensor:
    """amax / 127, which is stored in FP16 once codes are made with it in FP32."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    quotient = blocks * (1 / scale)
    codes = (quotient + 0.5 * quotient.sign()).trunc()
    found: Tensor = (codes * scale.half().float()).reshape(x.shape)
    return found


def q4_0(x: Tensor, bits: int = 4) -> Tensor:
    """The number of the largest magnitude, with its sign, over -8."""
    blocks, half = x.reshape(*x.shape[:-1], -1, 32), 2 ** (bits - 1)
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = largest / -half
    codes = (blocks * (1 / scale) + half + 0.5).trunc().clamp(max=2 * half - 1) - half
    found: Tensor = (codes * scale.half().float()).reshape(x.shape)
    return found


def q5_0(x: Tensor) -> Tensor:
    return q4_0(x, 5)


def inputs(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 1, T, D, generator=generator).half().float() for _ in range(3)]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With all else in FP32."""
    found: Tensor = (q @ k.mT * D**-0.5).softmax(-1) @ v
    return found


def verdict_of(q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> QuantityVerdict:
    (found,) = inspect(q, k, v, o=o).captures[0].observations[0].heads[0].quantities
    return found


def test_scales_in_fp16_are_told_and_leave_nothing() -> None:
    q, k, v = inputs()
    found = verdict_of(q.half(), k.half(), v.half(), attention(q8_0(q), q8_0(k), q8_0(v)))
    assert found.answer == "lossy"
    assert found.patterns[0].words == (
        "all rows are what k, v and q held in INT8 (an FP16 scale for 32 of a row) give, and but for that as good as a "
        "well-rounded kernel's"
    )


@pytest.mark.parametrize(("cache", "name", "lowest"), [(q4_0, "INT4", 8), (q5_0, "INT5", 16)])
def test_scales_with_a_sign_are_told(cache, name: str, lowest: int) -> None:  # type: ignore[no-untyped-def]
    q, k, v = inputs(1)
    found = verdict_of(q.half(), k.half(), v.half(), attention(q8_0(q), cache(k), cache(v)))
    assert found.patterns[0].formats == {"k": name, "v": name, "q": "INT8"}
    assert f"the number of largest magnitude over -{lowest}" in found.patterns[0].words


def test_scales_in_fp32_are_not_said_to_be_in_16_bits() -> None:
    q, k, v = inputs(2)

    def in_fp32(x: Tensor) -> Tensor:
        blocks = x.reshape(*x.shape[:-1], -1, 32)
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        return ((blocks / scale).round() * scale).reshape(x.shape)

    found = verdict_of(q.half(), k.half(), v.half(), attention(q, in_fp32(k), in_fp32(v)))
    assert "INT8 (a scale for 32 of a row)" in found.patterns[0].words


def test_fp32_inputs_near_a_format_are_not_said_to_be_no_rounding() -> None:
    q, k, v = inputs(3)
    o = attention(q8_0(q), q8_0(k), q8_0(v))
    o = o + 0.002 * o.roll(1, -1)
    head = inspect(q, k, v, o=o).captures[0].observations[0].heads[0]
    assert head.verdict is not None
    assert head.verdict.labels == ("wrong",)
    assert head.quantities[0].patterns[0].near
    (advice,) = head.verdict.suggestions
    assert advice.startswith("q, k or v lost their bits")
    assert "No rounding makes this error" not in advice


@pytest.mark.parametrize("cache", [q8_0, q4_0])
@pytest.mark.parametrize("out", [torch.float32, torch.float16])
def test_a_causal_border_one_key_further_on_is_wrong_beside_them(cache, out: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """O was half of itself off, and lossy: none of the roundings that were tried made it."""
    q, k, v = inputs(4)
    scores = q8_0(q) @ cache(k).mT * D**-0.5
    o = scores.masked_fill(torch.ones(T, T).triu(2) > 0, -torch.inf).softmax(-1) @ cache(v)
    found = inspect(*(x.half() for x in (q, k, v)), o=o.to(out), causal="top-left").captures[0].observations[0]
    (verdict,) = found.heads[0].quantities
    assert verdict.answer == "wrong"
    assert "near what a causal border one key further on gives" in verdict.words


def test_another_cache_is_no_mistake_of_the_kernel() -> None:
    """Held in four bits, O is a tenth of itself off, and nothing is said of its mask or its heads."""
    q, k, v = inputs(5)
    scores = q8_0(q) @ q4_0(k).mT * D**-0.5
    o = scores.masked_fill(torch.ones(T, T).triu(1) > 0, -torch.inf).softmax(-1) @ q4_0(v)
    found = inspect(*(x.half() for x in (q, k, v)), o=o, causal="top-left").captures[0].observations[0].heads[0]
    assert found.quantities[0].answer == "lossy"
    assert found.quantities[0].patterns[0].kind == "operands"


@pytest.mark.parametrize("highest", [127, 7])
def test_one_scale_of_all_heads_is_told_of_those_that_do_not_have_its_number(highest: int) -> None:
    """ONNX Runtime's caches in INT8 and INT4 with a scale a tensor; of INT4 it was "24 % off" in such heads."""
    generator = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(1, 2, T, D, generator=generator).half().float() for _ in range(3))
    k[:, 1], v[:, 1] = 0.7 * k[:, 1], 0.6 * v[:, 1]
    q, k, v = (x.half() for x in (q, k, v))
    held = [
        (x.float() / (x.float().abs().amax() / highest)).round() * (x.float().abs().amax() / highest) for x in (k, v)
    ]
    heads = inspect(q, k, v, o=attention(q.float(), *held).half()).captures[0].observations[0].heads
    (verdict,) = heads[1].quantities
    bits = 8 if highest == 127 else 4
    assert f"k and v held in INT{bits} (a scale for all heads) give, and but for that as good" in verdict.words


@pytest.mark.parametrize("seed", [7, 9])
def test_codes_above_the_lowest_number_are_not_said_to_have_scales_of_16_bits(seed: int) -> None:
    """KIVI's round((x - low) / s) breaks ties otherwise: an FP16 scale left less by chance, and was told."""

    def held(x: Tensor, dim: int) -> Tensor:
        low, high = x.float().amin(dim, keepdim=True), x.float().amax(dim, keepdim=True)
        scale = (high - low) / 15
        return ((x.float() - low) / scale).round() * scale + low

    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, 96, 32, generator=generator).bfloat16() for _ in range(3))
    later = torch.ones(96, 96, dtype=torch.bool).triu(1)
    scores = (q.float() @ held(k, 2).mT * 32**-0.5).masked_fill(later, -torch.inf)
    probs = (scores - scores.amax(-1, keepdim=True)).exp()
    o = ((probs.bfloat16().float() @ held(v, 3)) / probs.sum(-1, keepdim=True)).bfloat16()
    found = inspect(q, k, v, o=o, causal=True, device="cpu")
    said = str([head.quantities for head in found.captures[0].observations[0].heads])
    assert "k held in INT4 (a scale for a feature and a zero point" in said
    assert "16 scale" not in said
