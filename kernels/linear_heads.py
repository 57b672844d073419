"""What an emulated chunked kernel of linear attention computes with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LinearHeads:
    """N heads of one sequence, fp32; ``g`` [N, T, K], [N, T, 1] or None, ``beta`` [N, T, 1], all else [N, T, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    a: Tensor | None
    b: Tensor | None
    initial: Tensor
    """[N, K, V]."""
    scale: float
    normalize: bool = False
    skip: Tensor | None = None
    """What is added to o before it is rounded, [N, T, V]."""
    normalized: bool = False
    """Whether another kernel made q and k of length 1, and takes their gradients."""
    steps: Tensor | None = None
    """What v is multiplied with, [N, T, 1] (Mamba-2's dt)."""
    sharing: int = 1
    """So many heads, one behind the other, have the same q and k."""
