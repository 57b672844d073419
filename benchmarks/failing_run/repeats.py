"""Whether runs made twice did the same: equal digits of loss and gradient norm, and when each left its trend.

python benchmarks/failing_run/repeats.py runs-1 runs-2 [runs-3 …] --out benchmarks/results/failing_chain/repeats.json
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

from departure import departures
from folder import read_runs, start_of, write_json
from runlog import RunLog


@dataclass(frozen=True)
class Repeat:
    """One run in several folders; of a fork its own steps, not those copied from its parent. ``compared``: steps that
    any two have in common, the fewest; ``differs_at``: the first of them at which two do not have the same digits;
    ``departures``: None where a run kept its trend to its last step, in ``ends``."""

    run: str
    times: int
    compared: int
    differs_at: int | None
    departures: tuple[int | None, ...]
    ends: tuple[int, ...]
    devices: tuple[str, ...]
    dates: tuple[str, ...]


def repeat(name: str, logs: list[RunLog]) -> Repeat:
    """Of the logs of one run, two or more."""
    compared, differs = [], []
    own = [{s: row for s, *row in log.steps if (start := start_of(log)) is None or s >= start[1]} for log in logs]
    for one, other in combinations(own, 2):
        common = sorted(one.keys() & other.keys())
        compared.append(len(common))
        # Not finite is unequal to itself, and equal in this sense.
        differs += [step for step in common if repr(one[step]) != repr(other[step])]
    first = [next(iter(departures(log.steps)), None) for log in logs]
    return Repeat(
        run=name,
        times=len(logs),
        compared=min(compared),
        differs_at=min(differs, default=None),
        departures=tuple(None if d is None else d.step for d in first),
        ends=tuple(log.steps[-1][0] for log in logs),
        devices=tuple(str(log.headers[0].get("tool", {}).get("device")) for log in logs),
        dates=tuple(str(log.headers[0].get("date")) for log in logs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    runs = [read_runs(folder) for folder in options.folders]
    names = sorted({name for found in runs for name in found})
    logs = {name: [found[name] for found in runs if name in found] for name in names}
    repeats = [repeat(name, found) for name, found in logs.items() if len(found) > 1]
    for r in repeats:
        same = "all digits equal" if r.differs_at is None else f"digits differ from step {r.differs_at} on"
        print(f"{r.run}: {r.times} times, {r.compared} steps compared: {same}; left its trend at {r.departures}")
    if options.out:
        write_json(options.out, {"repeats": [asdict(r) for r in repeats]})


if __name__ == "__main__":
    main()
