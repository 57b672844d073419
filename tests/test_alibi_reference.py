"""The float64 reference of a head with ALiBi: against the definition written out, autograd and the oracle."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from builders import with_bounds
from torch import Tensor

from attn_diag.kernels import emulate_head, preset
from attn_diag.reference import Alibi, AttentionHead, Masking, reference_head
from attn_diag.reference.certify import check_rows
from attn_diag.reference.masking import AlibiOrigin

ROWS, KEYS, D = 12, 17, 8
HOLES = torch.ones(ROWS, KEYS, dtype=torch.bool)
HOLES[3] = False
HOLES[5, ::2] = False
ADDED = torch.linspace(-4, 4, ROWS * KEYS).reshape(ROWS, KEYS).float()

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom-right"},
    "top-left": {"causal": "top-left"},
    "window": {"causal": "bottom-right", "window": (4, 0)},
    "two-sided window": {"window": (4, 3)},
    "masked row": {"mask": HOLES},
    "additive": {"mask": ADDED},
    "chosen rows": {"causal": "bottom-right", "positions": torch.arange(ROWS) * 2 % KEYS},
}
SLOPES = [0.5, float(torch.tensor(0.1)), -0.25, 3e4, 2.0**-40]


def drawn(masking: Masking, dtype: torch.dtype = torch.bfloat16, **options: Any) -> AttentionHead:
    g = torch.Generator().manual_seed(5)
    shapes = ((ROWS, D), (KEYS, D), (KEYS, D), (ROWS, D))
    q, k, v, do = (torch.randn(shape, generator=g).to(dtype).double() for shape in shapes)
    return AttentionHead(2 * q, k, v, do, D**-0.5, masking, **options)


def bias(case: dict[str, Any], slope: float, origin: AlibiOrigin) -> Tensor:
    """Written out as flash_attn's documentation has it, i + Tk - Tq for rows unless they say where they are."""
    shift = 0 if case.get("causal") == "top-left" else KEYS - ROWS
    rows: Tensor = case.get("positions", torch.arange(ROWS) + shift)
    keys = torch.arange(KEYS)
    distance = {
        "row": -(rows[:, None] - keys).abs(),
        "first-key": keys.expand(ROWS, -1),
        "last-key": (keys - KEYS + 1).expand(ROWS, -1),
    }
    return slope * distance[origin].double()


def by_autograd(head: AttentionHead, added: Tensor) -> dict[str, Tensor]:
    leaves = [t.clone().requires_grad_() for t in (head.q, head.k, head.v)]
    q, k, v = leaves
    scores = q @ k.T * head.scale
    if head.softcap is not None:
        scores = head.softcap * (scores / head.softcap).tanh()
    masking = head.masking
    hidden = masking.hidden(head.positions, slice(0, KEYS))
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    if masking.mask is not None:
        own = masking.mask
        scores = scores.masked_fill(~own, -math.inf) if own.dtype == torch.bool else scores + own
    scores = scores + added
    empty = (scores == -math.inf).all(1, keepdim=True)
    out = scores.masked_fill(empty, 0.0).softmax(1).masked_fill(empty, 0.0) @ v
    assert head.do is not None
    dq, dk, dv = torch.autograd.grad(out, leaves, head.do)
    return {"out": out.detach(), "lse": scores.logsumexp(1).detach(), "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("origin", get_args(AlibiOrigin))
@pytest.mark.parametrize("case", CASES)
def test_reference_is_what_autograd_makes_of_the_bias_written_out(case: str, origin: AlibiOrigin) -> None:
    for slope in SLOPES:
        head = drawn(Masking(**CASES[case], alibi=Alibi(slope, origin)), softcap=3.0 if slope == 0.5 else None)
        found, expected = with_bounds(head)[0], by_autograd(head, bias(CASES[case], slope, origin))
        for name, values in expected.items():
            torch.testing.assert_close(getattr(found, name), values, rtol=1e-10, atol=1e-12, msg=f"{name} {slope}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_reference_is_within_its_bounds_of_the_oracle(case: str, dtype: torch.dtype) -> None:
    origins: tuple[AlibiOrigin, ...] = ("row", "first-key", "row", "last-key", "row")
    for slope, origin in zip(SLOPES, origins, strict=True):
        head = drawn(Masking(**CASES[case], alibi=Alibi(slope, origin)), dtype)
        found, bounds = with_bounds(head)
        rows = check_rows(head, found, bounds, [0, 3, 5, 11])
        assert all(row.held for row in rows)
        assert bool((bounds.out[found.lse.isfinite()] < 1e-8).all())


def test_origins_are_one_softmax_under_causality() -> None:
    heads = [drawn(Masking("bottom-right", alibi=Alibi(0.5, origin))) for origin in get_args(AlibiOrigin)]
    by_row, by_first, by_last = (with_bounds(head)[0] for head in heads)
    for other in (by_first, by_last):
        for name in ("out", "dq", "dk", "dv"):
            torch.testing.assert_close(getattr(other, name), getattr(by_row, name), rtol=1e-11, atol=1e-13)
    at = heads[0].positions
    torch.testing.assert_close(by_first.lse, by_row.lse + 0.5 * at)
    torch.testing.assert_close(by_last.lse, by_row.lse + 0.5 * (at - KEYS + 1))


@pytest.mark.parametrize("slope", [math.nan, math.inf, 0.1, 1e40])
def test_slopes_that_fp32_cannot_hold_are_refused(slope: float) -> None:
    with pytest.raises(ValueError, match="finite number of fp32"):
        Alibi(slope)


@pytest.mark.parametrize("origin", get_args(AlibiOrigin))
@pytest.mark.parametrize("recipe", ["fa2", "efficient", "flex"])
def test_emulation_rounds_the_biased_scores_as_fp32_does(recipe: str, origin: AlibiOrigin) -> None:
    """As far from the truth as without a bias; alpha left to the exponent divides the slope."""
    plain = drawn(Masking("bottom-right"))
    head = drawn(Masking("bottom-right", alibi=Alibi(0.5, origin)))
    errors = []
    for one in (plain, head):
        found, truth = emulate_head(preset(recipe, "bf16", D), one), reference_head(one)
        assert found.dq is not None
        assert truth.dq is not None
        errors.append([float((found.o.double() - truth.out).norm() / truth.out.norm()),
                       float((found.dq.double() - truth.dq).norm() / truth.dq.norm())])  # fmt: skip
        torch.testing.assert_close(found.lse.double(), truth.lse, rtol=1e-5, atol=1e-5)
    assert errors[1][0] < 2 * errors[0][0]
    assert errors[1][1] < 2 * errors[0][1]
