"""Signed errors of O and L against the float64 reference, what they may be, and the tests of their means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from operator import add

import numpy as np
import torch
from torch import Tensor

from attn_diag.head.signed_errors import of_elements
from attn_diag.reference import (
    AttentionHead,
    FloatFormat,
    RowBlock,
    format_of,
    reference_head,
    round_nearest_even,
    ulp,
)
from attn_diag.results.probe import Direction, LseTest, SignedTest
from attn_diag.statistics.means import SignedErrors, estimate_bias
from attn_diag.statistics.welch import confidence, p_beyond
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.probing.inputs import ProbeCase
from attn_diag.work import map_in_order

# One fp32 operation, whichever way it rounds (tensor cores truncate).
_FP32 = 2.0**-23
# fp32 below its normal numbers is zero where subnormals are flushed: ex2.approx.ftz on GPUs, vectorised exp on CPUs.
_FLUSHED = 2.0**-126
# Of a sink so far above all scores O is 0 in fp32.
_MOST_ABOVE = 120.0
# An O whose spacing is no more than 2^8 of fp32's shows what fp32 arithmetic does: orders of sums, exp, alpha's cast.
_FINE_PRECISION = 23 - 8
_SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LseErrors:
    """One head's errors of L, over the rows where it is finite."""

    signed: SignedErrors
    max_error: float
    of_budget: float
    """The largest error over its bound."""
    allowed: float
    """Sum of what fp32 arithmetic can make of each error."""
    nonfinite: int
    base_2: bool
    """L ln 2 lies within the bounds everywhere."""
    stored: frozenset[str]
    """Formats of 16 bits of which every L is a number, beside the reference; none where L came in 16 bits."""

    @classmethod
    def of(cls, lse: Tensor, truth: Tensor, budget: Tensor, arithmetic: Tensor) -> LseErrors:
        """All [T], float64 but L; ``budget`` and ``arithmetic``: bounds of every rounding, and of fp32's alone."""
        observed = lse.double()
        finite = observed.isfinite()
        observed, truth, budget = observed[finite], truth[finite], budget[finite]
        error = observed - truth
        return cls(
            signed=of_elements(error[:, None], 0.0),
            max_error=float(error.abs().max()) if len(error) else 0.0,
            of_budget=float((error.abs() / budget).max()) if len(error) else 0.0,
            allowed=float(arithmetic[finite].sum()),
            nonfinite=int((~finite).sum()),
            base_2=bool(((observed * math.log(2) - truth).abs() <= budget).all()),
            stored=frozenset(
                name
                for name, dtype in _SHORT.items()
                if lse.element_size() > 2 and _is_rounded_to(dtype, observed, truth, arithmetic[finite])
            ),
        )

    @classmethod
    def join(cls, parts: Sequence[LseErrors]) -> LseErrors:
        """Of one head's several V."""
        return cls(
            signed=SignedErrors.join([p.signed for p in parts]),
            max_error=max(p.max_error for p in parts),
            of_budget=max(p.of_budget for p in parts),
            allowed=sum(p.allowed for p in parts),
            nonfinite=sum(p.nonfinite for p in parts),
            base_2=all(p.base_2 for p in parts),
            stored=frozenset.intersection(*(p.stored for p in parts)),
        )


@dataclass(frozen=True)
class Halves:
    """Sums of errors in ulp, and counts, of the lower and the upper half of a binade."""

    sums: tuple[float, float]
    counts: tuple[int, int]

    @classmethod
    def of(cls, errors_ulp: Tensor, mantissa: Tensor) -> Halves:
        """``mantissa`` in [1, 2) where the reference is normal; both of one shape."""
        parts = [errors_ulp[(mantissa >= first) & (mantissa < first + 0.5)] for first in (1.0, 1.5)]
        low, high = parts
        return cls((float(low.sum()), float(high.sum())), (low.numel(), high.numel()))

    def __add__(self, other: Halves) -> Halves:
        """Of both."""
        (a, b), (c, d) = self.sums, other.sums
        (i, j), (k, n) = self.counts, other.counts
        return Halves((a + c, b + d), (i + k, j + n))

    @property
    def difference(self) -> float | None:
        """The upper half's mean less the lower's; None where one is empty."""
        return self.sums[1] / self.counts[1] - self.sums[0] / self.counts[0] if all(self.counts) else None


@dataclass(frozen=True)
class HeadErrors:
    """One head's errors over the rows that are finite."""

    signed: dict[tuple[Direction, str], SignedErrors]
    """By direction and "error" or "excess"."""
    lse: LseErrors | None
    elements: int
    differing: int
    """Elements whose excess is not zero."""
    nonfinite: int
    nonfinite_rows: frozenset[int]
    max_error_ulp: float
    of_budget: float
    """The largest error over its bound."""
    size: float
    """Sum of |O_ref|."""
    predicted: tuple[float, float] | None
    """Sums of the errors predicted for an l that sums the uncast P_bar, cast to nearest and truncated."""
    allowed: float
    """Sum of what fp32 arithmetic can make of each error, where O is so fine that it shows, else 0."""
    both_signs: bool
    """O_ref has both."""
    halves: dict[Direction, Halves]
    """The excess in ulp by where in its binade the reference lies; without subnormal references."""


def measure_case(
    case: ProbeCase,
    outputs: Sequence[tuple[Tensor, Tensor | None]],
    given: CaseInputs,
    device: torch.device,
) -> list[HeadErrors]:
    """Every head of a case, its V one after the other; a head's parts stay together. ``given``: of the first V."""
    fmt = format_of(case.q.dtype)

    def one(place: tuple[int, int]) -> HeadErrors:
        first, parts = given.head(*place, device), []
        for v, (o, lse) in zip(case.values, outputs, strict=True):
            head = replace(first, v=v[place].to(device).double())
            parts.append(measure_head(head, o[place], None if lse is None else lse[place], fmt, case.predicted))
        return _joined(parts)

    batch, heads = case.q.shape[:2]
    places = list(product(range(batch), range(heads)))
    return list(map_in_order(one, places, parallel=device.type == "cpu"))


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
    in_ulp, mantissa = excess / spacing, truth.abs() / (spacing * 2.0**out.precision)
    return HeadErrors(
        signed=signed,
        lse=None if lse is None else LseErrors.of(lse, reference.lse, lse_budget, lse_arithmetic),
        elements=observed.numel(),
        differing=int((excess != 0).sum()) + observed.numel() - o.numel(),
        nonfinite=int((~observed.isfinite()).sum()),
        nonfinite_rows=frozenset((~rows).nonzero()[:, 0].tolist()),
        max_error_ulp=_largest(error.abs() / spacing),
        of_budget=_largest(error.abs() / budget),
        size=float(truth.abs().sum()),
        predicted=None if predicted is None else _weighted(truth.abs().sum(1), predicted.to(rows.device)[:, rows]),
        allowed=float(arithmetic[rows].sum()) if out.precision >= _FINE_PRECISION else 0.0,
        both_signs=bool((truth < 0).any()) and bool((truth > 0).any()),
        halves={
            "away from zero": Halves.of(in_ulp * truth.sign(), mantissa),
            "upward": Halves.of(in_ulp, mantissa),
        },
    )


def signed_tests(heads: Sequence[HeadErrors], level: float) -> tuple[SignedTest, ...]:
    """Away from zero, and upward too where O_ref has both signs (else the two are one)."""
    clusters = _by_head([h.signed["upward", "error"] for h in heads])
    directions: list[Direction] = ["away from zero"]
    if any(h.both_signs for h in heads):
        directions.append("upward")
    return tuple(_test(heads, direction, clusters, level) for direction in directions)


def _by_head(errors: Sequence[SignedErrors]) -> np.ndarray:
    """The cluster of every row: its head, from 0 without gaps, as a head without a finite row is none."""
    of_rows = np.repeat(np.arange(len(errors)), [len(e.total) for e in errors])
    return np.unique(of_rows, return_inverse=True)[1]


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
    return SignedTest(
        direction, error, excess, excess.mean_ulp, in_ulp, p_value, allowed_ulp=allowed_ulp,
        upper_less_lower_ci=_upper_less_lower([h.halves[direction] for h in heads], level),
    )  # fmt: skip


def _upper_less_lower(heads: Sequence[Halves], level: float) -> tuple[float, float] | None:
    known = [d for h in heads if (d := h.difference) is not None]
    differences = of_elements(torch.tensor(known, dtype=torch.float64)[:, None], 0.0)
    return confidence(estimate_bias(differences, None, level, with_drift=False), level)


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
        nonfinite_rows=frozenset().union(*(p.nonfinite_rows for p in parts)),
        max_error_ulp=max(p.max_error_ulp for p in parts),
        of_budget=max(p.of_budget for p in parts),
        size=sum(p.size for p in parts),
        predicted=(sum(p[0] for p in predicted), sum(p[1] for p in predicted)) if predicted else None,
        allowed=sum(p.allowed for p in parts),
        both_signs=any(p.both_signs for p in parts),
        halves={name: reduce(add, [p.halves[name] for p in parts]) for name in first.halves},
    )


def _weighted(sizes: Tensor, predicted: Tensor) -> tuple[float, float]:
    to_nearest, truncated = (predicted * sizes).sum(1).tolist()
    return to_nearest, truncated


def _largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _is_rounded_to(dtype: torch.dtype, observed: Tensor, truth: Tensor, arithmetic: Tensor) -> bool:
    """Whether every L is a number of ``dtype`` less than a spacing (and fp32's errors) from the reference."""
    if not len(observed) or not bool((observed.to(dtype).double() == observed).all()):
        return False
    return bool(
        (
            (observed - truth).abs() <= ulp(torch.maximum(truth.abs(), observed.abs()), format_of(dtype)) + arithmetic
        ).all()
    )


def lse_test(heads: Sequence[LseErrors], level: float) -> LseTest:
    """Is L's mean error more than fp32 arithmetic can make? Heads are the clusters."""
    joined = LseErrors.join(heads)
    error = estimate_bias(joined.signed, _by_head([h.signed for h in heads]), level, with_drift=False)
    allowed = joined.allowed / error.n if error.n else 0.0
    return LseTest(
        error=error,
        ci=confidence(error, level),
        allowed=allowed,
        max_error=joined.max_error,
        of_budget=joined.of_budget,
        nonfinite=joined.nonfinite,
        fits_base_2=joined.base_2 and joined.of_budget > 1,
        rounded_to=min(joined.stored, default=None),
        p_value=p_beyond(error, allowed),
    )


@dataclass(frozen=True)
class ErrorBudget:
    """The largest |observed - reference| of a block's rows: of O [R, D], of L [R]. float64."""

    o: Tensor
    lse: Tensor


def error_budget(
    head: AttentionHead, block: RowBlock, fmt: FloatFormat, out: FloatFormat, lse: FloatFormat
) -> tuple[ErrorBudget, ErrorBudget]:
    """What every rounding may make, and what fp32 arithmetic alone may (P_bar uncast), of a block's rows.

    P_bar_j may change by the factors 1 +- u (its cast to ``fmt``, u half a spacing relative to its number),
    exp(+-d_t), d_t = (D + 8) 2^-23 max_j alpha sum |q_i k_i| (a dot product of D terms, its scaling, S - m and
    exp's argument; Higham, Accuracy and Stability, eq. 3.5; with softcap D + 16: tanh makes no error larger, errs by
    4 2^-23 itself, and a division and a product are added), and 1 +- (T + 8) 2^-23 (exp itself, rescaling, and
    sums over T keys); l likewise, whether it sums P_bar before or after the cast. With f the product of them less 1,
    |N'/l' - N/l| <= f / (1 - f) (P|V| + |O|). A P_bar below fmt's normal numbers is off by half its smallest
    spacing more, or by 2^-126 where fp32 flushes what lies below; of O_bar's T partial sums and of O each may lose
    2^-126 likewise. The last rounding of O, to ``out``, adds half a spacing at the largest value it may be given
    (without casts a whole one: a bound of mean errors must hold for every way to round).

    L = m + ln l moves by d_t with its scores, by at most -ln(1 - f') with l, f' the product of l's other factors less
    1 and T P_bars' tiny errors over l, by 4 2^-23 (|m| + ln l) in m's unit, the logarithm's, their sum and its scaling
    to base e, and by its own rounding to ``lse``.
    """
    q, k, v = head.q[block.rows], head.k[block.keys], head.v[block.keys].abs()
    keys = len(k)
    magnitude = (q.abs() * head.scale) @ k.abs().T
    if (alibi := head.masking.alibi) is not None:
        # A product and a sum more, of the bias.
        far = alibi.distances(head.positions[block.rows], block.keys, len(head.k))
        magnitude = magnitude + abs(alibi.slope) * far.abs()
    largest = magnitude.masked_fill_(block.scores == -torch.inf, 0.0).amax(1)
    shift = largest * (q.shape[1] + (8 if head.softcap is None else 16)) * _FP32
    sums = 1 + (keys + 8) * _FP32
    reach, weight, inverse = block.probs @ v + block.out.abs(), v.sum(0), block.inverse_row_sum
    # A kernel may begin its maximum with the sink's logit; then all P_bar are so many times smaller, and so is l.
    top = block.row_max.nan_to_num(neginf=0.0)
    above = torch.ones_like(top) if head.sink is None else (head.sink - top).clamp(0.0, _MOST_ABOVE).exp()
    logs = 4 * _FP32 * (block.row_max.abs() + block.row_sum.log())
    smallest = float(ulp(torch.zeros(1, dtype=torch.float64), fmt)) / 2

    def bounds(casts: float, tiny: float, last: float) -> ErrorBudget:
        f = (casts * sums * shift.exp() - 1)[:, None]
        # Where f reaches 1 (scores of many thousands) nothing is promised.
        inner = torch.where(f < 1, f / (1 - f).clamp(min=1e-300) * reach, torch.inf)
        lost = tiny * (weight + block.out.abs() * keys) + _FLUSHED * keys
        inner = inner + lost * (above * inverse)[:, None] + _FLUSHED
        o = inner + last * ulp((block.out.abs() + inner).clamp(max=out.largest), out)
        of_l = casts * sums - 1 + tiny * keys * above * inverse
        moved = shift - torch.log1p(-of_l.clamp(max=1.0)) + logs
        return ErrorBudget(o, moved + last * ulp((block.lse.abs() + moved).clamp(max=lse.largest), lse))

    return (
        bounds(1 + 2.0 ** -(fmt.precision + 1), max(smallest, _FLUSHED), 0.5),
        bounds(1.0, _FLUSHED, 1.0),
    )
