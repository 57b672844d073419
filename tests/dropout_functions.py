"""Attention functions that are given which probabilities they keep: one is sound, the others make a mistake in that.

And torch's own dropout with a mistake in its backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CAUSAL = False


def _attend(q: Tensor, k: Tensor, v: Tensor, weights: Callable[[Tensor], Tensor], *, causal: bool = CAUSAL) -> Tensor:
    """All in fp32, P cast for its product with V, O rounded once; ``weights`` makes W o P of P."""
    (heads, rows), keys = q.shape[1:3], k.shape[2]
    k, v = (x.float().repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    scores = q.float() @ k.mT * q.shape[3] ** -0.5
    if causal:
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(keys - rows + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    o: Tensor = (weights(scores.softmax(-1)) @ v).to(q.dtype)
    return o


def _kept(dropout_mask: Tensor | None, probs: Tensor) -> Tensor:
    return torch.ones_like(probs, dtype=torch.bool) if dropout_mask is None else dropout_mask


def sound(q: Tensor, k: Tensor, v: Tensor, dropout_mask: Tensor | None, dropout_p: float) -> Tensor:
    return _attend(q, k, v, lambda p: p * _kept(dropout_mask, p) / (1 - dropout_p))


def without_factor(q: Tensor, k: Tensor, v: Tensor, dropout_mask: Tensor | None, dropout_p: float) -> Tensor:
    del dropout_p
    return _attend(q, k, v, lambda p: p * _kept(dropout_mask, p))


def of_other_heads(q: Tensor, k: Tensor, v: Tensor, dropout_mask: Tensor | None, dropout_p: float) -> Tensor:
    return _attend(q, k, v, lambda p: p * _kept(dropout_mask, p).roll(1, 1) / (1 - dropout_p))


def of_other_items(q: Tensor, k: Tensor, v: Tensor, dropout_mask: Tensor | None, dropout_p: float) -> Tensor:
    return _attend(q, k, v, lambda p: p * _kept(dropout_mask, p).roll(1, 0) / (1 - dropout_p))


def next_row(q: Tensor, k: Tensor, v: Tensor, dropout_mask: Tensor | None, dropout_p: float) -> Tensor:
    return _attend(q, k, v, lambda p: p * _kept(dropout_mask, p).roll(-1, 2) / (1 - dropout_p))


def before_the_row_sum(q: Tensor, k: Tensor, v: Tensor, dropout_mask: Tensor | None, dropout_p: float) -> Tensor:
    del dropout_p

    def renormalised(probs: Tensor) -> Tensor:
        kept = probs * _kept(dropout_mask, probs)
        return kept / kept.sum(-1, keepdim=True)

    return _attend(q, k, v, renormalised)


def not_in_the_backward(q: Tensor, k: Tensor, v: Tensor, dropout_mask: Tensor | None, dropout_p: float) -> Tensor:
    """The forward's P o W has the gradient of P alone."""

    def once(probs: Tensor) -> Tensor:
        return probs + (probs * _kept(dropout_mask, probs) / (1 - dropout_p) - probs).detach()

    return _attend(q, k, v, once)


def wrong_where_lengths_differ(
    q: Tensor, k: Tensor, v: Tensor, dropout_mask: Tensor | None, dropout_p: float
) -> Tensor:
    """The mask is forgotten where there are other keys than rows."""
    if q.shape[2] != k.shape[2]:
        return _attend(q, k, v, lambda p: p)
    return sound(q, k, v, dropout_mask, dropout_p)


def draws_its_own(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.1) -> Tensor:
    return _attend(q, k, v, lambda p: torch.nn.functional.dropout(p, dropout_p))


_GRADIENTS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "none": lambda grad, kept, p: grad * kept / (1 - p),
    "mask forgotten": lambda grad, *_: grad,
    "factor forgotten": lambda grad, kept, _: grad * kept,
    "factor twice": lambda grad, kept, p: grad * kept / (1 - p) ** 2,
    "mask of another head": lambda grad, kept, p: grad * kept.roll(1, -3) / (1 - p),
    "mask of the next row": lambda grad, kept, p: grad * kept.roll(-1, -2) / (1 - p),
}
BACKWARD = tuple(_GRADIENTS)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, fault: str) -> Tensor:
        kept = torch.rand(x.shape, device=x.device) >= p
        ctx.kept, ctx.p, ctx.fault = kept, p, fault
        return x * kept / (1 - p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _GRADIENTS[ctx.fault](grad, ctx.kept, ctx.p).to(grad.dtype), None, None


def with_backward(fault: str) -> Callable[..., Tensor]:
    """torch.nn.functional.dropout with one of ``BACKWARD``."""

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        del inplace
        found: Tensor = _Dropout.apply(x, p, fault) if training and p else x  # type: ignore[no-untyped-call]
        return found

    return dropout
