"""Sums over training steps and what chance makes of them: running sums with a flat band, coherence of matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attn_diag.results.diagnosis import BiasEstimate
from attn_diag.results.paper import Accumulated
from attn_diag.statistics.welch import degrees_of_freedom

Array = npt.NDArray[np.float64]

# P(sup |Brownian motion| over [0, 1] > c) < 4 P(Z > c), and close to it: this is the point for 1 %.
_BAND_POINT = 1 - 0.01 / 4
# Fewer terms say nothing about their spread, or about neighbours.
_MIN_FOR_SPREAD, _MIN_FOR_LAG = 3, 8
SIGN_DRAWS = 9999


def flat_band(standard_errors: Array, df: Array) -> Array:
    """The +-99 % band of running sums of independent unbiased means.

    The variance of the whole sum is sum se^2, with
    Satterthwaite's degrees of freedom (sum se^2)^2 / sum(se^4 / df). With a known variance the band is Lévy's,
    4 P(Z > c) = 1 %; with an estimated one Z becomes Student's t, as P(sup |B| > c s) = E 4 P(Z > c s | s). A sum of
    finitely many steps leaves it less often than Brownian motion does: 0.8 % with 100 steps.

    Args:
        standard_errors: [..., S], of each mean.
        df: [..., S], the degrees of freedom that these are estimated with.

    Returns:
        The band, [...].
    """
    from scipy.special import stdtrit

    deviation, total = _of_sum(standard_errors, df)
    return np.asarray(stdtrit(np.minimum(total, 1e9), _BAND_POINT) * deviation)


def band_p_value(reached: float, standard_errors: Array, df: Array) -> float:
    """The p-value that goes with ``flat_band``: how often unbiased running sums reach +-``reached``, at most.

    Arguments are those of ``flat_band``, [S]. 1 where nothing is uncertain and nothing was reached.
    """
    from scipy.special import stdtr

    deviation, total = _of_sum(standard_errors, df)
    if not deviation:
        return 0.0 if reached else 1.0
    return min(1.0, 4 * float(stdtr(np.minimum(total, 1e9), -reached / deviation)))


def _of_sum(standard_errors: Array, df: Array) -> tuple[Array, Array]:
    """Standard error of the whole sum, and Satterthwaite's degrees of freedom; [..., S] -> [...]."""
    squares = np.square(standard_errors)
    variance = squares.sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        total = np.square(variance) / (np.square(squares) / df).sum(-1)
    return np.asarray(np.sqrt(variance)), np.asarray(np.where(variance > 0, total, np.inf))


def accumulate(estimates: Sequence[BiasEstimate | None]) -> Accumulated | None:
    """The running sum of the steps' means. None where a step has no mean (or is None), or one without a standard error.

    A step whose errors are all zero adds nothing, with certainty.
    """
    with_mean = [e for e in estimates if e is not None and e.mean is not None]
    known = [e for e in with_mean if e.standard_error is not None or not e.rms]
    if not known or len(known) < len(estimates):
        return None
    means = np.array([e.mean for e in known], dtype=np.float64)
    errors = np.array([e.standard_error or 0.0 for e in known])
    sums = np.cumsum(means)
    band = float(flat_band(errors, np.array([degrees_of_freedom(e) for e in known])))
    t, p = spread_test(means)
    lag = _lag1(means[errors > 0] / errors[errors > 0])
    return Accumulated(
        means=tuple(means.tolist()),
        standard_errors=tuple(errors.tolist()),
        sums=tuple(sums.tolist()),
        band99=band,
        outside=bool(np.abs(sums).max() > band),
        t_over_steps=t,
        p_over_steps=p,
        lag1=lag,
        lag1_limit=None if lag is None else 1.96 / math.sqrt(len(means)),
    )


def spread_test(means: Array) -> tuple[float | None, float | None]:
    """Student's t and two-sided p of a zero mean, from the spread of ``means`` [S] alone."""
    from scipy.special import stdtr

    if len(means) < _MIN_FOR_SPREAD or not (spread := float(means.std(ddof=1))):
        return None, None
    t = float(means.mean()) / (spread / math.sqrt(len(means)))
    return t, float(2 * stdtr(len(means) - 1, -abs(t)))


def sign_coherence(gram: Array, draws: int = SIGN_DRAWS, seed: int = 0) -> tuple[float, float, float]:
    """||sum M_s||^2 / sum ||M_s||^2 of matrices with inner products ``gram`` [S, S], its null's 95 % point, and p.

    The null: the same matrices with random signs, ``draws`` of them (1 in the mean). p = (1 + how many draws reach the
    observed value) / (1 + draws), so it is never below what S signs can tell, nor 0.
    """
    trace = float(np.trace(gram))
    signs = np.random.default_rng(seed).integers(0, 2, (draws, len(gram))) * 2.0 - 1
    null = ((signs @ gram) * signs).sum(1) / trace
    observed = float(gram.sum()) / trace
    # The identity's own draw must count, whatever the order of additions made of it.
    reached = int((null >= observed * (1 - 1e-12)).sum())
    return observed, float(np.quantile(null, 0.95)), (1 + reached) / (1 + draws)


def _lag1(values: Array) -> float | None:
    """Correlation of neighbours, about the mean."""
    if len(values) < _MIN_FOR_LAG:
        return None
    centred = values - values.mean()
    total = float(centred @ centred)
    return float(centred[1:] @ centred[:-1]) / total if total else None
