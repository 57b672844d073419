"""The alarm's rule replayed on the monitors' logs of a record, beside when the runs left their trend. Needs no GPU.

    python benchmarks/failing_run/alarms.py benchmarks/results/failing_run [--json FILE]

Of each monitored run: the first alarm at every logged check and at every second one, its lead before the departure, and
how near the run came to an alarm until then: the largest witness over its threshold (1 or more: the error is more than
correct rounding makes) and the largest average of dW_Q's predicted error (``level`` or more: it matters).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from record import Record, Run, markdown
from runlog import plain

from attn_diag.reports.charts import Axis, Band, Chart, Mark, Series, Tone, Value
from attn_diag.results.wording import DASH
from attn_diag.watching.monitoring.alarm import Alarm, AlarmRule, AlarmState
from attn_diag.watching.monitoring.record import MonitorCheck

# Steps between checks, at which runs from step 0 are replayed.
SPACINGS = (25, 50)
STEP = Axis("training step")
FAILING_TONE: Tone = "second"
HEALTHY_TONE: Tone = "accent"


@dataclass(frozen=True)
class Replay:
    """One run at one spacing of checks."""

    run: str
    every: int
    """Steps between the checks."""
    steps: int
    departure: int | None
    """When it left its trend."""
    reason: str | None
    """By which criterion."""
    alarm: int | None
    """The step of the first alarm."""
    layer: int | None
    head: int | None
    lead: int | None
    """Steps from the alarm to the departure."""
    alarms: int
    """How many there were."""
    witness: float
    """The largest before the first alarm, over its threshold."""
    share: float
    """The largest average before the first alarm."""


@dataclass(frozen=True)
class Watched:
    """What the rule saw at each check, of the worst head."""

    steps: tuple[float, ...]
    share: tuple[float, ...]
    """dW_Q's predicted error, averaged as the rule does."""
    witness: tuple[float, ...]
    """Over its threshold."""
    alarms: tuple[Alarm, ...]


def watched(checks: Iterable[MonitorCheck], every: int, rule: AlarmRule, start: int = 0) -> Watched:
    """Replay the rule at the checks whose step is a multiple of ``every``; alarms count from ``start`` on."""
    state, rows, alarms = AlarmState(rule), list[tuple[float, ...]](), list[Alarm]()
    for check in checks:
        if check.step % every == 0:
            alarms += [alarm for alarm in state.update(check) if alarm.step >= start]
            rows.append((check.step, state.share, state.witness))
    steps, share, witness = zip(*rows, strict=True) if rows else ((),) * 3
    return Watched(steps, share, witness, tuple(alarms))


def worst(check: MonitorCheck, metric: str) -> float:
    """The largest of all heads, NaN where none has it."""
    found = [
        float(np.nanmax(v)) for c in check.layers if (v := c.values.get(metric)) is not None and not np.isnan(v).all()
    ]
    return max(found, default=math.nan)


def replayed(run: Run, every: int, rule: AlarmRule, past: Sequence[MonitorCheck] = ()) -> Replay:
    """The rule on a run's checks, with those of its parent behind them: of a fork the first alarm since it began."""
    seen = watched([*past, *(c for c in run.checks if c.step >= run.first)], every, rule, run.first)
    first, departure = next(iter(seen.alarms), None), run.departure
    before = [i for i, step in enumerate(seen.steps) if first is None or step < first.step]
    return Replay(
        run=run.name,
        every=every,
        steps=run.until + 1,
        departure=departure.step if departure else None,
        reason=departure.reason if departure else None,
        alarm=first.step if first else None,
        layer=first.layer if first else None,
        head=first.head if first else None,
        lead=departure.step - first.step if departure and first else None,
        alarms=len(seen.alarms),
        witness=max((seen.witness[i] for i in before), default=0.0),
        share=max((seen.share[i] for i in before), default=0.0),
    )


def alarm_rows(runs: Iterable[Run], rule: AlarmRule) -> list[Replay]:
    """The rule on the own checks of every monitored run, at each spacing that these allow."""
    known = [(run, own) for run in runs if (own := spacing([run])) is not None]
    return [replayed(run, every, rule) for run, own in known for every in SPACINGS if every % own == 0]


def fork_alarms(record: Record, rule: AlarmRule) -> list[Replay]:
    """The same of monitored forks, each with the checks of its parent behind it, which its own monitor had not."""
    found = []
    for run in record.runs.values():
        if run.origin is not None and run.monitor is not None:
            parent = record.runs.get(run.origin)
            past = [check for check in parent.checks if check.step < run.first] if parent else []
            found.append(replayed(run, max(SPACINGS), rule, past))
    return found


def spacing(runs: Sequence[Run]) -> int | None:
    """Steps between checks that all these runs have; None where one of them has not two checks."""
    if any(len(run.checks) < 2 for run in runs):
        return None
    return math.lcm(*(int(np.diff([c.step for c in run.checks]).min()) for run in runs))


def all_rows(record: Record, rule: AlarmRule) -> list[Replay]:
    """The rule on every monitored run of a record."""
    return [*alarm_rows((run for run in record.runs.values() if run.origin is None), rule), *fork_alarms(record, rule)]


def table(runs: Iterable[Run], rows: Sequence[Replay], where: str = "") -> list[tuple[str, ...]]:
    """One line a run, with its ``rows``; witness and share: the largest before the first alarm, with the densest
    checks."""
    columns = [f"alarm (lead), every {every}" for every in SPACINGS]
    lines = [("run", "steps", "left its trend at", *columns, "witness / threshold", "share", "ms")]
    for run in runs:
        found = {r.every: r for r in rows if r.run == run.name}
        first = found[min(found)] if found else None
        lines.append((
            where + run.name, f"{run.until + 1:,}",
            DASH if run.departure is None else f"{run.departure.step:,}, {run.departure.reason}",
            *(_alarm(found.get(every)) for every in SPACINGS),
            *((f"{first.witness:.2f}", f"{first.share:.3f}") if first else (DASH, DASH)),
            f"{1e3 * median(run.log.seconds):.0f}",
        ))  # fmt: skip
    return lines


def _alarm(replay: Replay | None) -> str:
    if replay is None or replay.alarm is None:
        return DASH if replay is None else "silent"
    lead = "" if replay.lead is None else f" ({replay.lead:,})"
    return f"{replay.alarm:,}, L{replay.layer}H{replay.head}{lead}"


def words(rule: AlarmRule) -> str:
    """What the rule is."""
    return (
        "At a check the monitor samples rows of every head and predicts from O's rounding how much of dW_Q is in "
        "error. It alarms when at one head that error is more than correct rounding makes (witness: the sum of log "
        f"e-values, from 1 of its threshold on, with at most {rule.false_alarm_rate:g} false alarms in 1,000 checks of "
        f"the whole model), matters (share of ‖dW_Q‖, averaged over checks, {rule.level:g} or more), and grows. The "
        "table has the rule replayed on the monitors' logs, with witness and share at their largest before the alarm: "
        "both may pass their level, but not at one head that grows. The charts have the worst head. ms: a step's time, "
        "of runs that may have shared a GPU."
    )


def charts(record: Record, rule: AlarmRule) -> tuple[Chart, ...]:
    """Witness and share of the worst head, of the failing runs and the healthy ones."""
    every = spacing([run for run in [*record.of("A"), *record.healthy] if run.checks]) or 1
    failing, healthy = ([run for run in runs if run.checks] for runs in (record.of("A"), record.healthy))
    seen = {run.name: watched(run.checks, every, rule) for run in [*failing, *healthy]}
    # Healthy runs are drawn a little beyond the failure.
    last = math.ceil(1.3 * max(run.until + 1 for run in failing) / 100) * 100
    marks = events(failing[0], [alarm.step for alarm in seen[failing[0].name].alarms])

    def line(run: Run, metric: str, log: bool) -> Series:
        who, tone, group = ("arm A", FAILING_TONE, failing) if run in failing else ("healthy", HEALTHY_TONE, healthy)
        watch = seen[run.name]
        kept = [(x, drawable(y, log)) for x, y in zip(watch.steps, getattr(watch, metric), strict=True) if x <= last]
        x, y = zip(*kept, strict=True)
        return Series(f"{who}, seed {run.seed}", x, y, tone=tone, look=None if run is group[0] else "faint")

    return tuple(
        Chart(f"A-{metric}", title, f"Checks every {every} steps. {words}", STEP, axis,
              tuple(line(run, metric, axis.log) for run in [*healthy, *failing]), (band,), marks=marks)
        for metric, title, axis, words, band in (
            ("witness", "Arm A: is it more than correct rounding makes?", Axis("witness / threshold"), "",
             Band("threshold", 1, 1)),
            ("share", "Arm A: does it matter?", Axis("share of dW_Q in error", log=True),
             "The level alone tells no arm apart: healthy runs come near it or pass it.",
             Band("level", rule.level, rule.level)),
        )
    )  # fmt: skip


def events(run: Run, alarms: Sequence[int]) -> tuple[Mark, ...]:
    """A run's first alarm and its departure."""
    found = [("alarm", step) for step in alarms[:1]] + ([("fails", run.departure.step)] if run.departure else [])
    return tuple(Mark(float(step), f"{what} at {step:,}") for what, step in found)


def drawable(value: float | None, log: bool = False) -> Value:
    """None for what an axis cannot show: NaN, infinities, on a logarithmic one zero and less."""
    return value if value is not None and math.isfinite(value) and (value > 0 or not log) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rule, record = AlarmRule(), Record.read(options.folder)
    rows = all_rows(record, rule)
    print(markdown(table(record.runs.values(), rows)))
    if options.json:
        found = plain({"rule": asdict(rule), "runs": [asdict(row) for row in rows]})
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
