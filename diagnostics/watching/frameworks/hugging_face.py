"""The callback of transformers' Trainer, and of TRL's trainers, which are Trainers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from attn_diag.watching.frameworks.alerts import Alert, send, to_mlflow, to_tensorboard, to_trackio, to_wandb
from attn_diag.watching.frameworks.session import News, Session, Watched, complain, harmless

# From a callback's method up to the handler that calls it.
_MAX_FRAMES = 8


class TrainerMonitor(Watched, TrainerCallback):
    """See ``attn_diag.trainer_monitor``, which makes it."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def close(self) -> None:
        """Stop watching, where training ended by an exception."""
        self._session.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002 - their signature
        """Begin, with the step that the trainer begins with."""
        self._session.begin(given["model"], state.global_step)

    @harmless
    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Log what a check has brought."""
        if self._session.running:
            # Behind the last step the loggers close, before our own on_train_end.
            news = self._session.step_ended(state.global_step, last=control.should_training_stop)
            self._log(news, args, state, control, given)

    @harmless
    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        """Stop watching."""
        _remember(self._session.end(), state)

    def _log(self, news: News | None, args: Any, state: Any, control: Any, given: dict[str, Any]) -> None:
        """As ``Trainer.log`` does it, but for the console, and for the trainer's own log of this step."""
        _remember(news, state)
        if news is None or not state.is_world_process_zero:
            return
        ways: list[Callable[[Alert], None]] = []
        for callback in self._others():
            try:
                # What a logger says of control is meant for its own log.
                callback.on_log(args, state, copy.copy(control), logs=dict(news.metrics), **given)
            except Exception as error:
                complain(error)
            else:
                ways += _ways(callback)
        if news.alarms:
            send(ways, Alert.of(news.alarms, state.global_step))

    def _others(self) -> Iterator[Any]:
        """The trainer's callbacks that log elsewhere than to the console.

        A callback is told neither of its trainer nor of other callbacks: the handler is found where it calls us.
        """
        frame: FrameType | None = sys._getframe().f_back
        for _ in range(_MAX_FRAMES):
            if frame is None:
                break
            handler = frame.f_locals.get("self")
            if isinstance(handler, CallbackHandler):
                consoles = (PrinterCallback, ProgressCallback, TrainerMonitor)
                yield from (c for c in handler.callbacks if not isinstance(c, consoles))
                return
            frame = frame.f_back
        complain(LookupError("the trainer's loggers were not found: no CallbackHandler calls this callback"))


def _remember(news: News | None, state: Any) -> None:
    if news is not None:
        state.log_history.append(
            {**({} if state.epoch is None else {"epoch": state.epoch}), **news.metrics, "step": state.global_step}
        )


def _ways(callback: Any) -> Iterator[Callable[[Alert], None]]:
    """How an alert reaches what the callback logs to. By names: not every version has all of them."""
    names = {kind.__name__ for kind in type(callback).__mro__}
    if "TensorBoardCallback" in names:
        if callback.tb_writer is not None:
            yield partial(to_tensorboard, callback.tb_writer)
    elif "WandbCallback" in names:
        import wandb

        if wandb.run is not None:
            yield partial(to_wandb, wandb.run)
    elif "TrackioCallback" in names:
        from trackio import context_vars

        if (run := context_vars.current_run.get()) is not None:
            yield partial(to_trackio, run)
    elif "MLflowCallback" in names:
        import mlflow

        if (active := mlflow.active_run()) is not None:
            yield partial(to_mlflow, mlflow.MlflowClient(), active.info.run_id)
