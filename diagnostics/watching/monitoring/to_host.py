"""One check's metrics on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from attn_diag.watching.monitoring.figures import METRICS, HeadMetrics
from attn_diag.watching.monitoring.record import LayerCheck, MonitorCheck, with_growth
from attn_diag.watching.monitoring.stacks import Key


class Sent:
    """One check's metrics on their way to the host.

    Args:
        step: The check's.
        found: On the device.
        layers: Layers whose metrics are on the host already.
    """

    def __init__(
        self, step: int, found: list[tuple[list[Key], HeadMetrics]], layers: Sequence[LayerCheck] = ()
    ) -> None:
        self.step, self._known = step, layers
        columns = [torch.stack([getattr(metrics, name) for name in METRICS]) for _, metrics in found]
        self._layers = [(keys, column.shape[1]) for (keys, _), column in zip(found, columns, strict=True)]
        packed = (
            torch.zeros(0)
            if not columns
            else torch.cat([c.reshape(-1).to(columns[0].device, non_blocking=True) for c in columns])
        )
        self._event: torch.cuda.Event | None = None
        self._host = packed
        if packed.device.type == "cuda":
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(packed.device))

    def ready(self) -> bool:
        """Whether they have arrived; does not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def check(self, before: MonitorCheck | None) -> MonitorCheck:
        """The check, with its growth since the one ``before`` it; waits where they have not arrived."""
        if self._event is not None:
            self._event.synchronize()
        values, layers, at = self._host.numpy(), list(self._known), 0
        for keys, heads in self._layers:
            size = heads * len(METRICS)
            rows = np.array(values[at : at + size]).reshape(len(METRICS), len(keys), -1)
            at += size
            for number, (layer, module) in enumerate(keys):
                layers.append(LayerCheck(layer, module, dict(zip(METRICS, rows[:, number], strict=True))))
        layers.sort(key=lambda one: (one.layer, one.module or ""))
        return with_growth(MonitorCheck(self.step, tuple(layers)), before)
