"""Tensors of several heads side by side, so that what is computed of each of them is one operation for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """[H, ...], of H heads; of one its own memory."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def inner(a: Tensor, b: Tensor) -> Tensor:
    """The sum of each head's products of elements, [H]; of one head without the products in memory."""
    if len(a) == 1:
        return torch.dot(a.reshape(-1), b.reshape(-1))[None]
    return torch.linalg.vecdot(a.flatten(1), b.flatten(1))


def numbers(*by_head: Tensor) -> list[list[float]]:
    """Several numbers of every head, each of them [H]: one list a head, copied from their device at once."""
    return torch.stack(by_head, 1).tolist()
