"""NaN or Inf that a layer's own kernel made, check after check: when it alarms, and the words for it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attn_diag.results.wording import SYMBOLS, ranges
from attn_diag.watching.monitoring.record import MEASURED, LayerCheck, Values

# A loss scaler may begin at 2^32 (Megatron's) and halves its factor at each step that overflows: checks on end that
# span so many steps are not its.
SCALER_STEPS = 40


class MadeHere:
    """Of O, dQ, dK and dV how many checks on end found some, in each of ``heads``, and over how many steps."""

    def __init__(self, heads: int) -> None:
        self._checks = {name: np.zeros(heads, dtype=np.int64) for name in MEASURED}
        self._first = {name: np.zeros(heads, dtype=np.int64) for name in MEASURED}
        self._step = 0
        self._told: set[tuple[str, int]] = set()

    def __bool__(self) -> bool:
        """Whether the last check found some."""
        return any(bool(count.any()) for count in self._checks.values())

    def update(self, step: int, layer: LayerCheck) -> None:
        """Take a check."""
        self._step = step
        for name, count in self._checks.items():
            self._first[name] = np.where(count > 0, self._first[name], step)
            self._checks[name] = np.where(_found(layer, name) > 0, count + 1, 0)

    def alarms(self, layer: LayerCheck) -> Iterator[tuple[list[int], str]]:
        """What the last check, ``layer``, newly shows: the heads, the one to be named first, and the reason."""
        for name, count in self._checks.items():
            stays = (count >= 2) & (self._step - self._first[name] >= SCALER_STEPS)
            heads = [int(head) for head in np.flatnonzero((_found(layer, name) >= 1) | stays)]
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
