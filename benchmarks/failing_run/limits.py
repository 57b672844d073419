"""The NaN of a stabilised softmax, forecast from the capture at arm A's alarm, beside the step at which it came.

Where a row's maximum r > 0 is repeated, the stabilised softmax subtracts beta r, and P_bar's largest element is
exp(-(beta - 1) r). From (beta - 1) r = 126 ln 2 = 87.34 on it is below fp32's smallest normal number, which ex2.approx
flushes to 0: l = 0, and O = 0 / 0. So the NaN comes at the step in which the largest repeated maximum of any head and
sequence passes 87.34 / (beta - 1).

When that is: ln of the largest max logit of all heads is fitted by a straight line over the monitor's checks of the
last 200 steps (weights that grow at a steady relative rate make logits that do). The level at the capture's step is the
capture's largest repeated maximum, or the line's own value where that is higher: both are of fewer sequences than a
step has, so the larger one is the closer bound. The rule was chosen on the runs of ``benchmarks/results/failing_run``
(160 sequences a step) alone, before a stabilised run at 40 was seen. The interval is Fieller's for (ln limit - level) /
slope, with one draw's scatter about the line for the level, and the slope's standard error: 95 %, without an end where
the slope may be 0. Where the capture is beyond the limit already, the NaN is predicted at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from alarms import worst
from predictions import Chain
from record import Record, Run
from scipy import stats

from attn_diag import preset
from attn_diag.analyses.mitigation.equivalence import beta_limits
from attn_diag.reports.charts import Section
from attn_diag.results.wording import DASH
from attn_diag.watching.monitoring.record import MonitorCheck

WINDOW = 200
# A line through fewer checks has no scatter to speak of.
_FEWEST = 3


@dataclass(frozen=True)
class Forecast:
    """When the largest logit passes a limit."""

    at: int
    """The step at which it was foreseen."""
    level: float
    """The maximum at that step."""
    level_from: Literal["capture", "log"]
    """Whether the level is the capture's or the line's."""
    slope: float
    """Of ln maximum, a step."""
    checks: int
    """Over how many."""
    step: float | None
    """When it passes the limit; None where it does not grow."""
    low: float | None
    """The lower end of the 95 % interval; None where it is not known."""
    high: float | None
    """The upper end."""


def forecast(checks: Sequence[MonitorCheck], limit: float, at: int, captured: float) -> Forecast | None:
    """From the checks up to ``at``; ``captured``: the capture's largest repeated maximum at that step.

    None where the last ``WINDOW`` steps hold fewer than three checks.
    """
    seen = [(c.step - at, worst(c, "max_logit")) for c in checks if at - WINDOW < c.step <= at]
    steps, values = np.array([(step, math.log(value)) for step, value in seen if 0 < value < math.inf] or [(0, 0)]).T
    if len(steps) < _FEWEST:
        return None
    line, freedom = stats.linregress(steps, values), len(steps) - 2
    scatter = float(np.sqrt(np.square(values - line.intercept - line.slope * steps).sum() / freedom))
    level, slope, lifted = float(line.intercept), float(line.slope), math.log(captured) >= line.intercept
    if lifted:
        level = math.log(captured)
    gap = math.log(limit) - level
    ahead = max(gap, 0.0) / slope if slope > 0 else (0.0 if gap <= 0 else None)
    low, high = _fieller(gap, scatter, slope, float(line.stderr), float(stats.t.ppf(0.975, freedom)))
    found = Forecast(at, math.exp(level), "capture" if lifted else "log", slope, len(steps), ahead, low, high)
    ends = {name: at + value for name in ("step", "low", "high") if (value := getattr(found, name)) is not None}
    return replace(found, **ends)


def _fieller(
    gap: float, gap_error: float, slope: float, slope_error: float, t: float
) -> tuple[float | None, float | None]:
    """The x >= 0 with |gap - x slope| <= t sqrt(gap_error^2 + x^2 slope_error^2) (Fieller, 1954); None: no such end."""
    a, b, c = slope**2 - (t * slope_error) ** 2, gap * slope, gap**2 - (t * gap_error) ** 2
    root = b**2 - a * c
    if root < 0 and a <= 0:
        return None, None
    root = max(root, 0.0)  # below 0 by its own rounding alone, where the fit is exact
    # The smaller root, in the form that does not cancel; where the slope may be 0 the set has no upper end.
    low = c / (b + math.sqrt(root)) if c > 0 and b + math.sqrt(root) > 0 else 0.0
    return max(low, 0.0), max((b + math.sqrt(root)) / a, 0.0) if a > 0 and slope > 0 else None


@dataclass(frozen=True)
class Limited:
    """One stabilised run: what was forecast of it, and what came."""

    run: str
    beta: float
    """What a repeated maximum is multiplied by."""
    limit: float
    """Of the repeated maximum."""
    start: int
    """The first step that is stabilised."""
    forecast: Forecast | None
    """None: too few checks."""
    came: int | None
    """The first step whose loss or gradient norm is not finite; None where none is until ``until``."""
    until: int
    error: float | None
    """(predicted - come) / come; None where one of the two is not known, or the NaN came before the capture."""
    error_ahead: float | None
    """Of the steps from the capture or the start on; None where it came in the first."""

    @property
    def ahead(self) -> bool:
        """Whether there was something to forecast, rather than a limit that was passed already."""
        found = self.forecast
        return found is None or found.step is None or found.step > found.at + 1


def limit_of(beta: float) -> float:
    """The repeated maximum from which P_bar's largest element underflows: 126 ln 2 / (beta - 1)."""
    _, flush, _ = beta_limits(preset("bf16-forward"), 1.0)
    return (flush - 1.0) / (beta - 1.0)


def beta_of(run: Run) -> float | None:
    """A run's beta; None where its forward is not stabilised, or l has a lower limit and so never underflows."""
    forward = run.header.get("forward")
    if not isinstance(forward, dict) or forward.get("row sum clamp"):
        return None
    found = re.match(r"stabilised \(beta ([\d.]+)", str(forward.get("softmax", "")))
    return None if found is None else float(found[1])


def limited(run: Run, beta: float, checks: Sequence[MonitorCheck], at: int, captured: float) -> Limited:
    """What was forecast at ``at`` of a stabilised run, from the capture and the log of the run that it is of."""
    limit = limit_of(beta)
    made = forecast(checks, limit, at, captured)
    came = next((step for step, loss, norm in run.log.steps if not math.isfinite(loss + norm)), None)
    # Where the limit is behind already, the NaN is predicted in the first step that the stabilised softmax runs.
    begin = max(at, run.first)
    error = error_ahead = None
    if made is not None and made.step is not None and came is not None and came >= at:
        off = max(made.step, begin) - came
        error, error_ahead = off / came, off / (came - begin) if came > begin else None
    return Limited(run.name, beta, limit, run.first, made, came, run.until, error, error_ahead)


def limits_of(record: Record, chain: Chain) -> list[Limited]:
    """All stabilised runs with the weights or the seed of the run that was captured.

    Raises:
        ValueError: The captured run was not monitored, or the capture has no repeated maximum.
    """
    parent, captured = record.runs.get(chain.run), largest_repeated(chain)
    if parent is None or not parent.checks or captured is None:
        raise ValueError(f"{chain.run} has no monitor's log, or its capture no repeated maximum")
    return [
        limited(run, beta, parent.checks, chain.step, captured)
        for run in record.runs.values()
        if (beta := beta_of(run)) is not None
        and (run.seed == parent.seed if run.origin is None else run.origin == parent.name)
    ]


def largest_repeated(chain: Chain) -> float | None:
    """The largest repeated maximum of the capture's sequences."""
    found = [s.largest for t in chain.what_if if (s := t.stabilised) is not None and s.largest is not None]
    return max(found, default=None)


def section(found: Sequence[Limited], captured: float | None, title: str) -> Section:
    """When the NaN came, and when it was forecast."""
    said = (
        "The published mitigation multiplies a repeated maximum r of a row by beta, so that its largest term is "
        "exp(-(beta - 1) r). From (beta - 1) r = 87.3 on that is below the smallest normal fp32 number: the row sum is "
        "0, and O is 0 / 0. When the NaN comes is forecast at the alarm's capture, by a straight line through the "
        f"logarithm of the monitor's max logit of the {WINDOW} steps before; it starts from the capture's largest "
        f"repeated maximum ({captured:g}) where that is higher. Runs past their limit at the capture have nothing to "
        "forecast: the NaN comes at once."
    )
    lines = [
        ("run", "beta", "limit of r", "level then", "predicted (95 %)", "NaN came at", "error", "of the steps ahead")
    ]
    for o in found:
        came = f"not until {o.until:,}" if o.came is None else f"{o.came:,}"
        error = signed_percent(o.error) + ("" if o.ahead else ", at once")
        lines.append((o.run, f"{o.beta:g}", f"{o.limit:.3g}", *_words(o.forecast), came, error,
                      signed_percent(o.error_ahead)))  # fmt: skip
    return Section(title, (said,), tuple(lines))


def signed_percent(value: float | None) -> str:
    """ "+1.6 %"."""
    return DASH if value is None else f"{100 * value:+.1f} %"


def _words(found: Forecast | None) -> tuple[str, str]:
    if found is None:
        return DASH, "too few checks"
    level = f"{found.level:.3g} ({found.level_from})"
    if found.step is None:
        return level, "does not grow"
    low, high = ("open" if end is None else f"{end:,.0f}" for end in (found.low, found.high))
    return level, f"{found.step:,.0f} ({low} to {high})"
