"""Curves of runs as a chart's series: thinned without losing an extreme, gaps where a value is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from page_record import Run

from attn_diag.reports.charts import Axis, Mark, Series, Tone, Value

STEP = Axis("training step")
LOSS = Axis("loss", fit=True)
NORM = Axis("gradient norm before clipping", log=True)
FAILING_TONE: Tone = "second"
HEALTHY_TONE: Tone = "accent"
# How far beyond the failing runs' end the healthy ones are drawn: the failure is what is to be seen.
_BEYOND = 1.3
# Points of a curve; a figure is about as many pixels wide.
POINTS = 600


def thinned(
    x: Sequence[float], y: Sequence[Value], points: int = POINTS
) -> tuple[tuple[float, ...], tuple[Value, ...]]:
    """At most ``points`` of a curve: the lowest and the highest of equal stretches, first and last; gaps stay gaps."""
    if len(x) <= points:
        return tuple(x), tuple(y)
    stretches = (points - 2) // (2 if None not in y else 3)
    kept = {0, len(x) - 1}
    for i in range(stretches):
        places = range(i * len(x) // stretches, (i + 1) * len(x) // stretches)
        known = [(value, place) for place in places if (value := y[place]) is not None]
        kept |= {min(known)[1], max(known)[1]} if known else set()
        kept |= set([place for place in places if y[place] is None][:1])
    order = sorted(kept)
    return tuple(x[i] for i in order), tuple(y[i] for i in order)


def drawable(value: float, log: bool = False) -> Value:
    """None for what an axis cannot show: NaN, infinities, on a logarithmic one zero and less."""
    return value if math.isfinite(value) and (value > 0 or not log) else None


def curve(
    name: str,
    run: Run,
    axis: Axis,
    *,
    first: int = 0,
    last: int | None = None,
    tone: Tone | None = None,
    look: Literal["faint", "broad"] | None = None,
) -> Series:
    """A run's loss or gradient norm at the steps first..last that it trained itself."""
    column = 1 if axis is LOSS else 2
    rows = [row for row in run.steps if first <= row[0] and (last is None or row[0] <= last)]
    x, y = thinned([float(row[0]) for row in rows], [drawable(row[column], axis.log) for row in rows])
    return Series(name, x, y, tone=tone, look=look)


def events(run: Run, who: str = "") -> tuple[Mark, ...]:
    """A run's first alarm and its departure."""
    found = []
    if run.log.alarms:
        step = run.log.alarms[0]["step"]
        found.append(Mark(float(step), f"{who}alarm at {step:,}"))
    if run.departure:
        found.append(Mark(float(run.departure.step), f"{who}fails at {run.departure.step:,}"))
    return tuple(found)


def last_drawn(failing: Sequence[Run]) -> int:
    """The last step of a chart of failing runs."""
    return math.ceil(_BEYOND * max(run.end for run in failing) / 100) * 100
