"""When a growing max logit will pass a limit: a line through the monitor's checks, and how such rules did before.

    python benchmarks/failing_run/forecast.py benchmarks/results/failing_run/monitor/A_*.xz

**The rule, chosen on the runs of ``benchmarks/results/failing_run`` (160 sequences a step) alone**, before a stabilised
run at 40 was seen: ln of the largest max logit of all heads is fitted by a straight line over the checks of the last
200 steps (weights that grow at a steady relative rate make logits that do). The level at the capture's step is the
capture's largest repeated maximum, or the line's own value where that is higher: both are of fewer sequences than a
step has, so the larger one is the closer bound. The command shows how this rule and others do on logs of runs that are
over: the check at which max logit first passed a limit, foreseen 50, 100 and 150 steps before. On the runs above this
rule is 4 % early in the median, 11 % off in size, and once in 21 cases beyond 20 % (22 %); a line through max logit
itself is 13 % late, up to 199 %, and the head that is the largest at the time alone up to 42 % off.

The interval is Fieller's for (ln limit - level) / slope, with one draw's scatter about the line for the level, and the
slope's standard error: 95 %, without an end where the slope may be 0.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from folder import markdown
from scipy import stats

from attn_diag.watching.monitoring.record import MonitorCheck, read_log

Rule = Literal["log-linear", "linear"]
Which = Literal["all heads", "worst head"]
Points = npt.NDArray[np.float64]

RULE: Rule = "log-linear"
WHICH: Which = "all heads"
WINDOW = 200
# A line through fewer checks has no scatter to speak of.
_FEWEST = 3
_SCALES: dict[Rule, tuple[Callable[[Any], Any], Callable[[float], float]]] = {
    "log-linear": (np.log, math.exp),
    "linear": (lambda value: value, lambda value: value),
}
# The limits of a stabilised softmax with beta 3, 2.5 and 2, rounded.
_LIMITS = (43.7, 58.2, 87.3)
_LEADS = (50, 100, 150)


@dataclass(frozen=True)
class Forecast:
    """When a growing maximum passes ``limit``, foreseen at ``at``.

    ``level``: of the maximum at that step; ``level_from``: the capture's, or the line's. ``slope``: of ln maximum
    ("log-linear") or of the maximum a step, with its standard error over ``checks`` checks. ``step``: None where it
    does not grow; ``low``, ``high``: 95 %, None where they are not known.
    """

    rule: Rule
    which: Which
    at: int
    limit: float
    level: float
    level_from: Literal["capture", "log"]
    slope: float
    slope_error: float
    checks: int
    step: float | None
    low: float | None
    high: float | None


def series(checks: Sequence[MonitorCheck], which: Which, until: int) -> Points:
    """(step, max logit) [N, 2] of the checks up to a step: the largest of all heads, or of the one that is the largest
    at the last of them."""
    seen = [check for check in checks if check.step <= until]
    heads = [np.concatenate([layer.values["max_logit"] for layer in check.layers]) for check in seen]
    known = [(check.step, h) for check, h in zip(seen, heads, strict=True) if np.isfinite(h).any()]
    if not known:
        return np.empty((0, 2))
    worst = int(np.nanargmax(known[-1][1]))
    value: Callable[[Points], float] = np.nanmax if which == "all heads" else lambda found: found[worst]
    points: Points = np.array([(step, float(value(found))) for step, found in known])
    usable = np.isfinite(points[:, 1]) & (points[:, 1] > 0)
    return np.asarray(points[usable])


def forecast(
    points: Points, limit: float, at: int, rule: Rule, which: Which, captured: float | None = None
) -> Forecast | None:
    """From (step, max logit) up to ``at``; ``captured``: the capture's largest repeated maximum at that step.

    None where the last ``WINDOW`` steps hold fewer than three checks.
    """
    scale, back = _SCALES[rule]
    recent = points[(points[:, 0] > at - WINDOW) & (points[:, 0] <= at)]
    if len(recent) < _FEWEST:
        return None
    steps, values = recent[:, 0] - at, scale(recent[:, 1])
    line = stats.linregress(steps, values)
    freedom = len(recent) - 2
    scatter = float(np.sqrt(np.square(values - line.intercept - line.slope * steps).sum() / freedom))
    level = float(line.intercept)
    from_capture = captured is not None and bool(scale(captured) >= level)
    if captured is not None and from_capture:
        level = float(scale(captured))
    gap = float(scale(limit)) - level
    slope, slope_error = float(line.slope), float(line.stderr)
    ahead = max(gap, 0.0) / slope if slope > 0 else (0.0 if gap <= 0 else None)
    low, high = _fieller(gap, scatter, slope, slope_error, float(stats.t.ppf(0.975, freedom)))
    return Forecast(
        rule=rule,
        which=which,
        at=at,
        limit=limit,
        level=back(level),
        level_from="capture" if from_capture else "log",
        slope=slope,
        slope_error=slope_error,
        checks=len(recent),
        step=None if ahead is None else at + ahead,
        low=None if low is None else at + low,
        high=None if high is None else at + high,
    )


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


def all_forecasts(
    checks: Sequence[MonitorCheck], limit: float, at: int, captured: float | None
) -> tuple[Forecast, ...]:
    """By every rule, the chosen one first."""
    combinations: list[tuple[Rule, Which]] = [
        (RULE, WHICH), ("linear", "all heads"), ("log-linear", "worst head"), ("linear", "worst head"),
    ]  # fmt: skip
    found = (forecast(series(checks, w, at), limit, at, rule, w, captured) for rule, w in combinations)
    return tuple(f for f in found if f is not None)


@dataclass(frozen=True)
class Tried:
    """One rule on runs that are over: (predicted - come) / come of every limit and lead."""

    rule: Rule
    which: Which
    errors: tuple[float, ...]
    without: int


def backtest(
    logs: Sequence[Sequence[MonitorCheck]],
    limits: Sequence[float] = _LIMITS,
    leads: Sequence[int] = _LEADS,
) -> list[Tried]:
    """When max logit of all heads first passed a limit, foreseen so many steps before from the log alone.

    ``without``: forecasts in which it does not grow. Cases that no run reached, and those with too few checks before,
    are none.
    """
    found = []
    for which in ("all heads", "worst head"):
        for rule in ("log-linear", "linear"):
            errors, without = list[float](), 0
            for checks in logs:
                everything = series(checks, "all heads", sys.maxsize)
                for limit in limits:
                    passed = everything[everything[:, 1] > limit, 0]
                    for lead in leads if len(passed) else ():
                        came = float(passed[0])
                        at = int(came) - lead
                        made = forecast(series(checks, which, at), limit, at, rule, which)
                        if made is not None and made.step is not None:
                            errors.append((made.step - came) / came)
                        elif made is not None:
                            without += 1
            found.append(Tried(rule, which, tuple(errors), without))
    return found


def tried_table(found: Sequence[Tried]) -> str:
    """Markdown."""
    rows = [
        [f"{t.rule}, {t.which}", str(len(t.errors)), f"{100 * median(t.errors):+.0f} %",
         f"{100 * median(map(abs, t.errors)):.0f} %", f"{100 * max(map(abs, t.errors)):.0f} %",
         str(sum(abs(e) > 0.2 for e in t.errors)), str(t.without)]
        for t in found
    ]  # fmt: skip
    return markdown(["rule", "cases", "median", "median size", "largest", "beyond 20 %", "no growth"], rows)


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("monitors' logs of runs that are over are expected: python forecast.py LOG...")
    print(tried_table(backtest([list(read_log(path)) for path in map(Path, sys.argv[1:])])))


if __name__ == "__main__":
    main()
