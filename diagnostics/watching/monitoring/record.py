"""One check of the model on the host: every watched head's metrics at one step, and its line in a log."""

from __future__ import annotations

import json
import lzma
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LayerCheck:
    """Of one layer: metric name -> one value a head, [Hq]; NaN where unknown. ``module``: its dotted name, if any."""

    layer: int
    module: str | None
    values: Mapping[str, Values]

    @property
    def heads(self) -> int:
        """Hq."""
        return len(next(iter(self.values.values())))


@dataclass(frozen=True)
class MonitorCheck:
    """All layers that were seen at ``step``, in order."""

    step: int
    layers: tuple[LayerCheck, ...]

    @property
    def heads(self) -> int:
        """How many heads were looked at."""
        return sum(layer.heads for layer in self.layers)

    def to_json(self) -> str:
        """One line: {"step", "layers": [{"layer", "module", "metrics": {name: [a number a head, null: unknown]}}]}."""
        layers = [
            {"layer": c.layer, "module": c.module, "metrics": {n: [_plain(x) for x in v] for n, v in c.values.items()}}
            for c in self.layers
        ]
        return json.dumps({"step": self.step, "layers": layers}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> MonitorCheck:
        """Read what ``to_json`` wrote."""
        found = json.loads(text)
        layers = tuple(
            LayerCheck(
                c["layer"],
                c["module"],
                {n: np.array([math.nan if x is None else float(x) for x in v]) for n, v in c["metrics"].items()},
            )
            for c in found["layers"]
        )
        return cls(found["step"], layers)


def read_log(path: str | os.PathLike[str]) -> Iterator[MonitorCheck]:
    """The checks of a monitor's log (also of one packed with xz), in order; without a last line that was cut off."""
    with lzma.open(path, "rt") if Path(path).suffix == ".xz" else Path(path).open() as file:
        for line in file:
            if line.endswith("\n"):
                yield MonitorCheck.from_json(line)


def _plain(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float(f"{value:.9g}")


def with_growth(check: MonitorCheck, before: MonitorCheck | None) -> MonitorCheck:
    """The check with "max_logit_growth" and "dw_q_share_growth": of the logarithm, per step since ``before``."""
    known = {} if before is None else {(c.layer, c.module): c for c in before.layers}
    layers = []
    for layer in check.layers:
        old = known.get((layer.layer, layer.module))
        added = {}
        for name in ("max_logit", "dw_q_share"):
            added[f"{name}_growth"] = np.full(layer.heads, math.nan)
            if before is not None and old is not None and old.heads == layer.heads and check.step > before.step:
                with np.errstate(invalid="ignore", divide="ignore"):
                    ratio = layer.values[name] / old.values[name]
                    growth = np.log(np.where(ratio > 0, ratio, math.nan)) / (check.step - before.step)
                added[f"{name}_growth"] = growth
        layers.append(LayerCheck(layer.layer, layer.module, {**layer.values, **added}))
    return MonitorCheck(check.step, tuple(layers))
