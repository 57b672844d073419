"""Tiles of a gradient whose accumulator a kernel did not clear before it went on from the tile before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence, Guess
from attn_diag.analyses.patterns.lost_parts import TILES


def not_cleared(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
    """Rows that hold another tile's sum besides their own: that of the next one on either side, or of all there.

    Args:
        evidence: dQ, dK or dV.
        rows: Which n rows or keys.
    """
    count = len(evidence.truth)
    sources = [(evidence.truth, "")]
    if len(evidence.heads) > 1:
        # A kernel that takes the group's heads one after the other may carry on with one of them.
        of_heads = [getattr(r, evidence.quantity) for r in evidence.references]
        sources += [(t, f" ({name}'s part)") for t, name in zip(of_heads, evidence.names, strict=True)]
    for size, (source, of_head), way in product(TILES, sources, (-1, 1)):
        steps = torch.arange(1, -(-count // size), device=rows.device)
        if not len(steps):
            continue
        index = rows[:, None] + way * size * steps
        inside = (index >= 0) & (index < count)
        more = source[index.clamp(0, count - 1)].masked_fill(~inside[:, :, None], 0.0)
        where = f"{evidence.unit} {'before' if way < 0 else 'further on'}{of_head}"
        sums = {f"that of {size} {where}": more[:, 0]}
        if len(steps) > 1:
            sums[f"those of all tiles of {size} {where}"] = more.sum(1)
        for what, also in sums.items():
            words = f"hold their own sum and {what}, as where an accumulator is not cleared"
            yield Guess("accumulator", words, evidence.truth[rows] + also, 1, 4 * len(TILES) * len(sources))
