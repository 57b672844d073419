"""Fused attention in plain torch with a window and a softcap, its gradients by hand, and faults of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Limited(torch.autograd.Function):
    """P̄ and dS cast to the inputs' format, all else in fp32."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int] | None, cap: float | None, sloped: bool
    ) -> Tensor:
        scale = q.shape[-1] ** -0.5
        scores = q.float() @ k.float().mT * scale
        slope = torch.ones(())
        if cap is not None:
            bounded = torch.tanh(scores / cap)
            scores, slope = cap * bounded, 1 - bounded.square()
        rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        if window is not None:
            left, right = window
            scores = scores.masked_fill((keys < rows - left) | (keys > rows + right), -torch.inf)
        # A row that sees no key gives 0.
        top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
        p = (scores - top).exp()
        row_sum = p.sum(-1, keepdim=True).clamp(min=1e-30)
        o: Tensor = (p.to(q.dtype).float() @ v.float() / row_sum).to(q.dtype)
        ctx.save_for_backward(q, k, v, o, (scores - top - row_sum.log()).exp(), slope if sloped else torch.ones(()))
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (do,) = grads
        q, k, v, o, p, slope = ctx.saved_tensors
        dp = do.float() @ v.float().mT
        ds = (p * (dp - (do.float() * o.float()).sum(-1, keepdim=True)) * slope).to(q.dtype).float()
        scale, dv = q.shape[-1] ** -0.5, p.to(q.dtype).float().mT @ do.float()
        gradients = (ds @ k.float() * scale, ds.mT @ q.float() * scale, dv)
        return *(x.to(q.dtype) for x in gradients), None, None, None


def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """32 keys back."""
    return Limited.apply(q, k, v, (32, 0), None, True)  # type: ignore[no-any-return, no-untyped-call]


def around(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """32 keys back and 16 ahead."""
    return Limited.apply(q, k, v, (32, 16), None, True)  # type: ignore[no-any-return, no-untyped-call]


def one_more(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """33 keys back."""
    return Limited.apply(q, k, v, (33, 0), None, True)  # type: ignore[no-any-return, no-untyped-call]


def unlimited(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal."""
    return Limited.apply(q, k, v, (10**6, 0), None, True)  # type: ignore[no-any-return, no-untyped-call]


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softcap of 7.5 that no model uses."""
    return Limited.apply(q, k, v, None, 7.5, True)  # type: ignore[no-any-return, no-untyped-call]


def capped_tenth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softcap so small that no key weighs much less than another."""
    return Limited.apply(q, k, v, None, 0.1, True)  # type: ignore[no-any-return, no-untyped-call]


def truncated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As ``capped_tenth``, with O cast toward zero."""
    o: Tensor = Limited.apply(q.float(), k.float(), v.float(), None, 0.1, True)  # type: ignore[no-untyped-call]
    return (o.view(torch.int32) & -65536).view(torch.float32).bfloat16()


def coarse_tanh(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softcap of 30 whose tanh is taken of a number in BF16."""
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    scores = 30 * torch.tanh((scores / 30).bfloat16().float())
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    return (p.to(q.dtype).float() @ v.float() / p.sum(-1, keepdim=True)).to(q.dtype)


def capped_30(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softcap that shows where scores are large alone."""
    return Limited.apply(q, k, v, (10**6, 0), 30.0, True)  # type: ignore[no-any-return, no-untyped-call]


def unsloped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A backward that forgets the softcap's derivative."""
    return Limited.apply(q, k, v, (10**6, 0), 30.0, False)  # type: ignore[no-any-return, no-untyped-call]


def with_alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Slopes of 2^-2, 2^-4, … by the number of heads."""
    heads, far = q.shape[1], torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
    bias = (-slopes[:, None, None] * far).masked_fill(far < 0, -torch.inf)
    return torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), bias).to(q.dtype)


def shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """O + 1."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v) + 1
