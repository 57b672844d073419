"""Means that carry a standard error: the test of a difference (Welch), of more than what is allowed, an interval."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attn_diag.results.diagnosis import BiasEstimate

# From so many degrees of freedom on t is normal to six digits.
_MOST = 1e7


@dataclass(frozen=True)
class Estimated:
    """A mean that carries a test."""

    mean: float
    """The mean."""
    standard_error: float
    """Its standard error."""
    df: float
    """Degrees of freedom of its test."""


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
    """The degrees of freedom of an estimate's test; infinite where it was not tested.

    Documents written before they were stated have them in the 95 % interval, mean +- t(0.975, df) se; where rounding
    has swallowed that (a mean far beyond its standard error) they are taken from the number of clusters.
    """
    from scipy.special import stdtridf, stdtrit

    if estimate.degrees_of_freedom is not None:
        return estimate.degrees_of_freedom
    if estimate.ci95 is None or not estimate.standard_error:
        return math.inf
    ratio = (estimate.ci95[1] - estimate.ci95[0]) / 2 / estimate.standard_error
    normal = float(stdtrit(_MOST, 0.975))
    if ratio <= normal * (1 - 1e-3):
        return float(max(estimate.n_clusters - 1, 1))
    # A little less than the normal quantile can only be the rounding of a document's numbers.
    return math.inf if ratio <= normal else float(stdtridf(0.975, ratio))


@dataclass(frozen=True)
class Welch:
    """The test of a difference B - A of two means."""

    difference: float
    """b.mean - a.mean."""
    standard_error: float
    """Its standard error."""
    df: float
    """Satterthwaite's degrees of freedom."""
    t: float
    """difference / standard_error."""
    p_value: float
    """Two-sided p-value of no difference."""
    ci95: tuple[float, float]
    """95 % confidence interval of the difference."""


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


def confidence(estimate: BiasEstimate, level: float) -> tuple[float, float] | None:
    """The mean's interval at 1 - level; None without a standard error."""
    from scipy.special import stdtrit

    if estimate.mean is None or estimate.standard_error is None:
        return None
    half = float(stdtrit(estimate.n_clusters - 1, 1 - level / 2)) * estimate.standard_error
    return estimate.mean - half, estimate.mean + half


def p_beyond(estimate: BiasEstimate, allowed: float) -> float | None:
    """The p-value of "|mean| <= allowed"; None where the estimate has none.

    Of the t-test at the nearer end, two-sided, and 1 within: at least as large as under any mean that is allowed.
    """
    from scipy.special import stdtr

    if allowed == 0 or estimate.p_value is None or estimate.mean is None or estimate.standard_error is None:
        return estimate.p_value
    beyond = abs(estimate.mean) - allowed
    if beyond <= 0:
        return 1.0
    t = beyond / estimate.standard_error if estimate.standard_error else math.inf
    return float(2 * stdtr(estimate.n_clusters - 1, -t))
