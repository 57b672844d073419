"""The inputs of one attention call, for faults that are planted in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """q and do [B, Hq, Tq, D], k and v [B, Hk, Tk, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


def gaussian(
    g: torch.Generator,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    rows: int = 64,
    keys: int | None = None,
    d: int = 32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and do in BF16; as many keys as rows unless said otherwise."""
    of_keys = batch, kv_heads, keys or rows, d
    shapes = (batch, heads, rows, d), of_keys, of_keys, (batch, heads, rows, d)
    q, k, v, do = (torch.randn(shape, generator=g).bfloat16() for shape in shapes)
    return q, k, v, do
