"""Words of what is judged of a quantity (``quality``)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from attn_diag.captures.sources import KEYED
from attn_diag.head.quality import AS_GOOD, QuantitySample
from attn_diag.results.quality import Quantity
from attn_diag.results.wording import number, percent, plural, ranges, times
from attn_diag.statistics.ratios import MIN_GROUPS, RatioEstimate

AS_IN_BF16 = "as much as a kernel that multiplies in BF16"
# Both ends of an interval that is wider are not worth their place.
_VAGUE = 1e4
# Fewer than so many are one.
_ONE = 1.05


def cost(error: float, truth: float, plain: float | None) -> str:
    """Where a recipe below 16 bits is declared, what it costs."""
    if plain is None or not truth:
        return ""
    return f" ({percent(math.sqrt(error / truth))} off; in 16 bits {percent(plain)})"


def rows_named(rows: Sequence[int]) -> str:
    """ "row 7", "rows 7-9"."""
    return f"row{'s' if len(rows) > 1 else ''} {ranges(rows)}"


def stand_out(count: int, one: str) -> str:
    """ "8 rows stand out"."""
    return f"{plural(count, one)} {'stands' if count == 1 else 'stand'} out"


def left_with(way: str) -> str:
    """What of inputs that are finer went through BF16; empty: not known which."""
    coarse = f"what a kernel leaves with {way}" if way else AS_IN_BF16
    return f"{coarse}: more coarsely rounded than inputs of this format need"


def factor_words(ratio: RatioEstimate) -> str:
    """A factor with its interval, or the end of a wide one that tells something."""
    if not ratio.high > _VAGUE * ratio.low:
        interval = f"{times(ratio.low)} to {times(ratio.high)}"
    elif ratio.low > AS_GOOD:
        interval = f"at least {times(ratio.low)}"
    elif ratio.high <= AS_GOOD:
        interval = f"at most {times(ratio.high)}"
    else:
        interval = "no useful interval"
    return f"{times(ratio.factor)} ({interval})"


def too_few(whole: QuantitySample, groups: float, quantity: Quantity) -> str:
    """Why an error is not decided that too few groups carry, to be appended."""
    return f"; {few_carry(whole, groups, quantity)} it, and it takes {MIN_GROUPS} to decide"


def without_too_few(words: str) -> str:
    """A sentence without what ``too_few`` appended."""
    return re.sub(rf"; [^;]* it, and it takes {MIN_GROUPS} to decide", "", words)


def few_carry(whole: QuantitySample, groups: float, quantity: Quantity) -> str:
    """What carries an error, of which there are so many ``groups``: "about 2.4 rows carry"."""
    unit, of = "keys" if quantity in KEYED else "rows", ""
    if whole.counts_features:
        unit = "features"
    elif whole.carriers is not None and groups == whole.carriers.count:
        unit = "query rows"
    elif whole.rows_carrying() > _ONE * groups:  # rows that share a heaviest key, or are copies, are one group
        unit, of = ("heaviest keys", "rows with ") if quantity == "o" else (unit, "copies of ")
    if of:
        return f"{of}one {unit[:-1]} carry" if groups < _ONE else f"{of}about {number(groups, 2)} {unit} carry"
    return f"one of the {unit} carries" if groups < _ONE else f"about {number(groups, 2)} {unit} carry"
