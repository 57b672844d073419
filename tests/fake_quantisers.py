"""Weights for fake quantisers, what they are multiplied by, and one written by hand."""

from __future__ import annotations

import torch
from torch import Tensor


def weight(seed: int, rows: int = 64, columns: int = 256) -> Tensor:
    """Rows of different sizes, fp32."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=rng) * 0.02 * torch.exp(0.3 * torch.randn(rows, 1, generator=rng))


def inputs(rows: int = 96, columns: int = 256, out: int = 64) -> tuple[Tensor, Tensor]:
    """x [rows, columns] and dy [rows, out]."""
    rng = torch.Generator().manual_seed(7)
    return torch.randn(rows, columns, generator=rng), torch.randn(rows, out, generator=rng)


def plain_int4(w: Tensor) -> Tensor:
    """As trainers write it: in BF16's fp32, by hand."""
    groups = w.reshape(len(w), -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 7
    return (torch.round(groups / scale).clamp(-7, 7) * scale).reshape(w.shape)
