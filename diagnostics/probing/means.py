"""A mean error's interval, and the test of whether it is larger than what must be allowed."""

from __future__ import annotations

import math

from attn_diag.results.diagnosis import BiasEstimate


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
