"""Kernels that store O or a gradient below 16 bits, and widen it again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_diag import inspect
from attn_diag.analyses.patterns.of_stored import _grids
from attn_diag.kernels.quantize import quantize
from attn_diag.kernels.quantizers import PRESETS, quantizer
from attn_diag.results.findings import SharedFinding
from attn_diag.results.quality import QuantityVerdict

T, D = 192, 64
HIDDEN = torch.ones(T, T, dtype=torch.bool).triu(1)
Change = Callable[[Tensor], Tensor]


def inputs(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(T, D, generator=generator).bfloat16() for _ in range(4)]


def stored_as(x: Tensor, change: Change, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Of a number in fp32."""
    return change(x.float().double()).to(dtype)


def fp8(x: Tensor, scale: float = 1.0) -> Tensor:
    return (x / scale).float().to(torch.float8_e4m3fn).double() * scale


def by(name: str, block: str) -> Change:
    return lambda x: quantize(x, quantizer(PRESETS[name], block=block)).values


def judged(change: Change, *, dtype: torch.dtype = torch.bfloat16) -> tuple[QuantityVerdict, SharedFinding]:
    """Of an O that was stored so."""
    q, k, v, _ = (t.to(dtype) for t in inputs())
    scores = (q.double() @ k.double().T * D**-0.5).masked_fill(HIDDEN, -torch.inf)
    o = stored_as(scores.softmax(-1) @ v.double(), change, dtype)
    found = inspect(*(t[None, None] for t in (q, k, v)), o=o[None, None], causal=True)
    return found.captures[0].observations[0].heads[0].quantities[0], found.findings[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (fp8, "with 3 bits of mantissa, as in FP8 (E4M3, scale 1 up to a power of two)"),
        (lambda x: fp8(x, 0.0123), "with 3 bits of mantissa, as in FP8 (E4M3, a scale for the head)"),
        (by("fp8-row", "row"), "with 3 bits of mantissa, as in FP8 (E4M3, a scale for each row)"),
        (lambda x: x.float().to(torch.float8_e5m2).double(), "with 2 bits of mantissa, as in FP8 (E5M2, scale 1"),
        (by("int8", "row"), "in INT8 (a scale for each row)"),
        (by("int8", "tensor"), "in INT8 (a scale for the head)"),
    ],
)
def test_the_format_is_named(change: Change, words: str) -> None:
    verdict, finding = judged(change)
    assert verdict.answer == "lossy"
    assert f"all rows are stored {words}" in verdict.words
    assert verdict.words.endswith("and but for that as good as a well-rounded kernel's.")
    assert list(finding.formats) == ["o"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_four_bits_are_wrong_and_no_fault_of_the_mathematics(dtype: torch.dtype) -> None:
    verdict, finding = judged(by("int4", "row"), dtype=dtype)
    assert "are stored in INT4 (a scale for each row)" in verdict.words
    assert "no rounding" not in verdict.words
    assert finding.formats == {"o": "INT4"}


def test_a_cast_that_truncates_is_told_from_one_to_nearest() -> None:
    def cut_off(x: Tensor) -> Tensor:
        mantissa, exponent = x.frexp()
        return torch.ldexp((mantissa * 16).trunc() / 16, exponent)

    verdict, _ = judged(cut_off)
    assert "times a well-rounded kernel's error off the nearest such numbers" in verdict.words


def test_p_in_bf16_of_an_fp16_kernel_is_no_mistake_behind_the_cast() -> None:
    """It was "rows … are 2.7 % off, more than storing makes", which no rounding makes."""
    q, k, v, _ = (t.half() for t in inputs())
    scores = (q.float() @ k.float().T * D**-0.5).masked_fill(HIDDEN, -torch.inf)
    probs = (scores - scores.amax(1, keepdim=True)).exp()
    o = (probs.bfloat16().float() @ v.float()) / probs.sum(1, keepdim=True)
    o = stored_as(o, lambda x: fp8(x, float(o.abs().max()) / 448), torch.float16)
    found = inspect(*(t[None, None] for t in (q, k, v)), o=o[None, None], causal=True)
    assert "wrong" not in found.labels


def test_of_a_gradient() -> None:
    q, k, v, do = inputs(1)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    scores = (leaves[0] @ leaves[1].T * D**-0.5).masked_fill(HIDDEN, -torch.inf)
    o = scores.softmax(-1) @ leaves[2]
    dq, dk, dv = torch.autograd.grad(o, leaves, do.double())
    found = inspect(
        *(t[None, None] for t in (q, k, v)), o=o.detach().bfloat16()[None, None], do=do[None, None], causal=True,
        dq=dq.bfloat16()[None, None], dk=dk.bfloat16()[None, None], dv=stored_as(dv, fp8)[None, None],
    )  # fmt: skip
    head = found.captures[0].observations[0].heads[0]
    stored = {q.quantity: q.patterns[0].formats for q in head.quantities if q.patterns}
    assert stored == {"dv": {"dv": "FP8 (E4M3)"}}
    assert head.verdict is not None
    assert head.verdict.suggestions[0].startswith("The result lost its bits when it was stored.")


@pytest.mark.parametrize(
    "few",
    [
        torch.ones(64, 64),
        torch.full((64, 64), 0.997),
        inputs()[2][:1].float().expand(64, D),
        (torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) > 0.5).float(),
        torch.randint(0, 3, (64, 64), generator=torch.Generator().manual_seed(0)) / 3,
        torch.zeros(64, 64),
    ],
)
def test_few_different_numbers_are_no_format(few: Tensor) -> None:
    """As where V is the same everywhere, or holds zeros and ones."""
    assert not list(_grids(few.bfloat16().double(), 7))


@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, 7), (torch.float16, 10), (torch.float32, 23)])
def test_numbers_of_16_bits_are_no_codes(dtype: torch.dtype, precision: int) -> None:
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        rows, width = (1, 2, 4, 16, 64)[seed % 5], (16, 32, 64, 128)[seed % 4]
        x = torch.randn(rows, width, generator=generator) * torch.rand(rows, 1, generator=generator)
        assert not list(_grids(x.to(dtype).double(), precision))
