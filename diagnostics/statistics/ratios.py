"""How many times larger one set of paired errors is than another, with an interval.

Two kernels of one input share most bits of their results, so their errors are paired: the interval comes from a
jackknife of the log ratio over groups of rows, in which what both have in common cancels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# With fewer effective groups the interval itself is too uncertain to accuse anyone.
MIN_GROUPS = 8
_LEVEL = 0.05


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
    """What rows share: query rows whose delta's error reaches every key of dK."""

    count: float
    """Effective number of these query rows."""
    share: float
    """Their part in the squared error, as expected."""
    correlation: float
    """Of both kernels' errors of delta."""


def paired_ratio(
    observed: Array,
    yardstick: Array,
    clusters: npt.NDArray[np.int64] | None = None,
    carriers: Carriers | None = None,
) -> RatioEstimate | None:
    """The factor between two root-mean-square errors, by a delete-one jackknife of its logarithm (Efron & Stein 1981).

    Args:
        observed: [n], squared errors by row.
        yardstick: [n], those that they are compared with.
        clusters: [n], group of every row, from 0 without gaps; None: every row its own.
        carriers: What rows share, which the jackknife over them does not see. It adds to the variance that of the log
            ratio of two sums of so many squares, share^2 (1 - correlation^2) / count.

    Returns:
        None where the yardstick is 0 or there are fewer than two groups.
    """
    if clusters is not None:
        observed = np.bincount(clusters, observed).astype(np.float64)
        yardstick = np.bincount(clusters, yardstick).astype(np.float64)
    a, b = float(observed.sum()), float(yardstick.sum())
    if not b > 0 or not math.isfinite(a) or len(observed) < 2:
        return None
    groups = min(_effective(observed), _effective(yardstick))
    if carriers is not None and carriers.share > 0.5:
        groups = min(groups, carriers.count)
    if not a > 0:
        return RatioEstimate(0.0, 0.0, 0.0, groups)
    factor = math.sqrt(a / b)
    with np.errstate(divide="ignore", invalid="ignore"):
        left_out = 0.5 * (np.log(np.maximum(a - observed, 0.0)) - np.log(np.maximum(b - yardstick, 0.0)))
    if not np.isfinite(left_out).all():
        return RatioEstimate(factor, 0.0, math.inf, groups)  # one group has all the error
    n = len(left_out)
    variance = (n - 1) / n * float(np.square(left_out - left_out.mean()).sum())
    if carriers is not None:
        variance += carriers.share**2 * max(1 - carriers.correlation**2, 0.0) / max(carriers.count, 1.0)
    from scipy.special import stdtrit

    half = float(stdtrit(max(groups - 1, 1.0), 1 - _LEVEL / 2)) * math.sqrt(variance)
    return RatioEstimate(factor, factor * math.exp(-half), factor * math.exp(min(half, 700.0)), groups)


def _effective(squares: Array) -> float:
    """How many groups carry a sum of squares: ``effective`` of their roots."""
    largest = squares.max(initial=0.0)
    if not largest > 0:
        return float(len(squares))
    shares = squares / largest
    return float(shares.sum() ** 2 / np.square(shares).sum())
