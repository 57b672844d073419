"""Few rows of a layer in which the runs part by far more than rounding, where all others are right.

A layer's error as a whole has a wide interval then, and says nothing: a stale row, or one that sees a key too many at
the edge of a tile, is found by its own rounding. The limit of a row is the one of ``head.outlying``, by the directions
that its noise has, unless the kernel may round scores to 16 bits, as its other rows tell: then it is ``ELEMENT_LIMIT``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.analyses.mismatch.rows import RunRows
from attn_diag.analyses.mismatch.split import HeadSemantics, SplitHead, blocks_of, expected_square, heads_of
from attn_diag.head.noise_directions import directions
from attn_diag.head.outlying import GROUP_LIMIT, quantile
from attn_diag.head.quality import ELEMENT_LIMIT
from attn_diag.head.rounded_scores import expected_by_scores, moved_by_scores
from attn_diag.reference import FloatFormat

# Of each head, the rows that are furthest apart, and how many others say what is usual.
_FURTHEST, _USUAL = 4, 32


@dataclass(frozen=True)
class StrayRow:
    """The row that strays furthest."""

    head: int
    """Index of its query head."""
    token: int
    """Its place in the sequence."""
    times: float
    """By how many times two well-rounded kernels' error the runs part there."""
    side: int
    """Which run is further from float64: 0 train, 1 rollout."""
    by_scores: bool
    """Whether scores rounded to 16 bits inside that run's kernel could make it."""
    coarse: bool
    """Whether it is below ``ELEMENT_LIMIT``: another coarse site could make it."""


def find_stray(
    heads: Sequence[tuple[int, tuple[RunRows, RunRows], tuple[HeadSemantics, HeadSemantics], SplitHead]],
    formats: Sequence[tuple[FloatFormat, FloatFormat]],
) -> StrayRow | None:
    """The row whose difference is beyond its limit times rounding, and times what is usual in its head.

    Args:
        heads: Index, rows of train and rollout, what either computes, and how their difference splits.
        formats: Of train and rollout, the inputs' and O's.
    """
    worst: StrayRow | None = None
    for head, rows, semantics, split in heads:
        usable = split.usable.nonzero()[:, 0]
        if len(usable) < _USUAL:
            continue
        part, sizes = split.parts["rounding"].square().sum(1), split.reference.square().sum(1)
        relative = part[usable] / sizes[usable].clamp(min=1e-300)
        furthest = usable[relative.topk(_FURTHEST).indices].sort().values
        spread = usable[torch.linspace(0, len(usable) - 1, _USUAL, device=usable.device).long()]
        usually = _expected(spread, rows, semantics, formats)
        usual = float((part[spread] / usually).median().sqrt().clamp(min=1.0))
        expected = _expected(furthest, rows, semantics, formats)
        times = (part[furthest] / expected).sqrt()
        limits = torch.full_like(times, ELEMENT_LIMIT)
        if bool((times > GROUP_LIMIT * usual).any()):
            # A kernel that rounds scores shows that in its other rows too.
            with_scores = part[furthest] / (expected + _by_scores(furthest, rows, semantics, formats))
            others = part[spread] / (usually + _by_scores(spread, rows, semantics, formats))
            own = _limits(furthest, rows, semantics, formats)
            beyond = with_scores.sqrt() > own * float(others.median().sqrt())
            limits = torch.where(beyond, own.clamp(max=ELEMENT_LIMIT), limits)
        at = int((times / limits).argmax())
        found, row = float(times[at]), int(furthest[at])
        if found > float(limits[at]) * usual and (worst is None or found > worst.times):
            off = [float(error[row].norm()) for error in split.errors]
            side = int(off[1] > off[0])
            moved = _moved(rows[side], semantics[side], furthest[at : at + 1], formats[side][0])
            coarse = found <= ELEMENT_LIMIT * usual
            worst = StrayRow(head, int(rows[0].tokens[row]), found, side, off[side] <= moved, coarse)
    return worst


_BothRows = tuple[RunRows, RunRows]
_BothSemantics = tuple[HeadSemantics, HeadSemantics]
_Formats = Sequence[tuple[FloatFormat, FloatFormat]]


def _moved(run: RunRows, computes: HeadSemantics, at: Tensor, fmt: FloatFormat) -> float:
    """How far, at most, scores rounded to 16 bits move O in one row."""
    of_row = blocks_of(computes.of_rows(at), run.select(at))
    return max(float(moved_by_scores(head, block, fmt)) for rows, head, block in of_row if len(rows))


def _by_scores(at: Tensor, rows: _BothRows, semantics: _BothSemantics, formats: _Formats) -> Tensor:
    """The squared error that scores rounded to 16 bits in either run give some rows, [n]."""
    found = rows[0].o.new_zeros(len(at))
    for run, computes, (fmt, _) in zip(rows, semantics, formats, strict=True):
        for of_block, head, block in blocks_of(computes.of_rows(at), run.select(at)):
            found[of_block] += expected_by_scores(head, block, fmt)
    return found


def _limits(at: Tensor, rows: _BothRows, semantics: _BothSemantics, formats: _Formats) -> Tensor:
    """How many times what rounding gives a row it may leave by chance, [n]: more, the fewer directions it has."""
    found = rows[0].o.new_full((len(at),), GROUP_LIMIT)
    for run, computes, (fmt, _) in zip(rows, semantics, formats, strict=True):
        for of_block, head in heads_of(computes.of_rows(at), run.select(at)):
            counts = directions(head, fmt, "o", torch.arange(len(of_block), device=at.device)).tolist()
            limits = found.new_tensor([quantile(max(1, round(count))) for count in counts])
            found[of_block] = torch.maximum(found[of_block], limits)
    return found


def _expected(at: Tensor, rows: _BothRows, semantics: _BothSemantics, formats: _Formats) -> Tensor:
    """The square of what rounding gives both runs in some rows, [n]."""
    found = rows[0].o.new_zeros(len(at))
    for run, computes, (fmt, out) in zip(rows, semantics, formats, strict=True):
        found += expected_square(computes.of_rows(at), run.select(at), fmt, out)
    return found.clamp(min=1e-300)
