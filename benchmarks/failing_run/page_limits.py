"""The page's section on the published mitigation's limit: the NaN predicted from the capture, and when it came."""

from __future__ import annotations

from typing import Any

from page_monitor import worst
from page_record import Record, Run
from values import at, number, percent, signed_percent

from attn_diag.reports.charts import Axis, Band, Chart, Mark, Section, Series
from attn_diag.reports.words import DASH

_STEP = Axis("training step")
_LOGIT = Axis("largest logit of all heads", log=True)


def limits(record: Record, title: str) -> Section | None:
    """From ``stabilised.json``; None without it."""
    found = record.documents.get("stabilised")
    runs = [run for run in at(found, "runs") or () if isinstance(run, dict)]
    waiting = [run for run in at(found, "not_run") or () if isinstance(run, dict)]
    if not runs and not waiting:
        return None
    said = (
        "The published mitigation multiplies a repeated maximum r of a row by beta, so that its largest term is "
        "exp(-(beta - 1) r). From (beta - 1) r = 87.3 on that is below the smallest normal fp32 number: the row sum is "
        "0, and O is 0 / 0. When the NaN comes is forecast at the alarm's capture, by a straight line through the "
        f"logarithm of the monitor's max logit of the {at(found, 'rule', 'window') or 'last'} steps before; it starts "
        "from the capture's largest repeated maximum where that is higher. Runs past their limit at the capture have "
        "nothing to forecast: the NaN comes at once."
    )
    source = str(at(found, "capture", "run") or "")
    charts = tuple(chart for run in runs if ahead(run) and (chart := _chart(record, source, run)))
    return Section(title, (said,), _table(runs, waiting), charts)


def ahead(run: dict[str, Any]) -> bool:
    """Whether there was something to forecast, rather than a limit that was passed already."""
    step, seen = number(at(run, "forecast", "step")), number(at(run, "forecast", "at"))
    return step is None or seen is None or step > seen + 1


def _table(runs: list[dict[str, Any]], waiting: list[dict[str, Any]]) -> tuple[tuple[str, ...], ...]:
    lines = [
        (
            "run",
            "beta",
            "limit of r",
            "level at the capture",
            "NaN predicted at (95 %)",
            "NaN came at",
            "error",
            "of the steps ahead",
        )
    ]
    for run in runs:
        came, until = at(run, "came"), at(run, "until")
        lines.append((
            str(at(run, "run")), _plain(at(run, "beta")), _plain(at(run, "limit")), *_predicted(at(run, "forecast")),
            f"{came:,}" if isinstance(came, int) else f"not until {until:,}" if isinstance(until, int) else DASH,
            str(at(run, "note") or (signed_percent(at(run, "error")) if ahead(run) else "nothing to forecast")),
            signed_percent(at(run, "error_ahead")),
        ))  # fmt: skip
    for run in waiting:
        forecast = at(run, "forecasts", 0)
        limit = _plain(at(forecast, "limit"))
        lines.append(("not run", _plain(at(run, "beta")), limit, *_predicted(forecast), "not run", DASH, DASH))
    return tuple(lines)


def _predicted(forecast: Any) -> tuple[str, str]:
    if forecast is None:
        return DASH, "no prediction"
    step, low, high = (number(at(forecast, name)) for name in ("step", "low", "high"))
    level = f"{_plain(at(forecast, 'level'))} ({at(forecast, 'level_from')})"
    if step is None:
        return level, "max logit does not grow"
    ends = f"{'?' if low is None else f'{low:,.0f}'} to {'open' if high is None else f'{high:,.0f}'}"
    return level, f"{step:,.0f} ({ends})"


def _chart(record: Record, source: str, found: dict[str, Any]) -> Chart | None:
    """Max logit before and after the capture, the limit, the line that predicts, and the NaN."""
    name, limit, forecast = str(at(found, "run")), number(at(found, "limit")), at(found, "forecast")
    known = next((run for run in record.runs if run.name == source), None)
    run = next((run for run in record.runs if run.name == name), None)
    came, step, seen = number(at(found, "came")), number(at(forecast, "step")), number(at(forecast, "at"))
    series, marks = [], []
    if known and known.checks and seen is not None:
        series.append(_logits(f"{source}, seen until the capture", known, last=seen))
    if run and run.checks:
        series.append(_logits(f"{name}, as trained", run))
    level = number(at(forecast, "level"))
    if step is not None and seen is not None and level is not None and limit is not None and step > seen:
        series.append(Series("predicted", (seen, step), (level, limit), tone="good"))
    if limit is None or not series:
        return None
    marks += [Mark(seen, f"capture {seen:,.0f}")] if seen is not None else []
    marks += [Mark(step, f"NaN predicted {step:,.0f}")] if step is not None else []
    marks += [Mark(came, f"NaN came {came:,.0f}")] if came is not None else []
    beta, error = _plain(at(found, "beta")), number(at(found, "error_ahead"))
    off = "" if error is None else f" Of the steps ahead the forecast is {percent(abs(error))} "
    off += "" if error is None else "too few." if error < 0 else "too many."
    return Chart(
        f"stabilised-{name}", f"{name}: max logit against its limit",
        f"With beta = {beta} the largest repeated maximum must stay below {limit:.3g}.{off}",
        _STEP, _LOGIT, tuple(series), (Band(f"limit {limit:.3g}", limit, limit),), marks=tuple(marks),
    )  # fmt: skip


def _logits(name: str, run: Run, last: float | None = None) -> Series:
    rows = [(float(c.step), worst(c, "max_logit")) for c in run.checks if last is None or c.step <= last]
    return Series(name, tuple(x for x, _ in rows), tuple(y if 0 < y < float("inf") else None for _, y in rows))


def _plain(value: Any) -> str:
    found = number(value)
    return DASH if found is None else f"{found:.3g}"
