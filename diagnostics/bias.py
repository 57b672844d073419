"""Signed rounding errors and what can be said about their mean.

The estimand is the mean signed error over the query rows of a capture, conditional on K and V. Rows of one
sequence share K and V, so sequences are the clusters where there are enough of them; else rows (delta, dQ,
LSE), or all rows with the same argmax key (O: rows that copy the same V row share its rounding).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.diagnosis import BiasEstimate, Drift

Array = npt.NDArray[np.float64]

PRIMARY = ("delta", "delta_excess", "o_away_excess", "o_excess")
# Below this many effective terms a t-test leans on a handful of rows: no verdict from it.
MIN_EFFECTIVE = 20
# sup of |Brownian motion| over [0, 1] exceeds this with probability 1 %: 4 (1 - Phi(2.807)) = 0.01.
FLAT_BAND_99 = 2.807
MIN_SEQUENCES = 8
_POWER = 0.8
_DRIFT_POINTS = 256


@dataclass(frozen=True)
class SignedErrors:
    """Signed errors of ``count`` elements a query row.

    ``total`` [n] sums them by row; ``square`` sums their squares, ``positive`` and ``nonzero`` count them, over
    all rows. The mean in units is unit_total / unit_scale.
    """

    total: Array
    square: float
    positive: int
    nonzero: int
    unit_total: float
    unit_scale: float
    count: int

    @classmethod
    def of_elements(cls, errors: Tensor, ulp_sum: float) -> SignedErrors:
        """From elementwise errors [n, D] and the sum of their spacings: the mean in ulp is mean(e) / mean(ulp)."""
        total = errors.sum(1).cpu().numpy()
        positive, nonzero = _count_signs(errors)
        return cls(
            total=total,
            square=_sum_of_squares(errors),
            positive=positive,
            nonzero=nonzero,
            unit_total=float(total.sum()),
            unit_scale=ulp_sum,
            count=errors.shape[1],
        )

    @classmethod
    def of_rows(cls, errors: Tensor, units: Tensor) -> SignedErrors:
        """From one error a row in units of one scale a row, both [n]: the mean in units is mean(e / unit)."""
        usable = (units > 0) & units.isfinite()
        positive, nonzero = _count_signs(errors)
        return cls(
            total=errors.cpu().numpy(),
            square=_sum_of_squares(errors),
            positive=positive,
            nonzero=nonzero,
            unit_total=float((errors[usable] / units[usable]).sum()),
            unit_scale=float(usable.count_nonzero()),
            count=1,
        )

    @classmethod
    def join(cls, parts: Sequence[SignedErrors]) -> SignedErrors:
        """The rows of several heads or sequences, one after the other."""
        return cls(
            total=np.concatenate([p.total for p in parts]),
            square=sum(p.square for p in parts),
            positive=sum(p.positive for p in parts),
            nonzero=sum(p.nonzero for p in parts),
            unit_total=sum(p.unit_total for p in parts),
            unit_scale=sum(p.unit_scale for p in parts),
            count=parts[0].count,
        )


def estimate_bias(
    errors: SignedErrors, clusters: npt.NDArray[np.int64] | None, level: float, *, with_drift: bool = True
) -> BiasEstimate:
    """Mean signed error with a cluster-robust t interval and test of zero mean.

    ``clusters`` [n]: cluster number of each row, from 0 without gaps; None for every row its own. With cluster
    sums s_c over n_c elements, N = sum n_c and G clusters, mean = sum s_c / N and
    se^2 = G/(G-1) sum (s_c - n_c mean)^2 / N^2, t with G - 1 degrees of freedom (Cameron & Miller, J. Human
    Resources 50 (2015) 317, eq. 11; for single rows it is Student's t). n_eff = (sum s^2)^2 / sum s^4 over the
    clusters. ``level`` enters the minimum detectable mean at 80 % power, (t_{1-level/2} + t_{0.8}) se. The
    test's fields are None with fewer than two clusters, and where every error is zero.
    """
    from scipy.special import stdtr, stdtrit

    n = len(errors.total) * errors.count
    if not n:
        return BiasEstimate()
    sums, sizes = errors.total, np.full(len(errors.total), float(errors.count))
    if clusters is not None:
        sums, sizes = _by_cluster(clusters, sums), _by_cluster(clusters, sizes)
    mean = float(sums.sum() / n)
    result = BiasEstimate(
        n=n,
        n_clusters=len(sums),
        n_eff=_effective(sums),
        mean=mean,
        mean_ulp=_ratio(errors.unit_total, errors.unit_scale),
        rms=math.sqrt(errors.square / n),
        positive_fraction=_ratio(errors.positive, errors.nonzero),
        cumulative_sum=float(errors.total.sum()),
        **(_drift(errors.total) if with_drift else {}),
    )
    if len(sums) < 2 or not errors.nonzero:
        return result
    g = len(sums)
    se = math.sqrt(g / (g - 1) * float(np.square(sums - sizes * mean).sum())) / n
    t = mean / se if se else math.copysign(math.inf, mean)
    df = g - 1
    half = float(stdtrit(df, 0.975)) * se
    detectable = float(stdtrit(df, 1 - level / 2) + stdtrit(df, _POWER)) * se
    return replace(
        result,
        standard_error=se,
        t=t,
        p_value=float(2 * stdtr(df, -abs(t))),
        ci95=(mean - half, mean + half),
        minimum_detectable=detectable,
    )


def adjust(p_values: Sequence[float]) -> list[float]:
    """Benjamini-Hochberg adjusted p-values (J. R. Stat. Soc. B 57 (1995) 289)."""
    from scipy import stats

    return [float(p) for p in stats.false_discovery_control(p_values)] if len(p_values) else []


def _effective(sums: Array) -> float | None:
    squares = np.square(sums / (np.abs(sums).max() or 1.0))
    return _ratio(squares.sum() ** 2, np.square(squares).sum())


def _sum_of_squares(values: Tensor) -> float:
    flat = values.reshape(-1)
    return float(torch.dot(flat, flat))


def _count_signs(values: Tensor) -> tuple[int, int]:
    """How many are positive, and how many not zero. Sums of signs are exact, and a quarter of the cost of comparing."""
    signs = values.sign()
    nonzero = int(_sum_of_squares(signs))
    return (nonzero + int(signs.sum())) // 2, nonzero


def _by_cluster(index: npt.NDArray[np.int64], values: Array) -> Array:
    return np.bincount(index, values).astype(np.float64)


def _drift(row_totals: Array) -> dict[str, Any]:
    """The running sum in row order, thinned, with the flat 99 % band that unbiased noise stays inside."""
    path = np.cumsum(row_totals)
    band = FLAT_BAND_99 * math.sqrt(float(np.square(row_totals).sum()))
    picked = _thinned(len(path))
    return {
        "drift": Drift(picked, path[picked]),
        "drift_band99": band,
        "drift_outside": bool(np.abs(path).max() > band),
    }


@cache
def _thinned(n: int) -> npt.NDArray[np.int64]:
    """At most 256 of n rows, evenly spread, the first and the last among them."""
    return np.linspace(0, n - 1, min(n, _DRIFT_POINTS)).round().astype(np.int64)


def _ratio(numerator: float, denominator: float) -> float | None:
    return float(numerator / denominator) if denominator else None
