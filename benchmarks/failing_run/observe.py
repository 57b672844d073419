"""What a training run lets attn-diag see and writes down: monitor, captures, and the log of steps."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from runlog import Watch, Writer
from torch import nn

import attn_diag
from attn_diag.captures.files import write_atomically
from attn_diag.watching.monitoring.record import MonitorCheck, read_log

# Of the alarm's head: enough for a test clustered by sequence.
_SEQUENCES = range(8)
_MAX_BYTES = 8 * 2**30


def steps_of(text: str) -> range:
    """ "650:760" or "650". Raises ValueError for anything else."""
    first, _, end = text.partition(":")
    return range(int(first), int(end) if end else int(first) + 1)


def checks_before(first: int, log: Path, parent: Path | None) -> list[MonitorCheck]:
    """Leave a monitor's log with the checks before step ``first``, and return them: those from there on are made again.

    A run without a log, which starts from another one's checkpoint, has that one's checks behind it: ``parent``.
    """
    source = log if log.exists() else parent
    kept = [check for check in read_log(source) if check.step < first] if source and source.exists() else []
    text = "".join(check.to_json() + "\n" for check in kept)
    log.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(log, lambda temporary: Path(temporary).write_text(text))
    return kept


class Observer:
    """Puts the monitor and the captures that the options ask for around a model, until ``stack`` closes.

    The monitor's own log, with every head, is OUT/monitor/NAME.jsonl. Captures are in OUT/captures/NAME_fromSTEP (a
    folder takes those of one piece of a run), the first alarm's in OUT/captures/NAME_alarm. ``parent``: the run from
    whose checkpoint this one starts. ``alarmed``: an earlier piece of the run has had its first alarm.
    """

    def __init__(
        self,
        stack: ExitStack,
        model: nn.Module,
        options: argparse.Namespace,
        name: str,
        first: int,
        *,
        parent: str | None,
        alarmed: bool,
    ) -> None:
        self._stack, self._model, self._options, self._name, self._alarmed = stack, model, options, name, alarmed
        self.monitor: Any = None
        if options.capture_steps:
            self._capture(f"{name}_from{first}", first, steps=options.capture_steps, layers=options.capture_layers)
        if options.monitor_every:
            folder = options.out / "monitor"
            log, before = folder / f"{name}.jsonl", None if parent is None else folder / f"{parent}.jsonl"
            past = checks_before(first, log, before)
            monitor = attn_diag.Monitor(model, every=options.monitor_every, first_step=first, log=log, history=past)
            self.monitor = stack.enter_context(monitor)

    def first_alarm(self, step: int) -> bool:
        """Whether the steps before ``step`` brought the first alarm that matters here; then ``step`` is captured."""
        if self._alarmed or not self._options.at_alarm or self.monitor is None or not self.monitor.alarms:
            return False
        self._alarmed = True
        alarm = self.monitor.alarms[0]
        self._capture(
            f"{self._name}_alarm", step, steps={step}, layers={alarm.layer}, heads=[alarm.head], batch=_SEQUENCES
        )
        return True

    def _capture(self, folder: str, first: int, **what: Any) -> None:
        where = self._options.out / "captures" / folder
        self._stack.enter_context(attn_diag.capture(self._model, where, first_step=first, max_bytes=_MAX_BYTES, **what))


class StepLog:
    """Writes what a step brought to the log, and knows when the run has left its trend."""

    def __init__(self, log: Writer, monitor: Any, every: int, stop_after: int) -> None:
        self.log, self.monitor, self.every, self.stop_after, self.watch = log, monitor, every, stop_after, Watch()
        self._alarms = 0

    def step(self, row: dict[str, Any]) -> None:
        self.watch.update(row["step"], row["loss"], row["grad_norm"])
        self.log.write(row)
        if self.monitor is None:
            return
        if row["step"] % self.every == 0:
            self.monitor.metrics()  # takes in the check of this step
        for alarm in self.monitor.alarms[self._alarms :]:
            named = {name: getattr(alarm, name) for name in ("kind", "step", "layer", "head", "reason")}
            self.log.write({"alarm": named | {"seen": row["step"]}})
        self._alarms = len(self.monitor.alarms)

    def enough(self, step: int) -> bool:
        """Whether the run left its trend so long ago that ``step`` need not be done."""
        first = self.watch.first
        return first is not None and step > first.step + self.stop_after
