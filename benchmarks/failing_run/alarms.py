"""The alarm's rule replayed on the monitor's logs of a folder, beside when the runs left their trend. Needs no GPU.

    python benchmarks/failing_run/alarms.py benchmarks/results/failing_run [--json FILE]

Of each monitored run (``folder``): the first alarm at every logged check and at every second one, its lead before the
departure, and how near the run came to an alarm until then: the largest witness over its threshold (1 or more: the
error is more than correct rounding makes) and the largest average of dW_Q's predicted error (``level`` or more: it
matters).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from departure import departures
from folder import markdown, monitor_logs, read_checks, read_runs, start_of
from runlog import RunLog, plain

from attn_diag.watching.monitoring.alarm import Alarm, AlarmRule, AlarmState
from attn_diag.watching.monitoring.record import MonitorCheck

# Steps between checks, at which runs from step 0 are replayed.
SPACINGS = (25, 50)


@dataclass(frozen=True)
class Replay:
    """One run at one spacing of checks; steps. ``witness``: its largest over the threshold, before the first alarm."""

    run: str
    every: int
    steps: int
    departure: int | None
    reason: str | None
    alarm: int | None
    layer: int | None
    head: int | None
    lead: int | None
    alarms: int
    witness: float
    share: float


def replayed(log: RunLog, checks: Sequence[MonitorCheck], every: int, rule: AlarmRule) -> Replay:
    """The rule on the checks whose step is a multiple of ``every``; of a fork the first alarm since it began."""
    state, alarms, start = AlarmState(rule), list[Alarm](), (start_of(log) or ("", 0))[1]
    witness = share = 0.0
    for check in checks:
        if check.step % every:
            continue
        alarms += [alarm for alarm in state.update(check) if alarm.step >= start]
        if not alarms:
            witness = max(witness, state.witness)
            share = max(share, state.share)
    found = departures(log.steps)
    departure, first = (found[0] if found else None), (alarms[0] if alarms else None)
    return Replay(
        run=log.name,
        every=every,
        steps=log.steps[-1][0] + 1,
        departure=departure.step if departure else None,
        reason=departure.reason if departure else None,
        alarm=first.step if first else None,
        layer=first.layer if first else None,
        head=first.head if first else None,
        lead=departure.step - first.step if departure and first else None,
        alarms=len(alarms),
        witness=witness,
        share=share,
    )


def alarm_rows(folder: Path, runs: Mapping[str, RunLog], rule: AlarmRule) -> tuple[list[Replay], list[str]]:
    """The alarm's rule on every run from step 0, at each spacing that its checks allow; and the runs not monitored."""
    found, without = list[Replay](), list[str]()
    for name, log in runs.items():
        if start_of(log) is not None:
            continue
        checks = read_checks(folder, name) or []
        spacing = _spacing(checks)
        if spacing is None:
            without.append(name)
        else:
            found += [replayed(log, checks, every, rule) for every in SPACINGS if every % spacing == 0]
    return found, without


def fork_alarms(folder: Path, runs: Mapping[str, RunLog], rule: AlarmRule, every: int) -> list[Replay]:
    """The same of forks, each with the checks of its parent behind it, which a monitor that began with it had not."""
    found = []
    for name, log in runs.items():
        start = start_of(log)
        checks = read_checks(folder, name) if start is not None else None
        if start is None or checks is None:
            continue
        own = [check for check in checks if check.step >= start[1]]
        past = [check for check in read_checks(folder, start[0]) or () if check.step < start[1]]
        found.append(replayed(log, [*past, *own], every, rule))
    return found


def replay_folder(folder: Path, rule: AlarmRule) -> list[Replay]:
    """All runs of a folder that were monitored, at every check and at every second one."""
    found, runs = [], read_runs(folder)
    for name in monitor_logs(folder):
        checks = read_checks(folder, name) or []
        if name in runs and (spacing := _spacing(checks)) is not None:
            found += [replayed(runs[name], checks, every, rule) for every in (spacing, 2 * spacing)]
    return found


def _spacing(checks: Sequence[MonitorCheck]) -> int | None:
    """Steps between checks; None where there are no two."""
    return int(np.diff([check.step for check in checks]).min()) if len(checks) > 1 else None


def table(rows: list[Replay]) -> str:
    """Markdown."""
    head = ["run", "every", "left its trend at", "first alarm", "lead", "witness / threshold", "share before the alarm"]
    lines = []
    for r in rows:
        left = f"none until {r.steps - 1}" if r.departure is None else f"{r.departure} ({r.reason})"
        alarm = "silent" if r.alarm is None else f"{r.alarm}: layer {r.layer}, head {r.head}"
        lead = "–" if r.lead is None else str(r.lead)
        lines.append([r.run, str(r.every), left, alarm, lead, f"{r.witness:.2f}", f"{r.share:.3f}"])
    return markdown(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rule = AlarmRule()
    rows = replay_folder(options.folder, rule)
    print(table(rows))
    if options.json:
        found = plain({"rule": asdict(rule), "runs": [asdict(row) for row in rows]})
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
