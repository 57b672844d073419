"""Heads that are emulated together: on a GPU a launch takes longer than what it computes of one head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from attn_diag.kernels import Recipe, emulate_stack
from attn_diag.reference import AttentionHead

T = TypeVar("T")
R = TypeVar("R")


def in_parts(work: Callable[[Sequence[T]], list[R]], items: Sequence[T]) -> list[R]:
    """What ``work`` returns of some items together; of halves of them, and so on, where memory does not suffice.

    Raises:
        torch.OutOfMemoryError: It does not for one of them alone.
    """
    try:
        return work(items)
    except torch.OutOfMemoryError:
        if len(items) == 1:
            raise
    # Here, as the error holds what the attempt has made.
    torch.cuda.empty_cache()
    half = len(items) // 2
    return in_parts(work, items[:half]) + in_parts(work, items[half:])


def joins(device: torch.device) -> bool:
    """Whether heads are emulated together there: of a CPU's threads each takes a head."""
    return device.type == "cuda"


def alike(head: AttentionHead) -> object:
    """Heads of which this is the same can be emulated together; None of one that cannot."""
    masking = head.masking
    if head.sink is not None or head.dropout is not None or masking.mask is not None:
        return None
    if masking.alibi is not None or masking.positions is not None:
        return None
    shapes = head.q.shape, head.k.shape, head.v.shape, head.do is None, head.q.device
    return *shapes, head.scale, head.softcap, masking.causal, masking.window


def outputs_together(recipes: Sequence[Recipe], heads: Sequence[AttentionHead]) -> list[dict[str, Tensor]]:
    """What recipes of one query block return for heads that are ``alike``: "o", "lse" and, with dO, "delta" and "dq".

    Returns:
        Of each recipe all heads', [H, ...], in its arithmetic's dtype.
    """
    parts = [made for _, made in emulate_stack(recipes, heads)]
    fields = {"o": "out", "lse": "lse"} | ({} if heads[0].do is None else {"delta": "delta", "dq": "dq"})
    return [
        {name: torch.cat([getattr(part[i], field) for part in parts], 1) for name, field in fields.items()}
        for i in range(len(recipes))
    ]
