"""Where an O is not what the recipe makes that has its bits everywhere else.

A right recipe misses elements only where another order of fp32 additions, or a tensor core's truncation, carries an
intermediate across a rounding boundary. One element of O may so be off by

    ulp(O)                             the last rounding
    sqrt(sum_k (r_k P_k V_k)^2)        a rounding of P_bar or S of any key, r_k its relative size: 2^-p of a cast,
      + |O| sqrt(sum_k (r_k P_k)^2)    the spacing at S of scores that are rounded; and through l
    e sum_k P_k |V_k|                  e = (K/16 + D/16 + 2) 2^-23 of fp32 sums, truncated once every 16 products, and
                                       of scores, times the largest alpha |q| |k|
    2^-p sum_k P_k |V_k|               where l or accumulators are rounded to p mantissa bits, too

What is off by more than twice that, two such crossings, is wrong, and the rows or features that hold it are named.
(Genuine captures and kernels with other sums: at most 0.75 times.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from attn_diag.head.bit_matches import Match
from attn_diag.head.recipe_rows import usable_rows
from attn_diag.head.recipe_search import SearchedHead, Trial, threshold
from attn_diag.kernels import Recipe
from attn_diag.kernels.formats import parse
from attn_diag.reference import FloatFormat, RowBlock, format_of, reference_rows, ulp
from attn_diag.results.wording import number, plural, ranges

_BLOCK = 128
# So many runs of rows are a place, and one of every so many rows: of a short head any rows are few runs.
_RUNS, _ROWS_OF_RUN = 8, 32
# What arithmetic could make is a place of features where these miss so many rows each, of a short head a quarter: of
# one row in fifty, as another exponential misses them, so many fall to a feature of 64 rows with probability 4e-5.
# And it is a place of rows where as many at random lie so close together, or at one distance, no more often than this.
_OF_FEATURE, _CHANCE = 8, 1e-3
# Rows or features with so many times the misses of a recipe that fits are looked at together.
_CONCENTRATED = 10
# Rows by themselves are left to chance where they are at most this part of all, or two.
_FEW_ROWS = 16
# Features are named where they are at most this part of all.
_FEW_FEATURES = 4


@dataclass(frozen=True)
class Flaw:
    """Elements of O that a recipe does not explain, while it may have the bits of the others."""

    rows: tuple[int, ...]
    """The query rows that hold them."""
    rows_all: int
    """Query rows compared."""
    features: tuple[int, ...] | None
    """The features that hold them; None: any."""
    elements: int
    """How many there are."""
    largest_ulp: float
    """How far the furthest is off the recipe's, in ulp of O."""
    explained: bool
    """Whether arithmetic could make each of them; together they are too many to be chance."""
    kept: Tensor
    """The elements compared without these rows, or features, bool [R, Dv]."""
    agreement: float
    """The fraction of these that have the recipe's bits."""
    place: bool
    """Whether they are a place: few features, rows together or at one distance, or few of the rows that see as many
    keys; else the recipe itself may be another one."""
    chance: bool
    """Whether the right recipe may miss them too: a few rows, each by itself. One rounding of P_bar that falls to the
    other side, where a row has a heavy key, moves many features of that row."""

    @property
    def leaves_most(self) -> bool:
        """Whether the rest tells the recipe: half of it and more, without a place, or single rows that chance takes."""
        return (self.place or self.chance) and 2 * int(self.kept.sum()) >= self.kept.numel()

    @property
    def words(self) -> str:
        """Where and by how much."""
        rows = f"row{'s' if len(self.rows) > 1 else ''} {_in_words(self.rows)}"
        first, last = self.rows[0], self.rows[-1]
        if 4 * len(self.rows) >= last - first + 1 > len(self.rows):
            rows = f"rows {first}-{last} ({len(self.rows)} of {last - first + 1})"
        if len(self.rows) == self.rows_all:
            rows = "all rows"
        where = rows
        if self.features is not None:
            named = f"feature{'s' if len(self.features) > 1 else ''} {ranges(self.features)}"
            where = named if rows == "all rows" else f"{named} of {rows}"
        far = (
            f" up to {number(self.largest_ulp)} ulp" if math.isfinite(self.largest_ulp) else ", NaN or Inf among them,"
        )
        said = f"{where}: {plural(self.elements, 'element')}{far} off its bits"
        if self.explained:
            return f"rounds otherwise in {said}, too many in one place to be chance"
        return f"wrong in {said}, more than arithmetic explains"


def find_flaw(subject: SearchedHead, trial: Trial, rows: Tensor, *, misses_many: bool = False) -> Flaw | None:
    """The elements that the trial's recipe does not explain; None where there are none.

    Args:
        subject: The head.
        trial: The recipe, run on these rows.
        rows: Query rows, int64 [R].
        misses_many: The recipe is right and misses more than usual, as fp32 sums in place of a tensor core's do: only
            what arithmetic does not explain is told.
    """
    if bool(trial.match.equal.all()):
        return None
    trial = replace(trial, match=Match(trial.match.equal.to(rows.device)))
    observed, made = subject.observed[rows].double(), trial.out.double()
    fmt = format_of(subject.observed.dtype)
    unequal = (~trial.match.equal).any(1).nonzero()[:, 0]
    beyond = torch.zeros_like(trial.match.equal)
    in_ulp = torch.zeros_like(made)
    for start in range(0, len(unequal), _BLOCK):
        part = unequal[start : start + _BLOCK]
        block = reference_rows(replace(subject.inputs.head, do=None), rows[part])
        off = (observed[part] - made[part]).abs()
        in_ulp[part] = off / ulp(block.out, fmt)
        beyond[part] = ~(off <= 2 * allowance(trial.recipe, subject, block, fmt))
    found = _placed(subject, trial, rows, beyond, in_ulp, explained=False) if bool(beyond.any()) else None
    least = threshold(subject.fmt, beyond.numel())
    fits = trial.match.agreement >= least or (found is not None and found.place and found.agreement >= least)
    if fits or misses_many:
        return found
    # Too many elements are missed; perhaps all of them in one place.
    missed, most = ~trial.match.equal, _CONCENTRATED * (1 - least)
    for elements in (missed & (missed.double().mean(0) > most), missed & (missed.double().mean(1) > most)[:, None]):
        if not bool(elements.any()):
            continue
        other = _placed(subject, trial, rows, elements, in_ulp, explained=not bool((beyond & elements).any()))
        if other.leaves_most and other.agreement >= least:
            return other
    return found


def _placed(
    subject: SearchedHead, trial: Trial, rows: Tensor, wrong: Tensor, in_ulp: Tensor, *, explained: bool
) -> Flaw:
    """The rows or features that hold the elements marked in ``wrong`` [R, Dv]."""
    bad, width = wrong.any(1), wrong.shape[1]
    columns = wrong.any(0)
    count, each = int(columns.sum()), min(_OF_FEATURE, len(bad) // 4)
    few = count * _FEW_FEATURES <= width and (not explained or int(wrong.sum()) >= each * count)
    alone = not bool((bad[1:] & bad[:-1]).any()) and int(bad.sum()) <= max(2, len(bad) // _FEW_ROWS)
    # Neighbours of wrong rows may be right by chance: they put no weight on what is wrong.
    places = bad.nonzero()[:, 0]
    inside = torch.zeros_like(bad)
    inside[places[0] : places[-1] + 1] = True
    left = bad if 2 * int(inside.sum()) > len(bad) or 4 * int(bad.sum()) < int(inside.sum()) else inside
    close = not explained or _close_by_chance(int(bad.sum()), int(inside.sum()), len(bad)) <= _CHANCE
    spaced = not explained or not _at_one_distance(bad) or _spaced_by_chance(int(bad.sum()), len(bad)) <= _CHANCE
    together = _together(bad) and spaced and (close or not bool((bad == inside).all()))
    kept = ~left[:, None] if not few or int(bad.sum()) == 1 else ~columns[None]
    kept = kept.expand_as(wrong)
    equal = trial.match.equal[kept]
    return Flaw(
        rows=tuple(rows[bad].tolist()),
        rows_all=len(rows),
        features=tuple(columns.nonzero()[:, 0].tolist()) if few else None,
        elements=int(wrong.sum()),
        largest_ulp=float(in_ulp[wrong].nan_to_num(nan=torch.inf, posinf=torch.inf).max()),
        explained=explained,
        kept=kept,
        agreement=float(equal.double().mean()) if equal.numel() else 0.0,
        chance=explained and alone and not (spaced and _at_one_distance(bad)),
        place=few or (left is inside and close) or together or (not explained and _are_few(subject, rows, bad)),
    )


def allowance(recipe: Recipe, subject: SearchedHead, block: RowBlock, fmt: FloatFormat) -> Tensor:
    """How far an element of O may be off the right recipe's, [R, Dv]; see the module."""
    head = subject.inputs.head
    smallest = float(ulp(torch.zeros(1, dtype=torch.float64), subject.inputs.input_format))
    spacing, values = 2.0**-subject.inputs.input_format.precision, head.v[block.keys]
    probs, out = block.probs, block.out
    moved = torch.maximum(spacing * probs, smallest * block.inverse_row_sum[:, None] * (probs > 0))
    for site, at in (("scores", block.scores), ("difference", block.scores - block.row_max[:, None])):
        if parse(getattr(recipe, site)) is not None:
            moved += probs * (spacing * at.masked_fill(probs == 0, 0.0).abs()).expm1()
    by_sum = moved.square().sum(1, keepdim=True).sqrt()
    moved, kept = (head.drop(x, block.rows, block.keys) for x in (moved, probs))
    found = ulp(out, fmt) + (moved.square() @ values.square()).sqrt() + out.abs() * by_sum
    longest = max(head.k[block.keys].norm(dim=1).tolist(), default=0.0)  # of rows that see no key
    largest = head.scale * head.q[block.rows].norm(dim=1) * longest
    depth_sums = (probs.shape[1] + head.q.shape[1]) / 16 + 2
    every = depth_sums * 2.0**-23 * (1 + largest[:, None])
    if any(parse(getattr(recipe, site)) is not None for site in ("row_sum", "range_pv", "accumulator", "row_max")):
        every = every + spacing
    allowed: Tensor = found + every * (kept @ values.abs())
    return allowed


def _together(bad: Tensor) -> bool:
    """Whether the rows marked are few runs, or lie at one distance."""
    steps = bad.nonzero()[:, 0].diff()
    most = min(_RUNS, max(1, len(bad) // _ROWS_OF_RUN))
    return 1 + int((steps > 1).sum()) <= most or len(set(steps.tolist())) == 1


def _close_by_chance(count: int, span: int, rows: int) -> float:
    """An upper bound of the probability that so many of all rows, at random, lie within a span of so many."""
    return (rows - span + 1) * math.comb(span, count) / math.comb(rows, count)


def _spaced_by_chance(count: int, rows: int) -> float:
    """An upper bound of the probability that three or more of all rows, at random, lie at one distance."""
    return rows**2 / (2 * (count - 1)) / math.comb(rows, count)


def _at_one_distance(bad: Tensor) -> bool:
    """Whether the rows marked, three or more, follow each other at one distance: as the first rows of tiles do."""
    steps = bad.nonzero()[:, 0].diff().tolist()
    return len(steps) > 1 and len(set(steps)) == 1


def _are_few(subject: SearchedHead, rows: Tensor, bad: Tensor) -> bool:
    """Whether most rows that attend to as many keys as the wrong ones are right: rows with one key tell nothing."""
    attended = usable_rows(subject.inputs, subject.observed, rows)[1]
    alike = attended >= attended[bad].median()
    return 4 * int((bad & alike).sum()) <= int(alike.sum())


def _in_words(rows: Sequence[int]) -> str:
    steps = {b - a for a, b in pairwise(rows)}
    if len(rows) > 3 and len(steps) == 1 and (step := steps.pop()) > 1:
        return f"{rows[0]}, {rows[1]}, … {rows[-1]} (every {step}th)"
    return ranges(rows)
