"""What a training run lets attn-diag see and writes down: monitor, captures, Adam's moments, and the log of steps."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from runlog import Watch, Writer
from safetensors.torch import save_file
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
    folder takes those of one piece of a run), the first alarm's in OUT/captures/NAME_alarm, and moments in
    OUT/momentum/NAME. ``parent``: the run from whose checkpoint this one starts. ``alarmed``: an earlier piece of the
    run has had its first alarm.
    """

    def __init__(
        self,
        stack: ExitStack,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        options: argparse.Namespace,
        name: str,
        first: int,
        *,
        parent: str | None,
        alarmed: bool,
    ) -> None:
        self._stack, self._model, self._optimizer, self._options = stack, model, optimizer, options
        self._name, self._step, self._alarmed = name, first, alarmed
        self.monitor: Any = None
        if options.capture_steps:
            self._capture(f"{name}_from{first}", steps=options.capture_steps, layers=options.capture_layers)
        if options.monitor_every:
            folder = options.out / "monitor"
            log, before = folder / f"{name}.jsonl", None if parent is None else folder / f"{parent}.jsonl"
            past = checks_before(first, log, before)
            monitor = attn_diag.Monitor(model, every=options.monitor_every, first_step=first, log=log, history=past)
            self.monitor = stack.enter_context(monitor)

    def before_step(self, step: int) -> None:
        """Write Adam's moments as the step finds them, where they are asked for."""
        self._step = step
        if not self._options.capture_momentum or step not in (self._options.capture_steps or ()):
            return
        folder: Path = self._options.out / "momentum" / self._name
        folder.mkdir(parents=True, exist_ok=True)
        for layer, block in enumerate(self._model.transformer.h):  # type: ignore[union-attr, arg-type]
            weight = block.attn.c_attn.weight
            if self._options.capture_layers is None or layer in self._options.capture_layers:
                state = self._optimizer.state[weight]
                # Rows of q come first.
                moments = {m: state[m].chunk(3)[0].contiguous() for m in ("exp_avg", "exp_avg_sq")}
                metadata = {"step": str(step), "layer": str(layer)}
                save_file(moments, folder / f"step{step:06d}_layer{layer:02d}.safetensors", metadata)

    def first_alarm(self) -> bool:
        """Whether the step that is over brought the first alarm that matters here; then the next one is captured."""
        if self._alarmed or not self._options.at_alarm or self.monitor is None or not self.monitor.alarms:
            return False
        self._alarmed = True
        alarm, step = self.monitor.alarms[0], self._step + 1
        self._capture(
            f"{self._name}_alarm", step, steps={step}, layers={alarm.layer}, heads=[alarm.head], batch=_SEQUENCES
        )
        return True

    def _capture(self, folder: str, first: int | None = None, **what: Any) -> None:
        first = self._step if first is None else first
        where = self._options.out / "captures" / folder
        self._stack.enter_context(attn_diag.capture(self._model, where, first_step=first, max_bytes=_MAX_BYTES, **what))


class StepLog:
    """Writes what a step brought to the log, and knows when the run has left its trend.

    Without a log it only asks the monitor, whose answer may be a reduction over all processes.
    """

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
