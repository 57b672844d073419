"""Heads beside each other: which layers, heads and sites carry the squared error of dW_Q of a step.

A head has rows of its own in W_Q [D·heads, C], and dW_Q's rows of a head are dQ_hᵀ x of that head alone. The error of a
layer's dW_Q is those of its heads one below the other, so that squared Frobenius norms add up over heads, and over
layers, whose W_Q are different parameters:

    ‖error of dW_Q‖² = sum over layers and heads of ‖error of dW_Q,h‖²

The same holds of dQ and O. A head's part of that sum is its ``share``; it is large where the head's gradient is large
or far off, and says nothing of how far off it is: that is ``relative``. Shares of sites are Shapley values, which are
linear in the game (L. Shapley, "A value for n-person games", 1953): those of a sum of games are the sums of the heads'.

Of one head dQᵀ x of several sequences are added up as matrices, not in squares: each sequence counts by itself here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from typing import Literal

from attn_diag.results.attribution import CANCELLED, Attribution, HeadAttribution, Quantity
from attn_diag.results.base import Number, Result
from attn_diag.results.wording import SYMBOLS, file_name, head_name

# The deepest first: a head is compared by the first of them that is known of it.
_MAIN: tuple[Quantity, ...] = ("dw_q", "dq", "o")
# Of the squared error of all heads, what "most of it" stands for in ``ErrorMap.carry_most``.
MOST = 0.9
# Why no site is named of a head without one; such a head is attributed all the same.
NO_ERROR = "it has no error"


@dataclass(frozen=True)
class HeadError:
    """One head (of one sequence) beside all others of its step."""

    source: str
    """The capture."""
    layer: int | None
    """The model's number of the layer; null where it is not stated."""
    batch: int | None
    """Batch item; null where there is one only."""
    head: int
    """The model's number of the head."""
    relative: Number | None
    """||error|| / ||reference|| of this head's part of the quantity; null: not known, see ``reason``."""
    norm: Number | None
    """||reference||, by which ``relative`` is multiplied to compare heads; null: not known."""
    captured: bool
    """Whether that is the captured kernel's error; else the emulated recipe's."""
    share: Number | None
    """Its part of the squared error of all heads whose error is known; null: its own is not."""
    site: str | None
    """The site with the largest share of this head's error; null: not attributed, see ``reason``."""
    site_share: Number | None
    """That share."""
    second: str | None
    """The site with the next largest share."""
    second_share: Number | None
    """That share."""
    reason: str
    """Why no site is named; empty: one is."""

    @property
    def open(self) -> bool:
        """Whether it has an error, or one that is not known, of which no site is named."""
        return self.site is None and self.reason != NO_ERROR

    @property
    def name(self) -> str:
        """The head by the model's numbers."""
        return head_name(self.layer, self.head) + ("" if self.batch is None else f", batch {self.batch}")


@dataclass(frozen=True)
class SiteShare:
    """A site over all heads."""

    site: str
    """The recipe's field."""
    words: str
    """The site in words."""
    share: Number
    """Its Shapley value of the squared error of the heads that are attributed, as a part of that of all heads."""


@dataclass(frozen=True)
class ErrorMap:
    """All heads of one step that are compared by one quantity."""

    quantity: Quantity
    """dw_q; dq of heads whose dW_Q is not known, and o of those without dO."""
    step: int | None
    """Training step; null where it is not stated."""
    heads: tuple[HeadError, ...]
    """One entry a head, the one with the largest share first; those whose error is not known last."""
    relative: Number | None
    """||error|| / ||reference|| of the heads whose error is known together; null: of none."""
    sites: tuple[SiteShare, ...]
    """Every site, the one with the largest share first."""
    not_attributed: Number
    """The part of the squared error that lies in heads of which no site is named."""
    carry_most: int
    """How many heads make up 90 % of it, the largest first."""
    notes: tuple[str, ...]
    """What the heads leave out or assume."""

    @property
    def known(self) -> tuple[HeadError, ...]:
        """The heads whose error is known."""
        return tuple(head for head in self.heads if head.share is not None)

    @property
    def median(self) -> float:
        """The median of ``relative`` over the heads whose error is known."""
        return median(head.relative or 0.0 for head in self.known)


@dataclass(frozen=True, repr=False)
class Attributions(Result):
    """What ``attribute`` found in several captures: head by head, and all heads beside each other."""

    results: tuple[Attribution, ...]
    """One entry a capture."""
    maps: tuple[ErrorMap, ...]
    """The heads beside each other, step by step; one a quantity."""
    unreadable: tuple[str, ...]
    """What could not be read or attributed, and why."""
    warnings: tuple[str, ...] = ()
    """What is to be known of the captures, such as ranks that are missing."""
    schema: Literal["attn-diag-attributions"] = "attn-diag-attributions"
    schema_version: Literal[1] = 1

    @property
    def heads(self) -> tuple[HeadAttribution, ...]:
        """The entries of the heads."""
        return tuple(head for one in self.results for head in one.heads)

    @property
    def findings(self) -> tuple[str, ...]:
        """What was found, in sentences, head by head."""
        return tuple(words for one in self.results for words in one.findings)


@dataclass(frozen=True)
class Placed:
    """A head's attribution, and where it is from."""

    source: str
    """The capture."""
    step: int | None
    """Training step; None where it is not stated."""
    head: HeadAttribution


def side_by_side(results: Iterable[Attribution]) -> tuple[ErrorMap, ...]:
    """The maps of these captures' heads."""
    return error_maps(Placed(one.source, one.step, head) for one in results for head in one.heads)


def error_maps(heads: Iterable[Placed]) -> tuple[ErrorMap, ...]:
    """The heads beside each other: a map for each step, and within it for each quantity by which heads are compared."""
    groups: dict[tuple[int | None, Quantity], list[Placed]] = {}
    for one in heads:
        groups.setdefault((one.step, _main(one.head)), []).append(one)
    order = sorted(groups, key=lambda key: (-1 if key[0] is None else key[0], _MAIN.index(key[1])))
    return tuple(_map(quantity, step, *_without_copies(groups[step, quantity])) for step, quantity in order)


def _without_copies(group: Sequence[Placed]) -> tuple[list[Placed], list[str]]:
    """The heads of a step without those that another capture holds too; and which were, in words.

    References of one size in every digit are made of the same numbers; where the errors are, too, so is the rest.
    """
    kept: dict[object, list[Placed]] = {}
    copies: dict[str, str] = {}
    beside: dict[str, str] = {}
    for one in group:
        head = one.head
        norms = tuple(sorted(head.norms.items())) or id(head)
        same = kept.setdefault((head.layer, head.batch, head.head, norms), [])
        if (first := next((other for other in same if _errors(other) == _errors(one)), None)) is not None:
            copies[one.source] = first.source
            continue
        if same:
            beside[one.source] = same[0].source
        same.append(one)
    told = [
        f"{file_name(one)} holds the same numbers as {file_name(first)}: left out here" for one, first in copies.items()
    ]
    told += [f"{file_name(one)} has the inputs of {file_name(first)}: both count" for one, first in beside.items()]
    return [one for some in kept.values() for one in some], told


def _errors(one: Placed) -> tuple[object, ...]:
    totals = sorted(one.head.totals.items())
    # NaN is not itself.
    return one.head.recipe, *((name, str(t.error), str(t.captured)) for name, t in totals)


def _main(head: HeadAttribution) -> Quantity:
    return next((q for q in _MAIN if q in head.totals), "o")


def _map(quantity: Quantity, step: int | None, group: Sequence[Placed], told: Sequence[str]) -> ErrorMap:
    entries = [(entry_of(one), one.head) for one in group]
    squares = [_square(entry) for entry, _ in entries]
    whole = math.fsum(square for square in squares if square is not None)
    sites: dict[str, list[float]] = {}
    words: dict[str, str] = {}
    unattributed, heads = [], []
    for (entry, head), square in zip(entries, squares, strict=True):
        share = None if square is None else square / whole if whole else 0.0
        heads.append(replace(entry, share=share))
        if share is None:
            continue
        if entry.site is None:
            unattributed.append(share)
            continue
        for site in head.sites:
            words.setdefault(site.site, site.words)
            sites.setdefault(site.site, []).append(share * site.effects[quantity].share)
    heads.sort(key=lambda h: math.inf if h.share is None else -h.share)
    parts = [SiteShare(site, words[site], math.fsum(shares)) for site, shares in sites.items()]
    size = math.fsum(h.norm**2 for h in heads if h.share is not None and h.norm is not None)
    sums = accumulate(h.share for h in heads if h.share is not None)
    return ErrorMap(
        quantity=quantity,
        step=step,
        heads=tuple(heads),
        relative=math.sqrt(whole / size) if size else None,
        sites=tuple(sorted(parts, key=lambda part: -part.share)),
        not_attributed=math.fsum(unattributed),
        carry_most=sum(1 for reached in sums if reached < MOST) + 1 if whole else 0,
        notes=(*told, *dict.fromkeys(note for one in group for note in one.head.notes)),
    )


def _square(entry: HeadError) -> float | None:
    """A head's squared error; None where it is not known, or too large for a float."""
    if entry.relative is None or entry.norm is None:
        return None
    size = entry.relative * entry.norm
    return size * size if math.isfinite(size * size) else None


def entry_of(one: Placed) -> HeadError:
    """One head by itself: its error and guilty site, without its share of others'."""
    quantity = _main(one.head)
    head, total = one.head, one.head.totals.get(quantity)
    reason = _not_attributed(head, quantity)
    relative = None if total is None else total.captured
    captured = relative is not None
    if total is not None and not captured and not reason:
        relative = total.error
    norm = head.norms.get(quantity)
    if relative is not None and not math.isfinite(relative):
        relative, reason = None, reason or "its error is not finite"
    if norm is None or not math.isfinite(norm):
        norm, relative, reason = None, None, reason or "the size of the reference is not known"
    ranked = sorted(
        ((s.site, s.effects[quantity].share) for s in head.sites if quantity in s.effects), key=lambda part: -part[1]
    )
    if not reason and relative == 0:
        reason = NO_ERROR
    if not reason and not ranked:
        reason = "no rounding changes anything there"
    if not reason and ranked[0][1] > CANCELLED:
        reason = "the errors of several sites cancel, so that none makes it alone"
    first, second = (*ranked, (None, None), (None, None))[:2] if not reason else ((None, None), (None, None))
    return HeadError(
        source=one.source,
        layer=head.layer,
        batch=head.batch,
        head=head.head,
        relative=relative,
        norm=norm,
        captured=captured,
        share=None,
        site=first[0],
        site_share=first[1],
        second=second[0],
        second_share=second[1],
        reason=reason,
    )


def _not_attributed(head: HeadAttribution, quantity: Quantity) -> str:
    """Why the recipe's sites are not those of the captured kernel; empty: they are."""
    if head.unfit:
        return head.unfit.partition(": no rounding")[0].rstrip(".")
    if head.recipe_from == "assumed":
        return "no O was captured by which its recipe could be recognised (--recipe NAME takes one apart)"
    made_otherwise = [q for q in ("o", "dq") if q in head.differences and (q == "o" or quantity != "o")]
    if made_otherwise:
        q = made_otherwise[0]
        return f"the captured {SYMBOLS[q]} errs otherwise than {head.recipe.partition(',')[0]}: {head.differences[q]}"
    return ""
