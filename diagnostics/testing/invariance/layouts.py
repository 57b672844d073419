"""The same numbers elsewhere in memory: other strides, others beside them, NaN behind them."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_diag.testing.target import Place

# So much of other memory lies behind each row, each head and the storage's start.
_BESIDE = 8


def as_it_is(x: Tensor) -> Tensor:
    """Where it is."""
    return x


def before_nan(x: Tensor) -> Tensor:
    """With NaN behind the last row of every head, and behind every row's features."""
    b, h, t, d = x.shape
    memory = x.new_full((b, h, t + 128, d + _BESIDE), torch.nan)
    memory[:, :, :t, :d] = x
    return memory[:, :, :t, :d]


def rows_first(x: Tensor) -> Tensor:
    """As [B, T, H, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def packed(x: Tensor) -> Tensor:
    """As the middle of a packed [B, T, 3, H, D]."""
    b, h, t, d = x.shape
    memory = x.new_zeros((b, t, 3, h, d))
    memory[:, :, 1] = x.transpose(1, 2)
    return memory[:, :, 1].transpose(1, 2)


def shifted(x: Tensor) -> Tensor:
    """From the second element of its storage on, which no vector load likes."""
    memory = x.new_zeros(x.numel() + 1)
    memory[1:] = x.flatten()
    return memory[1:].view(x.shape)


PLACES: dict[str, Place] = {
    "as [B, T, H, D]": rows_first,
    "out of a packed q, k, v": packed,
    "off alignment": shifted,
}
