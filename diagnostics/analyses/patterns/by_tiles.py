"""Rows of a gradient that are wrong tile by tile, each in its own way: sums that lost or doubled different parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import LEAVES, Evidence, Fit, Guess
from attn_diag.analyses.patterns.lines import Group, off_by
from attn_diag.analyses.patterns.lost_parts import lost_parts
from attn_diag.analyses.patterns.not_cleared import not_cleared
from attn_diag.analyses.patterns.slab import slab_of

Explained = tuple[Group, Fit | None]
# Tiles of so many rows, so many of them, with at least so many wrong rows each.
_SIZES, _MOST_TILES, _LEAST_ROWS = (128, 64, 32), 16, 8


def in_tiles(evidence: Evidence, group: Group, how: Callable[[Evidence, Group], Explained]) -> list[Explained]:
    """A group that nothing explains as a whole, with those of its tiles apart that a lost part explains.

    Args:
        evidence: The quantity.
        group: Its rows.
        how: Explains one group by the guesses of ``of_tile``.
    """
    if evidence.coarse or not evidence.is_gradient or group.kind not in ("off", "unrelated"):
        return [(group, None)]
    for size in _SIZES:
        of_line = group.lines // size
        tiles = of_line.unique().tolist()
        if not 1 < len(tiles) <= _MOST_TILES:
            continue
        parts: dict[str, list[Explained]] = {}
        for tile in tiles:
            lines = group.lines[of_line == tile]
            if len(lines) >= _LEAST_ROWS:
                part, fit = how(evidence, replace(group, lines=lines, kind="off"))
                if fit is not None and fit.remaining <= LEAVES:
                    parts.setdefault(part.predicate, []).append((part, fit))
        if parts:
            found: list[Explained] = []
            for same in parts.values():
                lines = torch.cat([part.lines for part, _ in same]).sort().values
                found.append((replace(same[0][0], lines=lines), max((f for _, f in same if f), key=lambda f: f.before)))
            rest = group.lines[~torch.isin(group.lines, torch.cat([part.lines for part, _ in found]))]
            if len(rest):
                words = off_by(evidence.observed[rest], evidence.truth[rest])
                found.append((replace(group, kind="off", lines=rest, predicate=words), None))
            return found
    return [(group, None)]


def of_tile(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
    """Guesses for the rows of one tile."""
    slabs = [slab_of(h, r, evidence.quantity, rows) for h, r in zip(evidence.heads, evidence.references, strict=True)]
    yield from lost_parts(evidence, slabs, rows)
    yield from not_cleared(evidence, rows)
