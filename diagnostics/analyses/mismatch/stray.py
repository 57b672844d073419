"""Few rows of a layer in which the runs part by far more than rounding, where all others are right.

A layer's error as a whole has a wide interval then, and says nothing: a stale row, or one that sees a key too many at
the edge of a tile, is found by its own rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.analyses.mismatch.rows import RunRows
from attn_diag.analyses.mismatch.split import HeadSemantics, SplitHead, blocks_of, expected_square
from attn_diag.head.quality import ELEMENT_LIMIT
from attn_diag.head.rounded_scores import moved_by_scores
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


def find_stray(
    heads: Sequence[tuple[int, tuple[RunRows, RunRows], tuple[HeadSemantics, HeadSemantics], SplitHead]],
    formats: Sequence[tuple[FloatFormat, FloatFormat]],
) -> StrayRow | None:
    """The row whose difference is beyond ``ELEMENT_LIMIT`` times rounding, and times what is usual in its head.

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
        usual = float(_times(part, spread, rows, semantics, formats).median().clamp(min=1.0))
        times = _times(part, furthest, rows, semantics, formats)
        at = int(times.argmax())
        found, row = float(times[at]), int(furthest[at])
        if found > ELEMENT_LIMIT * usual and (worst is None or found > worst.times):
            off = [float(error[row].norm()) for error in split.errors]
            side = int(off[1] > off[0])
            moved = _by_scores(rows[side], semantics[side], furthest[at : at + 1], formats[side][0])
            worst = StrayRow(head, int(rows[0].tokens[row]), found, side, off[side] <= moved)
    return worst


def _by_scores(run: RunRows, computes: HeadSemantics, at: Tensor, fmt: FloatFormat) -> float:
    """How far, at most, scores rounded to 16 bits move O in one row."""
    of_row = blocks_of(computes.of_rows(at), run.select(at))
    return max(float(moved_by_scores(head, block, fmt)) for rows, head, block in of_row if len(rows))


def _times(
    part: Tensor, at: Tensor, rows: tuple[RunRows, RunRows], semantics: tuple[HeadSemantics, HeadSemantics],
    formats: Sequence[tuple[FloatFormat, FloatFormat]],
) -> Tensor:  # fmt: skip
    """The difference of some rows over what rounding gives both runs there, [n]."""
    expected = torch.zeros_like(part[at])
    for run, computes, (fmt, out) in zip(rows, semantics, formats, strict=True):
        expected += expected_square(computes.of_rows(at), run.select(at), fmt, out)
    return (part[at] / expected.clamp(min=1e-300)).sqrt()
