"""Which way each layer's predicted errors of dW_Q pointed in the last checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_diag.watching.monitoring.stacks import Key

# Weight of the newest check in the average: about the last ten count.
_NEWEST = 0.1


class PastDirections(dict[Key, Tensor]):
    """Averages of unit errors, [Hq, D, c] of every layer."""

    def of(self, keys: Sequence[Key]) -> Tensor | None:
        """Those of layers that all have one or have none, [L * Hq, D, c]."""
        past = [self[key] for key in keys if key in self]
        return torch.cat(past) if past else None

    def remember(self, keys: Sequence[Key], error: Tensor) -> None:
        """Average a check's ``error``, [L * Hq, D, c]."""
        length = torch.linalg.vector_norm(error, dim=(1, 2), keepdim=True)
        direction = torch.where((length > 0) & (length < torch.inf), error / length, 0.0)
        past = self.of(keys)
        if past is not None and past.shape == direction.shape:
            direction = past.lerp_(direction, _NEWEST)
        self.update(zip(keys, direction.chunk(len(keys)), strict=True))
