"""Small figures in characters: a running sum as a line of blocks, and a shade for one number of many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attn_diag.results.diagnosis import BiasEstimate

_SIGNIFICANT = 0.05
BLOCKS = "▁▂▃▄▅▆▇█"
# The same eight levels where only ASCII can be written.
ASCII = "_.-~=+*#"


@dataclass(frozen=True)
class Spark:
    """A running sum in ``cells``: levels 0 to 7, zero between 3 and 4, and which cells lie outside the band.

    ``first_row``: the first row drawn that is outside; None where none of those drawn is.
    """

    levels: tuple[int, ...]
    outside: tuple[bool, ...]
    first_row: int | None

    def text(self, characters: str = BLOCKS) -> str:
        """The line."""
        return "".join(characters[level] for level in self.levels)

    def marks(self) -> str:
        """An exclamation mark below every cell outside the band; empty where there is none."""
        return "".join("!" if out else " " for out in self.outside).rstrip()


def spark(estimate: BiasEstimate, cells: int) -> Spark | None:
    """A signed error's running sum over the rows in at most ``cells`` cells; None where there is nothing to draw.

    Full height is the larger of the flat 99 % band and the largest sum drawn, so that a line that stays low stays
    within the band. A cell shows the sum farthest from zero among its points.
    """
    points = [p for p in estimate.drift if math.isfinite(p["sum"])]
    if len(points) < 2 or not any(p["sum"] for p in points):
        return None
    band = estimate.drift_band99 or 0.0
    reach = max(band, max(abs(p["sum"]) for p in points))
    count = min(cells, len(points))
    groups = [points[i * len(points) // count : (i + 1) * len(points) // count] for i in range(count)]
    sums = [max((p["sum"] for p in group), key=abs) for group in groups]
    beyond = [p["row"] for p in points if abs(p["sum"]) > band]
    return Spark(
        levels=tuple(min(int((s / reach + 1) * 4), 7) for s in sums),
        outside=tuple(bool(estimate.drift_outside) and abs(s) > band for s in sums),
        first_row=beyond[0] if beyond and estimate.drift_outside else None,
    )


def drift_words(estimate: BiasEstimate, found: Spark) -> str:
    """Where the running sum ends, and whether it leaves the band that unbiased noise stays inside."""
    band = "" if estimate.drift_band99 is None else f" of +-{estimate.drift_band99:.2g}"
    ends = "" if estimate.cumulative_sum is None else f"ends at {estimate.cumulative_sum:+.2g}, "
    if not estimate.drift_outside:
        return f"{ends}inside the 99 % band{band}"
    first = f" from row {found.first_row} on" if found.first_row is not None else " between the rows drawn"
    p = estimate.p_value if estimate.p_adjusted is None else estimate.p_adjusted
    # The test of the mean clusters rows that copy the same key; the band takes rows as independent.
    clustered = ", though the mean is not significant where rows that copy one key count as one"
    chance = "" if p is None or p < _SIGNIFICANT else clustered
    return f"{ends}OUTSIDE the 99 % band{band}{first}{chance}"


def log_levels(values: Sequence[float | None], count: int = 8) -> list[int | None]:
    """A level 0 to ``count`` - 1 for each positive value, in equal steps of its logarithm between the extremes.

    Steps are at least a factor of 1.25, so that values which hardly differ look alike. Zero is level 0, None stays.
    """
    logs = [math.log(v) for v in values if v is not None and v > 0 and math.isfinite(v)]
    low, high = (min(logs), max(logs)) if logs else (0.0, 0.0)
    step = max((high - low) / count, math.log(1.25))
    found: list[int | None] = []
    for value in values:
        if value is None or math.isnan(value):
            found.append(None)
        elif value <= 0:
            found.append(0)
        elif math.isinf(value):
            found.append(count - 1)
        else:
            found.append(min(int((math.log(value) - low) / step), count - 1))
    return found
