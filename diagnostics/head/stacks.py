"""Sums over tensors of several heads that lie side by side."""

from __future__ import annotations

import torch
from torch import Tensor


def inner(a: Tensor, b: Tensor) -> Tensor:
    """The sum of each head's products of elements, [H]; of one head without the products in memory."""
    if len(a) == 1:
        return torch.dot(a.reshape(-1), b.reshape(-1))[None]
    found: Tensor = torch.linalg.vecdot(a.flatten(1), b.flatten(1))
    return found


def numbers(*by_head: Tensor) -> list[list[float]]:
    """Several numbers of every head, each of them [H]: one list a head, copied from their device at once."""
    found: list[list[float]] = torch.stack(by_head, 1).tolist()
    return found
