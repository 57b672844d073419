"""The page's section on the monitor: what the alarm's rule saw of the failing and the healthy runs, and when."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from alarms import replayed
from page_record import Record, Run
from page_series import FAILING_TONE, HEALTHY_TONE, STEP, drawable, last_drawn

from attn_diag.reports.charts import Axis, Band, Chart, Mark, Section, Series, Tone
from attn_diag.reports.words import DASH
from attn_diag.watching.monitoring.alarm import AlarmRule, AlarmState
from attn_diag.watching.monitoring.record import MonitorCheck


@dataclass(frozen=True)
class Watched:
    """What the rule saw at each check: ``share`` averaged and ``witness`` over its threshold, of the worst head."""

    steps: tuple[float, ...]
    share: tuple[float, ...]
    witness: tuple[float, ...]
    w_q_norm: tuple[float, ...]
    max_logit: tuple[float, ...]
    alarm: int | None


def watched(checks: Iterable[MonitorCheck], every: int, rule: AlarmRule) -> Watched:
    """Replay the rule at the checks whose step is a multiple of ``every``."""
    state, rows, alarm = AlarmState(rule), list[tuple[float, ...]](), None
    for check in checks:
        if check.step % every:
            continue
        if state.update(check) and alarm is None:
            alarm = check.step
        rows.append((check.step, state.share, state.witness, worst(check, "w_q_norm"), worst(check, "max_logit")))
    steps, share, witness, norms, logits = zip(*rows, strict=True) if rows else ((),) * 5
    return Watched(steps, share, witness, norms, logits, alarm)


def worst(check: MonitorCheck, metric: str) -> float:
    """The largest of all heads, NaN where none has it."""
    found = [
        float(np.nanmax(v)) for c in check.layers if (v := c.values.get(metric)) is not None and not np.isnan(v).all()
    ]
    return max(found, default=math.nan)


def spacing(runs: Sequence[Run]) -> int:
    """Steps between checks that all these runs have: the least common multiple of their spacings."""
    return math.lcm(*(int(np.diff([c.step for c in run.checks]).min()) for run in runs if len(run.checks) > 1))


def monitor(record: Record, arm: str, title: str, rule: AlarmRule, signs: bool = True) -> list[Section]:
    """What the alarm's rule saw of an arm and of the healthy runs, and the alarms. Empty where it was not monitored.

    ``signs``: also of what does not tell the arms apart.
    """
    groups: list[tuple[str, Tone, Run]] = [
        (who, tone, run)
        for who, tone, runs in ((f"arm {arm}", FAILING_TONE, record.of(arm)), ("healthy", HEALTHY_TONE, record.healthy))
        for run in runs
        if run.checks
    ]
    if not groups or groups[0][2].arm != arm:
        return []
    every = spacing([run for *_, run in groups])
    seen = {run.name: watched(run.checks, every, rule) for *_, run in groups}
    main = groups[0][2]
    marks = _marks(main, seen[main.name])
    last = last_drawn([run for *_, run in groups if run.arm == arm])

    def lines(value: Callable[[Watched], Sequence[float]], log: bool) -> tuple[Series, ...]:
        first = {run.arm: run.name for *_, run in reversed(groups)}
        return tuple(
            Series(f"{who}, seed {run.seed}", *_points(seen[run.name], value, last, log), tone=tone,
                   look=None if first[run.arm] == run.name else "faint")
            for who, tone, run in sorted(groups, key=lambda group: group[2].arm == arm)
        )  # fmt: skip

    def chart(stem: str, name: str, axis: Axis, value: Callable[[Watched], Sequence[float]], caption: str,
              bands: tuple[Band, ...] = ()) -> Chart:  # fmt: skip
        return Chart(f"{arm}-{stem}", name, caption, STEP, axis, lines(value, axis.log), bands, marks=marks)

    charts = (
        chart("witness", "Is it more than correct rounding makes?", Axis("witness / threshold"), lambda w: w.witness,
              "Sum of log e-values of the worst head's error against what one correct rounding of O leaves of it. From "
              f"1 on: more than correct rounding makes, with at most {rule.false_alarm_rate:g} false alarms in 1,000 "
              "checks of the whole model.", (Band("threshold", 1, 1),)),
        chart("share", "Does it matter?", Axis("share of dW_Q in error", log=True), lambda w: w.share,
              "The worst head's share of ‖dW_Q‖ that the rounding of O is predicted to put in error, averaged over "
              "checks as the rule does. The level alone tells no arm apart: healthy runs come near it or pass it.",
              (Band("level", rule.level, rule.level),)),
    )  # fmt: skip
    no_signs = (
        chart("w-q-norm", "No sign: spectral norm of W_Q", Axis("largest spectral norm of a head's W_Q"),
              lambda w: w.w_q_norm, _compared(record, arm, seen, "w_q_norm")),
        chart("max-logit", "No sign: largest logit", Axis("largest logit of all heads", log=True),
              lambda w: w.max_logit, _compared(record, arm, seen, "max_logit")),
    )  # fmt: skip
    paragraph = (
        "At a check the monitor samples rows of every head and predicts from O's rounding how much of dW_Q is in "
        "error. It alarms when at one head that error is more than correct rounding makes, matters, and grows. Drawn "
        f"is the worst head, with checks every {every} steps"
    )
    own, live = spacing([main]), main.log.alarms
    if own != every and live:
        paragraph += f", as all these runs have them; checked every {own}, arm {arm} alarmed at {live[0]['step']:,}"
    paragraph += "."
    replays = (
        "The rule replayed on the monitors' logs, with checks as they were made and at every second one. Before an "
        "alarm the witness may pass its threshold and the share its level, but not both at one head that grows; the "
        "last two columns are the largest until then."
    )
    return [
        Section(title, (paragraph,), charts=charts + (no_signs if signs else ())),
        Section(f"{title}: run by run", (replays,), _table(groups, every, rule)),
    ]


def _points(
    w: Watched, value: Callable[[Watched], Sequence[float]], last: int, log: bool
) -> tuple[tuple[float, ...], tuple[float | None, ...]]:
    kept = [(x, drawable(y, log)) for x, y in zip(w.steps, value(w), strict=True) if x <= last]
    return tuple(x for x, _ in kept), tuple(y for _, y in kept)


def _marks(run: Run, seen: Watched) -> tuple[Mark, ...]:
    found = [Mark(float(seen.alarm), f"alarm at {seen.alarm:,}")] if seen.alarm is not None else []
    if run.departure:
        found.append(Mark(float(run.departure.step), f"fails at {run.departure.step:,}"))
    return tuple(found)


def _compared(record: Record, arm: str, seen: dict[str, Watched], metric: str) -> str:
    """Values at the failing run's alarm, beside the healthy run's at that step."""
    run = next(r for r in record.of(arm) if r.name in seen)
    alarm = seen[run.name].alarm
    if alarm is None:
        return "The largest of all heads."
    values = [
        (who, _at(seen[r.name], metric, alarm))
        for who, r in [(f"arm {arm}", run)] + [("healthy", h) for h in record.healthy[:1] if h.name in seen]
    ]
    known = ", ".join(f"{who} {value:.3g}" for who, value in values if value is not None)
    return f"The largest of all heads. At step {alarm:,}, arm {arm}'s alarm: {known}."


def _at(w: Watched, metric: str, step: int) -> float | None:
    return next((y for x, y in zip(w.steps, getattr(w, metric), strict=True) if x == step), None)


def _table(groups: Sequence[tuple[str, Tone, Run]], every: int, rule: AlarmRule) -> tuple[tuple[str, ...], ...]:
    """Each run at every spacing of checks that it has of ``every`` and its half."""
    lines = [
        (
            "run",
            "steps",
            "fails at",
            "by",
            "check every",
            "first alarm",
            "head",
            "lead, steps",
            "witness / threshold before",
            "share before",
        )
    ]
    for who, _, run in groups:
        for distance in (every // 2, every):
            if distance % spacing([run]):
                continue
            r = replayed(run.log, run.checks, distance, rule)
            fails, by = (DASH, DASH) if run.departure is None else (f"{run.departure.step:,}", run.departure.reason)
            lines.append((
                f"{who}, seed {run.seed}", f"{run.end:,}", fails, by, str(distance),
                "silent" if r.alarm is None else f"{r.alarm:,}",
                DASH if r.alarm is None else f"layer {r.layer}, head {r.head}",
                DASH if r.lead is None else str(r.lead), f"{r.witness:.2f}", f"{r.share:.3f}",
            ))  # fmt: skip
    return tuple(lines)
