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
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from attn_diag.errors import InputError
from attn_diag.results.diagnosis import BiasEstimate
from attn_diag.statistics.drift import drift_of

Array = npt.NDArray[np.float64]

PRIMARY = ("delta", "delta_excess", "o_away_excess", "o_excess")
# Below this many effective terms a test that finds nothing says nothing: its standard error rests on less than
# 3 * 4 - 2 = 10 degrees of freedom (see ``_detectable``) and is itself uncertain by over 22 %.
MIN_EFFECTIVE = 4
MIN_SEQUENCES = 8
# So many rows, where features alone are the clusters: what those of a row share averages out over rows alone.
MIN_FOR_FEATURES = 8
# A standard error below this part of the errors' root mean square is what float64's own rounding of sums leaves.
_VANISHED = 2.0**-40
_POWER = 0.8


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
        return cls(
            sums=np.concatenate([np.sum([p.sums for p in found], 0) for found in together.values()]),
            sizes=np.concatenate([np.sum([p.sizes for p in found], 0) for found in together.values()]),
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
    """Mean signed error with a cluster-robust t interval and test of zero mean.

    The test is ``mean_test``, on the cluster sums s_c, and ``two_way`` where there are feature sums. n_eff is
    (sum s^2)^2 / sum s^4 over the clusters.

    Where the standard error is no more than the rounding of sums, t says nothing: all G clusters have the same mean
    error. Of independent errors as likely positive as negative, so many agree in sign with probability 2^(1 - G) at
    most, and that is the p-value; where that mean is 0 there is none. (Clusters that are copies of each other must be
    left out before: ``head.shared``.)

    Args:
        errors: The errors of n rows.
        clusters: [n], cluster number of each row, from 0 without gaps; None for every row its own. Where ``errors`` has
            feature sums they must be its keys.
        level: Significance level, for the minimum detectable mean.
        with_drift: Also keep the running sum over the rows.

    Returns:
        The estimate; the test's fields are None with fewer than two clusters, or eight rows clustered by feature alone,
        and where every error is zero; all but standard_error and p_value also where all clusters have the same mean.
    """
    return estimate_biases([BiasCase(errors, clusters, with_drift)], level)[0]


@dataclass(frozen=True)
class BiasCase:
    """One mean to be tested, see ``estimate_bias``."""

    errors: SignedErrors
    """The errors of n rows."""
    clusters: npt.NDArray[np.int64] | None
    """[n], cluster number of each row; None for every row its own."""
    with_drift: bool = True
    """Also keep the running sum over the rows."""


def estimate_biases(cases: Sequence[BiasCase], level: float) -> list[BiasEstimate]:
    """``estimate_bias`` of several cases; those with as many clusters are computed together."""
    found = [_Untested(case) for case in cases]
    tested = [one for one in found if one.testable]
    by_cluster = _mean_tests([(one.sums, one.sizes) for one in tested], level)
    shared = [(i, one.shared) for i, one in enumerate(tested) if one.shared is not None and len(one.shared.sums) > 1]
    if shared:
        places, features = [i for i, _ in shared], [one for _, one in shared]
        by_feature = _mean_tests([(one.sums, one.sizes) for one in features], level)
        cells = np.array([[one.cell_squares, one.cell_products, one.cell_sizes] for one in features])
        n = np.array([tested[i].n for i in places])
        by_cluster.put(places, two_way(by_cluster.take(places), by_feature, cells, n, level))
    results = {id(one): one.with_test(by_cluster.take([i])) for i, one in enumerate(tested)}
    return [results.get(id(one), one.estimate) for one in found]


class _Untested:
    """What is known of a mean before it is tested."""

    def __init__(self, case: BiasCase) -> None:
        errors, rows = case.errors, len(case.errors.total)
        self.errors, self.shared, self.n = errors, errors.features, rows * errors.count
        self.sums, self.sizes, self.estimate, self.testable = errors.total, np.zeros(0), BiasEstimate(), False
        if not self.n:
            return
        self.sizes = np.full(rows, float(errors.count))
        if case.clusters is not None:
            self.sums, self.sizes = (_by_cluster(case.clusters, values) for values in (self.sums, self.sizes))
        few = False
        if self.shared is not None and len(self.sums) < 2:
            self.sums, self.sizes, self.shared, few = self.shared.sums, self.shared.sizes, None, rows < MIN_FOR_FEATURES
        self.testable = len(self.sums) > 1 and errors.nonzero > 0 and not few
        self.estimate = BiasEstimate(
            n=self.n,
            n_clusters=len(self.sums),
            n_eff=float(effective(self.sums)) if self.sums.any() else None,
            mean=float(self.sums.sum() / self.n),
            mean_ulp=_ratio(errors.unit_total, errors.unit_scale),
            rms=math.sqrt(errors.square / self.n),
            positive_fraction=_ratio(errors.positive, errors.nonzero),
            cumulative_sum=float(errors.total.sum()),
            **(drift_of(errors.total) if case.with_drift else {}),
        )

    def with_test(self, test: MeanTest) -> BiasEstimate:
        """The estimate with its test, a ``MeanTest`` [1]."""
        mean, rms = self.estimate.mean, self.estimate.rms
        assert mean is not None
        assert rms is not None
        se, half = float(test.standard_error[0]), float(test.half_width95[0])
        if se <= (dust := _VANISHED * rms):
            agree = max(2.0 ** (1 - len(self.sums)), float(np.finfo(float).tiny))
            return replace(self.estimate, standard_error=se, p_value=agree if abs(mean) > dust else None)
        return replace(
            self.estimate,
            standard_error=se,
            t=float(test.t[0]),
            p_value=float(test.p_value[0]),
            degrees_of_freedom=float(test.df[0]),
            ci95=(mean - half, mean + half),
            minimum_detectable=float(test.minimum_detectable[0]),
        )


@dataclass(frozen=True)
class MeanTest:
    """What ``mean_test`` and ``two_way`` return: arrays [...] of one shape."""

    mean: Array
    """Mean signed error."""
    standard_error: Array
    """Its cluster-robust standard error."""
    df: Array
    """Degrees of freedom of the test."""
    error_df: Array
    """Degrees of freedom of the standard error, see ``_detectable``."""
    t: Array
    """mean / standard_error."""
    p_value: Array
    """Two-sided p-value of a zero mean."""
    half_width95: Array
    """The 95 % interval is mean +- this."""
    minimum_detectable: Array
    """The mean that the test would find with 80 % power."""

    def take(self, places: Sequence[int]) -> MeanTest:
        """Some of [m] tests."""
        return MeanTest(*(getattr(self, f.name)[places] for f in fields(self)))

    def put(self, places: Sequence[int], others: MeanTest) -> None:
        """Replace some of [m] tests."""
        for f in fields(self):
            getattr(self, f.name)[places] = getattr(others, f.name)

    @classmethod
    def of(cls, mean: Array, se: Array, df: Array, error_df: Array, level: float) -> MeanTest:
        """Student's t-test of a zero mean."""
        from scipy.special import stdtr, stdtrit

        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.where(se > 0, mean / se, np.copysign(np.inf, mean))
        return cls(
            mean=mean,
            standard_error=se,
            df=df,
            error_df=error_df,
            t=t,
            p_value=2 * stdtr(df, -np.abs(t)),
            half_width95=stdtrit(df, 0.975) * se,
            minimum_detectable=_detectable(df, error_df, level) * se,
        )


def mean_test(sums: Array, sizes: Array, level: float) -> MeanTest:
    """t-test of zero mean for clustered errors, for any number of data sets at once.

    With N = sum n_c, shares h_c = n_c / N, mean = sum s_c / N and residuals r_c = s_c - n_c mean, the variance is
    CR2's, se^2 = sum r_c^2 / (1 - h_c) / N^2, with Bell & McCaffrey's degrees of freedom under independent errors of
    equal variance, 1 / (sum h^2 + (sum y)^2 - sum y^2), y_c = h_c^2 / (1 - h_c) (Imbens & Kolesar, Rev. Econ. Stat. 98
    (2016) 701, section III). Clusters of one size give G - 1 degrees of freedom: Student's t of their means.

    Args:
        sums: [..., G], each cluster's summed errors s_c; at least two clusters in each data set.
        sizes: [..., G], its number of elements n_c; 0: no such cluster, so that data sets with different numbers of
            clusters fit one array.
        level: Significance level, for the minimum detectable mean.
    """
    return MeanTest.of(*_moments(sums, sizes), level)


def _mean_tests(cases: Sequence[tuple[Array, Array]], level: float) -> MeanTest:
    """``mean_test`` of m data sets, sums and sizes of each [G]: [m]; those with one G are one array."""
    alike: dict[int, list[int]] = {}
    for i, (sums, _) in enumerate(cases):
        alike.setdefault(len(sums), []).append(i)
    found = np.empty((4, len(cases)))
    for places in alike.values():
        found[:, places] = _moments(np.stack([cases[i][0] for i in places]), np.stack([cases[i][1] for i in places]))
    return MeanTest.of(found[0], found[1], found[2], found[3], level)


def _moments(sums: Array, sizes: Array) -> tuple[Array, Array, Array, Array]:
    """mean, its standard error, and both degrees of freedom, of ``mean_test``."""
    n = sizes.sum(-1)
    share = sizes / n[..., None]
    mean = sums.sum(-1) / n
    residuals = (sums - sizes * mean[..., None]) / np.sqrt(1 - share)
    se = np.sqrt(np.square(residuals).sum(-1)) / n
    leverage = np.square(share) / (1 - share)
    df = 1 / (np.square(share).sum(-1) + leverage.sum(-1) ** 2 - np.square(leverage).sum(-1))
    # Where all residuals are zero n_eff is NaN, and so is nothing else: 1 changes nothing, as se = 0.
    error_df = np.minimum(df, np.fmax(3 * effective(residuals) - 2, 1.0))
    return mean, se, df, error_df


def two_way(first: MeanTest, second: MeanTest, cells: Array, n: Array | int, level: float) -> MeanTest:
    """The test of one mean with two ways of clustering at once, argmax keys and features.

    Errors may be correlated within both: the variances add, less that of the cells, which both count (Cameron, Gelbach
    & Miller, J. Bus. Econ. Stat. 29 (2011) 238). That difference is kept from falling below the smaller of the two;
    degrees of freedom are the smaller ones.

    Args:
        first: The test with one of them.
        second: The test with the other.
        cells: [..., 3], ``FeatureSums``'s sums over the cells in which both agree.
        n: [...] elements.
        level: Significance level, for the minimum detectable mean.
    """
    mean = first.mean
    squares, products, sizes = (cells[..., i] for i in range(3))
    of_cells = (squares - 2 * mean * products + mean**2 * sizes) / np.square(n)
    one, other = np.square(first.standard_error), np.square(second.standard_error)
    se = np.sqrt(np.maximum(one + other - of_cells, np.minimum(one, other)))
    df, error_df = np.minimum(first.df, second.df), np.minimum(first.error_df, second.error_df)
    return MeanTest.of(mean, se, df, error_df, level)


def _detectable(df: Array, error_df: Array, level: float) -> Array:
    """c [...] such that a mean of c se is found with 80 % power in new data of the same kind, se being this data's.

    ``df``: the test's degrees of freedom. Not only the new test's standard error is an estimate (that alone would be
    the noncentral t) but the stated one too. With S, S' independent, of mean k and variance v = 1 - k^2, distributed as
    sqrt(chi^2_f / f), the new test rejects where Z + c S - t S' > 0; taking that sum as normal, (c - t) k = z sqrt(1 +
    (c^2 + t^2) v), z the 80 % point. f (``error_df``) counts what the standard error rests on: residuals of variances
    V_c have f = (sum V)^2 / sum V^2, estimated by 3 n_eff - 2, as E r^4 = 3 V^2 (Lipsitz, Ibrahim & Parzen, J. R. Stat.
    Soc. D 48 (1999) 495); at most ``df``.

    Eight normal clusters, level 1 %: the power is 0.68 with c = t + z, 0.70 with the noncentral t, 0.80 with this.
    """
    from scipy.special import gammaln, ndtri, stdtrit

    t, z2 = stdtrit(df, 1 - level / 2), float(ndtri(_POWER)) ** 2
    k2 = 2 / error_df * np.exp(2 * (gammaln((error_df + 1) / 2) - gammaln(error_df / 2)))
    v = 1 - k2
    a = k2 - z2 * v
    return np.asarray((t * k2 + np.sqrt((t * k2) ** 2 - a * (t**2 * k2 - z2 * (1 + t**2 * v)))) / a)


def require_level(level: float) -> None:
    """Raise InputError unless ``level`` is a significance level."""
    if not 0 < level < 1:
        raise InputError(f"level must lie between 0 and 1, got {level}; 0.01 is usual")


def adjust(p_values: Sequence[float]) -> list[float]:
    """Benjamini-Hochberg adjusted p-values (J. R. Stat. Soc. B 57 (1995) 289)."""
    from scipy import stats

    return [float(p) for p in stats.false_discovery_control(p_values)] if len(p_values) else []


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (Scand. J. Stat. 6 (1979) 65): valid however the tests depend on each other."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def effective(sums: Array) -> Array:
    """How many of the ``sums`` [..., G] carry their squares, (sum s^2)^2 / sum s^4; NaN where all are zero."""
    largest = np.abs(sums).max(-1, keepdims=True, initial=0.0)
    squares = np.square(sums / np.where(largest > 0, largest, np.nan))
    return np.asarray(squares.sum(-1) ** 2 / np.square(squares).sum(-1))


def _by_cluster(index: npt.NDArray[np.int64], values: Array) -> Array:
    return np.bincount(index, values).astype(np.float64)


def _ratio(numerator: float, denominator: float) -> float | None:
    return float(numerator / denominator) if denominator else None
