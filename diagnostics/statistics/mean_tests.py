"""Cluster-robust t-tests of means, of any number of data sets at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attn_diag.statistics.arrays import in_parts, side_by_side, stacked

Array = npt.NDArray[np.float64]

_POWER = 0.8
# Sums beyond this, and its inverse, are scaled: the fourth powers of residuals, 2^-52 of them and more, can be added.
_SMALL = 2.0**-128


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
    return MeanTest.of(*Moments.of(sums, Shares.of(sizes)).spread(sizes.sum(-1)), level)


@dataclass(frozen=True, eq=False)
class Shares:
    """What the sizes of clusters alone say, of one or several data sets; ``mean_test`` has the formulas."""

    share: Array
    """h, [..., G]; [1] where all of one data set are alike."""
    weight: Array
    """1 / (1 - h)."""
    df: Array
    """Degrees of freedom of the test, [...]."""

    @classmethod
    def of(cls, sizes: npt.NDArray[np.float64] | npt.NDArray[np.int64]) -> Shares:
        """Of sizes [..., G]."""
        share = sizes / sizes.sum(-1)[..., None]
        with np.errstate(divide="ignore", invalid="ignore"):  # a single cluster
            weight = 1 / (1 - share)
            squares = np.square(share)
            leverage = squares * weight
            return cls(share, weight, 1 / (squares.sum(-1) + leverage.sum(-1) ** 2 - np.square(leverage).sum(-1)))

    @classmethod
    def stacked(cls, several: Sequence[Shares]) -> Shares:
        """Of data sets with as many clusters each; of the same in all of them once."""
        if all(one is several[0] for one in several):
            return several[0]
        share, weight = (stacked([getattr(one, name) for one in several]) for name in ("share", "weight"))
        return cls(share, weight, np.array([float(one.df) for one in several]))

    @classmethod
    def of_one(cls, sizes: Array) -> Shares:
        """Of one data set's sizes [G], which may all be alike."""
        return cls.alike(len(sizes)) if len(sizes) and (sizes == sizes[0]).all() else cls.of(sizes)

    @classmethod
    @lru_cache(maxsize=64)
    def alike(cls, clusters: int) -> Shares:
        """Of so many clusters of one size; asked again, the same object."""
        weight = clusters / (clusters - 1) if clusters > 1 else math.inf
        return cls(np.array([1 / clusters]), np.array([weight]), np.array(float(clusters - 1)))


class Spread(NamedTuple):
    """What a test is made of: the first fields of ``MeanTest``, [...]."""

    mean: Array
    standard_error: Array
    df: Array
    error_df: Array

    def take(self, places: Sequence[int]) -> Spread:
        """Of some of [m] means."""
        return Spread(*(of_all[places] for of_all in self))


@dataclass(frozen=True)
class Moments:
    """What tests need of the sums s of clusters, [...]."""

    total: Array
    """sum s."""
    error: Array
    """The standard error of that total."""
    df: Array
    """Degrees of freedom of the test."""
    error_df: Array
    """Degrees of freedom of the standard error."""
    effective: Array
    """As the function of this name says of s."""

    @classmethod
    def of(cls, sums: Array, shares: Shares) -> Moments:
        """Of sums [..., G], whose squares need not be representable."""
        largest = np.asarray(np.maximum(sums.max(-1, initial=0.0), -sums.min(-1, initial=0.0)))
        with np.errstate(invalid="ignore", divide="ignore"):  # a single cluster, or none but zeros
            if largest.min(initial=1.0) > _SMALL and largest.max(initial=1.0) < 1 / _SMALL:
                return cls._of(sums, shares)
            exponent = np.where(largest > 0, np.frexp(largest)[1], 0)
            found = cls._of(np.ldexp(sums, -exponent[..., None]), shares)
        return replace(found, total=np.ldexp(found.total, exponent), error=np.ldexp(found.error, exponent))

    @classmethod
    def _of(cls, sums: Array, shares: Shares) -> Moments:
        add = np.add.reduce
        total, count = add(sums, -1), sums.shape[-1]
        of_sums, fourths, of_residuals, their_fourths = np.zeros((4, *total.shape))
        for part in in_parts(count, total.size):
            own, one = sums[..., part], part if shares.share.shape[-1] == count else slice(None)
            squares = np.square(own)
            of_sums += add(squares, -1)
            fourths += add(np.square(squares, out=squares), -1)
            residuals = own - shares.share[..., one] * total[..., None]
            np.square(residuals, out=residuals)
            residuals *= shares.weight[..., one]
            of_residuals += add(residuals, -1)
            their_fourths += add(np.square(residuals, out=residuals), -1)
        # Where all residuals are zero this is NaN, and so is nothing else: 1 changes nothing, as the error is 0.
        carrying = np.square(of_residuals) / their_fourths
        error_df = np.minimum(shares.df, np.fmax(3 * carrying - 2, 1.0))
        return cls(total, np.sqrt(of_residuals), shares.df + np.zeros(total.shape), error_df, of_sums**2 / fourths)

    def take(self, places: Sequence[int]) -> Moments:
        """Of some of [m] data sets."""
        return Moments(*(getattr(self, f.name)[places] for f in fields(self)))

    def spread(self, n: Array | npt.NDArray[np.int64] | int) -> Spread:
        """Of the mean of ``n`` elements [...]."""
        return Spread(self.total / n, self.error / n, self.df, self.error_df)


def moments(cases: Sequence[tuple[Array, Shares]]) -> Moments:
    """Of m data sets, the sums [G] and the shares of each: [m]; those with as many clusters are one array."""
    found = np.empty((len(fields(Moments)), len(cases)))
    even = [len(shares.share) < len(sums) for sums, shares in cases]
    for kind in (True, False):
        every = [i for i, one in enumerate(even) if one == kind]
        for some, sums in side_by_side([cases[i][0] for i in every]):
            places = [every[i] for i in some]
            of_some = Moments.of(sums, Shares.stacked([cases[i][1] for i in places]))
            found[:, places] = [*vars(of_some).values()]
    return Moments(*found)


def two_way(first: MeanTest, second: MeanTest, cells: Array, n: Array | int, level: float) -> MeanTest:
    """The test of one mean with two ways of clustering at once, argmax keys and features; see ``both_ways``."""
    return MeanTest.of(*both_ways(first, second, cells, n), level)


def both_ways(
    first: MeanTest | Spread, second: MeanTest | Spread, cells: Array, n: Array | npt.NDArray[np.int64] | int
) -> Spread:
    """What the test of a mean with two ways of clustering is made of.

    Errors may be correlated within both: the variances add, less that of the cells, which both count (Cameron, Gelbach
    & Miller, J. Bus. Econ. Stat. 29 (2011) 238). That difference is kept from falling below the smaller of the two;
    degrees of freedom are the smaller ones.

    Args:
        first: With one of them.
        second: With the other.
        cells: [..., 3], ``FeatureSums``'s sums over the cells in which both agree.
        n: [...] elements.
    """
    mean = first.mean
    squares, products, sizes = (cells[..., i] for i in range(3))
    of_cells = (squares - 2 * mean * products + mean**2 * sizes) / np.square(n)
    one, other = np.square(first.standard_error), np.square(second.standard_error)
    se = np.sqrt(np.maximum(one + other - of_cells, np.minimum(one, other)))
    return Spread(mean, se, np.minimum(first.df, second.df), np.minimum(first.error_df, second.error_df))


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
