"""The record of the experiment: a folder of packed logs and of what was made from them.

    python benchmarks/failing_run/record.py runs benchmarks/results/failing_chain [--again runs-2 runs-3]

packs the logs of ``runs`` into the record: logs in six digits, the monitors' in five, each as .jsonl.xz; what the
record holds of other runs stays. ``--again``: folders in which runs were made once more; what of them is equal goes
into repeats.json. Needs no GPU.

    FOLDER/NAME.jsonl[.xz]             log of a run (``runlog``); NAME = ARM_seedN, or ARM_seedN_TAG
    FOLDER/monitor/NAME.jsonl[.xz]     its monitor's log, every head
    FOLDER/chain_ARM.json.xz           what the tool said of the capture at the first alarm (``predictions``)

A run whose first header has "from": {"run", "step"} is a fork: it starts from that run's weights at that step.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from runlog import WINDOW, Departure, RunLog, begun, departures, plain, rows_of

from attn_diag.captures.files import write_atomically
from attn_diag.results.base import Result
from attn_diag.watching.monitoring.record import MonitorCheck, read_log

# Arms that round O once, at the end; the first of them that is there is the yardstick.
HEALTHY = ("fa2", "healthy")
_NAME = re.compile(r"(?P<arm>.+)_seed(?P<seed>\d+)(_(?P<tag>.+))?")


@dataclass(frozen=True)
class Run:
    """One run of a record."""

    log: RunLog
    arm: str
    seed: int
    """Of its weights and data."""
    tag: str = ""
    """What tells it from another run of the same arm and seed."""
    monitor: Path | None = None
    """Its monitor's log; None where it was not monitored."""

    @property
    def name(self) -> str:
        """As its file is called."""
        return self.log.name

    @property
    def header(self) -> dict[str, Any]:
        """Of its first piece."""
        return self.log.headers[0]

    @property
    def origin(self) -> str | None:
        """The run from whose weights it started; None where it began at step 0."""
        found = self.header.get("from")
        return str(found["run"]) if found else None

    @property
    def first(self) -> int:
        """The first step that it trained itself: a fork's log has steps of its origin before it."""
        found = self.header.get("from")
        return int(found["step"]) if found else 0

    @cached_property
    def steps(self) -> list[tuple[int, float, float]]:
        """(step, loss, gradient norm) of the steps that it trained itself."""
        return [row for row in self.log.steps if row[0] >= self.first]

    @property
    def until(self) -> int:
        """Its last step."""
        return self.log.steps[-1][0]

    @cached_property
    def departure(self) -> Departure | None:
        """The first of its own steps at which it left its trend."""
        return self.departure_from(self.first)

    def departure_from(self, step: int) -> Departure | None:
        """The first departure from ``step`` on; what lies further back than its trend does not count."""
        found = departures(row for row in self.log.steps if row[0] >= step - WINDOW)
        return next((d for d in found if d.step >= step), None)

    @cached_property
    def checks(self) -> tuple[MonitorCheck, ...]:
        """The monitor's, every head."""
        return tuple(read_log(self.monitor)) if self.monitor else ()


@dataclass(frozen=True)
class Record:
    """A folder of runs."""

    folder: Path
    runs: dict[str, Run]
    """By name."""

    @classmethod
    def read(cls, folder: Path) -> Record:
        """All runs that have done a step. Raises FileNotFoundError where there is no such folder."""
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is no folder: expected the record of a failing run")
        # Names may hold dots: A+stabilised-1.5_seed0.
        monitors = {path.name.partition(".jsonl")[0]: path for path in (folder / "monitor").glob("*.jsonl*")}
        found = {}
        for path in sorted(folder.glob("*.jsonl*")):
            if begun(path) and (log := RunLog.read(path)).steps:
                named = _NAME.fullmatch(log.name)
                arm, seed, tag = named.group("arm", "seed", "tag") if named else (log.name, 0, None)
                found[log.name] = Run(log, arm, int(seed), tag or "", monitors.get(log.name))
        return cls(folder, found)

    def of(self, *arms: str) -> list[Run]:
        """The runs of these arms from step 0 on, by arm and seed."""
        found = [run for run in self.runs.values() if run.arm in arms and run.origin is None and not run.tag]
        return sorted(found, key=lambda run: (arms.index(run.arm), run.seed))

    @property
    def healthy(self) -> list[Run]:
        """The runs of the first healthy arm there is."""
        return next((found for arm in HEALTHY if (found := self.of(arm))), [])

    def document(self, name: str) -> bytes | None:
        """The text of NAME.json or NAME.json.xz; None where there is neither."""
        path, packed = self.folder / f"{name}.json", self.folder / f"{name}.json.xz"
        if packed.exists():
            return lzma.decompress(packed.read_bytes())
        return path.read_bytes() if path.exists() else None


@dataclass(frozen=True)
class Repeat:
    """One run that was made several times."""

    run: str
    times: int
    """How often it was made."""
    compared: int
    """Steps that any two have in common, the fewest; of a fork its own, not those copied from its parent."""
    differs_at: int | None
    """The first of them at which two do not have the same digits."""
    departures: tuple[int | None, ...]
    """When each left its trend; None where it kept it to its last step, in ``ends``."""
    ends: tuple[int, ...]
    """The last steps."""


@dataclass(frozen=True)
class Repeats(Result):
    """All runs that were made more than once."""

    repeats: tuple[Repeat, ...]


def repeat(runs: Sequence[Run]) -> Repeat:
    """Compare one run's logs, two or more."""
    compared, differs = [], []
    for one, other in combinations([{step: row for step, *row in run.steps} for run in runs], 2):
        common = sorted(one.keys() & other.keys())
        compared.append(len(common))
        # Not finite is unequal to itself, and equal in this sense.
        differs += [step for step in common if repr(one[step]) != repr(other[step])]
    departures = tuple(None if run.departure is None else run.departure.step for run in runs)
    ends = tuple(run.until for run in runs)
    return Repeat(runs[0].name, len(runs), min(compared), min(differs, default=None), departures, ends)


def write_json(path: Path, value: Any) -> None:
    """Write to six digits, complete or not at all; raises InputError where that cannot be."""
    text = json.dumps(plain(value), separators=(",", ":"), allow_nan=False) + "\n"
    data = lzma.compress(text.encode()) if path.suffix == ".xz" else text.encode()
    write_atomically(path, lambda temporary: Path(temporary).write_bytes(data))


def markdown(table: Sequence[Sequence[str]]) -> str:
    """A table, its first row the header, as a report's ``Section`` has it."""
    lines = [table[0], ["---"] * len(table[0]), *table[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def listed(words: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def pack(path: Path, folder: Path, digits: int) -> None:
    """Put one log into a folder, its numbers in so many digits."""
    text = "".join(json.dumps(plain(row, digits), separators=(",", ":")) + "\n" for row in rows_of(path))
    folder.mkdir(parents=True, exist_ok=True)
    packed = lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)
    write_atomically(folder / f"{path.name}.xz", lambda temporary: Path(temporary).write_bytes(packed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("record", type=Path)
    parser.add_argument("--again", type=Path, nargs="+", metavar="RUNS", help="folders of the same runs")
    options = parser.parse_args()
    for folder, digits in (("", 6), ("monitor", 5)):
        for path in sorted((options.runs / folder).glob("*.jsonl")):
            pack(path, options.record / folder, digits)
    if options.again:
        made = [Record.read(folder).runs for folder in (options.runs, *options.again)]
        found = [[runs[name] for runs in made if name in runs] for name in sorted({n for runs in made for n in runs})]
        write_json(options.record / "repeats.json", asdict(Repeats(tuple(repeat(r) for r in found if len(r) > 1))))


if __name__ == "__main__":
    main()
