"""The keys that a row attends to, as the oracle counts them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from attn_diag.reference.attention import AttentionHead


def visible_keys(head: AttentionHead, t: int) -> tuple[npt.NDArray[np.int64], list[float]]:
    """The keys that row t attends to, and their additive mask."""
    count, position = len(head.k), int(head.positions[t])
    left, right = head.masking.reach
    first = 0 if left is None else max(0, position - left)
    stop = count if right is None else min(count, position + right + 1)
    keys, mask = np.arange(first, stop, dtype=np.int64), np.zeros(count)
    if head.masking.mask is not None:
        row = head.masking.mask[t].cpu()
        if row.dtype == torch.bool:
            keys = keys[row.numpy()[keys]]
        else:
            mask = row.double().numpy()
            keys = keys[mask[keys] > -np.inf]
    return keys, mask[keys].tolist()
