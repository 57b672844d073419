"""What many elements of a layer's O share in words; ``small`` finds it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from attn_diag.results.wording import number, percent, plural, times, together

FEW = 16
"""Rows of the smallest group that is looked at."""


@dataclass(frozen=True)
class SmallError:
    """An error that a group of a head's elements shares."""

    side: int
    """0 train, 1 rollout."""
    sequence: int
    """Number of the pair of sequences."""
    head: int
    """Index of the query head."""
    what: str
    """Which elements of its O, in words; empty: all."""
    off: float
    """The relative error of their values, or of the scale; signed."""
    error: float
    """Its standard error, with what roundings share."""
    kind: Literal["factor", "scale", "either", "rows"]
    """What it is a factor of: O, the softmax scale, not told which; or each row has its own."""
    scale: float
    """The stated softmax scale."""

    @property
    def clear(self) -> float:
        """In standard errors."""
        return abs(self.off) / self.error if self.error else math.inf


@dataclass(frozen=True)
class Seen:
    """The smallest errors of a kind that would have been told in whichever head, relative."""

    head: float = 0.0
    """A factor of all of a head's O."""
    rows: float = 0.0
    """Of the smallest group of its rows."""
    feature: float = 0.0
    """Of a feature."""
    scale: float = 0.0
    """Another softmax scale."""

    def beside(self, other: Seen) -> Seen:
        """The larger of each."""
        return Seen(*(max(a, b) for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def words(self) -> str:
        """What follows "not seen are"."""
        named = (
            (self.scale, "softmax scales", ""), (self.head, "factors of a head's O", ""),
            (self.rows, "", f"in {FEW} rows of it"), (self.feature, "", "in one feature"),
        )  # fmt: skip
        told = []
        for least, of, where in named:
            size = f"less than {percent(least, '.2g')} off" if of else percent(least, ".2g")
            told.append(
                " ".join(filter(None, (of, size, where))) if least < 1 else f"any {of or 'factor'} {where}".strip()
            )
        return together(told)


def words_of(found: Sequence[SmallError], run: str, heads: int) -> str:
    """One run's in a sentence.

    Args:
        found: Those of one run, one at least.
        run: Its name.
        heads: How many heads were looked at.
    """
    first, more = _first(found, heads)
    if first.kind == "rows":
        rms, beyond = map(float, first.what.split())
        return (
            f"{run}'s O has an error that is a factor of each row, {percent(rms, '.2g')} (rms) in head {first.head}: "
            f"{times(beyond)} times what rounding leaves of that{more}; a fault in some rows or all, or a coarser "
            "rounding than a well-rounded kernel's"
        )
    if first.kind == "scale":
        return shared_words(found, run, heads)
    made = "a factor of O" + (", or a cast that truncates" if first.kind == "factor" else " and of its scores")
    return f"{shared_words(found, run, heads)}: no rounding to nearest makes that ({made})"


def shared_words(found: Sequence[SmallError], run: str, heads: int) -> str:
    """The same of what elements share, without what makes it."""
    first, more = _first(found, heads)
    where = f"most clearly in head {first.head}{first.what}{more}"
    size = f"{percent(abs(first.off), '.2g')} (± {percent(first.error, '.1g')})"
    way = "small" if first.off < 0 else "large"
    if first.kind != "scale":
        return f"{run}'s O is {size} too {way}, {where}"
    scale = f"{number(first.scale * (1 + first.off), 6)} where {number(first.scale, 6)} is stated"
    return (
        f"{run}'s O is as a softmax scale {size} too {way} makes it, {scale}, or scores that are so much "
        f"too {way}, {where}"
    )


def _first(found: Sequence[SmallError], heads: int) -> tuple[SmallError, str]:
    """The clearest, and how many heads show such."""
    more = "" if heads == 1 else f"; {len(found)} of {plural(heads, 'head')} show such"
    return max(found, key=lambda one: one.clear), more
