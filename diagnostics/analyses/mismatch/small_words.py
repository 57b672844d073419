"""What many elements of a layer's O share in words; ``small`` finds it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from attn_diag.results.wording import number, percent, plural

Kind = Literal["head", "rows", "feature", "scale"]
FEW = 16
"""Rows of the smallest group that is looked at."""
# An O that is so much too small along what it should be is no smaller for it: it is another.
_UNRELATED = -0.5


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
    kind: Kind
    """What shares it; of another scale: all."""
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
    """Of the smallest group of its rows; any 64 neighbouring ones hold one."""
    feature: float = 0.0
    """Of a feature."""
    scale: float = 0.0
    """Another softmax scale."""

    def beside(self, other: Seen) -> Seen:
        """The larger of each."""
        return Seen(*(max(a, b) for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def words(self) -> str:
        """What follows "not seen"."""
        # From a factor of two on it is not computed: what is so far off may be seen as another computation.
        sizes = [percent(size, ".2g") if size < 1 else "an unknown size" for size in astuple(self)]
        return (
            f"not seen are errors below {sizes[0]} that all of a head's O shares, {sizes[1]} in {4 * FEW} successive "
            f"rows, {sizes[2]} in a feature, {sizes[3]} of the softmax scale, and what only single elements or rows "
            "here and there have"
        )


def words_of(found: Sequence[SmallError], run: str, heads: int) -> str:
    """One run's in a sentence.

    Args:
        found: Those of one run, one at least.
        run: Its name.
        heads: How many heads were looked at.
    """
    first = max(found, key=lambda one: one.clear)
    more = "" if heads == 1 else f"; {len(found)} of {plural(heads, 'head')} show such"
    where = f"most clearly in head {first.head}{first.what}{more}"
    size = f"{percent(abs(first.off), '.2g')} (± {percent(first.error, '.1g')})"
    way = "small" if first.off < 0 else "large"
    if first.kind != "scale" and first.off < _UNRELATED:
        factor = f"{number(1 + first.off, 2)} (± {number(first.error, 1)})"
        return (
            f"{run}'s O has a factor of {factor} along what it should be, {where}: it is something else (another "
            "head's or row's, or never written)"
        )
    if first.kind != "scale":
        return (
            f"{run}'s O is {size} too {way}, {where}: roundings of P and O to nearest do not make that (a factor "
            "of O or of scores, another value rounded coarsely, or a cast that truncates)"
        )
    scale = f"{number(first.scale * (1 + first.off), 6)} where {number(first.scale, 6)} is stated"
    return (
        f"{run}'s O is as a softmax scale {size} too {way} makes it, {scale}, or scores that are so much "
        f"too {way}, {where}"
    )
