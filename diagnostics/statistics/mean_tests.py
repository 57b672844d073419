"""Cluster-robust t-tests of means, of any number of data sets at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from attn_diag.statistics.arrays import side_by_side

Array = npt.NDArray[np.float64]

_POWER = 0.8


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

    def each(self) -> Iterator[dict[str, float]]:
        """Each of [m] tests, its fields by name."""
        names = [f.name for f in fields(self)]
        for values in zip(*(getattr(self, name).tolist() for name in names), strict=True):
            yield dict(zip(names, values, strict=True))

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


def mean_tests(cases: Sequence[tuple[Array, Array]], level: float) -> MeanTest:
    """``mean_test`` of m data sets, sums and sizes of each [G]: [m]; those with one G are one array."""
    found = np.empty((4, len(cases)))
    for places, sums in side_by_side([sums for sums, _ in cases]):
        found[:, places] = _moments(sums, np.stack([cases[i][1] for i in places]))
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


def effective(sums: Array) -> Array:
    """How many of the ``sums`` [..., G] carry their squares, (sum s^2)^2 / sum s^4; NaN where all are zero."""
    largest = np.abs(sums).max(-1, keepdims=True, initial=0.0)
    squares = np.square(sums / np.where(largest > 0, largest, np.nan))
    return np.asarray(squares.sum(-1) ** 2 / np.square(squares).sum(-1))
