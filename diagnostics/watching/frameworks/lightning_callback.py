"""The callback of Lightning, under both of its names: ``lightning`` and ``pytorch_lightning``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

from attn_diag.errors import InputError
from attn_diag.watching.frameworks.alerts import Alert, send, to_mlflow, to_tensorboard, to_wandb
from attn_diag.watching.frameworks.session import News, Session, Watched, complain, harmless

_NAMES = ("lightning.pytorch", "pytorch_lightning")


class LightningMonitor(Watched):
    """See ``attn_diag.lightning_monitor``, which makes it a ``Callback`` too."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __reduce__(self) -> tuple[Any, ...]:
        # The class that is also a Callback has no name that pickle could find; "ddp_spawn" pickles callbacks.
        return lightning_callback, (self._session,)

    def close(self) -> None:
        """Stop watching."""
        self._session.close()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin, behind the sanity check, with the step that the trainer begins with."""
        self._session.begin(pl_module, trainer.global_step)

    @harmless
    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:  # noqa: ARG002 - their signature
        """Log what a check has brought."""
        if self._session.running:
            _log(self._session.step_ended(trainer.global_step), trainer)

    @harmless
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Stop watching, and log what was still to come."""
        _log(self._session.end(), trainer)

    @harmless
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Stop watching."""
        self._session.close()


def lightning_callback(session: Session) -> LightningMonitor:
    """Make it a Callback of the Lightning that is there; of both, where a program has both.

    Raises:
        InputError: there is none.
    """
    imported = [name for name in _NAMES if sys.modules.get(name) is not None]
    bases = []
    for name in imported or _NAMES:
        try:
            bases.append(import_module(name).Callback)
        except ModuleNotFoundError:
            continue
        if not imported:
            break
    if not bases:
        raise InputError("lightning_monitor needs Lightning, which is not installed: pip install lightning")
    made = type("LightningMonitor", (LightningMonitor, *bases), {"__doc__": LightningMonitor.__doc__})
    found: LightningMonitor = made(session)
    return found


def _log(news: News | None, trainer: Any) -> None:
    if news is None or not trainer.is_global_zero:
        return
    step = _logged_step(trainer)
    ways: list[Callable[[Alert], None]] = []
    for logger in trainer.loggers:
        try:
            logger.log_metrics(news.metrics, step=step)
            ways += _ways(logger)
        except Exception as error:
            complain(error)
    if news.alarms:
        send(ways, Alert.of(news.alarms, step))


def _logged_step(trainer: Any) -> int:
    """What Lightning logs its own metrics of this batch under: batches that stepped, however many optimizers did."""
    stepped = getattr(getattr(trainer.fit_loop, "epoch_loop", None), "_batches_that_stepped", None)
    return stepped if isinstance(stepped, int) else max(trainer.global_step - 1, 0)


def _ways(logger: Any) -> Iterator[Callable[[Alert], None]]:
    """How an alert reaches what the logger logs to. By names: there are two classes of each."""
    names = {kind.__name__ for kind in type(logger).__mro__}
    if "TensorBoardLogger" in names:
        yield partial(to_tensorboard, logger.experiment)
    elif "WandbLogger" in names:
        yield partial(to_wandb, logger.experiment)
    elif "MLFlowLogger" in names:
        yield partial(to_mlflow, logger.experiment, logger.run_id)
