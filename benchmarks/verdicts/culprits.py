"""Whether a verdict names what was planted: the quantity, the pattern or the site; and nothing that is not so.

A statement is false where a quantity is accused that is as right as healthy kernels leave it; where rows are named of
which most are as right; where a coarse rounding is called wrong mathematics; where a pattern of another kind than the
defect's is named (``KINDS``); where the forward is blamed for a backward's defect; where another site is named.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from attn_diag.results.quality import SHARED_ERRORS, Pattern, QuantityVerdict
from verdicts.effects import Effect
from verdicts.planting import Defect

# Kinds of pattern that say where, and what is there, and nothing of how it came about.
PLACES = frozenset(
    {"off", "unrelated", "elements", "factors", "rows", "keys", "features", "NaN", "offset", "zeros", "factor"}
)
# What a defect's pattern may be called. A defect may look like several: O of rows that lost their last tile is what
# another mask gives.
KINDS: dict[str, frozenset[str]] = {
    name: frozenset(kinds.split())
    for name, kinds in {
        "keys missing": "part mask zeros normalisation",
        "keys counted twice": "part mask",
        "rows missing": "part mask zeros",
        "mask": "mask part",
        "mask alignment": "mask part",
        "window": "mask part",
        "key padding": "mask part",
        "rescale": "part normalisation factor",
        "split merge": "part normalisation factor",
        "copy": "copy head tensor",
        "scale": "scale factor",
        "softcap": "softcap formula scale",
        "features": "features zeros",
        "heads": "head heads copy tensor",
        "batch": "head copy",
        "group": "heads head factor zeros",
        "factor": "factor normalisation formula scale base",
        "sign": "sign factor",
        "zeros": "zeros",
        "unwritten": "zeros",
        "rows": "copy formula zeros part shift",
        "transpose": "transpose copy",
        "layout": "transpose copy",
        "element": "elements zeros",
        "NaN": "NaN",
        "LSE base": "base offset scale factor lse",
        "LSE scale": "scale formula lse",
        "LSE maximum": "formula offset lse",
        "LSE row sum": "formula offset lse",
        "LSE offset": "offset factor",
        "delta": "delta formula part",
        "gradient of another tensor": "tensor",
        "row max": "part normalisation",
        "race": "part zeros",
    }.items()
}
# What a wrong O or L makes of dQ and dK, and what many defects make of single rows.
_CONSEQUENCES = frozenset({"delta"})
# A quantity within so much of the worst healthy kernel is right.
_RIGHT = 1.1
_ACCUSING = ("nonfinite", "wrong", "lossy")
_SITES: dict[str, tuple[str, ...]] = {
    "dS": ("dscores_from",),
    "delta": ("rounded-delta", "rounded-products"),
    "dP": ("rounded-dprobs",),
    "LSE": ("lse",),
    "scores": ("backward_scores",),
} | dict.fromkeys(("dK accumulator", "dV accumulator"), ("gradient_accumulator",))
# What a recipe with O's bits calls the sites that are planted, where by another name.
_IN_WORDS = {"row max": "maximum", "O accumulator": "O's accumulator", "PV": "PV of a range"}


@dataclass(frozen=True)
class Named:
    """What a verdict says of a culprit."""

    right: bool
    """It names the quantity that the defect makes wrong by itself, its pattern or its site."""
    false: tuple[str, ...]
    """Statements that are not so."""


def named(defect: Defect, quantities: Sequence[QuantityVerdict], effects: Sequence[Effect]) -> Named:
    """What the answers about one head say of the culprit.

    Args:
        defect (Defect): What was planted.
        quantities (Sequence[QuantityVerdict]): The tool's answers.
        effects (Sequence[Effect]): What the defect did to this head, of every sequence and quantity.
    """
    false: list[str] = []
    right = False
    for q in (q for q in quantities if q.answer in _ACCUSING):
        did = [e for e in effects if e.quantity == q.quantity]
        right = right or q.quantity in defect.quantities
        if did and all(_is_right(e) for e in did):
            false.append(f"{q.quantity} is right but called {q.answer}")
        # What is dropped below a threshold is no rounding.
        rounds = bool(defect.site) and defect.extent == "everywhere" and "flushed" not in defect.name
        if q.answer == "wrong" and rounds:
            false.append(f"{q.quantity}: called wrong where {defect.site} is coarse")
        if q.site is not None and not _names(q.site, defect.site):
            false.append(f"{q.quantity}: site {q.site}")
        for pattern in q.patterns:
            if pattern.kind == "forward":
                right = right or defect.where == "forward"
                if defect.where != "forward":
                    false.append(f"{q.quantity}: the forward is blamed")
                continue
            if pattern.kind == "rounding" and q.site is not None:
                continue  # what the site says
            if pattern.kind in SHARED_ERRORS and rounds:
                # What all numbers share of a rounding is told as such; that it is the last one must be so.
                last = q.quantity == defect.site.lower() or " or " in pattern.words
                # A truncation may look like a scale, and is then told beside it; no rounding makes another softcap.
                other = pattern.kind == "shared softcap" or (
                    pattern.kind == "shared scale" and "truncates" not in pattern.words
                )
                if other or (pattern.kind == "last rounding" and not last):
                    false.append(f"{q.quantity}: {pattern.words}")
                continue
            kind = pattern.kind.removeprefix("shared ")
            if kind not in PLACES or kind in KINDS.get(defect.pattern, ()):
                of_forward = defect.where == "forward" and kind in _CONSEQUENCES
                fits = of_forward or kind in KINDS.get(defect.pattern, ())
                right = right or (fits and bool(defect.pattern))
                if not fits:
                    false.append(f"{q.quantity}: {pattern.kind}: {pattern.words}")
            if pattern.rows and _misplaced(pattern, did):
                false.append(f"{q.quantity}: place: {pattern.words}")
    return Named(right, tuple(false))


def _names(said: str, site: str) -> bool:
    """Whether what is said to round is the planted site: by name, or in words that O's bits show."""
    return said in _SITES.get(site, ()) or _IN_WORDS.get(site, site) in re.split(", |; | in ", said)


def _is_right(effect: Effect) -> bool:
    """Whether neither the whole, nor a typical row, nor any row is worse than healthy kernels leave them."""
    limit = max(3.0, effect.healthy_row_factor)
    rows = max(effect.row_factor, effect.small_row_factor)
    return max(effect.factor, effect.typical_factor) < _RIGHT and rows <= limit and not effect.rows_off


def _misplaced(pattern: Pattern, did: Sequence[Effect]) -> bool:
    """Whether most of the rows that a pattern names are as right as healthy kernels leave them."""
    rows = {row for first, last in pattern.rows for row in range(first, last + 1)}
    return all(e.finite and len(rows - set(e.rows_off)) > len(rows) / 2 for e in did)
