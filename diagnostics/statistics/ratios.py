"""How many times larger one set of paired errors is than another, with an interval.

Two kernels of one input share most bits of their results, so their errors are paired: the interval comes from a
jackknife of the log ratio over groups of rows, in which what both have in common cancels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attn_diag.statistics.arrays import in_parts, padded, side_by_side, stacked

Array = npt.NDArray[np.float64]

# With fewer effective groups the interval itself is too uncertain to accuse anyone.
MIN_GROUPS = 8
_LEVEL = 0.05
# Rows of their own differ by percents; whose log ratios differ by no more than float64's sums are one row's copies.
_COPIES = 1e-9


@dataclass(frozen=True)
class RatioEstimate:
    """sqrt(sum observed / sum yardstick) and its 95 % interval."""

    factor: float
    """The ratio of the root mean squares."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end."""
    groups: float
    """Effective number of groups that carry the errors, the fewer of both."""


@dataclass(frozen=True)
class Carriers:
    """What rows share: query rows whose delta's error reaches every key of dK.

    It adds to the variance that of the log ratio of two sums of so many squares, share^2 (1 - correlation^2) / count.
    """

    count: float
    """Effective number of these query rows."""
    share: float
    """Their part in the squared error, as expected."""
    correlation: float
    """Of both kernels' errors of delta."""


@dataclass(frozen=True)
class RatioCase:
    """Two sets of paired errors, see ``paired_ratios``."""

    observed: Array
    """[n], squared errors by row."""
    yardstick: Array
    """[n], those that they are compared with."""
    clusters: npt.NDArray[np.int64] | None = None
    """[n], group of every row, from 0 without gaps; None: every row its own."""
    carriers: Carriers | None = None
    """What rows share, which the jackknife over them does not see."""

    def by_group(self) -> tuple[Array, Array]:
        """Both sums of squares of every group."""
        if self.clusters is None:
            return self.observed, self.yardstick
        observed, yardstick = (np.bincount(self.clusters, x) for x in (self.observed, self.yardstick))
        return observed.astype(np.float64), yardstick.astype(np.float64)


def paired_ratio(
    observed: Array,
    yardstick: Array,
    clusters: npt.NDArray[np.int64] | None = None,
) -> RatioEstimate | None:
    """``paired_ratios`` of one ``RatioCase``."""
    return paired_ratios([RatioCase(observed, yardstick, clusters)])[0]


def paired_ratios(cases: Sequence[RatioCase]) -> list[RatioEstimate | None]:
    """The factors between root-mean-square errors, by a delete-one jackknife of their logarithms (Efron & Stein 1981).

    Returns:
        One a case: None where the yardstick is 0 or there are fewer than two groups. Where all groups are copies of
        one, which is one independent sample, the interval tells nothing.
    """
    groups, found = [case.by_group() for case in cases], list[RatioEstimate | None]([None] * len(cases))
    counts = np.array([len(observed) for observed, _ in groups], dtype=np.int64)
    for places, observed in side_by_side([padded(observed) for observed, _ in groups]):
        yardstick = stacked([padded(groups[i][1]) for i in places])
        carriers = [cases[i].carriers for i in places]
        for i, one in zip(places, _side_by_side(observed, yardstick, counts[places], carriers), strict=True):
            found[i] = one
    return found


def _side_by_side(
    observed: Array, yardstick: Array, groups: npt.NDArray[np.int64], carriers: Sequence[Carriers | None]
) -> Iterator[RatioEstimate | None]:
    """Of m cases [m, n] with so many groups each, [m], and nothing in the others."""
    from scipy.special import stdtrit

    sets, n = observed.shape
    totals, squares = np.stack([observed.sum(1), yardstick.sum(1)]), np.zeros((2, sets))
    spread, mean = np.zeros((2, sets))
    with np.errstate(all="ignore"):
        for part in in_parts(n, sets):
            one, other = (x[:, part] / total[:, None] for x, total in zip((observed, yardstick), totals, strict=True))
            squares += [np.square(one).sum(1), np.square(other).sum(1)]
            # The log ratio with a group left out, less that of all groups.
            left_out = np.log(np.maximum(1 - one, 0.0) / (1 - other))
            mean += left_out.sum(1)
            spread += np.square(left_out).sum(1)
        spread = (spread - np.square(mean) / groups) / 4
        counts = np.where(squares > 0, 1 / squares, groups.astype(np.float64)).min(0).tolist()
        whole = np.isfinite(spread).tolist()
        spread = np.maximum(spread, 0.0).tolist()
    for i, shared in enumerate(carriers):
        if shared is not None and shared.share > 0.5:
            counts[i] = min(counts[i], shared.count)
    points = stdtrit(np.maximum(np.array(counts) - 1, 1.0), 1 - _LEVEL / 2).tolist()
    sums = zip(groups.tolist(), *totals.tolist(), carriers, strict=True)
    for i, (n, one, other, shared) in enumerate(sums):
        if n < 2 or not other > 0 or not math.isfinite(one):
            yield None
        elif not one > 0:
            yield RatioEstimate(0.0, 0.0, 0.0, counts[i])
        elif not whole[i]:  # one group has all the error
            yield RatioEstimate(math.sqrt(one / other), 0.0, math.inf, counts[i])
        else:
            factor, variance = math.sqrt(one / other), (n - 1) / n * spread[i]
            if shared is not None:
                variance += shared.share**2 * max(1 - shared.correlation**2, 0.0) / max(shared.count, 1.0)
            half = points[i] * math.sqrt(variance)
            if half < _COPIES < abs(math.log(factor)):  # one independent sample
                yield RatioEstimate(factor, 0.0, math.inf, 1.0)
                continue
            yield RatioEstimate(factor, factor * math.exp(-half), factor * math.exp(min(half, 700.0)), counts[i])
