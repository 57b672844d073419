"""Signed errors of one probe's heads against the float64 reference, and the tests of their means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from attn_diag.head.signed_errors import of_elements
from attn_diag.reference import (
    AttentionHead,
    FloatFormat,
    Masking,
    RowBlock,
    format_of,
    reference_head,
    round_nearest_even,
    ulp,
)
from attn_diag.results.probe import Direction, SignedTest
from attn_diag.statistics.means import SignedErrors, estimate_bias
from attn_diag.statistics.welch import confidence, p_beyond
from attn_diag.testing.probing.budget import error_budget
from attn_diag.testing.probing.inputs import ProbeCase
from attn_diag.testing.probing.lse import LseErrors
from attn_diag.work import map_in_order

# An O whose spacing is no more than 2^8 of fp32's shows what fp32 arithmetic does: orders of sums, exp, alpha's cast.
_FINE_PRECISION = 23 - 8


@dataclass(frozen=True)
class HeadErrors:
    """One head's errors over the rows that are finite; ``signed`` by (direction, "error" or "excess").

    ``size``: sum of |O_ref|; ``predicted``: sum of the errors predicted for an l that sums the uncast P_bar;
    ``allowed``: sum of what fp32 arithmetic can make of each error, where O is so fine that it shows, else 0;
    ``both_signs``: whether O_ref has both.
    """

    signed: dict[tuple[Direction, str], SignedErrors]
    lse: LseErrors | None
    elements: int
    differing: int
    nonfinite: int
    max_error_ulp: float
    of_budget: float
    size: float
    predicted: float | None
    allowed: float
    both_signs: bool


def measure_case(
    case: ProbeCase,
    outputs: Sequence[tuple[Tensor, Tensor | None]],
    scale: float,
    masking: Masking,
    device: torch.device,
) -> list[HeadErrors]:
    """Every head of a case, its V one after the other; a head's parts stay together."""
    batch, heads = case.q.shape[:2]

    def one(place: tuple[int, int]) -> list[HeadErrors]:
        return list(_parts(case, outputs, place, scale, masking, device))

    places = list(product(range(batch), range(heads)))
    return [_joined(parts) for parts in map_in_order(one, places, parallel=device.type == "cpu")]


def _parts(
    case: ProbeCase,
    outputs: Sequence[tuple[Tensor, Tensor | None]],
    place: tuple[int, int],
    scale: float,
    masking: Masking,
    device: torch.device,
) -> Iterator[HeadErrors]:
    q, k = (x[place].to(device).double() for x in (case.q, case.k))
    for v, (o, lse) in zip(case.values, outputs, strict=True):
        head = AttentionHead(q, k, v[place].to(device).double(), None, scale, masking)
        yield measure_head(head, o[place], None if lse is None else lse[place], format_of(case.q.dtype), case.predicted)


def measure_head(
    head: AttentionHead, observed: Tensor, lse: Tensor | None, fmt: FloatFormat, predicted: Tensor | None = None
) -> HeadErrors:
    """``observed`` [T, D] and ``lse`` [T] in their own dtypes; ``fmt``: the inputs' format."""
    out = format_of(observed.dtype)
    of_lse = format_of(torch.float32 if lse is None else lse.dtype)
    o = observed.double()
    budget, arithmetic = torch.empty_like(o), torch.empty_like(o)
    lse_budget, lse_arithmetic = torch.empty_like(o[:, 0]), torch.empty_like(o[:, 0])

    def see(block: RowBlock) -> None:
        whole, alone = error_budget(head, block, fmt, out, of_lse)
        budget[block.rows], arithmetic[block.rows] = whole.o, alone.o
        lse_budget[block.rows], lse_arithmetic[block.rows] = whole.lse, alone.lse

    reference = reference_head(head, see, key_gradients=False)
    rows = o.isfinite().all(1)
    truth, o, budget = reference.out[rows], o[rows], budget[rows]
    error, excess = o - truth, o - round_nearest_even(truth, out)
    spacing = ulp(truth, out)
    signed: dict[tuple[Direction, str], SignedErrors] = {}
    for name, values in (("error", error), ("excess", excess)):
        signed["away from zero", name] = of_elements(values * truth.sign(), float(spacing.sum()))
        signed["upward", name] = of_elements(values, float(spacing.sum()))
    return HeadErrors(
        signed=signed,
        lse=None if lse is None else LseErrors.of(lse.double(), reference.lse, lse_budget, lse_arithmetic),
        elements=observed.numel(),
        differing=int((excess != 0).sum()) + observed.numel() - o.numel(),
        nonfinite=int((~observed.isfinite()).sum()),
        max_error_ulp=_largest(error.abs() / spacing),
        of_budget=_largest(error.abs() / budget),
        size=float(truth.abs().sum()),
        predicted=None if predicted is None else float((truth.abs() * predicted.to(rows.device)[rows, None]).sum()),
        allowed=float(arithmetic[rows].sum()) if out.precision >= _FINE_PRECISION else 0.0,
        both_signs=bool((truth < 0).any()) and bool((truth > 0).any()),
    )


def signed_tests(heads: Sequence[HeadErrors], level: float) -> tuple[SignedTest, ...]:
    """Away from zero, and upward too where O_ref has both signs (else the two are one)."""
    clusters = np.concatenate(
        [np.full(len(h.signed["upward", "error"].total), i, dtype=np.int64) for i, h in enumerate(heads)]
    )
    # A head without a finite row is no cluster.
    clusters = np.unique(clusters, return_inverse=True)[1]
    directions: list[Direction] = ["away from zero"]
    if any(h.both_signs for h in heads):
        directions.append("upward")
    return tuple(_test(heads, direction, clusters, level) for direction in directions)


def _test(heads: Sequence[HeadErrors], direction: Direction, clusters: np.ndarray, level: float) -> SignedTest:
    joined = {name: SignedErrors.join([h.signed[direction, name] for h in heads]) for name in ("error", "excess")}
    error, excess = (estimate_bias(joined[name], clusters, level, with_drift=False) for name in ("error", "excess"))
    allowed = sum(h.allowed for h in heads) / excess.n if excess.n else 0.0
    p_values = [p_beyond(e, allowed) for e in (error, excess)]
    # An excess without a test is zero everywhere, or there is one head only.
    p_value = None if any(p is None for p in p_values) else max(p for p in p_values if p is not None)
    interval = confidence(excess, level)
    spacing = joined["excess"].unit_scale / excess.n if excess.n else 0.0
    in_ulp = (interval[0] / spacing, interval[1] / spacing) if interval is not None and spacing else None
    allowed_ulp = allowed / spacing if spacing else 0.0
    return SignedTest(direction, error, excess, excess.mean_ulp, in_ulp, p_value, allowed_ulp=allowed_ulp)


def _joined(parts: Sequence[HeadErrors]) -> HeadErrors:
    first = parts[0]
    if len(parts) == 1:
        return first
    predicted = [p.predicted for p in parts if p.predicted is not None]
    lse = [p.lse for p in parts if p.lse is not None]
    return HeadErrors(
        signed={key: SignedErrors.join([p.signed[key] for p in parts]) for key in first.signed},
        lse=LseErrors.join(lse) if lse else None,
        elements=sum(p.elements for p in parts),
        differing=sum(p.differing for p in parts),
        nonfinite=sum(p.nonfinite for p in parts),
        max_error_ulp=max(p.max_error_ulp for p in parts),
        of_budget=max(p.of_budget for p in parts),
        size=sum(p.size for p in parts),
        predicted=sum(predicted) if predicted else None,
        allowed=sum(p.allowed for p in parts),
        both_signs=any(p.both_signs for p in parts),
    )


def _largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0
