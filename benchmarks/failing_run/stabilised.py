"""The NaN of a stabilised softmax, predicted from the capture at arm A's alarm, beside the step at which it came.

    python benchmarks/failing_run/stabilised.py benchmarks/results/failing_chain [--json [FILE]]

Where a row's maximum r > 0 is repeated, the stabilised softmax subtracts beta r, and P_bar's largest element is
exp(-(beta - 1) r). From (beta - 1) r = 126 ln 2 = 87.34 on it is below fp32's smallest normal number, which ex2.approx
flushes to 0: l = 0, and O = 0 / 0. (With subnormal numbers 1 / l would overflow from 128 ln 2 + ln 2 = 89.4 on, two
keys at the maximum.) So the NaN comes at the step in which the largest repeated maximum of any head and sequence passes
87.34 / (beta - 1). When that is, is foreseen by ``forecast``'s rule from the monitor's log of arm A until the capture,
and the capture's largest repeated maximum; other rules are reported beside it. Where the capture is beyond the limit
already, the NaN is predicted at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from folder import command, markdown, read_chains, read_checks, read_runs, start_of
from forecast import RULE, WHICH, WINDOW, Forecast, all_forecasts
from runlog import RunLog
from values import signed_percent

from attn_diag import preset
from attn_diag.analyses.mitigation.equivalence import beta_limits
from attn_diag.head.machine import describe_tool, pick_device
from attn_diag.watching.monitoring.record import MonitorCheck

BETAS = (2.0, 4.0, 8.0)


@dataclass(frozen=True)
class Outcome:
    """One stabilised run: what was predicted of it, and what came.

    ``limit``: of the repeated maximum; ``came``: the first step whose loss or gradient norm is not finite, None where
    none is until ``until``. ``error``: (predicted - come) / come; ``error_ahead``: of the steps from the capture or
    the fork's start on, None where it came in the first. ``inside``: whether it came within the 95 % interval.
    ``errors``: ``error`` by every rule that gives a step. ``note``: why there is no comparison.
    """

    run: str
    beta: float
    limit: float
    start: int
    forecasts: tuple[Forecast, ...]
    came: int | None
    until: int
    error: float | None
    error_ahead: float | None
    inside: bool | None
    errors: dict[str, float]
    note: str = ""

    @property
    def forecast(self) -> Forecast | None:
        """That of the rule chosen beforehand."""
        return next((f for f in self.forecasts if (f.rule, f.which) == (RULE, WHICH)), None)


def limit_of(beta: float) -> float:
    """The repeated maximum from which P_bar's largest element underflows: 126 ln 2 / (beta - 1)."""
    _, flush, _ = beta_limits(preset("bf16-forward"), 1.0)
    return (flush - 1.0) / (beta - 1.0)


def beta_of(log: RunLog) -> float | None:
    """A run's beta; None where its forward is not stabilised, or l has a lower limit and so never underflows."""
    forward = log.headers[0].get("forward")
    if not isinstance(forward, dict) or forward.get("row sum clamp"):
        return None
    found = re.match(r"stabilised \(beta ([\d.]+)", str(forward.get("softmax", "")))
    return None if found is None else float(found[1])


def first_nonfinite(log: RunLog) -> int | None:
    """The first step whose loss or gradient norm is not finite."""
    return next((step for step, loss, norm in log.steps if not math.isfinite(loss + norm)), None)


def outcome(log: RunLog, beta: float, checks: Sequence[MonitorCheck], at: int, captured: float) -> Outcome:
    """What was predicted at ``at`` of a stabilised run, from the capture and the log of the run that it is of."""
    limit, origin = limit_of(beta), start_of(log)
    start = 0 if origin is None else origin[1]
    forecasts = all_forecasts(checks, limit, at, captured)
    came, until, note = first_nonfinite(log), log.steps[-1][0], ""
    chosen = next((f for f in forecasts if (f.rule, f.which) == (RULE, WHICH)), None)
    if came is None:
        note = f"no NaN until step {until}"
    elif came < at:
        note, chosen = f"the NaN came before the capture of step {at}: no prediction of it", None
    elif chosen is None:
        note = f"too few checks before step {at}"
    elif chosen.step is None:
        note = "max logit did not grow: no step is predicted"
    step = inside = None
    errors: dict[str, float] = {}
    # Where the limit is behind already, the NaN is predicted in the first step that the stabilised softmax runs.
    begin = max(at, start)
    if chosen is not None and came is not None and chosen.step is not None:
        step = max(chosen.step, float(begin))
        known = [f for f in forecasts if f.step is not None]
        errors = {f"{f.rule}, {f.which}": (max(f.step or 0.0, begin) - came) / came for f in known}
        # What passes the limit since the step before shows in a whole step.
        high = math.inf if chosen.high is None else max(chosen.high, begin) + 1
        inside = chosen.low is not None and chosen.low <= came + 1 and came <= high
    return Outcome(
        run=log.name,
        beta=beta,
        limit=limit,
        start=start,
        forecasts=forecasts,
        came=came,
        until=until,
        error=None if step is None or not came else (step - came) / came,
        error_ahead=None if step is None or came is None or came <= begin else (step - came) / (came - begin),
        inside=inside,
        errors=errors,
        note=note,
    )


def outcomes(folder: Path) -> dict[str, Any]:
    """All stabilised runs of a folder; betas without a run are named. Raises ValueError where there is no chain_A."""
    chain = read_chains(folder).get("A")
    if chain is None:
        raise ValueError(f"no chain_A.json in {folder.name}: make it with predictions.py")
    parent, at = chain["run"], chain["step"]
    checks = read_checks(folder, parent)
    captured = [r for r in chain["what_if"]["stabilised"]["largest"] if r is not None]
    if checks is None or not captured:
        raise ValueError(f"{parent} has no monitor's log, or its capture no repeated maximum: nothing to predict from")
    found = [
        outcome(log, beta, checks, at, max(captured))
        for log in read_runs(folder).values()
        if (beta := beta_of(log)) is not None and _belongs(log, parent)
    ]
    missing = [beta for beta in BETAS if beta not in {o.beta for o in found}]
    predicted = {beta: all_forecasts(checks, limit_of(beta), at, max(captured)) for beta in missing}
    return {
        "tool": asdict(describe_tool(pick_device("cpu"))),
        "rule": {"scale": RULE, "of": WHICH, "window": WINDOW},
        "capture": {name: chain[name] for name in ("run", "step", "layer", "head", "sequences")}
        | {"largest_repeated_maximum": captured},
        "runs": [asdict(o) | {"forecast": None if o.forecast is None else asdict(o.forecast)} for o in found],
        "not_run": [{"beta": b, "forecasts": [asdict(f) for f in made]} for b, made in predicted.items()],
    }


def _belongs(log: RunLog, parent: str) -> bool:
    """Whether a run is a fork of the parent, or one from step 0 with the parent's seed."""
    origin = start_of(log)
    if origin is not None:
        return origin[0] == parent
    return parent.partition("_seed")[2].partition("_")[0] == str(log.headers[0]["run"]["seed"])


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    head = ["run", "beta", "limit of r", "r at the capture", "predicted step (95 %)", "came", "error",
            "of the steps ahead", "other rules' error"]  # fmt: skip
    rows = []
    for o in found["runs"]:
        came = "–" if o["came"] is None else str(o["came"])
        others = [f"{rule}: {signed_percent(e)}" for rule, e in o["errors"].items() if rule != f"{RULE}, {WHICH}"]
        rows.append([o["run"], f"{o['beta']:g}", f"{o['limit']:.3g}", *_predicted(o["forecast"]), came,
                     o["note"] or signed_percent(o["error"]), signed_percent(o["error_ahead"]),
                     "; ".join(others) or "–"])  # fmt: skip
    for n in found["not_run"]:
        chosen = next((f for f in n["forecasts"] if (f["rule"], f["which"]) == (RULE, WHICH)), None)
        limit = f"{limit_of(n['beta']):.3g}"
        rows.append(["–", f"{n['beta']:g}", limit, *_predicted(chosen), "not run", "–", "–", "–"])
    return markdown(head, rows)


def _predicted(chosen: dict[str, Any] | None) -> tuple[str, str]:
    if chosen is None:
        return "–", "too few checks"
    level = f"{chosen['level']:.3g} ({chosen['level_from']})"
    if chosen["step"] is None:
        return level, "does not grow"
    low = "?" if chosen["low"] is None else f"{chosen['low']:.0f}"
    high = "open" if chosen["high"] is None else f"{chosen['high']:.0f}"
    at_once = ", at once" if chosen["level"] >= chosen["limit"] else ""
    return level, f"{chosen['step']:.0f} ({low} to {high}){at_once}"


def main() -> None:
    command(__doc__, "stabilised.json", outcomes, table)


if __name__ == "__main__":
    main()
