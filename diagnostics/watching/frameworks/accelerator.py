"""For loops that are written with Accelerate, which has no callbacks: the optimizer's step is where we come in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch.optim.optimizer import register_optimizer_step_post_hook

from attn_diag.watching.frameworks.alerts import Alert, send, to_mlflow, to_tensorboard, to_trackio, to_wandb
from attn_diag.watching.frameworks.session import News, Session, Watched, complain, harmless

if TYPE_CHECKING:
    from torch import nn


class AccelerateMonitor(Watched):
    """See ``attn_diag.accelerate_monitor``, which makes it. A context manager too."""

    def __init__(self, accelerator: Any, model: nn.Module, session: Session, first_step: int) -> None:
        self._accelerator, self._session, self._first_step = accelerator, session, first_step
        session.begin(accelerator.unwrap_model(model), first_step)
        # Behind the monitor's own: its step is over when ours is called.
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def end_step(self) -> None:
        """Say that a step is over, where no torch.optim optimizer does (DeepSpeed's)."""
        for one in (self.monitor, self.recorder):
            if one is not None:
                one.end_step()
        self._tell(self._session.news())

    def close(self) -> None:
        """Stop watching, and log what was still to come; before ``accelerator.end_training()``."""
        self._hook.remove()
        self._tell(self._session.end())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @harmless
    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002 - a hook's signature
        self._tell(self._session.news())

    @harmless
    def _tell(self, news: News | None) -> None:
        if news is None or not self._accelerator.is_main_process or self.monitor is None:
            return
        # The step that has just ended: later ones would have W&B drop what the loop itself logs of this one.
        step = max(self.monitor.step - 1, self._first_step)
        self._accelerator.log(news.metrics, step=step)
        if news.alarms:
            send(_ways(self._accelerator.trackers), Alert.of(news.alarms, step))


def _ways(trackers: Any) -> Iterator[Callable[[Alert], None]]:
    """How an alert reaches what the trackers log to."""
    for tracker in trackers:
        try:
            if tracker.name == "tensorboard":
                yield partial(to_tensorboard, tracker.tracker)
            elif tracker.name == "wandb":
                yield partial(to_wandb, tracker.tracker)
            elif tracker.name == "trackio":
                yield partial(to_trackio, tracker.tracker)
            elif tracker.name == "mlflow":
                import mlflow

                yield partial(to_mlflow, mlflow.MlflowClient(), tracker.tracker.info.run_id)
        except Exception as error:
            complain(error)
