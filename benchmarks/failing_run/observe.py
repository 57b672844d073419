"""What a training run lets attn-diag see and writes down: monitor and captures."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from runlog import Writer
from torch import nn

import attn_diag
from attn_diag.captures.files import write_atomically
from attn_diag.watching.monitoring.alarm import Alarm
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

    Alarms go into the run's ``log``. The monitor's own log, with every head, is OUT/monitor/NAME.jsonl. Captures are in
    OUT/captures/NAME_fromSTEP (a folder takes those of one piece of a run), the first alarm's in
    OUT/captures/NAME_alarm. ``parent``: the run from whose checkpoint this one starts. ``alarmed``: an earlier piece of
    the run has had its first alarm.
    """

    def __init__(
        self,
        stack: ExitStack,
        log: Writer,
        model: nn.Module,
        options: argparse.Namespace,
        name: str,
        first: int,
        *,
        parent: str | None,
        alarmed: bool,
    ) -> None:
        self._stack, self._model, self._options, self._name, self._alarmed = stack, model, options, name, alarmed
        self._monitor: attn_diag.Monitor | None = None
        if options.capture_steps:
            self._capture(f"{name}_from{first}", first, steps=options.capture_steps, layers=options.capture_layers)
        if options.monitor_every:
            folder = options.out / "monitor"
            checks, before = folder / f"{name}.jsonl", None if parent is None else folder / f"{parent}.jsonl"

            def note(alarm: Alarm) -> None:
                log.write({"alarm": {n: getattr(alarm, n) for n in ("kind", "step", "layer", "head", "reason")}})

            monitor = attn_diag.Monitor(
                model, every=options.monitor_every, first_step=first, log=checks,
                history=checks_before(first, checks, before), on_alarm=note,
            )  # fmt: skip
            self._monitor = stack.enter_context(monitor)

    def first_alarm(self, step: int) -> bool:
        """Whether the steps before ``step`` brought the first alarm that matters here; then ``step`` is captured."""
        if self._monitor is None:
            return False
        if (step - 1) % self._options.monitor_every == 0:
            self._monitor.metrics()  # takes in the check of the step that is over
        if self._alarmed or not self._options.at_alarm or not self._monitor.alarms:
            return False
        self._alarmed = True
        alarm = self._monitor.alarms[0]
        self._capture(
            f"{self._name}_alarm", step, steps={step}, layers={alarm.layer}, heads=[alarm.head], batch=_SEQUENCES
        )
        return True

    def _capture(self, folder: str, first: int, **what: Any) -> None:
        where = self._options.out / "captures" / folder
        self._stack.enter_context(attn_diag.capture(self._model, where, first_step=first, max_bytes=_MAX_BYTES, **what))
