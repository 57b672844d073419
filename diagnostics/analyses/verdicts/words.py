"""Words of what is judged of a quantity (``quality``)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from attn_diag.captures.sources import KEYED
from attn_diag.head.cut_off import SITES as CUT_OFF
from attn_diag.head.quality import AS_GOOD, QuantitySample
from attn_diag.head.unfused import WORDS
from attn_diag.results.quality import CAST_TO, HELD_IN, Quantity, QuantityVerdict
from attn_diag.results.wording import number, percent, plural, ranges, times
from attn_diag.statistics.ratios import MIN_GROUPS, RatioEstimate

AS_IN_BF16 = "as much as a kernel that multiplies in BF16"
# Both ends of an interval that is wider are not worth their place.
_VAGUE = 1e4
# Fewer than so many are one.
_ONE = 1.05
_NOT_FUSED = (
    "The rounding is known, and named with the head: keep in fp32 what it casts, or use a fused kernel, which does."
)
_OF_FUSED = ("scores", "lse", "backward_scores", "backward_shifted")
_SCORES = "The rounding is known, and named with the head: keep in fp32 what it casts."
KEPT_WHOLE = (
    "P or dS loses all behind its tenth bit. Where tl.dot takes it in fp32 (as TF32, by default), cast it to nearest, "
    'to the inputs\' format, or give input_precision="ieee" or "tf32x3"; where it is cast to FP16, let that cast round '
    "to nearest."
)
_ADDED_UP = "The rounding is known, and named with the head: add up these gradients in fp32, and round each once."
OPERANDS = (
    "q, k or v lost their bits before they were multiplied. Where that is meant (a cache in FP8), give them as the "
    "kernel multiplies them, code times scale: then all else is judged."
)
_PROBS = (
    "P̄ lost its bits before it was multiplied with v: cast it to the inputs' 16 bits. Where 8 are meant, declare the "
    "kernel (--declared fa3-fp8, sage2, …): then it is held against one that has them."
)
_BOTH = (
    "q, k or v and P̄ lost their bits before they were multiplied. Where that is meant, declare the kernel (--declared "
    "fa3-fp8, sage2, …): then it is held against one that has no more bits."
)
LOW_BITS = (OPERANDS, _PROBS, _BOTH)
MEAN_OF_OPERANDS = (
    "Bits that q, k, v or P̄ lost make a mean error of O as well: test it again without that loss, or declared."
)
_OF_RECIPE = "The rounding is known from O's bits, and named with the head: keep in fp32 what is rounded there."


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


def known_rounding(lossy: Sequence[QuantityVerdict]) -> str | None:
    """What to do about quantities of which the rounding is known that makes them lossy; None: of one it is not."""
    if lossy and all(q.site in CUT_OFF for q in lossy):
        return KEPT_WHOLE
    if lossy and all(q.site == "gradient_accumulator" for q in lossy):
        return _ADDED_UP
    if lossy and all(q.patterns and q.patterns[0].kind == "operands" for q in lossy):
        said = " ".join(q.patterns[0].words for q in lossy)
        return _BOTH if HELD_IN in said and CAST_TO in said else _PROBS if CAST_TO in said else OPERANDS
    if all(q.site in WORDS for q in lossy):
        return _SCORES if any(q.site in _OF_FUSED for q in lossy) else _NOT_FUSED
    others = [q for q in lossy if q.quantity != "o" and not any(p.kind == "forward" for p in q.patterns)]
    by_bits = any(q.quantity == "o" and q.site is not None and q.site not in (*WORDS, *CUT_OFF) for q in lossy)
    return _OF_RECIPE if by_bits and not others else None
