"""Frameworks' attention on a CPU that rounds where plain torch does not: their sums, products, powers, or alpha k."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag.head.low_sums import LOW_SUMS, low_sum_ways, low_summed
from attn_diag.head.unfused import WORDS, unfused, ways
from attn_diag.reference import AttentionHead, Masking, format_of

BF16, FP16 = torch.bfloat16, torch.float16
LATER = torch.ones(96, 96, dtype=torch.bool).triu(1)
Outputs = dict[str, Any]


def inputs(dtype: torch.dtype, width: int = 64, heads: int = 1, heat: float = 1.0) -> tuple[Tensor, ...]:
    """q, k, v and dO of 96 rows."""
    drawn = torch.Generator().manual_seed(9)
    q, k, v, do = (torch.randn(1, heads, 96, width, generator=drawn) for _ in range(4))
    q, k, v, do = (x.to(dtype) for x in (heat * q, k, v, do))
    return q, k, v, do


def masked(scores: Tensor) -> Tensor:
    """Causal."""
    return scores.masked_fill(LATER, -torch.inf)


def by_mlx(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Outputs:
    """MLX 0.32 on a CPU: alpha cast, softmax in fp32, its gradient in 16 bits, a sum of which is cast at each key."""
    alpha = torch.tensor(q.shape[-1] ** -0.5).to(q.dtype)
    scaled = q * alpha
    p = masked(scaled @ k.mT).softmax(-1)
    products = p * (do @ v.mT)
    delta = torch.zeros_like(products[..., 0])
    for key in range(96):
        delta = delta + products[..., key]
    ds = products - p * delta[..., None]
    return {"o": p @ v, "dq": (ds @ k) * alpha, "dk": ds.mT @ scaled, "dv": p.mT @ do}


def one_by_one(a: Tensor, b: Tensor, *, sums: bool = True) -> Tensor:
    """a b, each product cast to their format, and each sum, or these in fp32."""
    found = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype if sums else torch.float32)
    for n in range(a.shape[-1]):
        found = found + a[..., n, None] * b[..., n, None, :]
    return found


def by_tensorflow(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Outputs:
    """TensorFlow 2.21 on a CPU in FP16, as keras.ops.dot_product_attention calls it: Eigen's products."""
    alpha = q.shape[-1] ** -0.5
    wide = masked(one_by_one(q, k.mT).float() * alpha).softmax(-1)
    p, dp = wide.to(q.dtype), one_by_one(do, v.mT).float()
    ds = (wide * (dp - (dp * wide).sum(-1, keepdim=True)) * alpha).to(q.dtype)
    return {"o": one_by_one(p, v), "dq": one_by_one(ds, k), "dk": one_by_one(ds.mT, q), "dv": one_by_one(p.mT, do)}


def by_tinygrad(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Outputs:
    """Tinygrad 0.14 on a CPU in BF16."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        return one_by_one(a, b, sums=False)

    alpha, low = q.shape[-1] ** -0.5, q.dtype
    scores = masked((product(q, k.mT) * alpha).to(low))
    wide = (scores - scores.amax(-1, keepdim=True)).float().exp()
    e = wide.to(low)
    row_sum = e.float().sum(-1, keepdim=True).to(low)
    p, dp = e / row_sum, product(do, v.mT).to(low)
    inner = (dp * e).float().sum(-1, keepdim=True).to(low)
    ds = (((dp / row_sum - inner / row_sum / row_sum).float() * wide).to(low).float() * alpha).to(low)
    made = {"o": product(p, v), "dq": product(ds, k), "dk": product(ds.mT, q), "dv": product(p.mT, do)}
    return {name: x.to(low) for name, x in made.items()}


def by_tinygrad_in_fp16(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Outputs:
    """The same in FP16, whose arithmetic C makes in fp32."""
    q, k, v, do = (x.float() for x in (q, k, v, do))

    def cast(x: Tensor) -> Tensor:
        return x.half().float()

    alpha = q.shape[-1] ** -0.5
    scores = masked(cast(q @ k.mT * alpha))
    wide = (scores - scores.amax(-1, keepdim=True)).exp()
    e, row_sum = cast(wide), cast(wide.sum(-1, keepdim=True))
    p, dp = cast(e / row_sum), cast(do @ v.mT)
    inner = cast((dp * e).sum(-1, keepdim=True))
    ds = cast((dp / row_sum - cast(inner / row_sum.square())) * wide * alpha)
    return {"o": (p @ v).half(), "dq": (ds @ k).half(), "dk": (ds.mT @ q).half(), "dv": (p.mT @ do).half()}


def reasons(given: tuple[Tensor, ...], outputs: dict[str, Any]) -> dict[str, str]:
    """What is said of each quantity."""
    q, k, v, do = given
    found = attn_diag.inspect(q, k, v, do=do, causal=True, **outputs)
    return {one.quantity: one.words for one in found.heads[0].quantities if one.quantity in outputs}


@pytest.mark.parametrize(
    ("kernel", "dtype", "width", "site", "quantities"),
    [
        (by_mlx, BF16, 64, "keys", ("dq", "dk")),
        (by_mlx, FP16, 32, "keys", ("dq", "dk")),
        (by_mlx, BF16, 32, "alpha", ("o", "dv")),
        (by_tensorflow, FP16, 64, "low-sums", ("o", "dq", "dk", "dv")),
        (by_tinygrad, BF16, 64, "low-products", ("o", "dq", "dk", "dv")),
        (by_tinygrad_in_fp16, FP16, 64, "powers", ("o", "dq", "dk", "dv")),
    ],
)
def test_a_framework_is_named(
    kernel: Callable[..., Outputs], dtype: torch.dtype, width: int, site: str, quantities: tuple[str, ...]
) -> None:
    given = inputs(dtype, width)
    said = reasons(given, kernel(*given))
    assert {name for name, words in said.items() if WORDS[site] in words} >= set(quantities), said


def head_of(given: tuple[Tensor, ...]) -> AttentionHead:
    q, k, v, do = (x[0, 0].double() for x in given)
    return AttentionHead(q=q, k=k, v=v, do=do, scale=q.shape[1] ** -0.5, masking=Masking(causal="top-left"))


@pytest.mark.parametrize(
    ("kernel", "dtype", "width", "way"),
    [
        (by_mlx, BF16, 64, "unfused:q:keys"),
        (by_mlx, FP16, 32, "unfused:low:keys"),
        (by_tinygrad_in_fp16, FP16, 64, "unfused:summed:powers"),
        (by_tensorflow, FP16, 64, "low-sums"),
        (by_tinygrad, BF16, 64, "low-products"),
    ],
)
def test_its_emulation_has_its_bits(kernel: Callable[..., Outputs], dtype: torch.dtype, width: int, way: str) -> None:
    given = inputs(dtype, width)
    head, fmt = head_of(given), format_of(dtype)
    made = low_summed(head, fmt, way) if way in LOW_SUMS else unfused(head, fmt, way)
    assert way in (*ways(head), *low_sum_ways(head, fmt))
    for name, x in kernel(*given).items():
        assert float((made[name] == x[0, 0].double()).double().mean()) > 0.985, name


def test_identify_knows_sums_in_16_bits() -> None:
    given = inputs(FP16)
    capture = attn_diag.Capture.from_tensors(
        dict(zip("qkv", given, strict=False)) | {"o": by_tensorflow(*given)["o"]}, causal="top-left"
    )
    assert WORDS["low-sums"] in attn_diag.identify_captures([capture]).heads[0].verdict


def test_a_row_that_such_sums_do_not_make_is_wrong() -> None:
    given = inputs(FP16)
    outputs = by_tensorflow(*given)
    outputs["dq"][:, :, 70] *= 1.5
    said = reasons(given, outputs)["dq"]
    assert "row 70 is 50 % off" in said
    assert "as where" not in said


def test_a_factor_beside_such_sums_is_told() -> None:
    given = inputs(FP16)
    outputs = by_tensorflow(*given)
    outputs["dk"] *= 2
    said = reasons(given, outputs)["dk"]
    assert "all keys are 2 times those of a kernel where every product" in said, said


def by_openvino(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """OpenVINO 2026.4 on a CPU under INFERENCE_PRECISION_HINT bf16: FP32 in and out."""

    def cast(x: Tensor) -> Tensor:
        return x.bfloat16().float()

    p = cast(masked(cast(q) @ cast(k * q.shape[-1] ** -0.5).mT).softmax(-1))
    return p @ cast(v)


@pytest.mark.parametrize(
    ("width", "words"), [(64, "P is normalised before its cast"), (32, "alpha k one; P is normal")]
)
def test_openvino_in_bf16_is_not_wrong_and_named(width: int, words: str) -> None:
    q, k, v, _ = inputs(torch.float32, width, heat=4.0)
    found = attn_diag.inspect(q, k, v, o=by_openvino(q, k, v), causal=True).heads[0]
    assert found.verdict is not None
    assert found.verdict.labels == ("lossy",)
    assert words in found.verdict.reasons[0], found.verdict.reasons


def test_an_alpha_k_that_is_cast_is_named() -> None:
    given = inputs(BF16, 32, heat=4.0)
    q, k, v, _ = given
    found = attn_diag.inspect(q, k, v, o=by_openvino(q.float(), k.float(), v.float()), causal=True).heads[0]
    assert found.verdict is not None
    assert WORDS["key"] in found.verdict.reasons[0]


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_scale_a_few_percent_off_is_named_in_plain_torch(dtype: torch.dtype) -> None:
    q, k, v, _ = inputs(dtype, heads=2)
    o = masked((q @ k.mT) * (1.045 * 0.125)).softmax(-1) @ v
    for head in attn_diag.inspect(q, k, v, o=o, causal=True).heads:
        assert head.verdict is not None
        assert head.verdict.labels[0] == "wrong"
        assert "what the scale 0.13" in head.verdict.reasons[0], head.verdict.reasons


def test_next_is_no_command_that_knows_no_such_kernel(tmp_path: Path) -> None:
    given = inputs(FP16)
    tensors = dict(zip(("q", "k", "v", "do"), given, strict=True)) | by_tensorflow(*given)
    attn_diag.Capture.from_tensors(tensors, causal="top-left").save(tmp_path / "a.safetensors")
    said = str(attn_diag.inspect_captures([attn_diag.load(tmp_path / "a.safetensors")]).report())
    assert "attn-diag replay" in said
    assert "attn-diag attribute" not in said


@pytest.mark.parametrize("lanes", [1, 8])
def test_a_mean_that_a_row_sum_in_fp32_leaves_is_no_fault(lanes: int) -> None:
    """MLX (one lane), OpenVINO and Paddle (several) on peaked scores: 1 to 10 ulp of fp32 away from zero."""
    drawn = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 1, 768, 64, generator=drawn) for _ in range(3))
    scores = (4 * q).double() @ k.double().mT / 8
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    row_sum = torch.zeros(768, lanes)
    for keys in torch.split(powers[0, 0].float(), lanes, 1):
        row_sum += keys
    o = (powers @ v.double() / row_sum.sum(1).double()[:, None]).float()
    found = attn_diag.inspect(4 * q, k, v, o=o).heads[0]
    assert found.verdict is not None
    assert "biased" not in found.verdict.labels, found.verdict.reasons
