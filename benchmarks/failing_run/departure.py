"""When a training run has left its trend: one definition, for stopping a run and for reading its log.

- "loss": above the mean + 5 standard deviations of the 100 steps before, for 5 steps in a row; the departure is the
  first of the five. The 100 steps are those before that first step: if they moved on with the departure, a jump to a
  higher level would raise its own limit and never count for long enough (with d the jump, four such steps among 100
  put mean + 5 deviations at more than d).
- "gradient norm": before clipping, above 20 times the median of the 100 steps before.
- "non-finite": loss or gradient norm is NaN or infinite, at any step.

The first two need 100 steps behind them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev

WINDOW = 100
DEVIATIONS = 5.0
PERSISTENCE = 5
FACTOR = 20.0


@dataclass(frozen=True)
class Departure:
    """The step at which a run left its trend, and the criterion that says so."""

    step: int
    reason: str


@dataclass
class Watch:
    """Follows a run step by step. ``found``: the first departure by each criterion, as they become certain."""

    found: list[Departure] = field(default_factory=list)
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    # Steps in a row above the limit, and the limit, kept from the first of them on.
    _above: int = 0
    _limit: float = math.inf

    def update(self, step: int, loss: float, grad_norm: float) -> None:
        """One more step. After a non-finite one nothing can be compared any more: the history stays as it was."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._note(step, "non-finite")
            return
        if len(self._norms) == WINDOW and grad_norm > FACTOR * median(self._norms):
            self._note(step, "gradient norm")
        if not self._above and len(self._losses) == WINDOW:
            self._limit = self.limit(self._losses)
        self._above = self._above + 1 if loss > self._limit else 0
        if self._above == PERSISTENCE:
            self._note(step - PERSISTENCE + 1, "loss")
        self._losses.append(loss)
        self._norms.append(grad_norm)

    @staticmethod
    def limit(losses: Iterable[float]) -> float:
        """The highest loss within the trend of these steps."""
        values = list(losses)
        return fmean(values) + DEVIATIONS * pstdev(values)

    @property
    def first(self) -> Departure | None:
        """The earliest departure by any criterion, None while the run is on its trend."""
        return min(self.found, key=lambda d: d.step, default=None)

    def _note(self, step: int, reason: str) -> None:
        if reason not in {d.reason for d in self.found}:
            self.found.append(Departure(step, reason))


def departures(rows: Iterable[tuple[int, float, float]]) -> list[Departure]:
    """The departures in a log of (step, loss, gradient norm), earliest first, at most one by each criterion."""
    watch = Watch()
    for row in rows:
        watch.update(*row)
    return sorted(watch.found, key=lambda d: d.step)
