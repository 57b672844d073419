"""Attention with faults of its own, and probe runs of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import attn_diag
from attn_diag.kernels.formats import parse, round_to
from attn_diag.reference import format_of, round_nearest_even

SHAPE = (2, 8, 96, 32)
QUIET = {"exact", "within-rounding"}
Fn = Callable[[Tensor, Tensor, Tensor], Tensor]


def nearest(o: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return round_nearest_even(o.contiguous(), format_of(dtype)).to(dtype)


def rounding(mode: str) -> Callable[[Tensor], Tensor]:
    draws = iter(range(10**9))
    return lambda o: round_to(o, parse(f"bf16:{mode}"), next(draws)).bfloat16()


def kernel(
    *,
    cast: Callable[[Tensor], Tensor] = nearest,
    scale: float = 1.0,
    scores: Callable[[Tensor], Tensor] = lambda s: s,
    probs: Callable[[Tensor], Tensor] = lambda p: p,
    row_sum: Callable[[Tensor], Tensor] = lambda p: p.sum(-1, keepdim=True),
    out: Callable[[Tensor], Tensor] = lambda o: o,
) -> Fn:
    """Attention in float64 with one rounding at the end, and the hooks at which a defect can be planted.

    ``probs`` changes the P_bar that multiplies V, ``row_sum`` makes l of the unchanged one.
    """

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q.double() @ k.double().mT * (scale / q.shape[-1] ** 0.5))
        p = (s - s.amax(-1, keepdim=True)).exp()
        return cast(out(probs(p) @ v.double() / row_sum(p)))

    return attention


def changed_columns(p: Tensor, columns: slice) -> Tensor:
    """These keys weigh a third less: on N(0,1) inputs little enough for the function to be the one asked for."""
    p = p.clone()
    p[..., columns] *= 2 / 3
    return p


def consistently(change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The same changed P_bar in l and for V."""
    return {"probs": change, "row_sum": lambda p: change(p).sum(-1, keepdim=True)}


def once_each(p: Tensor) -> Tensor:
    """Of keys that tie for the maximum only the first counts."""
    tied = p == 1
    return torch.where(tied & (tied.cumsum(-1) > 1), 0.0, p)


def in_length_dependent_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """P_bar V in tiles of an eighth of the keys, the accumulator in BF16."""
    p = (q.double() @ k.double().mT / q.shape[-1] ** 0.5).softmax(-1)
    total = torch.zeros_like(q).double()
    for tile in torch.arange(k.shape[2]).chunk(8):
        total = nearest(total + p[..., tile] @ v.double()[:, :, tile]).double()
    return total.to(q.dtype)


def batch_dependent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return kernel(cast=rounding("toward-zero") if len(q) * q.shape[1] == 1 else nearest)(q, k, v)


TRUNCATING = kernel(cast=rounding("toward-zero"))
CAST_PROBS = kernel(probs=lambda p: nearest(p).double())
EPSILON = kernel(row_sum=lambda p: p.sum(-1, keepdim=True) + 0.02)


def run(fn: Any, **options: Any) -> attn_diag.ProbeReport:
    return attn_diag.probe(fn, **{"shape": SHAPE, "device": "cpu", **options})


def pivoting_on_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As flash_attn_triton.py: every tile's P_bar is scaled to max(its scores, the LSE so far), not to the maximum."""
    o = torch.zeros_like(q).double()
    lse = torch.full((*q.shape[:3], 1), -math.inf, dtype=torch.float64)
    before = lse
    for tile in torch.split(torch.arange(k.shape[2]), 64):
        s = q.double() @ k.double()[:, :, tile].mT / q.shape[-1] ** 0.5
        pivot = torch.maximum(s.amax(-1, keepdim=True), lse)
        p = (s - pivot).exp()
        o = o * (before - pivot).exp() + nearest(p).double() @ v.double()[:, :, tile]
        lse, before = pivot + ((lse - pivot).exp() + p.sum(-1, keepdim=True)).log(), pivot
    return nearest(o * (before - lse).exp()), lse[..., 0].float()


def mathematics(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Everything in fp32, alpha too; O in fp32."""
    p: Tensor = (q.float() @ k.float().mT / q.shape[-1] ** 0.5).softmax(-1)
    return p @ v.float()
