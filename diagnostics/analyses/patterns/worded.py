"""What patterns say of a quantity, and of which sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attn_diag.analyses.patterns.backward import FORWARD_BLAMED
from attn_diag.captures.metadata import Metadata
from attn_diag.results.quality import OR_WRONG, SHARED_ERRORS, Pattern, QuantityVerdict, no_rounding
from attn_diag.results.wording import SYMBOLS, percent

# What makes a kernel that is merely lossy by its size wrong.
MERE_PLACES = ("off", "unrelated", "elements", "factors", "zeros", "NaN")


def item_of(metadata: Metadata, batch: int) -> tuple[str, str]:
    """A batch item in words, as its rank counts where several ranks' are put together; and that rank, or ""."""
    owners = metadata.extra.get("rank_of_items", "").split(",")
    if len(set(owners)) < 2:
        return f"batch item {batch}", ""
    rank = owners[batch]
    number = "" if owners.count(rank) == 1 else f"batch item {owners[:batch].count(rank)} of "
    return f"{number}rank {rank}", rank


def with_patterns(verdict: QuantityVerdict, patterns: Sequence[Pattern], where: str = "") -> QuantityVerdict:
    """The verdict with patterns that were found, and their words.

    A quantity that is coarse by its size is wrong where something other than rounding explains it; a gradient that a
    coarse forward explains, and what a factor near 1 does, as a rounded constant may be, is not.

    Args:
        verdict: The quantity's.
        patterns: What was found; the first says all of it.
        where: What is said before their words.
    """
    if not patterns:
        return verdict
    name, first = SYMBOLS[verdict.quantity], patterns[0]
    if verdict.answer == "nonfinite":
        return replace(verdict, words=f"{name} holds NaN or Inf: {where}{first.words}.", patterns=tuple(patterns))
    if verdict.answer in ("lossy", "undecided", "stated") and first.kind in MERE_PLACES:
        return verdict
    if verdict.answer == "undecided" and first.kind == "forward":
        # Whoever is not shown to be at fault is not blamed.
        first = replace(first, words=first.words.replace(FORWARD_BLAMED, ": its backward adds no error to theirs"))
        patterns = (first, *patterns[1:])
    if verdict.answer in ("lossy", "undecided") and first.kind in ("forward", *SHARED_ERRORS):
        words = verdict.words[:-1].replace(OR_WRONG, "") if first.formats else verdict.words[:-1]
        return replace(verdict, words=f"{words}; {where}{first.words}.", patterns=tuple(patterns))
    if first.formats:
        words = verdict.words.partition(", which no ")[0]
        return replace(verdict, words=f"{words}: {where}{first.words}.", patterns=tuple(patterns))
    off = "" if verdict.relative_error is None else f"{percent(verdict.relative_error)} off"
    words = (
        f"{name} is {off or 'off'}{no_rounding(patterns, compared=verdict.factor is not None)}: {where}{first.words}."
    )
    return replace(verdict, answer="wrong", words=words, patterns=tuple(patterns))
