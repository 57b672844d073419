"""Tensors of attention calls that have another number of axes than four."""

from __future__ import annotations

import torch
from torch import Tensor


def with_four_axes(t: Tensor) -> Tensor:
    """q, k, v or o: two or three axes are one head of one or several sequences; of more the first are all sequences."""
    if t.dim() > 4:
        return t.flatten(0, -4)
    return t[:, None] if t.dim() == 3 else t[(None,) * (4 - t.dim())]


def heads_as_sequences(t: Tensor) -> Tensor:
    """Three axes as ``with_four_axes`` has them, of a fused kernel: from 2.15 on torch gives them to it as heads of one
    sequence, [1, N, T, D]."""
    return t.transpose(0, 1)


def mask_with_four_axes(mask: Tensor, q: Tensor) -> Tensor:
    """A mask that broadcasts to the scores of ``q``, for ``with_four_axes(q)``."""
    if q.dim() > 4 and mask.dim() > 3:
        return mask.expand(*q.shape[:-3], *mask.shape[-3:]).flatten(0, -4)
    return mask[:, None] if q.dim() == 3 and mask.dim() > 2 else mask


def is_batched(t: Tensor) -> bool:
    """Whether torch.vmap hides an axis of it, so that its numbers cannot be read."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(t):
        if functorch.is_batchedtensor(t):
            return True
        t = functorch.get_unwrapped(t)
    return False
