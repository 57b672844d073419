"""Did a mean error change? Welch's test of the difference of two estimates that each carry a standard error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from attn_diag.results.comparison import MeanChange, MeanOutcome
from attn_diag.results.diagnosis import BiasEstimate, HeadDiagnosis

PRIMARY = ("delta", "delta_excess", "o_away_excess", "o_excess")
# Degrees of freedom outside are taken as these: below, a mean says nothing; above, t is normal to six digits.
_FEWEST, _MOST = 0.2, 1e7


@dataclass(frozen=True)
class Estimated:
    """A mean with the standard error and degrees of freedom of its test."""

    mean: float
    standard_error: float
    df: float


def estimated(estimate: BiasEstimate | None) -> Estimated | None:
    """What can be compared of an estimate; None where its mean was not tested.

    Errors that are all zero are an exact mean of zero. A test that was left out because the float64 reference is not
    sharp enough (no adjusted p-value) is none.
    """
    if estimate is None or estimate.mean is None:
        return None
    if estimate.rms == 0:
        return Estimated(0.0, 0.0, math.inf)
    if estimate.standard_error is None or estimate.p_adjusted is None:
        return None
    return Estimated(estimate.mean, estimate.standard_error, degrees_of_freedom(estimate))


def degrees_of_freedom(estimate: BiasEstimate) -> float:
    """The degrees of freedom that an estimate's test used, which a diagnosis does not state.

    The 95 % interval is mean +- t(0.975, df) se: its half-width over se has one df. Unlike the p-value it neither
    hardly depends on df (where t is near 0) nor underflows (where t is large). Where there is no interval, or rounding
    has made it useless, df comes from t and p = 2 P(T > |t|), and where that fails from the number of clusters.
    """
    from scipy.special import stdtr, stdtrit

    se = estimate.standard_error
    if se and estimate.ci95 is not None:
        ratio = (estimate.ci95[1] - estimate.ci95[0]) / 2 / se
        normal = float(stdtrit(_MOST, 0.975))
        # Less than the normal quantile can only be rounding; a little of it is infinitely many.
        if ratio > normal * (1 - 1e-3):
            return math.inf if ratio <= normal else _solved(lambda df: float(stdtrit(df, 0.975)) - ratio)
    t, p = estimate.t, estimate.p_value
    if t is not None and p is not None and math.isfinite(t) and t and 0 < p < 1:
        if 2 * float(stdtr(_MOST, -abs(t))) >= p:
            return math.inf
        return _solved(lambda df: 2 * float(stdtr(df, -abs(t))) - p)
    return float(max(estimate.n_clusters - 1, 1))


def _solved(excess: Callable[[float], float]) -> float:
    """Where a falling function of the degrees of freedom is zero, within their limits."""
    from scipy.optimize import brentq

    low, high = math.log(_FEWEST), math.log(_MOST)
    if excess(_FEWEST) <= 0:
        return _FEWEST
    if excess(_MOST) >= 0:
        return math.inf
    return math.exp(brentq(lambda x: excess(math.exp(x)), low, high, xtol=1e-12))


@dataclass(frozen=True)
class Welch:
    """The test of a difference B - A of two means."""

    difference: float
    standard_error: float
    df: float
    t: float
    p_value: float
    ci95: tuple[float, float]


def welch(a: Estimated, b: Estimated) -> Welch:
    """Welch's t-test (Biometrika 34 (1947) 28) of b.mean - a.mean, with Satterthwaite's degrees of freedom.

    se^2 = se_a^2 + se_b^2 takes the two estimates as independent. Where both kernels ran on the same inputs their
    errors share what correct rounding does, and are positively correlated: the true standard error is smaller, and the
    test conservative.
    """
    from scipy.special import ndtr, ndtri, stdtr, stdtrit

    difference = b.mean - a.mean
    se = math.hypot(a.standard_error, b.standard_error)
    if not se:
        t = math.copysign(math.inf, difference) if difference else 0.0
        return Welch(difference, 0.0, math.inf, t, 0.0 if difference else 1.0, (difference, difference))
    # In shares of the variance, so that nothing underflows.
    spread = sum((e.standard_error / se) ** 4 / e.df for e in (a, b))
    df = 1 / spread if spread else math.inf
    t = difference / se
    if math.isinf(df):
        p, half = 2 * float(ndtr(-abs(t))), float(ndtri(0.975)) * se
    else:
        p, half = 2 * float(stdtr(df, -abs(t))), float(stdtrit(df, 0.975)) * se
    return Welch(difference, se, df, t, p, (difference - half, difference + half))


def mean_changes(a: HeadDiagnosis, b: HeadDiagnosis, levels: tuple[float, float]) -> list[MeanChange]:
    """The primary means of one head that A or B has, tested but not yet judged. ``levels``: of A's and B's own runs."""
    found = []
    for name in PRIMARY:
        one, other = getattr(a.bias, name), getattr(b.bias, name)
        if one is None and other is None:
            continue
        change = MeanChange(
            name=name,
            a=one.mean if one else None,
            b=other.mean if other else None,
            a_units=one.mean_ulp if one else None,
            b_units=other.mean_ulp if other else None,
            a_biased=_significant(one, levels[0]),
            b_biased=_significant(other, levels[1]),
        )
        first, second = estimated(one), estimated(other)
        if first is not None and second is not None:
            test = welch(first, second)
            change = replace(
                change,
                difference=test.difference,
                standard_error=test.standard_error,
                df=test.df,
                t=test.t,
                p_value=test.p_value,
                ci95=test.ci95,
                outcome="none",
            )
        found.append(change)
    return found


def _significant(estimate: BiasEstimate | None, level: float) -> bool:
    return estimate is not None and estimate.p_adjusted is not None and estimate.p_adjusted <= level


def judged(changes: Sequence[MeanChange], level: float) -> list[MeanChange]:
    """The changes of the whole run with adjusted p-values and outcomes.

    Benjamini & Hochberg, J. R. Stat. Soc. B 57 (1995) 289, over all differences tested.
    """
    from scipy.stats import false_discovery_control

    tested = [c.p_value for c in changes if c.p_value is not None]
    adjusted = iter(false_discovery_control(tested) if tested else ())
    result = []
    for change in changes:
        if change.p_value is None:
            result.append(change)
            continue
        p = float(next(adjusted))
        result.append(replace(change, p_adjusted=p, outcome=_outcome(change) if p <= level else "none"))
    return result


def _outcome(change: MeanChange) -> MeanOutcome:
    """What a significant difference means."""
    a, b = change.a or 0.0, change.b or 0.0
    if change.a_biased and change.b_biased:
        if a * b < 0:
            return "reversed"
        return "grew" if abs(b) > abs(a) else "shrank"
    if change.b_biased:
        return "became biased"
    return "cured" if change.a_biased else "moved"
