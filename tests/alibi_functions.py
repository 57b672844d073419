"""Attention functions with ALiBi slopes of their own, for as many heads as they are given: one is sound."""

from __future__ import annotations

import torch
from torch import Tensor

HEADS = 4
SLOPES = 2.0 ** (-2.0 * (torch.arange(HEADS) + 1))


def _attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, shift: int) -> Tensor:
    """Causal (bottom-right), all in fp32, O rounded once."""
    (heads, rows), keys = q.shape[1:3], k.shape[2]
    group = heads // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    at = torch.arange(rows, device=q.device)[:, None] + keys - rows
    distance = (at - torch.arange(keys, device=q.device)).clamp(min=0)
    own = slopes.to(q.device)[torch.arange(heads) % HEADS][:, None, None]
    scores = q.float() @ k.mT * q.shape[3] ** -0.5 - own * (distance - shift * (keys != rows) * distance / 8)
    hidden = at < torch.arange(keys, device=q.device)
    probs = scores.masked_fill(hidden, -1e30).softmax(-1).masked_fill(hidden.all(1)[:, None], 0)
    o: Tensor = (probs @ v).to(q.dtype)
    return o


def sound(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _attend(q, k, v, SLOPES, 0)


def off_by_one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _attend(q, k, v, SLOPES.roll(1), 0)


def wrong_where_lengths_differ(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Distances an eighth too small where there are other keys than rows."""
    return _attend(q, k, v, SLOPES, 1)
