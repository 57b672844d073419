"""Signed rounding errors and what can be said about their mean.

The estimand is the mean signed error over the query rows of a capture, conditional on K and V. Rows of one
sequence share K and V, so sequences are the clusters where there are enough of them. Else

- O and delta in total, whose errors are mostly the rounding of O: rows with the same argmax key nearly copy the same
  row of V and share its rounding; and where the rows of V are nearly parallel, all rows have nearly the same O_d in
  feature d, and share that. Hence two ways of clustering at once: argmax keys and features.
- O's excess, what lies beyond its correct rounding: argmax keys.
- delta's excess, dQ, LSE: rows.
- Where all rows have one argmax key (a sink): features alone for O and delta (of 8 rows and more), rows for O's excess.
- Where attention is nearly uniform, O is nearly the same number in all rows: the excesses are clustered both ways, too.

Rows that several sequences have in common count once, and sequences that look at the same keys are one
(``head.shared``, ``inspection.clusters``); delta and dQ are tested over the rows that have a gradient.

Chosen by ``benchmarks/study_calibration.py``, on other seeds than its committed results. Alarms at 1 % / 5 % on
unbiased redraws where O is rounded to nearest, in the worst capture: of O 12 / 24 % with rows as clusters, 4 / 12 %
with argmax keys, 1.1 / 5.1 % with both ways; of delta 4 / 12 %, 2.7 / 9 % and 1.1 / 5.3 %. (Features alone would do
there; but what the features of a row share, such as an error of l, they do not see.) Beside CR2 with Bell & McCaffrey's
degrees of freedom: CR1 with G - 1 alarms a little more often where clusters are unequal; degrees of freedom for fully
correlated clusters alarm hardly ever (0 to 0.4 % at 1 %) where one key has most rows; those from the errors' fourth
moments and random signs gain nothing. Terms dominated by a few clusters do not raise false alarms. To drop tests with
fewer than 20 effective terms, as verdicts once did, left O's tests of excess 0 to 0.9 % at 1 %, and next to no planted
bias of 0.1 ulp was found on heads that copy one key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from attn_diag.errors import InputError
from attn_diag.results.diagnosis import BiasEstimate
from attn_diag.statistics.arrays import padded, side_by_side
from attn_diag.statistics.drift import each_drift
from attn_diag.statistics.mean_tests import MeanTest, Moments, Shares, both_ways, moments

Array = npt.NDArray[np.float64]
_P = TypeVar("_P", float, float | None)

PRIMARY = ("delta", "delta_excess", "o_away_excess", "o_excess")
# Below this many effective terms a test that finds nothing says nothing: its standard error rests on less than
# 3 * 4 - 2 = 10 degrees of freedom (see ``_detectable``) and is itself uncertain by over 22 %.
MIN_EFFECTIVE = 4
MIN_SEQUENCES = 8
# So many rows, where features alone are the clusters: what those of a row share averages out over rows alone.
MIN_FOR_FEATURES = 8
# A standard error below this part of the errors' root mean square is what float64's own rounding of sums leaves.
_VANISHED = 2.0**-40
# A rounding of float64 is no more than this part of the result.
_UNIT = 2.0**-53
_TINY = float(np.finfo(float).tiny)


@dataclass(frozen=True)
class FeatureSums:
    """Errors by feature, and by cell = (argmax key, feature), for ``two_way``."""

    sums: Array
    """[D of every head]: errors summed by feature."""
    sizes: Array
    """[D of every head]: how many elements these stand for."""
    cell_squares: float
    """Over all cells: the squares of a cell's sum s."""
    cell_products: float
    """Over all cells: s times the cell's elements n."""
    cell_sizes: float
    """Over all cells: the squares of n."""

    @classmethod
    def join(cls, parts: Sequence[FeatureSums], groups: Sequence[object] | None = None) -> FeatureSums:
        """The features and cells of several heads or sequences side by side; in those of one group features are one.

        Their cells stay apart, as if none had a key of another's: that leaves the variance rather too large.
        """
        together: dict[object, list[FeatureSums]] = {}
        for group, part in zip(range(len(parts)) if groups is None else groups, parts, strict=True):
            together.setdefault(group, []).append(part)

        def joined(name: str) -> Array:
            each = [[getattr(p, name) for p in found] for found in together.values()]
            return np.concatenate([found[0] if len(found) == 1 else np.sum(found, 0) for found in each])

        return cls(
            sums=joined("sums"),
            sizes=joined("sizes"),
            cell_squares=sum(p.cell_squares for p in parts),
            cell_products=sum(p.cell_products for p in parts),
            cell_sizes=sum(p.cell_sizes for p in parts),
        )


@dataclass(frozen=True)
class SignedErrors:
    """Signed errors of the same number of elements in each of n query rows."""

    total: Array
    """[n]: their sum by row."""
    square: float
    """Sum of their squares over all rows."""
    positive: int
    """How many are above 0."""
    nonzero: int
    """How many are not 0."""
    unit_total: float
    """The mean in units is unit_total / unit_scale."""
    unit_scale: float
    """See ``unit_total``."""
    count: int
    """Elements of a row."""
    features: FeatureSums | None = None
    """Where rounding is shared by features, too."""

    @classmethod
    def of_sums(cls, total: Array, count: int) -> SignedErrors:
        """Errors of which only the sums by row, of ``count`` elements each, are known; a unit is 1."""
        square, positive, nonzero = float(np.square(total).sum()), int((total > 0).sum()), int((total != 0).sum())
        return cls(total, square, positive, nonzero, float(total.sum()), 1.0, count)

    @classmethod
    def join(cls, parts: Sequence[SignedErrors], groups: Sequence[object] | None = None) -> SignedErrors:
        """The rows of several heads or sequences, one after the other; ``groups``: see ``FeatureSums.join``."""
        if len(parts) == 1:
            return parts[0]
        features = [p.features for p in parts if p.features is not None]
        return cls(
            total=np.concatenate([p.total for p in parts]),
            square=sum(p.square for p in parts),
            positive=sum(p.positive for p in parts),
            nonzero=sum(p.nonzero for p in parts),
            unit_total=sum(p.unit_total for p in parts),
            unit_scale=sum(p.unit_scale for p in parts),
            count=parts[0].count,
            features=FeatureSums.join(features, groups) if len(features) == len(parts) else None,
        )


def estimate_bias(
    errors: SignedErrors, clusters: npt.NDArray[np.int64] | None, level: float, *, with_drift: bool = True
) -> BiasEstimate:
    """``estimate_biases`` of one ``BiasCase``."""
    return estimate_biases([BiasCase(errors, clusters, with_drift)], level)[0]


@dataclass(frozen=True)
class BiasCase:
    """One mean to be tested, see ``estimate_biases``."""

    errors: SignedErrors
    """The errors of n rows."""
    clusters: npt.NDArray[np.int64] | None
    """[n], cluster number of each row, from 0 without gaps; None for every row its own. Where ``errors`` has feature
    sums they must be its keys."""
    with_drift: bool = True
    """Also keep the running sum over the rows."""
    attention: bool = True
    """Whether rows are a kernel's, whose features share what its casts of P leave, so that a few rows are no test."""
    reference_error: float | None = None
    """By so much at most the float64 reference's own errors moved the sum of all errors; None: not known."""
    well_rounded: float | None = None
    """By so much the sum of a well-rounded kernel's errors is larger; None: not known."""


def estimate_biases(cases: Sequence[BiasCase], level: float) -> list[BiasEstimate]:
    """Mean signed errors with a cluster-robust t interval and test of zero mean.

    The test is ``mean_test``, on the cluster sums s_c, and ``two_way`` where there are feature sums. n_eff is
    (sum s^2)^2 / sum s^4 over the clusters. Cases with as many rows, or the same clusters, are computed together.

    Where the standard error is no more than the rounding of sums, t says nothing: all G clusters have the same mean
    error. Of independent errors as likely positive as negative, so many agree in sign with probability 2^(1 - G) at
    most, and that is the p-value; where that mean is 0 there is none. (Clusters that are copies of each other must be
    left out before: ``head.shared``.)

    Args:
        cases: The errors of rows, and which of them belong together.
        level: Significance level, for the minimum detectable mean.

    Returns:
        The estimates; the test's fields are None with fewer than two clusters, or eight rows clustered by feature
        alone, and where every error is zero; all but standard_error and p_value also where all clusters have the same
        mean.
    """
    counted = dict[int, tuple[int, Shares]]()
    found = [_Counted(case, counted) if len(case.errors.total) * case.errors.count else None for case in cases]
    some = [one for one in found if one is not None]
    of_sums = moments([(one.sums, one.shares) for one in some])
    drifts = _drifts([one.case for one in some])
    tests = _tests(some, of_sums, level)
    numbers = zip(some, of_sums.total.tolist(), of_sums.effective.tolist(), drifts, tests, strict=True)
    estimates = (one.estimate(*known) for one, *known in numbers)
    return [BiasEstimate() if one is None else next(estimates) for one in found]


class _Counted:
    """A mean of n errors before its test: the sums of its clusters."""

    def __init__(self, case: BiasCase, counted: dict[int, tuple[int, Shares]]) -> None:
        """``counted``: how many clusters there are and what their sizes say, by their identity."""
        errors, rows, few = case.errors, len(case.errors.total), False
        self.case, self.features, self.n = case, errors.features, rows * errors.count
        if case.clusters is None:
            self.count, self.sums, self.shares = rows, errors.total, Shares.alike(rows)
        else:
            if id(case.clusters) not in counted:
                sizes = np.bincount(case.clusters)
                counted[id(case.clusters)] = len(sizes), Shares.of(padded(sizes))
            self.count, self.shares = counted[id(case.clusters)]
            length = self.shares.share.shape[-1]
            self.sums = np.bincount(case.clusters, errors.total, length).astype(np.float64, copy=False)
        if self.features is not None and self.count < 2:
            self.sums, self.shares = self.features.sums, Shares.of_one(self.features.sizes)
            self.count = len(self.sums)
            self.features, few = None, case.attention and rows < MIN_FOR_FEATURES
        self.testable = self.count > 1 and errors.nonzero > 0 and not few

    def estimate(
        self, total: float, effective: float, drift: Mapping[str, Any], test: Sequence[float] | None
    ) -> BiasEstimate:
        """With the sum of all errors, n_eff (NaN: none), the running sum, and what ``_tests`` found."""
        errors, n, mean = self.case.errors, self.n, total / self.n
        rms, bound, beside = math.sqrt(errors.square / n), self.case.reference_error, self.case.well_rounded
        known: dict[str, Any] = {}
        if test is not None:
            se, t, p_value, df, half, detectable = test
            if se <= (dust := _VANISHED * rms):
                agree = max(2.0 ** (1 - self.count), _TINY)
                known = {"standard_error": se, "p_value": agree if abs(mean) > dust else None}
            else:
                known = {"standard_error": se, "t": t, "p_value": p_value, "degrees_of_freedom": df}
                known |= {"ci95": (mean - half, mean + half), "minimum_detectable": detectable}
        return BiasEstimate(
            n=n,
            n_clusters=self.count,
            n_eff=None if math.isnan(effective) else effective,
            mean=mean,
            mean_ulp=_ratio(errors.unit_total, errors.unit_scale),
            rms=rms,
            positive_fraction=_ratio(errors.positive, errors.nonzero),
            cumulative_sum=total,
            # Differences observed - reference and their sum: n + 2 roundings (Higham, eq. 4.4), and mean |e| <= rms.
            reference_bound=None if bound is None else bound / n + (n + 2) * _UNIT * 1.01 * rms,
            well_rounded_mean=None if beside is None else mean + beside / n,
            **known,
            **drift,
        )


def _tests(found: Sequence[_Counted], of_sums: Moments, level: float) -> list[Sequence[float] | None]:
    """Of each standard error, t, p, degrees of freedom, half a 95 % interval, smallest mean; None: not tested."""
    places = [i for i, one in enumerate(found) if one.testable]
    tested = [found[i] for i in places]
    spread = of_sums.take(places).spread(np.array([one.n for one in tested]))
    shared = [(i, one.features) for i, one in enumerate(tested) if one.features is not None]
    shared = [(i, one) for i, one in shared if len(one.sums) > 1]
    if shared:
        which = [i for i, _ in shared]
        of_features = moments([(one.sums, Shares.of_one(one.sizes)) for _, one in shared])
        by_feature = of_features.spread(np.array([one.sizes.sum() for _, one in shared]))
        cells = np.array([[one.cell_squares, one.cell_products, one.cell_sizes] for _, one in shared])
        n = np.array([tested[i].n for i in which])
        for all_of, of_shared in zip(spread, both_ways(spread.take(which), by_feature, cells, n), strict=True):
            all_of[which] = of_shared
    test = MeanTest.of(*spread, level)
    numbers = test.standard_error, test.t, test.p_value, test.df, test.half_width95, test.minimum_detectable
    result = list[Sequence[float] | None]([None] * len(found))
    for i, values in zip(places, zip(*(of_all.tolist() for of_all in numbers), strict=True), strict=True):
        result[i] = values
    return result


def _drifts(cases: Sequence[BiasCase]) -> list[Mapping[str, Any]]:
    """The running sums of those that are to keep them."""
    result = list[Mapping[str, Any]]([{}] * len(cases))
    drifting = [i for i, case in enumerate(cases) if case.with_drift]
    for places, totals in side_by_side([cases[i].errors.total for i in drifting]):
        for place, drift in zip(places, each_drift(totals), strict=True):
            result[drifting[place]] = drift
    return result


def require_level(level: float) -> None:
    """Raise InputError unless ``level`` is a significance level."""
    if not 0 < level < 1:
        raise InputError(f"level must lie between 0 and 1, got {level}; 0.01 is usual")


def adjust(p_values: Sequence[_P]) -> list[_P]:
    """Benjamini-Hochberg adjusted p-values (J. R. Stat. Soc. B 57 (1995) 289); None, which is no test, stays None.

    As ``scipy.stats.false_discovery_control`` has them, whose import takes a sixth of a short command.
    """
    known = np.array([p for p in p_values if p is not None], dtype=np.float64)
    order = np.argsort(known)[::-1]
    scaled = known[order] * (len(order) / np.arange(len(order), 0, -1))
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(np.minimum.accumulate(scaled), 1.0)
    found = iter(adjusted.tolist())
    return [p if p is None else next(found) for p in p_values]


def holm(p_values: Sequence[_P]) -> list[_P]:
    """Holm's adjusted p-values (Scand. J. Stat. 6 (1979) 65): valid however tests depend on each other; None stays."""
    tested = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted, largest = list(p_values), 0.0
    for rank, (p, i) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))
        adjusted[i] = largest
    return adjusted


def _ratio(numerator: float, denominator: float) -> float | None:
    return float(numerator / denominator) if denominator else None
