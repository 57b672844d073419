"""One quantity of one head beside a well-rounded kernel's: squared errors by row and feature, and what stands out.

A group of elements (a row, a feature) stands out where its error is beyond what any sane kernel of this format leaves
there: above ``outlying.GROUP_LIMIT`` times the largest of the counterfactual's error, the noise floor of one correct
rounding, its expected noise and, of a gradient, what the casts of a backward make that is fed with the captured O and
LSE; and above the quantile of that noise itself, however few directions it has. An element stands out where its error
exceeds the counterfactual's by ``ELEMENT_LIMIT`` standard deviations of that noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.head.outlying import OF_FEATURE, OF_ROW, rows_that_are_one, times_limit, too_far_off
from attn_diag.reference import FloatFormat, ulp
from attn_diag.results.quality import AS_GOOD as AS_GOOD
from attn_diag.results.quality import LOSSY as LOSSY
from attn_diag.statistics.arrays import dense, stacked
from attn_diag.statistics.ratios import MIN_GROUPS, Carriers, RatioCase, RatioEstimate, paired_ratios

# Healthy elements exceed the counterfactual's error by at most 5.3 standard deviations; their noise is bounded.
ELEMENT_LIMIT = 8.0
# Kernels may flush a P or dS below 2^-126 to zero: of a thousand such terms, with operands about 1, so much is lost.
# Nothing is forgiven that is more than such a part of the tensor's largest element.
_FLUSHED, _NEXT_TO_NOTHING = 2.0**-116, 2.0**-20
# fp32's smallest normal number: of every row's term, with the other operand about 1, so much may be lost in any case.
_SMALLEST_NORMAL = 2.0**-126
# No rounding leaves more than so many times the error of the coarsest sane kernel.
BEYOND = 3.0
# A row of zeros was not rounded to them where it is so many times what any sane kernel leaves; elements of a row of so
# many do not all round to zero by chance.
_LOST, _LOST_ELEMENTS = 16.0, 8
# A row that sees one key has dQ = 0: dP and delta cancel. fp32 leaves 2^-22 of the variance that O's rounding would
# make there; a rounded delta leaves about all of it.
_ZERO, _SPEAKS = 2.0**-20, 2.0**-6
# A well-rounded kernel with so little of its expected error is exact by chance: equal tokens, a V without differences
# and rows with one key leave it 0 to 0.013 times that, and healthy kernels up to 0.51; data without such, 0.16 to 1.5.
_BY_CHANCE = 2.0**-6
# Where few rows have most of an error none counts as more than so many times its noise.
LIMITED = 4.0
Array = npt.NDArray[np.float64]
# Effective number of directions of the noise in some rows ([n] indices), [n].
Directions = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Drawn:
    """What is known of noise that was drawn, not derived."""

    draws: int
    """How many times."""
    rows: Directions
    """Of some rows."""
    features: Directions
    """Of some features, whose errors rows may share."""


@dataclass(frozen=True)
class QuantitySample:
    """Squared errors of one quantity in one head of one sequence; n rows (of O, dQ: queries; of dK, dV: keys)."""

    rows: npt.NDArray[np.int64]
    """[n], which rows."""
    error: Array
    """[n], observed."""
    counterfactual: Array
    """[n], of the well-rounded kernel."""
    floor: Array
    """[n], the sum of ulp^2 / 12."""
    reference: Array
    """[n], the sum of the reference's squares."""
    expected: Array
    """[n], the sum of the expected squared errors of a well-rounded kernel."""
    features: Array
    """[3, D]: error, counterfactual and floor by feature instead of by row."""
    bad_rows: Array
    """[n], how many times its limit a row's error is where it stands out; 0 elsewhere."""
    bad_features: Array
    """[D], likewise of features."""
    bad_elements: npt.NDArray[np.int64]
    """[m, 2], row and feature of elements that stand out."""
    in_outlying_element: npt.NDArray[np.bool_]
    """[n], rows in which an element stands out."""
    not_zero: npt.NDArray[np.bool_]
    """[n], rows that are zero in exact arithmetic and in a well-rounded kernel, and not here."""
    zeroed: npt.NDArray[np.bool_]
    """[n], rows that are zero here in every element, and nothing that a kernel rounds makes them so."""
    misplaced: npt.NDArray[np.bool_]
    """[n], rows that are further off than a kernel that is as coarse as this one makes them."""
    misplaced_features: npt.NDArray[np.bool_]
    """[D], likewise of features."""
    largest: tuple[int, int, float, float]
    """Row, feature, error in ulp, and in standard deviations beyond the counterfactual's, of the worst element."""
    clusters: npt.NDArray[np.int64] | None
    """[n], groups of rows whose errors are shared, from 0 without gaps."""
    carriers: Carriers | None
    """The query rows that all keys of dK share."""
    site: str | None = None
    """The recipe's field by which another published kernel's explains the error; None: not looked for, or none does."""
    made_by_site: float = 0.0
    """What of the squared error the rounding at that site makes by itself, where its bits tell; else 0."""
    unlike: npt.NDArray[np.bool_] | None = None
    """[n], rows that none of the ways of plain torch makes that reproduce most others; None: no way does."""
    unlike_features: npt.NDArray[np.bool_] | None = None
    """[D], likewise of features."""
    copied: npt.NDArray[np.int64] | None = None
    """[n], of several sequences, some of them copies of each other: the same number for rows that are copies."""
    compared: bool = True
    """Whether there is a published recipe to compare with; else only what no sane kernel leaves stands out."""
    ceiling: float = math.inf
    """The squared error of all rows that no rounding exceeds; infinite where the error is far from it."""
    rounding: bool = False
    """Whether a coarser rounding of one thing explains the rows and elements that stand out."""
    way: str = ""
    """Where there is no recipe to compare with, and ``rounding``: what is in BF16; empty: not known."""
    features_rounding: bool = False
    """Likewise the features."""
    declared: str = ""
    """The recipe below 16 bits that the kernel is declared to be, and that the counterfactual is; empty: none."""
    factors: str = ""
    """What wrongly multiplies a coarse quantity, or of a declared kernel O or its scores, in words; empty: nothing."""
    scales: str = ""
    """Where one is declared, which other scales of q, k and v make O as it is, in words; empty: not known."""
    beyond_backward: float = 0.0
    """Where one is declared whose backward works in 16 bits, and dV is further than that off what the captured LSE
    gives: how many times; 0: it is not, or it is not known."""
    in_16_bits: float | None = None
    """Where one is declared, the squared error of a well-rounded kernel of 16 bits; None: unknown, or none is."""

    @property
    def outlying(self) -> npt.NDArray[np.bool_]:
        """[n], rows that stand out, or in which an element does."""
        return (self.bad_rows > 0) | self.in_outlying_element

    @property
    def has_unlike(self) -> bool:
        """Whether rows or features are not as plain torch rounds them, but most others are."""
        return any(bool(one.any()) for one in (self.unlike, self.unlike_features) if one is not None)

    @property
    def only_features(self) -> bool:
        """Whether it is features alone, of rows that stand out in these."""
        return self.has_unlike and self.unlike is not None and not self.unlike.any()

    @property
    def by_last_rounding(self) -> npt.NDArray[np.bool_]:
        """[n], rows that are no further off than a last rounding which is not to nearest may make them."""
        made: npt.NDArray[np.bool_] = within_last_rounding(self.error, self.counterfactual, self.floor)
        return made & ~self.in_outlying_element

    @property
    def exact_by_chance(self) -> bool:
        """Whether a well-rounded kernel is next to exact on these very numbers, as no other one need be."""
        yardstick = max(self.counterfactual.sum(), self.floor.sum())
        return bool(self.compared and not self.declared and yardstick <= _BY_CHANCE**2 * self.expected.sum())

    def beside_expected(self) -> RatioEstimate | None:
        """Observed over what a well-rounded kernel's casts are expected to leave."""
        return paired_ratios([RatioCase(self.error, self.expected, self.clusters, self.carriers)])[0]

    def ratio(self, kept: npt.NDArray[np.bool_] | None = None) -> RatioEstimate | None:
        """Observed over the larger of counterfactual and floor, of some rows or all."""
        return self._ratios[0] if kept is None else paired_ratios([self._case(kept)])[0]

    @property
    def typical_ratio(self) -> RatioEstimate | None:
        """The same with every row's errors in units of its own expected noise, so that no row outweighs the others."""
        return self._ratios[1]

    def limited_ratio(self) -> RatioEstimate | None:
        """``typical_ratio``, no row's error above ``LIMITED`` times its noise: too small, but carried by many rows."""
        return paired_ratios(_typical_cases([self], LIMITED**2))[0]

    @property
    def counts_features(self) -> bool:
        """Whether ``ratio`` counts features: all rows copy few keys, and share their rounding."""
        return self.clusters is not None and int(self.clusters.max(initial=0)) + 1 < MIN_GROUPS

    def rows_carrying(self) -> float:
        """Effective number of rows that carry the errors, each counted by itself."""
        case = replace(self, clusters=None)._case(None)
        carried = [x for x in (case.observed, case.yardstick) if x.any()]
        return min((float(x.sum() ** 2 / np.square(x).sum()) for x in carried), default=0.0)

    @cached_property
    def _ratios(self) -> list[RatioEstimate | None]:
        return paired_ratios([self._case(None), *_typical_cases([self])])

    @staticmethod
    def find_ratios(several: Sequence[QuantitySample]) -> None:
        """Compute both ratios of some samples of as many rows side by side, before they are asked for."""
        found = paired_ratios([one._case(None) for one in several] + _typical_cases(several))
        for i, one in enumerate(several):
            one.__dict__["_ratios"] = found[i :: len(several)]

    def _case(self, kept: npt.NDArray[np.bool_] | None) -> RatioCase:
        part = slice(None) if kept is None else kept
        yardstick = self.counterfactual if self.counterfactual[part].sum() > self.floor[part].sum() else self.floor
        clusters = self.clusters
        if kept is not None and clusters is not None:
            clusters = dense(clusters[kept])
        if kept is None and self.counts_features:
            error, other, floor = self.features
            return RatioCase(error, other if other.sum() > floor.sum() else floor)
        return RatioCase(self.error[part], yardstick[part], clusters, self.carriers)


def _typical_cases(several: Sequence[QuantitySample], most: float = math.inf) -> list[RatioCase]:
    """Of samples of as many rows each, errors in units of the row's own expected noise, none above ``most``."""
    error, other, floor, unit = (
        stacked([getattr(one, name) for one in several]) for name in ("error", "counterfactual", "floor", "expected")
    )
    unit = np.maximum(unit, 1e-300)
    error, other, floor = np.minimum(error / unit, most), other / unit, floor / unit
    larger = (other.sum(1) > floor.sum(1)).tolist()
    return [
        RatioCase(error[i], other[i] if larger[i] else floor[i], one.copied, one.carriers)
        for i, one in enumerate(several)
    ]


def within_last_rounding(error: Array, counterfactual: Array, floor: Array) -> npt.NDArray[np.bool_]:
    """Whether summed squares of errors are what a whole ulp beside a well-rounded kernel's errors makes.

    These count as one ulp at most: of a dK that cancels they may be larger than all of it.
    """
    last = np.sqrt(12 * floor)
    made: npt.NDArray[np.bool_] = np.sqrt(error) <= np.minimum(np.sqrt(counterfactual), last) + last
    return made


def sample(
    observed: Tensor,
    reference: Tensor,
    counterfactual: Tensor,
    variance: Tensor,
    fmt: FloatFormat,
    rows: Tensor,
    *,
    fed: Tensor | None = None,
    clusters: npt.NDArray[np.int64] | None = None,
    carriers: Carriers | None = None,
    directions: Directions | Drawn | None = None,
) -> QuantitySample:
    """Compare one quantity with a well-rounded kernel's; ``samples`` of one head.

    Args:
        observed: [T, D] float64, as the next four.
        reference: What is true.
        counterfactual: What a well-rounded kernel returns.
        variance: Its expected squared error.
        fmt: The format in which ``observed`` was stored.
        rows: Indices of the n rows that count, [n].
        fed: What the casts of a backward make that is fed with the captured O and LSE.
        clusters: [n], groups of rows whose errors are shared.
        carriers: What all keys of dK share.
        directions: See ``Directions``; ``Drawn``, where ``variance`` is the mean of draws.
    """
    seen, true, other, noise = (t[rows][None] for t in (observed, reference, counterfactual, variance))
    casts = None if fed is None else fed[rows][None]
    (one,) = samples(
        seen, true, other, noise, fmt, rows[None], len(reference), fed=casts, clusters=[clusters],
        directions=[directions],
    )  # fmt: skip
    return one if carriers is None else replace(one, carriers=carriers)


def samples(
    observed: Tensor,
    truth: Tensor,
    counterfactual: Tensor,
    variance: Tensor,
    fmt: FloatFormat,
    rows: Tensor,
    length: int,
    *,
    fed: Tensor | None,
    clusters: Sequence[npt.NDArray[np.int64] | None],
    directions: Sequence[Directions | Drawn | None],
) -> list[QuantitySample]:
    """Compare one quantity of H heads, n rows of each, with a well-rounded kernel's.

    Args:
        observed, truth, counterfactual, variance, fed: As of ``sample``, the rows that count alone, [H, n, D].
        fmt: The format in which ``observed`` was stored.
        rows: Which rows they are, [H, n].
        length: How many rows there are, T.
        clusters, directions: As of ``sample``, of every head.
    """
    lost = torch.full_like(truth[:, :1, :1], length * _SMALLEST_NORMAL)
    if truth.numel():
        most = truth.abs().amax((1, 2), keepdim=True)
        lost = torch.maximum(lost, (most * _NEXT_TO_NOTHING).clamp_(max=_FLUSHED))
    error, other = _beyond(observed - truth, lost), _beyond(counterfactual - truth, lost)
    squares, others, spacing = error.square(), other.square(), ulp(truth, fmt)
    floor = spacing.square().div_(12)
    expected = torch.maximum(variance, floor)
    unit = expected.clamp(min=1e-300)
    allowed = torch.maximum(others, (fed - truth).square()) if fed is not None else others
    # What is too large is rounded as much more coarsely.
    rounded = torch.maximum(unit, ulp(observed, fmt).square_().div_(12))
    deviations = (error - allowed.sqrt()).clamp_(min=0.0).div_(rounded.sqrt_())
    every = (squares, others, floor, expected, allowed)
    # By row, by feature, and by feature once more in units of every element's noise: no row outweighs the others.
    by_row, by_feature, in_units = (
        torch.stack([t.sum(dim) for t in of]).cpu().numpy()
        for of, dim in ((every, 2), (every, 1), ((t / unit for t in every), 1))
    )
    true = truth.square()
    sizes, of_features, zeros = (t.cpu().numpy() for t in (true.sum(2), true.sum(1), (observed == 0).all(2)))
    places, worst = rows.cpu().numpy(), _worst(deviations, error, spacing)

    drawn = [known if isinstance(known, Drawn) else None for known in directions]

    def of_rows(h: int, found: Tensor) -> Tensor | Array:
        own = directions[h]
        if isinstance(own, Drawn):
            return own.rows(rows[h, found])
        return np.ones(len(found)) if own is None else own(rows[h, found])

    def of_columns(h: int, found: Tensor, *, in_units: bool) -> Tensor:
        if (own := drawn[h]) is not None:
            return own.features(found)
        # Rows' errors are independent of each other, but for rows that are one row.
        noise = (expected[h] / unit[h] if in_units else expected[h])[:, found]
        if (once := rows_that_are_one(truth[h], counterfactual[h])) is not None:
            into = torch.from_numpy(once).to(noise.device)
            noise = noise.new_zeros(int(once.max()) + 1, len(found)).index_add_(0, into, noise)
        return noise.sum(0).square() / noise.square().sum(0).clamp(min=1e-300)

    draws = [None if one is None else one.draws for one in drawn]
    outlying = partial(times_limit, device=truth.device, draws=draws)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        bad_rows = outlying(by_row, of_rows)
        bad_features = np.maximum(
            outlying(by_feature, partial(of_columns, in_units=False)),
            outlying(in_units, partial(of_columns, in_units=True)),
        )
        error, other, _, noise, _ = by_row
        zeroed = zeros & (error > _LOST**2 * by_row[1:].max(0)) & (truth.shape[2] >= _LOST_ELEMENTS)
        zeroed &= sizes > _NEXT_TO_NOTHING**2 * sizes.max(1, initial=0.0)[:, None]
        not_zero = (sizes <= _ZERO**2 * noise) & (other <= _ZERO * noise) & (error > _SPEAKS * noise)
        misplaced, misplaced_features = (
            too_far_off(by_row, sizes, OF_ROW),
            too_far_off(by_feature, of_features, OF_FEATURE),
        )

    def of_head(h: int) -> QuantitySample:
        row, feature, ulps, beyond = worst[h]
        stands_out, marked = np.zeros((0, 2), dtype=np.int64), np.zeros(len(places[h]), dtype=bool)
        if not beyond <= ELEMENT_LIMIT:  # NaN too: another element may stand out.
            stands_out = (deviations[h] > ELEMENT_LIMIT).nonzero().cpu().numpy()
            marked[stands_out[:, 0]] = True
            stands_out[:, 0] = places[h][stands_out[:, 0]]
        return QuantitySample(
            rows=places[h],
            error=error[h],
            counterfactual=other[h],
            floor=by_row[2, h],
            expected=noise[h],
            reference=sizes[h],
            features=by_feature[:3, h],
            bad_rows=bad_rows[h],
            bad_features=bad_features[h],
            bad_elements=stands_out,
            in_outlying_element=marked,
            not_zero=not_zero[h],
            zeroed=zeroed[h],
            misplaced=misplaced[h],
            misplaced_features=misplaced_features[h],
            largest=(int(places[h][row]) if len(places[h]) else 0, feature, ulps, beyond),
            clusters=clusters[h],
            carriers=None,
        )

    return [of_head(h) for h in range(len(rows))]


def _beyond(error: Tensor, lost: Tensor) -> Tensor:
    """How much of an error, in place, is more than flushed terms explain: of one above 1e-18 that changes no bit."""
    return error.abs_().sub_(lost).clamp_(min=0.0)


def _worst(deviations: Tensor, error: Tensor, spacing: Tensor) -> list[tuple[int, int, float, float]]:
    """Of each head (all [H, n, D]) the element that deviates most: row, feature, error in ulp, and deviation."""
    if not deviations.numel():
        return [(0, 0, 0.0, 0.0)] * len(deviations)
    most, at = deviations.flatten(1).max(1)
    ulps = (error.flatten(1).gather(1, at[:, None]) / spacing.flatten(1).gather(1, at[:, None]))[:, 0]
    numbers = zip(at.tolist(), *torch.stack([ulps, most]).tolist(), strict=True)
    return [(*divmod(place, deviations.shape[2]), in_ulps, beyond) for place, in_ulps, beyond in numbers]
