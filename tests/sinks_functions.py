"""Attention functions that are given the logits of their sinks: one is sound, the others make a mistake in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float | None = None) -> Tensor:
    """All in fp32, O rounded once."""
    heads = q.shape[1]
    k, v = (x.float().repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    scores = q.float() @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    o: Tensor = (scores.softmax(-1)[..., : k.shape[2]] @ v).to(q.dtype)
    return o


class _Gradient(torch.autograd.Function):
    """Its input, whose gradient is changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grad), None


def _changed(sinks: Tensor | None, change: Callable[[Tensor], Tensor]) -> Tensor | None:
    found: Tensor | None = None if sinks is None else _Gradient.apply(sinks, change)  # type: ignore[no-untyped-call]
    return found


def sound(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    return _attend(q, k, v, sinks)


def dropped(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    return _attend(q, k, v, None) + (0.0 if sinks is None else 0.0 * sinks.sum())


def scaled(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    return _attend(q, k, v, None if sinks is None else sinks * q.shape[3] ** -0.5)


def of_other_heads(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    return _attend(q, k, v, None if sinks is None else sinks.roll(1))


def wrong_sign(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    return _attend(q, k, v, _changed(sinks, torch.neg))


def twice(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    return _attend(q, k, v, _changed(sinks, lambda grad: 2 * grad))


def never_written(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    return _attend(q, k, v, _changed(sinks, torch.zeros_like))


def mean_over_the_batch(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    return _attend(q, k, v, _changed(sinks, lambda grad: grad / len(q)))


def wrong_where_lengths_differ(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """dSink is twice the true one where there are other keys than rows."""
    return (sound if q.shape[2] == k.shape[2] else twice)(q, k, v, sinks)
