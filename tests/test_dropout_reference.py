"""The float64 reference of a head with dropout: against autograd and the oracle, within its bounds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import with_bounds
from torch import Tensor

from attn_diag.reference import (
    AttentionHead,
    Dropout,
    Masking,
    reference_rows,
)
from attn_diag.reference.bias_gradient import bias_gradient
from attn_diag.reference.certify import check_rows
from attn_diag.reference.oracle import HeadOracle

ROWS, KEYS, D, DV = 12, 17, 8, 6
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"masking": Masking("bottom-right")},
    "window": {"masking": Masking("bottom-right", (4, 0))},
    "sink": {"sink": 0.75, "masking": Masking("bottom-right")},
    "softcap": {"softcap": 3.0},
}
# A power of two, and two whose 1 / (1 - p) rounds.
PS = [0.5, 0.1, 0.9]


def drawn(p: float, dtype: torch.dtype = torch.bfloat16, **options: Any) -> AttentionHead:
    g = torch.Generator().manual_seed(7)
    shapes = ((ROWS, D), (KEYS, D), (KEYS, DV), (ROWS, DV))
    q, k, v, do = (torch.randn(shape, generator=g).to(dtype).double() for shape in shapes)
    kept = torch.rand(ROWS, KEYS, generator=g) >= p
    kept[2] = False  # nothing is left of this row
    kept[3] = True
    return AttentionHead(2 * q, k, v, do, D**-0.5, dropout=Dropout(kept, p), **options)


def by_autograd(head: AttentionHead) -> dict[str, Tensor]:
    """As torch's own math path has it: softmax over all keys, then the mask and 1 / (1 - p)."""
    leaves = [t.clone().requires_grad_() for t in (head.q, head.k, head.v)]
    q, k, v = leaves
    scores = q @ k.T * head.scale
    if head.softcap is not None:
        scores = head.softcap * (scores / head.softcap).tanh()
    hidden = head.masking.hidden(head.positions, slice(0, KEYS))
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    if head.sink is not None:
        scores = torch.cat([scores, scores.new_full((ROWS, 1), head.sink)], 1)
    assert head.dropout is not None
    assert head.do is not None
    out = (scores.softmax(1)[:, :KEYS] * head.dropout.kept / (1 - head.dropout.p)) @ v
    dq, dk, dv = torch.autograd.grad(out, leaves, head.do)
    return {"out": out.detach(), "lse": scores.logsumexp(1).detach(), "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("case", CASES)
def test_reference_is_what_autograd_makes_of_dropped_probabilities(case: str) -> None:
    for p in PS:
        head = drawn(p, **CASES[case])
        found = with_bounds(head)[0]
        for name, values in by_autograd(head).items():
            torch.testing.assert_close(getattr(found, name), values, rtol=1e-10, atol=1e-12, msg=f"{name} {p}")
        # rowsum(dO o O) is the sum over keys of P o dP still, as both have W.
        block = reference_rows(head, torch.arange(ROWS))
        assert block.dprobs is not None
        torch.testing.assert_close((block.probs * block.dprobs).sum(1), found.delta, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_reference_is_within_its_bounds_of_the_oracle(case: str, dtype: torch.dtype) -> None:
    for p in PS:
        head = drawn(p, dtype, **CASES[case])
        found, bounds = with_bounds(head)
        assert all(row.held for row in check_rows(head, found, bounds, [0, 2, 3, 11]))
        assert bool((bounds.out < 1e-11).all())


@pytest.mark.parametrize("fault", ["no factor", "another mask", "before the sum"])
def test_a_wrong_dropout_is_outside_the_bounds(fault: str) -> None:
    head = drawn(0.1)
    assert head.dropout is not None
    kept = head.dropout.kept
    if fault == "no factor":
        wrong = with_bounds(replace(head, dropout=Dropout(kept, 0.0)))[0]
    elif fault == "another mask":
        wrong = with_bounds(replace(head, dropout=Dropout(kept.roll(1, 0), 0.1)))[0]
    else:  # l sums what is kept alone
        wrong = with_bounds(replace(head, dropout=None, masking=Masking(mask=kept)))[0]
    bounds = with_bounds(head)[1]
    assert not any(row.held for row in check_rows(head, wrong, bounds, [0, 11]))


def test_nothing_dropped_is_no_dropout() -> None:
    head = replace(drawn(0.5), dropout=Dropout(torch.ones(ROWS, KEYS, dtype=torch.bool), 0.0))
    for name in ("out", "lse", "delta", "dq", "dk", "dv"):
        assert torch.equal(
            getattr(with_bounds(head)[0], name), getattr(with_bounds(replace(head, dropout=None))[0], name)
        ), name


def test_the_gradient_of_a_bias_holds_its_bound() -> None:
    """Its rows are those of dS, which the oracle has."""
    for p in PS:
        head = drawn(p, torch.float64)
        bounds = with_bounds(head)[1]
        found, bound = bias_gradient(head, bounds, reference_rows(head, torch.arange(ROWS)))
        oracle = HeadOracle(head)
        for t in (0, 2, 11):
            true = torch.tensor(oracle.row(t).dscores(), dtype=torch.float64)
            assert bool(((found[t] - true).abs() <= bound[t]).all())


@pytest.mark.parametrize(("kept", "p", "error"), [
    (torch.ones(ROWS, KEYS, dtype=torch.bool), 1.0, ValueError),
    (torch.ones(ROWS, KEYS, dtype=torch.bool), math.nan, ValueError),
    (torch.ones(ROWS, KEYS), 0.1, TypeError),
    (torch.ones(KEYS, ROWS, dtype=torch.bool), 0.1, ValueError),
])  # fmt: skip
def test_dropout_that_cannot_be_is_refused(kept: Tensor, p: float, error: type[Exception]) -> None:
    with pytest.raises(error, match="dropout"):
        replace(drawn(0.5), dropout=Dropout(kept, p))
