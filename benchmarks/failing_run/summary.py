"""The logs of a folder as a table: when a run left its trend, and when the monitor had said so. Needs no GPU.

python benchmarks/failing_run/summary.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

from departure import departures
from folder import markdown
from runlog import RunLog, begun

# Steps whose mean is called the last loss.
_LAST = 20


def read(folder: Path) -> list[RunLog]:
    """All logs of a folder that have begun, by name."""
    return [RunLog.read(path) for path in sorted(folder.glob("*.jsonl*")) if begun(path)]


def row(log: RunLog) -> dict[str, str]:
    """One run in words and numbers."""
    run = log.headers[0]["run"]
    found = departures(log.steps)
    losses = [loss for _, loss, _ in log.steps]
    until = found[0].step - log.steps[0][0] if found else len(losses)
    last = losses[max(until - _LAST, 0) : until]
    return {
        "arm": run["arm"],
        "seed": str(run["seed"]),
        "steps": str(log.steps[-1][0] + 1 if log.steps else 0),
        "left its trend at": "; ".join(f"{d.step} ({d.reason})" for d in found) or "–",
        "first alarm": _alarm(log),
        "lead, steps": str(found[0].step - log.alarms[0]["step"]) if found and log.alarms else "–",
        "alarms": str(len(log.alarms)),
        "last loss": f"{fmean(last):.4f}" if last else "–",
        "ms a step": f"{1e3 * median(log.seconds):.0f}" if log.seconds else "–",
        "end": log.end,
    }


def table(logs: list[RunLog]) -> str:
    """Markdown. "last loss": the mean of the last 20 steps, of those before the departure where there is one."""
    rows = [row(log) for log in logs]
    if not rows:
        return "no logs"
    return markdown(list(rows[0]), [list(r.values()) for r in rows])


def _alarm(log: RunLog) -> str:
    if not log.headers[0].get("monitor_every"):
        return "not monitored"
    if not log.alarms:
        return "silent"
    first: dict[str, Any] = log.alarms[0]
    return f"{first['step']}: layer {first['layer']}, head {first['head']} ({first['kind']})"


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("one folder of logs is expected: python summary.py FOLDER")
    print(table(read(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
