"""Words of what is judged of a quantity (``quality``)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attn_diag.results.wording import number, percent, ranges, times
from attn_diag.statistics.ratios import RatioEstimate

AS_IN_BF16 = "as much as a kernel that multiplies in BF16"
# The ends of an interval that is wider say nothing.
_VAGUE = 1e4


def cost(error: float, truth: float, plain: float | None) -> str:
    """Where a recipe below 16 bits is declared, what it costs."""
    if plain is None or not truth:
        return ""
    return f" ({percent(math.sqrt(error / truth))} off; in 16 bits {percent(plain)})"


def rows_named(rows: Sequence[int]) -> str:
    """ "row 7", "rows 7-9"."""
    return f"row{'s' if len(rows) > 1 else ''} {ranges(rows)}"


def left_with(way: str) -> str:
    """What of inputs that are finer went through BF16; empty: not known which."""
    coarse = f"what a kernel leaves with {way}" if way else AS_IN_BF16
    return f"{coarse}: more coarsely rounded than inputs of this format need"


def factor_words(ratio: RatioEstimate) -> str:
    """A factor with its interval, where that tells something."""
    if ratio.high > _VAGUE * ratio.low:
        return f"{times(ratio.factor)} (no useful interval)"
    return f"{times(ratio.factor)} ({times(ratio.low)} to {times(ratio.high)})"


def few_carry(groups: float, unit: str) -> str:
    """How many rows or keys carry an error: "about 2.4 rows carry"."""
    return f"one of the {unit} carries" if groups < 1.05 else f"about {number(groups, 2)} {unit} carry"
