"""Alarms, in the words of the logger that is there: W&B's and trackio's alerts, TensorBoard's text, MLflow's tags.

Where a logger has nothing of the kind, the alarm is in Python's logging, where the monitor puts it in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

from attn_diag.watching.frameworks.session import complain
from attn_diag.watching.monitoring.alarm import Alarm

# The name of the metric that counts them.
_NAME = "attn/alarms"
# MLflow keeps no longer value of a tag.
_LONGEST = 5000
# A failing run alarms with many heads at once, which nobody reads one by one.
_LINES = 10


@dataclass(frozen=True)
class Alert:
    """One message about all alarms that came together."""

    title: str
    text: str
    step: int
    """Of the trainer, as its metrics are logged."""

    @classmethod
    def of(cls, alarms: Iterable[Alarm], step: int) -> Self:
        """Put at most ten alarms into words, one a line."""
        lines = [str(alarm) for alarm in alarms]
        more = [f"… and {len(lines) - _LINES} more: see monitor.alarms"] if len(lines) > _LINES else []
        # W&B wants less than 64 characters.
        count = f"{len(lines)} attention alarm" + ("s" if len(lines) != 1 else "")
        return cls(f"attn-diag: {count} at step {step}", "\n".join([*lines[:_LINES], *more]), step)


def to_tensorboard(writer: Any, alert: Alert) -> None:
    """``writer``: a SummaryWriter."""
    # Markdown: two blanks at a line's end keep it.
    writer.add_text(_NAME, alert.text.replace("\n", "  \n"), alert.step)
    writer.flush()


def to_wandb(run: Any, alert: Alert) -> None:
    """``run``: a wandb Run."""
    run.alert(title=alert.title, text=alert.text, level="WARN")


def to_trackio(run: Any, alert: Alert) -> None:
    """``run``: a trackio Run."""
    run.alert(title=alert.title, text=alert.text)


def to_mlflow(client: Any, run_id: str, alert: Alert) -> None:
    """``client``: an MlflowClient. One tag for each step that has alarms, as a tag holds one text."""
    client.set_tag(run_id, f"{_NAME}/step{alert.step}", alert.text[:_LONGEST])


def send(ways: Iterable[Callable[[Alert], None]], alert: Alert) -> None:
    """Go all ways; one that fails does not keep the others."""
    for way in ways:
        try:
            way(alert)
        except Exception as error:
            complain(error)
