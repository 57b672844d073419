"""One monitor, and a capture where asked for, from a trainer's first step to its last, whatever the trainer is."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypedDict

from attn_diag.errors import InputError
from attn_diag.printing import printable
from attn_diag.watching.live.capturing import capture as new_capture
from attn_diag.watching.live.clock import TRAINS
from attn_diag.watching.live.recorder import Recorder
from attn_diag.watching.monitoring.alarm import Alarm, AlarmRule
from attn_diag.watching.monitoring.monitor import Monitor
from attn_diag.watching.monitoring.record import MonitorCheck, read_log

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

_log = logging.getLogger("attn_diag")
_P = ParamSpec("_P")

# Where to, or all arguments of ``attn_diag.capture`` but the model and the first step.
CaptureOptions: TypeAlias = str | os.PathLike[str] | Mapping[str, Any]


class MonitorOptions(TypedDict, total=False):
    """What ``attn_diag.Monitor`` takes; its first step and history are the trainer's to know."""

    sequences: int
    rows: int
    layers: Container[int] | None
    on_alarm: Callable[[Alarm], None] | None
    false_alarm_rate: float
    rule: AlarmRule | None
    log: str | os.PathLike[str] | None
    process_group: ProcessGroup | None
    functions: Mapping[str, Callable[..., Any]] | None
    declared: str | None


@dataclass(frozen=True)
class News:
    """What a check brought.

    Attributes:
        metrics: of ``Monitor.metrics``.
        alarms: raised since the last news.
    """

    metrics: dict[str, float]
    alarms: tuple[Alarm, ...]


@dataclass
class _Counted:
    """A monitor or recorder, and the step it stood at when the trainer's step began."""

    what: Monitor | Recorder
    at: int

    def step_over(self) -> None:
        """End its step too, where no optimizer did: a loss scaler skipped it, or it is not of torch.optim."""
        if self.what.step == self.at:
            self.what.end_step()
        self.at = self.what.step


class Session:
    """Watches one model after the other, as a trainer trains them.

    Nothing is raised into the training loop. What a user can put right, an option that cannot be used, is an InputError
    before the first step; all else is logged, and training goes on.

    Args:
        every: steps between checks.
        capture: see ``CaptureOptions``; None: no captures.
        options: of the monitor.

    Attributes:
        monitor: the newest one; None before the first step.
        recorder: likewise, of the captures.

    Raises:
        TypeError: an option has no such name.
    """

    def __init__(self, every: int, capture: CaptureOptions | None, options: MonitorOptions) -> None:
        self.monitor: Monitor | None = None
        self.recorder: Recorder | None = None
        self._every, self._options = every, options
        self._capture = {"path": capture} if isinstance(capture, str | os.PathLike) else capture
        # A name that is not there shall not come out after an hour in a cluster's queue.
        known = inspect.signature(Monitor).parameters.keys() & MonitorOptions.__annotations__.keys()
        _require_names("Monitor", options, known)
        if self._capture is not None:
            _require_names("capture", self._capture, _CAPTURE)
            if "path" not in self._capture:
                raise TypeError(f'capture needs a "path", the folder to write to, got {dict(self._capture)!r}')
        self._counted: list[_Counted] = []
        self._raised: list[Alarm] = []
        self._step = 0
        self._told: int | None = None

    @property
    def running(self) -> bool:
        """Whether it has begun and not ended."""
        return bool(self._counted)

    def begin(self, model: nn.Module, first_step: int) -> None:
        """Watch ``model`` from its step ``first_step`` on; if that is not the run's first, with what was found before.

        Raises:
            InputError: an option cannot be used.
        """
        self.end()
        trains = TRAINS.set(True)
        try:
            self._begin(model, first_step)
        except InputError:
            self.close()
            raise
        except Exception as error:
            self.close()
            complain(error)
        finally:
            TRAINS.reset(trains)

    def _begin(self, model: nn.Module, first_step: int) -> None:
        before = list(self._history(first_step))
        options = self._options | {"on_alarm": self._on_alarm}
        self._raised.clear()
        self.monitor = Monitor(model, self._every, first_step=first_step, history=before, **options)
        self._told, self._step = self._newest(), first_step
        self._counted = [_Counted(self.monitor, self.monitor.step)]
        self.recorder = None
        if self._capture is not None:
            # Resumed runs are the rule under trainers.
            given = {"if_taken": "another", "first_step": first_step, **self._capture}
            self.recorder = new_capture(model, **given).start()
            self._counted.append(_Counted(self.recorder, self.recorder.step))

    def step_ended(self, step: int, *, last: bool = False) -> News | None:
        """Say where the trainer stands; the same ``step`` as before (gradients are accumulated) is no new step.

        Args:
            step: how many steps the trainer has made.
            last: wait for what is still being computed.

        Returns:
            What a check has brought since the last time, if one did.
        """
        if step != self._step:
            self._step = step
            for counted in self._counted:
                counted.step_over()
        return self.news(wait=last)

    def news(self, *, wait: bool = False) -> News | None:
        """What a check has brought since the last time, if one did."""
        if self.monitor is None:
            return None
        if wait:
            self.monitor.metrics(wait=True)
        if (newest := self._newest()) == self._told:
            return None
        self._told = newest
        alarms, self._raised = tuple(self._raised), []
        return News(self.monitor.metrics(), alarms)

    def end(self) -> News | None:
        """Stop watching, and tell what was still to come."""
        if not self.running:
            return None
        self.close()
        return self.news()

    def close(self) -> None:
        """Stop watching."""
        counted, self._counted = self._counted, []
        for one in reversed(counted):
            one.what.close()

    def _newest(self) -> int | None:
        return self.monitor.history[-1].step if self.monitor is not None and self.monitor.history else None

    def _history(self, first_step: int) -> Iterable[MonitorCheck]:
        """The checks before ``first_step``: of the log, where one is written, else of the monitor before."""
        if not first_step:
            return ()
        log = self._options.get("log")
        if log is not None and Path(log).is_file():
            # Several resumed runs may have written the same steps: the last one's count.
            found = {check.step: check for check in read_log(log)}
            return (found[step] for step in sorted(found))
        return () if self.monitor is None else tuple(self.monitor.history)

    def _on_alarm(self, alarm: Alarm) -> None:
        self._raised.append(alarm)
        theirs = self._options.get("on_alarm")
        if theirs is not None:
            theirs(alarm)


class Watched:
    """What a trainer's callback shows of its session."""

    _session: Session

    @property
    def monitor(self) -> Monitor | None:
        """Of the newest training; None before the first."""
        return self._session.monitor

    @property
    def recorder(self) -> Recorder | None:
        """Of the newest training's captures; None without."""
        return self._session.recorder


def harmless(method: Callable[_P, None]) -> Callable[_P, None]:
    """Wrap a trainer's hook so that our own failures are logged instead of raised."""

    @wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception as error:
            complain(error)

    return run


def complain(error: Exception) -> None:
    """Log a failure of ours, or of a logger that we call: each once, and not for ever new ones."""
    words = f"{type(error).__name__}: {error}"
    if words not in _told and len(_told) < _MOST_COMPLAINTS:
        _told.add(words)
        _log.warning("attention is not watched, or not told of: %s", printable(words))


def _require_names(whose: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    if unknown := sorted(set(given) - set(known)):
        raise TypeError(f"{whose} takes no {', '.join(unknown)} here; it takes {', '.join(sorted(known))}")


_CAPTURE = inspect.signature(new_capture).parameters.keys() - {"model", "first_step"}
_MOST_COMPLAINTS = 20
_told: set[str] = set()
