"""Whether a run's later calls find in its cache what its earlier calls put there, and whether rounding explains it.

A cache holds bits: what is found is what was put there, but for a rotation that is made again. Where a cache below
16 bits lies between the two, found = put + d, with d of rounding to the nearest of some levels. Two things rounding
does not do tell a wrong scale and a wrong zero point from it:

* found is g put in the mean, g = <found, put> / <put, put>. With levels at their cells' means <d, put> = -<d, d>, so
  that 1 - g = e^2, e the error's size relative to put; with even steps (Bennett) 0. Chance adds e / sqrt(n) of n
  numbers, the arithmetic and the scales' own format two units. What lies beyond all of it is a factor.
* d's mean over the tokens of a feature, or over the features of a token, is 0 within chance: of n numbers it holds
  1/n of <d, d>. A zero point that is lost holds most of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.analyses.mismatch.rows import RunRows
from attn_diag.analyses.mismatch.tokens import TokenRun
from attn_diag.results.mismatch import MismatchCause, RunName
from attn_diag.results.wording import percent, plural, runs_of, times

# A rotation that is made again is two roundings, each one unit at most.
_ROTATED = 2
# One bit, its two levels at the best places, leaves sqrt(1 - 2 / pi) of Gaussian numbers: 60 %.
_ONE_BIT = math.sqrt(1 - 2 / math.pi)
# Standard deviations of a mean that chance does not exceed in some thousand heads.
_CHANCE = 5.0
# A constant a feature or token that is more than half of d; of so many tokens and features chance makes a tenth of it.
_MOST, _MANY = 0.5, 16


@dataclass(frozen=True)
class CacheChange:
    """What became of keys or values in a cache."""

    apart: float
    """||found - put|| / ||put||, of all heads."""
    factors: Mapping[int, float]
    """By query head found over put, where that is no rounding."""
    shifted: tuple[int, ...]
    """Query heads in which found - put is for the most part one number a feature, or one a token."""
    replaced: tuple[int, int] | None = None
    """Where few tokens have others and all else is as put, bit for bit: how many of how many, at most, in a head."""


def changed_in_cache(heads: Sequence[tuple[int, RunRows]], unit: float) -> dict[str, CacheChange]:
    """What a run's last calls find of the keys and values that it put there, by name.

    Args:
        heads: Index and rows of every query head.
        unit: The largest relative error of one rounding of their format.

    Returns:
        k and v, where one of them is off by more than a rotation that is made again; else empty.
    """
    held: dict[str, dict[int, list[tuple[Tensor, Tensor]]]] = {"k": {}, "v": {}}
    for index, rows in heads:
        at, *seen = rows.blocks[-1]
        earlier = rows.tokens < rows.tokens[at].min()
        for (name, of), found in zip(held.items(), seen, strict=True):
            put: Tensor = getattr(rows, name)[earlier]
            of.setdefault(index, []).append((found[rows.tokens[earlier]], put))
    changes = {
        name: _change({h: tuple(map(torch.cat, zip(*both, strict=True))) for h, both in of.items()}, unit)
        for name, of in held.items()
    }
    return changes if any(change.apart > _ROTATED * unit for change in changes.values()) else {}


def _change(heads: Mapping[int, tuple[Tensor, ...]], unit: float) -> CacheChange:
    apart = size = 0.0
    factors, shifted, others = {}, [], list[tuple[int, int]]()
    few = True
    for head, (found, put) in heads.items():
        d = found - put
        error, square = float(d.square().sum()), float(put.square().sum())
        apart, size = apart + error, size + square
        changed = d.square().sum(1)
        off = changed > 0
        # A token of small numbers may round to none of them; one that is twice its own size off is another's.
        few &= 2 * int(off.sum()) < len(d) and bool((changed[off] > _ONE_BIT**2 * put.square().sum(1)[off]).all())
        others.append((int(off.sum()), len(d)))
        if not square or min(put.shape) < _MANY or error <= (_ROTATED * unit) ** 2 * square:
            continue
        if _constant(d) > _MOST * error:
            shifted.append(head)
            continue
        g = float((found * put).sum()) / square
        e = math.sqrt(max(error / square - (g - 1) ** 2, 0.0)) / abs(g) if g else math.inf
        # Of levels so far apart the mean is what their places make it: one bit from least to greatest has g above 1.
        if e <= _ONE_BIT and abs(g - 1) > e * e + _CHANCE * e / math.sqrt(put.numel()) + _ROTATED * unit:
            factors[head] = g
    replaced = max(others) if few and apart else None
    return CacheChange(math.sqrt(apart / size) if size else 0.0, factors, tuple(shifted), replaced)


def _constant(d: Tensor) -> float:
    """The larger of the squares that one number a feature, and one a token, holds of d [n, D]."""
    return max(float(d.mean(axis).square().sum()) * d.shape[axis] for axis in (0, 1))


def cache_words(run: RunName, changes: Mapping[str, CacheChange]) -> tuple[str, bool]:
    """The change in words, and whether rounding makes it."""
    apart = " and ".join(f"{name} is {percent(change.apart)} off" for name, change in changes.items())
    told = []
    for name, change in changes.items():
        if change.shifted:
            told.append(
                f"{name} is off by one number a feature or token for the most part in "
                f"{runs_of('head', change.shifted)}: a zero point that is lost or another"
            )
        if change.factors:
            least, most = min(change.factors.values()), max(change.factors.values())
            by = times(least) if times(least) == times(most) else f"{times(least)} to {times(most)}"
            why = "another scale" if most > 1 else "another scale, or numbers that are clipped"
            told.append(f"{name} is {by} times what was put there in {runs_of('head', tuple(change.factors))}: {why}")
    words = f"{run}'s cache no longer holds what was put there: {apart}"
    if (replaced := [(name, change) for name, change in changes.items() if change.apart]) and all(
        change.replaced for _, change in replaced
    ):
        where = " and ".join(
            f"{name} in {change.replaced[0]} of {plural(change.replaced[1], 'token')}"
            for name, change in replaced
            if change.replaced
        )
        return f"{words}, which no rounding makes: {where} is another, and all else is as it was put", False
    if told:
        return f"{words}, which rounding alone does not make; {'; '.join(told)}", False
    if max(change.apart for change in changes.values()) > _ONE_BIT:
        return f"{words}, more than one bit a number leaves at its best", False
    return f"{words}, as a cache below 16 bits makes it", True


def lost_keys(layer: int, sides: Mapping[RunName, TokenRun]) -> list[MismatchCause]:
    """The causes where calls find other keys in their caches than were put there.

    Args:
        layer: The layer by whose values the calls of a sequence were found.
        sides: Both runs.
    """
    causes = []
    for name, run in sides.items():
        lost = [sequence.lost for sequence in run.sequences if sequence.lost is not None]
        if lost:
            first = lost[0]
            words = (
                f"{name}'s cache does not hold the keys that were put there: {first.held} where {first.put} were "
                f"put, other ones from token {first.token} on, at step {first.call[0]}"
            )
            if len(lost) > 1:
                words += f"; so in {plural(len(lost), 'call')}, which are not compared"
            causes.append(
                MismatchCause(layer, "unnamed-input", "unnamed", name, words, "fitted", None, "", "projection")
            )
    return causes
