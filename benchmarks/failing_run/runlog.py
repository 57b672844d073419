"""The log of a run: one JSON object a line, written as it happens, so that a killed run keeps what it had.

    {"header": {...}}                                   configuration, recipes, versions, device; again after a resume
    {"step": 0, "loss": 9.7, "grad_norm": 4.1, "lr": 5e-07, "seconds": 0.27}        steps count from 0
    {"monitor": 50, "names": [...], "values": [...]}    names only where they differ from the row before
    {"alarm": {"kind": "growth", "step": 450, "layer": 2, "head": 7, "reason": "...", "seen": 451}}
    {"end": "finished", "step": 1100}                   or "departed", "stopped by a signal": step is the next one

Steps are the optimizer's; their loss is that of the weights before the step. Numbers have six digits, the monitor's
four; those that are not finite are the strings "NaN", "Infinity", "-Infinity". A line that a kill cut short is left out
when read.
"""

from __future__ import annotations

import json
import lzma
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from departure import Watch


def plain(value: Any, digits: int = 6) -> Any:
    """``value`` with floats rounded to significant digits, and those that JSON does not have as strings."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: plain(item, digits) for key, item in value.items()}
    return [plain(item, digits) for item in value] if isinstance(value, list | tuple) else value


class Writer:
    """Appends rows to a log. ``resume_at``: keep what an earlier piece logged of the steps before this one."""

    def __init__(self, path: Path, resume_at: int | None = None) -> None:
        kept = []
        if path.exists():
            if resume_at is None:
                raise FileExistsError(f"{path.name} exists already; give --resume, or another --out")
            kept = [row for row in rows_of(path) if _belongs(row, resume_at)]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(_line(row) for row in kept))
        partial.replace(path)
        self._file = path.open("a", buffering=1)
        self._names = next((row["names"] for row in reversed(kept) if "names" in row), None)

    def write(self, row: dict[str, Any], digits: int = 6) -> None:
        """Append one row; it is in the file when this returns."""
        self._file.write(_line(plain(row, digits)))

    def write_monitor(self, step: int, metrics: dict[str, float]) -> None:
        """What the monitor saw, read after ``step``."""
        names = list(metrics)
        row = {"monitor": step} | ({} if names == self._names else {"names": names})
        self._names = names
        self.write(row | {"values": list(metrics.values())}, digits=4)

    def write_history(self, path: Path, first: int, end: int) -> None:
        """Copy another log's steps from ``first`` up to ``end``: what a run that starts there has behind it."""
        for row in rows_of(path):
            if "loss" in row and first <= row["step"] < end:
                self.write(row)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            self.write({"end": f"{kind.__name__}: {error}"[:300]})
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class Record:
    """Writes what a step brought to the log, and knows when the run has left its trend. Without a log it only asks the
    monitor, whose answer may be a reduction over all processes."""

    def __init__(self, log: Writer | None, monitor: Any, every: int, stop_after: int) -> None:
        self.log, self.monitor, self.every, self.stop_after, self.watch = log, monitor, every, stop_after, Watch()
        self._metrics, self._alarms = "", 0

    def step(self, row: dict[str, Any]) -> None:
        if self.log is not None:
            self.watch.update(row["step"], row["loss"], row["grad_norm"])
            self.log.write(row)
        if self.monitor is not None:
            self._read_monitor(row["step"])

    def _read_monitor(self, step: int) -> None:
        # A check of an earlier step may come late.
        if step % self.every in (0, self.every - 1):
            metrics = self.monitor.metrics()
            if metrics and repr(metrics) != self._metrics and self.log is not None:
                self.log.write_monitor(step, metrics)
            self._metrics = repr(metrics)
        for alarm in self.monitor.alarms[self._alarms :]:
            if self.log is not None:
                named = {name: getattr(alarm, name) for name in ("kind", "step", "layer", "head", "reason")}
                self.log.write({"alarm": named | {"seen": step}})
        self._alarms = len(self.monitor.alarms)

    def enough(self, step: int) -> bool:
        """Whether the run left its trend so long ago that ``step`` need not be done."""
        first = self.watch.first
        return first is not None and step > first.step + self.stop_after


@dataclass
class RunLog:
    """A log read back. ``steps``: (step, loss, gradient norm); ``monitor``: metrics by step; ``seconds``: by step."""

    name: str
    headers: list[dict[str, Any]] = field(default_factory=list)
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    monitor: dict[int, dict[str, float]] = field(default_factory=dict)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    end: str = "cut off"

    @classmethod
    def read(cls, path: Path) -> RunLog:
        """Raises ValueError for a file without a header."""
        log = cls(path.name.partition(".jsonl")[0])
        names: list[str] = []
        for row in rows_of(path):
            if "header" in row:
                log.headers.append(row["header"])
            elif "loss" in row:
                log.steps.append((row["step"], float(row["loss"]), float(row["grad_norm"])))
                log.seconds.append(row["seconds"])
            elif "monitor" in row:
                names = row.get("names", names)
                log.monitor[row["monitor"]] = dict(zip(names, map(float, row["values"]), strict=True))
            elif "alarm" in row:
                log.alarms.append(row["alarm"])
            elif "end" in row:
                log.end = row["end"]
        if not log.headers:
            raise ValueError(f"{path.name} has no header: not the log of a run")
        return log


def run_name(arm: str, seed: int | str, tag: str = "") -> str:
    """The stem of a run's files."""
    return f"{arm}_seed{seed}" + (f"_{tag}" if tag else "")


def begun(path: Path) -> bool:
    """Whether a log is there with its header: one that was killed before that has not begun."""
    return path.exists() and any("header" in row for row in rows_of(path))


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a log (also of one packed with xz), without the last one where a kill cut it short."""
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n"


def _belongs(row: dict[str, Any], resume_at: int) -> bool:
    """Whether a row is of the steps before ``resume_at``. Ends are not kept: the run goes on."""
    if "header" in row:
        return bool(row["header"].get("first_step", 0) < resume_at)
    step = row.get("monitor", row.get("alarm", row).get("step", resume_at))
    return "end" not in row and int(step) < resume_at
