"""How good each captured quantity of a head is beside a well-rounded kernel's: plain frozen dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from attn_diag.results.base import Number

Quantity = Literal["o", "lse", "delta", "dq", "dk", "dv", "dkv", "dsinks", "dmask", "dw_q"]
Answer = Literal["nonfinite", "wrong", "lossy", "undecided", "good", "stated"]
# Above ``LOSSY`` a kernel is worse than a well-rounded one, below ``AS_GOOD`` as good; real ones: 0.93 to 1.07.
LOSSY, AS_GOOD = 1.25, 1.1

BEYOND_FORMAT = "beyond format"
"""The kind of a pattern of rows that are further off than the format below 16 bits makes, which others show."""
NO_GRADIENT = "dO is zero in every row: no gradient comes here"
"""Why gradients are not judged that are zeros, as none came."""
UNSEEN_DROPOUT = "unseen dropout"
"""The kind of a pattern that dropout without its mask would make, which is no fault."""
MASK_UNSEEN = "whose mask was not captured"
OR_WRONG = "; so large a factor need not be rounding, it may be wrong mathematics"
"""What is said of a large factor of which nothing else is known."""
OPERANDS, PROBS = ("q", "k", "v"), "p"
"""Names in ``Pattern.formats``; p: P_bar."""
SHARED_ERRORS = ("shared factor", "shared scale", "shared softcap", "last rounding", "operands", "stored", "kernel")
"""Kinds of patterns of an error that all numbers share: a factor or scale near 1, another softcap, half an ulp, or q,
k, v, P_bar or the result itself in a format below 16 bits."""


@dataclass(frozen=True)
class Pattern:
    """Where, or how, a quantity is wrong."""

    kind: str
    """What kind: rows, keys, features, elements, zeros, factor, sign, copy, another semantics, …"""
    words: str
    """The pattern in words, with numbers."""
    explained: Number | None = None
    """The part of the squared error that it explains; null: not measured."""
    remaining: Number | None = None
    """The factor over a well-rounded kernel's error once it is left out; null: nothing is left, or not measured."""
    rows: tuple[tuple[int, int], ...] = ()
    """The rows (of dK and dV: keys) where it is, first and last of each run."""
    features: tuple[tuple[int, int], ...] = ()
    """Likewise the features, where it is in some alone."""
    formats: dict[str, str] = field(default_factory=dict)
    """What lost its bits in a format below 16 (q, k, v; p: P_bar; or the quantity itself), and which format; empty: it
    is something else."""

    kernel: str | None = None
    """The published kernel below 16 bits that O has the bits of, though it was not declared; null: none."""

    @property
    def of_few_bits(self) -> bool:
        """Whether it says no more than how far off rows are, which an operand of fewer than 8 bits makes as well."""
        return self.kind == "off" and "% off" in self.words and not self.features

    @property
    def near(self) -> bool:
        """Whether it is only near what there is: it leaves more than a well-rounded kernel does."""
        return self.remaining is not None and self.remaining > AS_GOOD


@dataclass(frozen=True)
class QuantityVerdict:
    """One captured quantity of a head: is it the mathematics, and is it as good as a well-rounded kernel's?"""

    quantity: Quantity
    """Its name."""
    answer: Answer
    """nonfinite: it holds NaN or Inf. wrong: beyond any rounding. lossy: 1.25 times a well-rounded kernel's error or
    more. good: as good as a well-rounded kernel. undecided: between these, or too little data. stated: not judged, its
    error is stated."""
    words: str
    """Why, in words with numbers."""
    factor: Number | None = None
    """Its root-mean-square error over the larger of the counterfactual's and the noise floor's; null: not compared."""
    factor_ci95: tuple[Number, Number] | None = None
    """The factor's 95 % interval, a jackknife over rows."""
    groups: Number | None = None
    """Effective number of rows (of O: of argmax keys) that carry the error; below 8 nothing is called lossy."""
    typical_factor: Number | None = None
    """The factor with every row's errors in units of its own expected noise, so that no row outweighs the others; where
    few rows carry even that, and the others show it lossy, none counts as more than four times its noise."""
    typical_factor_ci95: tuple[Number, Number] | None = None
    """The interval of ``typical_factor``."""
    relative_error: Number | None = None
    """||error|| / ||reference||."""
    relative_error_well_rounded: Number | None = None
    """The same of the well-rounded kernel."""
    rows_outlying: int = 0
    """Rows (of dK and dV: keys) beyond what rounding can make there."""
    rows: int = 0
    """Rows compared."""
    largest_ulp: Number | None = None
    """Error of the element that is furthest off beside its noise, in ulp."""
    largest_at: tuple[int, int, int] | None = None
    """Its batch item, row and feature."""
    declared: str | None = None
    """The recipe below 16 bits that the kernel is declared to be; factors and what is said of a well-rounded kernel are
    then of that recipe. Null: none is declared."""
    relative_error_16_bit: Number | None = None
    """Where one is declared, the relative error of a well-rounded kernel of 16 bits: what the format costs."""
    site: str | None = None
    """Where it is lossy or undecided, and has a factor: the rounding site that explains it, by name; or, in words, what
    O's bits show. Null elsewhere, and where none is known."""
    patterns: tuple[Pattern, ...] = ()
    """Where and how it is wrong."""
    ranks: tuple[str, ...] = ()
    """The ranks that are at fault, where a capture merged of several has others that are not; else none."""


def is_explained(verdict: QuantityVerdict) -> bool:
    """Whether bits that were lost below 16, here or in the forward, are what is wrong with a quantity."""
    return any(pattern.formats or pattern.kind == "forward" for pattern in verdict.patterns[:1])


TRIED = "no rounding that was tried"
"""What is said to make no error of FP32 inputs, which are not held against FP8."""


def no_rounding(patterns: Sequence[Pattern], *, compared: bool) -> str:
    """What is said behind how far off a wrong quantity is that shows these patterns; ``compared``: with FP8 in all.

    Fewer bits than 8, and 8 in steps of one size (a softmax in INT8), make as much in all rows, and FP8 in some alone.
    """
    if patterns and not patterns[0].of_few_bits:
        return ", which no rounding makes"
    what = "no FP8 rounding" if compared else TRIED
    return f", which {what} makes" if not patterns or patterns[0].words.startswith("all ") else ""


# How a verdict's words end where rows that see no key hold something.
NOT_JUDGED = "which is not judged."


KEPT_OPEN = (
    "The rounding is known, and named with the head: more rows would only narrow its factor. One of 1.1 to 1.25 is no "
    "alarm; to be rid of it keep in fp32 what it casts, or use a fused kernel, which does."
)
"""What to do where a known rounding alone leaves it open whether a head is lossy."""
# Above it more rows do not make a known rounding's factor a well-rounded kernel's.
_COARSE = 1.1


def kept_open(quantities: Sequence[QuantityVerdict]) -> str | None:
    """``KEPT_OPEN`` where all that is undecided has a known rounding, and one of it a factor that more rows keep."""
    undecided = [q for q in quantities if q.answer == "undecided"]
    known = all(q.site is not None for q in undecided) and any((q.factor or 0.0) >= _COARSE for q in undecided)
    return KEPT_OPEN if known else None


def right_beside(quantities: Sequence[QuantityVerdict]) -> tuple[Quantity, ...]:
    """What is right beside what is wrong; not delta beside a wrong O, as it is judged as made of the captured one, nor
    an O with NaN or other numbers in rows that see no key."""
    out_is_wrong = any(q.quantity == "o" and q.answer in ("wrong", "nonfinite") for q in quantities)
    good = [q for q in quantities if q.answer == "good" and not q.words.endswith(NOT_JUDGED)]
    return tuple(q.quantity for q in good if not (out_is_wrong and q.quantity == "delta"))
