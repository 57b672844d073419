"""What to do about the label of a head: what to look for, or of a rounding that is known how to be rid of it."""

from __future__ import annotations

from collections.abc import Sequence

from attn_diag.head.cut_off import SITES as CUT_OFF
from attn_diag.head.unfused import WORDS
from attn_diag.results.diagnosis import Label
from attn_diag.results.quality import PROBS, QuantityVerdict, is_explained
from attn_diag.results.wording import SYMBOLS, together

_NOT_FUSED = (
    "The rounding is known, and named with the head: keep in fp32 what it casts, or use a fused kernel, which does."
)
_OF_FUSED = ("scores", "summed", "lse", "backward_scores", "backward_shifted")
_SCORES = "The rounding is known, and named with the head: keep in fp32 what it casts."
KEPT_WHOLE = (
    "P or dS loses all behind its tenth bit. Where tl.dot takes it in fp32 (as TF32, by default), cast it to nearest, "
    'to the inputs\' format, or give input_precision="ieee" or "tf32x3"; where it is cast to FP16, let that cast round '
    "to nearest."
)
_ADDED_UP = "The rounding is known, and named with the head: add up these gradients in fp32, and round each once."
_OPERANDS = (
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
_KERNEL = (
    "O has the bits of a published kernel below 16 bits. Where that is meant, declare it (--declared {}): then all is "
    "held against that."
)
_STORED = (
    "The result lost its bits when it was stored. Where that is meant (an O in FP8 for the next product), capture it "
    "before that cast: then all else is judged."
)
MEAN_OF_OPERANDS = (
    "Bits that q, k, v, P̄ or O lost make a mean error of O as well: test it again without that loss, or declared."
)
_OF_RECIPE = "The rounding is known from O's bits, and named with the head: keep in fp32 what is rounded there."
# E4M3 leaves 4 to 11 times (P) and 12 to 26 times (all operands too) a well-rounded BF16 kernel's error at 256 keys.
_LIKE_A_FAULT = 30.0
# INT8 q and k leave 4 to 6 times, in SageAttention 1.
_LIKE_8_BITS = 3.0
_OR_A_FAULT = (
    " So much may also be wrong mathematics (a part of a sum that is missing, a stale row) of which no pattern was "
    "recognised: where no cast to 8 bits is meant, look for that first."
)
_OR_BEYOND = " What they leave of the error is another way of rounding to these bits, or another fault."
SUGGESTIONS: dict[Label, str] = {
    "nonfinite": (
        "Find the first row with NaN or Inf, and look there for a row that sees no key, an overflow of the format, or "
        "memory that was never written."
    ),
    "wrong": (
        "No rounding makes this error: look for indexing, masks, strides, tiles or missing terms in the kernel, and "
        "check that the tensors captured belong together."
    ),
    "ill_conditioned": (
        "Another kernel of this kind does no better here: keep O (or delta) in fp32 for the backward, make delta as "
        "rowsum(P o dP), or bound the logits (QK-norm, QK-clip)."
    ),
    "lossy": (
        "The error is larger than a well-rounded kernel's: look for scores, row maximum, row sum, accumulators or LSE "
        "below fp32, and for casts that truncate; where none of these makes it, for mathematics that is a little off."
    ),
    "biased": (
        "Look for the site: directed rounding of P or of the accumulator, "
        "or a row sum that adds another P than PV uses."
    ),
    "undecided": (
        "Capture more rows or sequences: what was captured does not decide. A factor that stays between 1.1 and 1.25 "
        "is no alarm, but more than production kernels have (0.93 to 1.07)."
    ),
    "clean": "Nothing to do for this head: if training goes wrong, look at other heads, layers and steps first.",
}
DROPPED_OUT = (
    "If attention dropout was on, this is no fault: add its mask (dropout_mask, bool [B, Hq, Tq, Tk], True: kept, and "
    "dropout_p; a seed does not tell it), or capture with dropout 0 (model.eval())."
)
_OR_DECLARED = " Where it is meant to work below 16 bits, inspect it as the kernel that it is (--declared)."
_OR_FEWER_BITS = " Where fewer than 8 bits are meant (INT4, FP4), inspect it as the kernel that it is (--declared)."
WITHOUT_O = (
    "Capture O too: without it no bias can be tested, and the parts of dK's error that query rows share are not known."
)


def of_lossy(lossy: Sequence[QuantityVerdict]) -> str:
    """What to do about quantities that are lossy."""
    if (lost := lost_bits(lossy)) is not None:
        return lost
    known = _known_rounding(lossy)
    largest = max(q.factor or 0.0 for q in lossy) if lossy else 0.0
    low = known is None and any(q.quantity == "o" and (q.factor or 0.0) > _LIKE_8_BITS for q in lossy if not q.declared)
    declared = _OR_DECLARED if low else ""
    return f"{known or SUGGESTIONS['lossy']}{_OR_A_FAULT if largest > _LIKE_A_FAULT else ''}{declared}"


def of_wrong(wrong: Sequence[QuantityVerdict]) -> str:
    """What to do about quantities that are wrong: formats of a few bits make so much as well."""
    lost, unexplained = lost_bits(wrong), [SYMBOLS[q.quantity] for q in wrong if not is_explained(q)]
    if lost is not None and unexplained:
        return f"{lost} That does not explain {together(unexplained)}: look there for another fault."
    near = [pattern for q in wrong for pattern in q.patterns[:1] if pattern.near]
    if lost is not None and not any(pattern.kernel for pattern in near):
        return lost + _OR_BEYOND if near else lost
    few = [q for q in wrong if not q.declared and (not q.patterns or q.patterns[0].of_few_bits)]
    if few:
        # FP32 inputs are not held against FP8.
        held = all(q.factor is not None for q in few)
        makes = "Rounding all to FP8 makes less" if held else "No rounding that was tried makes this error"
        meant = _OR_FEWER_BITS if held else _OR_FEWER_BITS.replace("fewer than 8 bits", "8 bits or fewer")
        return SUGGESTIONS["wrong"].replace("No rounding makes this error", makes, 1) + meant
    return SUGGESTIONS["wrong"]


def lost_bits(quantities: Sequence[QuantityVerdict]) -> str | None:
    """What to do about bits that were lost below 16; None: it is not that, or not in all of the quantities."""
    if (name := next((p.kernel for q in quantities for p in q.patterns[:1] if p.kernel is not None), None)) is not None:
        return _KERNEL.format(name)
    if not quantities or not all(q.patterns and q.patterns[0].formats for q in quantities):
        return None
    lost = {name for q in quantities for name in q.patterns[0].formats}
    if all(q.quantity in q.patterns[0].formats for q in quantities):
        return _STORED
    return _OPERANDS if PROBS not in lost else _PROBS if lost == {PROBS} else _BOTH


def _known_rounding(lossy: Sequence[QuantityVerdict]) -> str | None:
    """What to do about quantities of which the rounding is known that makes them lossy; None: of one it is not.

    Of bits that were lost below 16 ``lost_bits`` tells.
    """
    if lossy and all(q.site in CUT_OFF for q in lossy):
        return KEPT_WHOLE
    if lossy and all(q.site == "gradient_accumulator" for q in lossy):
        return _ADDED_UP
    if all(q.site in WORDS for q in lossy):
        return _SCORES if any(q.site in _OF_FUSED for q in lossy) else _NOT_FUSED
    others = [q for q in lossy if q.quantity != "o" and not any(p.kind == "forward" for p in q.patterns)]
    by_bits = any(q.quantity == "o" and q.site is not None and q.site not in (*WORDS, *CUT_OFF) for q in lossy)
    return _OF_RECIPE if by_bits and not others else None
