"""Sums over tensors of several heads that lie side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
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


def on_host(tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    """NumPy arrays of some tensors; from a GPU those of one shape and dtype come in one copy."""
    if not tensors or not tensors[0].is_cuda:
        return [t.numpy() for t in tensors]
    alike: dict[object, list[int]] = {}
    for i, t in enumerate(tensors):
        alike.setdefault((t.shape, t.dtype), []).append(i)
    found: dict[int, npt.NDArray[Any]] = {}
    for places in alike.values():
        found |= zip(places, torch.stack([tensors[i] for i in places]).cpu().numpy(), strict=True)
    return [found[i] for i in range(len(tensors))]
