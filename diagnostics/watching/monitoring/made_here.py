"""NaN or Inf that a layer's own kernel made, check after check: when it alarms, and the words for it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attn_diag.results.wording import SYMBOLS, ranges
from attn_diag.watching.monitoring.record import MEASURED, LayerCheck, Values


class MadeHere:
    """Of O, dQ, dK and dV how many checks on end found some, in each of ``heads``."""

    def __init__(self, heads: int) -> None:
        self._checks = {name: np.zeros(heads, dtype=np.int64) for name in MEASURED}
        self._told: set[tuple[str, int]] = set()

    def __bool__(self) -> bool:
        """Whether the last check found some."""
        return any(bool(count.any()) for count in self._checks.values())

    def update(self, layer: LayerCheck) -> None:
        """Take a check."""
        for name, count in self._checks.items():
            self._checks[name] = np.where(_found(layer, name) > 0, count + 1, 0)

    def alarms(self, layer: LayerCheck) -> Iterator[tuple[list[int], str]]:
        """What the last check, ``layer``, newly shows: the heads, the one to be named first, and the reason."""
        for name, count in self._checks.items():
            heads = [int(head) for head in np.flatnonzero((_found(layer, name) >= 1) | (count >= 2))]
            new = [head for head in heads if (name, head) not in self._told]
            self._told |= {(name, head) for head in heads}
            if new:
                went_in = "q, k and v" if name == "o" else "q, k, v, O and dO"
                reason = f"{SYMBOLS[name]} holds NaN or Inf, made here: what went in ({went_in}) is finite"
                others = [head for head in heads if head != new[0]]
                if others:
                    reason += f"; so in head{'s' * (len(others) > 1)} {ranges(others)}"
                yield [new[0], *others], reason


def _found(layer: LayerCheck, name: str) -> Values:
    """Above 0 where a quantity is NaN or Inf and what went in is not; 1 where no loss scaler makes it so, [Hq]."""
    return np.nan_to_num(layer.values.get(f"{name}_nonfinite", np.zeros(layer.heads)))
