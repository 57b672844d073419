"""The alarm's rule replayed on the monitor's logs of a folder, beside when the runs left their trend. Needs no GPU.

    python benchmarks/failing_run/alarms.py benchmarks/results/failing_run [--json FILE]

Of each monitored run (``folder``): the first alarm at every logged check and at
every second one, its lead before the departure, and how near the run came to an alarm until then: the largest witness
over its threshold (1 or more: the error is more than correct rounding makes) and the largest average of dW_Q's
predicted error (``level`` or more: it matters).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from departure import departures
from folder import markdown, monitor_logs, read_runs
from runlog import RunLog, plain

from attn_diag.monitoring.alarm import Alarm, AlarmRule, AlarmState
from attn_diag.monitoring.record import Check, read_log


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


def replayed(log: RunLog, checks: Sequence[Check], every: int, rule: AlarmRule) -> Replay:
    """The rule on the checks whose step is a multiple of ``every``."""
    state, alarms = AlarmState(rule), list[Alarm]()
    witness = share = 0.0
    for check in checks:
        if check.step % every:
            continue
        alarms += state.update(check)
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


def replay_folder(folder: Path, rule: AlarmRule) -> list[Replay]:
    """All runs of a folder that were monitored."""
    found, runs = [], read_runs(folder)
    for name, path in monitor_logs(folder).items():
        checks = list(read_log(path))
        spacing = int(np.diff([check.step for check in checks]).min())
        found += [replayed(runs[name], checks, every, rule) for every in (spacing, 2 * spacing)]
    return found


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
