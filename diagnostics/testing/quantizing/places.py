"""Where blocks of a weight are, in words."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from attn_diag.kernels.quantizers import Quantizer
from attn_diag.results.wording import runs_of

# As many places are told one by one.
_TOLD = 3


def place_of(bad: Tensor, by: Quantizer, shape: tuple[int, int]) -> str:
    """Where the blocks ``bad`` are, in words."""
    r, c = by.block_shape(shape)
    places = bad.nonzero().tolist()
    noun = {(1, shape[1]): "row", (shape[0], 1): "column"}.get((r, c), "block")
    lines = bad.flatten().nonzero().flatten().tolist()
    if noun != "block" and sum(b > a + 1 for a, b in pairwise(lines)) < _TOLD:
        return runs_of(noun, lines)
    if len(places) > _TOLD:
        return f"{len(places)} of {bad.numel()} {noun}s"
    told = []
    for down, across in places:
        rows = runs_of("row", list(range(down * r, min((down + 1) * r, shape[0]))))
        columns = runs_of("column", list(range(across * c, min((across + 1) * c, shape[1]))))
        told.append(rows if c >= shape[1] else columns if r >= shape[0] else f"{rows}, {columns}")
    return " and ".join(told)
