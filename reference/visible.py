"""The keys that a row attends to, as the oracle counts them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch

from attn_diag.reference.attention import AttentionHead


def visible_keys(head: AttentionHead, t: int) -> tuple[npt.NDArray[np.int64], list[Fraction]]:
    """The keys that row t attends to, and what is added to their scores, exactly."""
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
    found = [Fraction(x) for x in mask[keys].tolist()]
    alibi = head.masking.alibi
    if alibi is not None:
        every = alibi.distances(head.positions[t : t + 1], slice(0, count), count)[0].tolist()
        found = [x + Fraction(alibi.slope) * every[j] for x, j in zip(found, keys.tolist(), strict=True)]
    return keys, found
