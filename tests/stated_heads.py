"""Kernels with ALiBi's slopes or attention sinks of their own, or as parameters: sound ones, and faults of both."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SLOPES = [0.25, 0.0625, 0.015625]
SINKS = [1.0, -0.5, 2.0]


def attend(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None, sinks: Tensor | None = None,
    cap: float | None = None, *, mask_first: bool = False,
) -> Tensor:  # fmt: skip
    """Causal (top-left); P̄ cast to the inputs' format, all else in fp32."""
    (batch, heads, rows), keys = q.shape[:3], k.shape[2]
    k, v = (x.float().repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    far = torch.arange(rows)[:, None] - torch.arange(keys)
    scores = q.float() @ k.mT * q.shape[3] ** -0.5
    if mask_first:
        scores = scores.masked_fill(far < 0, -1e30)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if slopes is not None:
        scores = scores - slopes.float()[:, None, None] * far.abs()
    if not mask_first:
        scores = scores.masked_fill(far < 0, -torch.inf)
    top = scores.detach().amax(-1, keepdim=True)
    if sinks is not None:  # as vLLM's kernel, which begins with it
        column = sinks.float()[:, None, None].expand(batch, heads, rows, 1)
        top = torch.maximum(top, column.detach())
    probs = (scores - top).exp()
    row_sum = probs.sum(-1, keepdim=True) + (0 if sinks is None else (column - top).exp())
    o: Tensor = (probs.to(q.dtype).float() @ v / row_sum).to(q.dtype)
    return o


def sloped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three slopes of its own."""
    return attend(q, k, v, torch.tensor(SLOPES))


def from_first_key(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Its bias is slope j (BLOOM, flash_attn 2 under causality): O is the same, LSE larger by slope times the row."""
    keys = torch.arange(k.shape[2])
    scores = q.float() @ k.float().mT * q.shape[3] ** -0.5 + torch.tensor(SLOPES)[:, None, None] * keys
    lse = scores.masked_fill(keys > keys[:, None], -torch.inf).logsumexp(-1)
    return sloped(q, k, v), lse


def sunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three sinks of its own."""
    return attend(q, k, v, sinks=torch.tensor(SINKS))


def one_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sink, of every head."""
    return attend(q, k, v, sinks=torch.full((q.shape[1],), 1.5))


def usual(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Slopes by the number of heads, 2^-2, 2^-4, … of four."""
    return attend(q, k, v, 2.0 ** (-8 * torch.arange(1, q.shape[1] + 1) / q.shape[1]))


def everything(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Slopes, sinks and a softcap."""
    return attend(q, k, v, torch.tensor(SLOPES), torch.tensor(SINKS), 20.0)


def told(q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
    """What it is given."""
    return attend(q, k, v, alibi_slopes, sinks)


def needs_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """It cannot be called without them."""
    return attend(q, k, v, sinks=1.0 * sinks)


def by_default(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor = torch.tensor(SINKS)) -> Tensor:  # noqa: B008
    """Sinks of its own where it is given none."""
    return attend(q, k, v, sinks=sinks)


def base_2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """exp2 of the logits."""
    return attend(q, k, v, sinks=torch.tensor(SINKS) * math.log(2))


def other_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The slope of the head before."""
    return attend(q, k, v, torch.tensor(SLOPES).roll(1))


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Neither slopes nor sinks."""
    return attend(q, k, v)


def capped_33(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softcap near 30."""
    return attend(q, k, v, cap=33.0)


def capped_30(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softcap that N(0,1) scores hardly show."""
    return attend(q, k, v, cap=30.0)


def masked_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Hidden scores go through the softcap too, and become -30."""
    return attend(q, k, v, cap=30.0, mask_first=True)
