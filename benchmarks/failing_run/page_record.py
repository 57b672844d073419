"""What a record folder holds, read for the page: runs with their departures, monitors' checks, and JSON results.

Nothing is required: what is not in the folder is None or empty, and ``page_missing`` says so on the page.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from departure import Departure, departures
from folder import HEALTHY, monitor_logs, read_runs
from runlog import RunLog

from attn_diag.watching.monitoring.record import MonitorCheck, read_log

_NAME = re.compile(r"(?P<arm>.+)_seed(?P<seed>\d+)(_(?P<tag>.+))?")

Row = tuple[int, float, float]


@dataclass(frozen=True)
class Run:
    """One run. ``tag``: what tells it from another of the same arm and seed."""

    log: RunLog
    arm: str
    seed: int
    tag: str = ""
    monitor: Path | None = None

    @property
    def name(self) -> str:
        """As its file is called."""
        return self.log.name

    @property
    def header(self) -> dict[str, Any]:
        """The first."""
        return self.log.headers[0]

    @property
    def origin(self) -> str | None:
        """The name of the run from whose checkpoint it started, None where it began at the beginning."""
        found = self.header.get("from")
        return str(found["run"]) if found else None

    @property
    def first(self) -> int:
        """The first step that it trained itself; a fork's log has the steps of its origin before it."""
        found = self.header.get("from")
        return int(found["step"]) if found else 0

    @cached_property
    def steps(self) -> list[Row]:
        """(step, loss, gradient norm) of the steps that it trained itself."""
        return [row for row in self.log.steps if row[0] >= self.first]

    @property
    def end(self) -> int:
        """The step after its last one."""
        return self.log.steps[-1][0] + 1 if self.log.steps else 0

    @cached_property
    def departure(self) -> Departure | None:
        """The first of its own steps."""
        return next((d for d in departures(self.log.steps) if d.step >= self.first), None)

    @cached_property
    def checks(self) -> tuple[MonitorCheck, ...]:
        """The monitor's, every head."""
        return tuple(read_log(self.monitor)) if self.monitor else ()

    @property
    def change(self) -> str:
        """What a fork changes: "fp32-scores" of "A+fp32-scores" from a run of A; of another arm, that arm."""
        origin = (self.origin or "").partition("_seed")[0]
        return self.arm.removeprefix(origin).lstrip("+-") if origin else self.arm


@dataclass(frozen=True)
class Record:
    """A folder's content. ``documents``: its JSON files, by name."""

    folder: Path
    runs: tuple[Run, ...]
    documents: dict[str, Any]

    def of(self, *arms: str) -> list[Run]:
        """Runs of these arms from the beginning, by seed."""
        found = [run for run in self.runs if run.arm in arms and run.origin is None and not run.tag]
        return sorted(found, key=lambda run: (arms.index(run.arm), run.seed))

    @property
    def healthy(self) -> list[Run]:
        """Of the first healthy arm there is."""
        return next((found for arm in HEALTHY if (found := self.of(arm))), [])

    def first(self, arm: str) -> Run | None:
        """The run of the lowest seed."""
        return next(iter(self.of(arm)), None)

    def forks(self, origin: str) -> list[Run]:
        """Forks of the run of that name, by name."""
        return [run for run in self.runs if run.origin == origin]


def read_record(folder: Path) -> Record:
    """Read a folder of logs (.jsonl, .jsonl.xz), ``monitor/`` and JSON files (.json, .json.xz).

    Raises FileNotFoundError where there is no such folder, ValueError for a log or JSON file that cannot be read.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: expected the record of a failing run")
    files = [path for path in sorted(folder.glob("*.json*")) if path.name.endswith((".json", ".json.xz"))]
    documents = {path.name.partition(".json")[0]: _document(path) for path in files}
    return Record(folder, tuple(_runs(folder)), documents)


def _document(path: Path) -> Any:
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            return json.load(file)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from error


def _runs(folder: Path) -> Iterable[Run]:
    monitors = monitor_logs(folder)
    for name, log in read_runs(folder).items():
        found = _NAME.fullmatch(name)
        arm, seed, tag = (found["arm"], int(found["seed"]), found["tag"] or "") if found else (name, 0, "")
        yield Run(log, arm, seed, tag, monitors.get(name))
