"""The log of a run, and when the run left its trend.

A log has one JSON object a line, written as it happens, so that a killed run keeps what it had:

    {"header": {...}}                                   configuration, recipes, versions, device; again after a resume
    {"step": 0, "loss": 9.7, "grad_norm": 4.1, "lr": 5e-07, "seconds": 0.27}        steps count from 0
    {"alarm": {"kind": "growth", "step": 450, "layer": 2, "head": 7, "reason": "..."}}
    {"end": "finished", "step": 1100}                   or "departed", "stopped by a signal": step is the next one

Steps are the optimizer's; their loss is that of the weights before the step. Numbers have six digits; those
that are not finite are the strings "NaN", "Infinity", "-Infinity". A line that a kill cut short is left out when read,
and so are the monitor's figures that older logs hold: they are in the monitor's own log.

A run has left its trend, by one definition for stopping it and for reading its log:

- "loss": above the mean + 5 standard deviations of the 100 steps before, for 5 steps in a row; the departure is the
  first of the five. The 100 steps are those before that first step: if they moved on with the departure, a jump to a
  higher level would raise its own limit and never count for long enough (with d the jump, four such steps among 100
  put mean + 5 deviations at more than d).
- "gradient norm": before clipping, above 20 times the median of the 100 steps before.
- "non-finite": loss or gradient norm is NaN or infinite, at any step.

The first two need 100 steps behind them.
"""

from __future__ import annotations

import json
import lzma
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from types import TracebackType
from typing import Any

WINDOW = 100
DEVIATIONS = 5.0
PERSISTENCE = 5
FACTOR = 20.0


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

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; it is in the file when this returns."""
        self._file.write(_line(plain(row)))

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


@dataclass
class RunLog:
    """A log read back. ``steps``: (step, loss, gradient norm); ``seconds``: by step."""

    name: str
    headers: list[dict[str, Any]] = field(default_factory=list)
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    end: str = "cut off"

    @classmethod
    def read(cls, path: Path) -> RunLog:
        """Raises ValueError for a file without a header."""
        log = cls(path.name.partition(".jsonl")[0])
        for row in rows_of(path):
            if "header" in row:
                log.headers.append(row["header"])
            elif "loss" in row:
                log.steps.append((row["step"], float(row["loss"]), float(row["grad_norm"])))
                log.seconds.append(row["seconds"])
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
    step = row.get("alarm", row).get("step", resume_at)
    return "end" not in row and int(step) < resume_at


@dataclass(frozen=True)
class Departure:
    """The step at which a run left its trend, and the criterion that says so."""

    step: int
    reason: str


@dataclass
class Watch:
    """Follows a run step by step. ``found``: the first departure by each criterion, as they become certain."""

    found: list[Departure] = field(default_factory=list)
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    # Steps in a row above the limit, and the limit, kept from the first of them on.
    _above: int = 0
    _limit: float = math.inf

    def update(self, step: int, loss: float, grad_norm: float) -> None:
        """One more step. After a non-finite one nothing can be compared any more: the history stays as it was."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._note(step, "non-finite")
            return
        if len(self._norms) == WINDOW and grad_norm > FACTOR * median(self._norms):
            self._note(step, "gradient norm")
        if not self._above and len(self._losses) == WINDOW:
            self._limit = self.limit(self._losses)
        self._above = self._above + 1 if loss > self._limit else 0
        if self._above == PERSISTENCE:
            self._note(step - PERSISTENCE + 1, "loss")
        self._losses.append(loss)
        self._norms.append(grad_norm)

    @staticmethod
    def limit(losses: Iterable[float]) -> float:
        """The highest loss within the trend of these steps."""
        values = list(losses)
        mean = fmean(values)
        # statistics.pstdev adds fractions: exactly, and thirty times as slowly.
        return mean + DEVIATIONS * math.sqrt(math.fsum((x - mean) ** 2 for x in values) / len(values))

    @property
    def first(self) -> Departure | None:
        """The earliest departure by any criterion, None while the run is on its trend."""
        return min(self.found, key=lambda d: d.step, default=None)

    def _note(self, step: int, reason: str) -> None:
        if reason not in {d.reason for d in self.found}:
            self.found.append(Departure(step, reason))


def departures(rows: Iterable[tuple[int, float, float]]) -> list[Departure]:
    """The departures in a log of (step, loss, gradient norm), earliest first, at most one by each criterion."""
    watch = Watch()
    for row in rows:
        watch.update(*row)
    return sorted(watch.found, key=lambda d: d.step)
