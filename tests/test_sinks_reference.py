"""The float64 reference of a head with a sink: against the oracle, autograd, and a key appended by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from builders import with_bounds
from mpmath import mp, mpf
from torch import Tensor

from attn_diag.reference import AttentionHead, Masking
from attn_diag.reference.certify import check_rows
from attn_diag.reference.oracle import HeadOracle

ROWS, KEYS, D = 12, 17, 8
MASK = torch.ones(ROWS, KEYS, dtype=torch.bool)
MASK[3] = False

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"masking": Masking("bottom-right")},
    "softcap": {"softcap": 3.0},
    "window": {"masking": Masking("bottom-right", window=(4, 0))},
    "masked row": {"masking": Masking(mask=MASK)},
    "additive": {"masking": Masking(mask=torch.linspace(-4, 4, ROWS * KEYS).reshape(ROWS, KEYS).float())},
}
SINKS = [0.0, -3.5, 2.3125, 30.0, 709.0, 760.0, 1e6, -1e6]


def drawn(
    sink: float | None, dtype: torch.dtype = torch.bfloat16, spread: float = 2.0, **options: Any
) -> AttentionHead:
    g = torch.Generator().manual_seed(5)
    shapes = ((ROWS, D), (KEYS, D), (KEYS, D), (ROWS, D))
    q, k, v, do = (torch.randn(shape, generator=g).to(dtype).double() for shape in shapes)
    return AttentionHead(spread * q, k, v, do, D**-0.5, options.pop("masking", Masking()), sink=sink, **options)


def by_autograd(head: AttentionHead) -> dict[str, Tensor]:
    """One more column of logits, dropped after the softmax, as gpt-oss has it."""
    leaves = [t.clone().requires_grad_() for t in (head.q, head.k, head.v)]
    sink = torch.tensor(head.sink, dtype=torch.float64, requires_grad=True)
    q, k, v = leaves
    scores = q @ k.T * head.scale
    if head.softcap is not None:
        scores = head.softcap * (scores / head.softcap).tanh()
    hidden = torch.zeros_like(scores)
    head.apply_mask(hidden, slice(0, len(q)), slice(0, len(k)))
    scores = torch.cat([scores + hidden, sink.expand(len(q), 1)], 1)
    out = scores.softmax(1)[:, :-1] @ v
    assert head.do is not None
    dq, dk, dv, dsink = torch.autograd.grad(out, [*leaves, sink], head.do)
    return {"out": out.detach(), "lse": scores.logsumexp(1).detach(), "dq": dq, "dk": dk, "dv": dv, "dsink": dsink}


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("case", CASES)
def test_reference_is_what_autograd_makes_of_one_more_column(case: str, sink: float) -> None:
    head = drawn(sink, **CASES[case])
    found, expected = with_bounds(head)[0], by_autograd(head)
    assert found.dsink is not None
    for name, values in expected.items():
        ours = found.dsink.sum() if name == "dsink" else getattr(found, name)
        torch.testing.assert_close(ours, values, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "spread"), [(torch.bfloat16, 2.0), (torch.float64, 11.3)])
def test_reference_is_the_oracles_within_its_bound(case: str, sink: float, dtype: torch.dtype, spread: float) -> None:
    head = drawn(sink, dtype, spread, **CASES[case])
    reference, bounds = with_bounds(head)
    rows = check_rows(head, reference, bounds, range(ROWS))
    assert all(row.held for row in rows), next((row.row, row.outputs) for row in rows if not row.held)
    assert all(set(row.outputs) == {"out", "lse", "delta", "dq", "dsink"} for row in rows)
    assert all(math.isfinite(x.bound) for row in rows for x in row.outputs.values())


@pytest.mark.parametrize("sink", [0.0, 2.3125, 760.0])
def test_bounds_are_not_idle(sink: float) -> None:
    """A sink moved by a millionth of a millionth is found out, and a gradient without it too."""
    head = drawn(sink, masking=Masking("bottom-right"))
    reference, bounds = with_bounds(head)
    moved = with_bounds(drawn(sink * (1 + 1e-12) + 1e-12, masking=Masking("bottom-right")))[0]
    assert not any(row.held for row in check_rows(head, moved, bounds, range(ROWS)))
    lost, _ = with_bounds(drawn(None, masking=Masking("bottom-right")))
    assert not any(row.held for row in check_rows(head, lost, bounds, range(ROWS)))
    assert reference.dsink is not None
    reference.dsink.mul_(1 + 1e-12)
    assert sink > 700 or not all(row.held for row in check_rows(head, reference, bounds, range(ROWS)))


def test_oracle_is_mpmath_written_out() -> None:
    head = drawn(1.375, masking=Masking(mask=MASK))
    oracle = HeadOracle(head)
    assert head.do is not None
    with mp.workprec(200):
        for t in (0, 3, 7):
            keys = [j for j in range(KEYS) if MASK[t, j]]
            logits = [mpf(head.scale) * sum(mpf(a) * mpf(b) for a, b in zip(head.q[t].tolist(), head.k[j].tolist(),
                      strict=True)) for j in keys]  # fmt: skip
            weights = [mp.exp(x) for x in logits]
            total = sum(weights) + mp.exp(mpf(1.375))
            out = [sum(w * mpf(float(head.v[j, d])) for w, j in zip(weights, keys, strict=True)) / total
                   for d in range(D)]  # fmt: skip
            delta = sum(mpf(float(head.do[t, d])) * out[d] for d in range(D))
            row = oracle.row(t)
            assert row.lse() == float(mp.log(total))
            assert row.out() == [float(x) for x in out]
            assert row.delta() == float(delta)
            assert row.dsink() == float(-mp.exp(mpf(1.375)) / total * delta)
            assert len(row.probs()) == len(row.scores()) == len(row.dscores()) == len(keys)


def test_a_sink_of_no_finite_logit_is_refused() -> None:
    for wrong in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="sink must be a finite logit"):
            drawn(wrong)
