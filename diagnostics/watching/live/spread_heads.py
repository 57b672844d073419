"""Sequence parallelism that exchanges rows for heads (Ulysses): which of the model's heads a rank's attention has.

Each rank projects its own rows, for all heads; then all ranks exchange, and attention runs on all rows of some heads.
That shows: a linear layer of the module made a ``ranks``-th of the rows that attention sees, and ``ranks`` times its
heads. The ranks' places are read off the values: the rows that a rank made itself are among those that it gets.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from attn_diag.watching.live.run import rank, world_size

ASSUMED = "attention has the heads of a part of the ranks: ranks that follow each other are taken to share a sequence"
# As for the search for projections: rotations leave norms as they are, BF16 changes them by less.
_SAME_NORM, _ROWS = 0.02, 8


class SpreadHeads:
    """Remembers of each module what its first call showed."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[int, bool]] = {}

    def first(self, module: str, q: Tensor, k: Tensor, made: Iterable[Tensor]) -> tuple[int, bool] | None:
        """The number of q's first head in the whole model, and whether it is sure; None: heads are not spread.

        Args:
            module: The attention module's name.
            q: What ran, [B, Hq, T, D].
            k: Likewise, [B, Hk, T, D].
            made: Outputs of the module's linear layers, the newest first.
        """
        if world_size() == 1:
            return None
        if module not in self._places:
            for y in made:
                if (ranks := _sharing(q, k, y)) is not None:
                    place = _place(q, y, ranks)
                    self._places[module] = (rank() % ranks, False) if place is None else (place, True)
                    if place is not None:  # not of k or v, which may be as wide
                        break
        found = self._places.get(module)
        return None if found is None else (found[0] * q.shape[1], found[1])


def _sharing(q: Tensor, k: Tensor, y: Tensor) -> int | None:
    """How many ranks share the sequence, if ``y`` is the output of a query projection before the exchange."""
    batch, heads, rows, dim = q.shape
    width = y.shape[-1]
    ranks, rest = divmod(batch * rows * width, max(y.numel(), 1))
    if rest or ranks < 2 or world_size() % ranks or width % dim:
        return None
    # q alone; or k and v beside it, of which ranks may have copies.
    more = width // dim - ranks * heads
    return ranks if more == 0 or (more % 2 == 0 and 0 < more <= 2 * ranks * k.shape[1]) else None


@torch.no_grad()
def _place(q: Tensor, y: Tensor, ranks: int) -> int | None:
    """Which rank this is of those that share a sequence, by norms; None where they do not tell."""
    batch, heads, rows, dim = q.shape
    own_rows = rows // ranks
    if y.dim() != 3 or tuple(y.shape[:2]) != (batch, own_rows):
        return None
    first = y[0, :_ROWS, : ranks * heads * dim].double()
    own = first.reshape(len(first), ranks, heads, dim).norm(dim=-1).permute(1, 2, 0)
    starts = range(0, ranks * own_rows, own_rows)
    seen = torch.stack([q[0, :, start : start + own.shape[2]].double().norm(dim=-1) for start in starts])
    off = (seen - own).flatten(1).norm(dim=1) / seen.flatten(1).norm(dim=1)
    fitting = (off < _SAME_NORM).nonzero()[:, 0].tolist()
    return fitting[0] if len(fitting) == 1 else None
