"""Kernels that a hunt is set on: a sound attention in fp32, and the same with one thing wrong under some conditions."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_diag.reference import Masking

# (name of the tensor, the right one, q, k, v, whether it is causal) -> what is returned instead.
Change = Callable[[str, Tensor, Tensor, Tensor, Tensor, bool], Tensor]


class _Through(torch.autograd.Function):
    """The input; its gradient is changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradients[0].clone()), None


def attend(q: Tensor, k: Tensor, v: Tensor, change: Change, causal: str = "none", scale: float | None = None) -> Tensor:
    """All in fp32, O and gradients rounded once; then changed."""
    own = q, k, v

    def changed(name: str) -> Callable[[Tensor], Tensor]:
        return lambda x: change(name, x, *own, causal != "none")

    q, k, v = (
        _Through.apply(x, changed(name))  # type: ignore[no-untyped-call]
        for name, x in zip(("dq", "dk", "dv"), own, strict=True)
    )
    masking = Masking(causal=causal)  # type: ignore[arg-type]
    hidden = masking.hidden(masking.row_positions(q.shape[2], k.shape[2], q.device), slice(0, k.shape[2]))
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = q.float() @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -1e30)
    probs = scores.softmax(-1)
    if hidden is not None:
        probs = probs.masked_fill(hidden.all(1)[:, None], 0)
    o = (probs @ v).to(q.dtype)
    return change("o", o, *own, causal != "none")


def _off(x: Tensor) -> Tensor:
    """Wrong as a whole tile is that is never written."""
    return torch.zeros_like(x)


def _dq_at_odd_sizes(name: str, x: Tensor, q: Tensor, *_: Any) -> Tensor:
    return _off(x) if name == "dq" and q.shape[3] % 16 == 8 else x


def _group_of_three(name: str, x: Tensor, q: Tensor, k: Tensor, *_: Any) -> Tensor:
    """The last query head of three is left out of dK and dV."""
    return x * (2 / 3) if name in ("dk", "dv") and q.shape[1] == 3 * k.shape[1] else x


def _grouped_at_odd_sizes(name: str, x: Tensor, q: Tensor, k: Tensor, *_: Any) -> Tensor:
    """dQ is wrong at some head sizes; dK and dV are too where heads share keys."""
    if q.shape[3] % 16 != 8 or (name != "dq" and (name == "o" or q.shape[1] == k.shape[1])):
        return x
    return _off(x)


def _one_row_over(name: str, x: Tensor, q: Tensor, *_: Any) -> Tensor:
    if name != "o" or q.shape[2] % 64 != 1:
        return x
    return torch.cat([x[:, :, :-1], torch.zeros_like(x[:, :, -1:])], 2)


def _strided_k(name: str, x: Tensor, _: Tensor, k: Tensor, *__: Any) -> Tensor:
    """It takes k for contiguous."""
    return x.roll(1, 2) if name == "dk" and not k.is_contiguous() else x


def _hot_row(name: str, x: Tensor, q: Tensor, *_: Any) -> Tensor:
    """A row whose q is huge overflows."""
    norm = q.detach().float().norm(dim=3, keepdim=True)
    return torch.where(norm > 16 * norm.median(), torch.nan, x) if name == "o" else x


def _three_together(name: str, x: Tensor, q: Tensor, k: Tensor, _: Tensor, causal: bool) -> Tensor:
    return _off(x) if name == "dv" and q.shape[3] == 96 and causal and q.shape[1] > k.shape[1] else x


def _repeated_keys(name: str, x: Tensor, _: Tensor, k: Tensor, *__: Any) -> Tensor:
    alike = (k.detach()[:, :, 1:] == k.detach()[:, :, :-1]).all(3).any()
    return x * 1.5 if name == "dv" and bool(alike) else x


def _second_item(name: str, x: Tensor, *_: Any) -> Tensor:
    """Every batch item gets the first one's dQ."""
    return x[:1].expand_as(x) if name == "dq" else x


def _last_key(name: str, x: Tensor, _: Tensor, k: Tensor, *__: Any) -> Tensor:
    """The last partial tile of 32 keys gets no dV, where it is short."""
    left = k.shape[2] % 32
    return torch.cat([x[:, :, : k.shape[2] - left], 0 * x[:, :, k.shape[2] - left :]], 2) if name == "dv" else x


def _fp16_and_large(name: str, x: Tensor, q: Tensor, *_: Any) -> Tensor:
    return x * float("inf") if name == "dk" and q.dtype == torch.float16 and q.shape[3] > 128 else x


def _head_mapping(name: str, x: Tensor, q: Tensor, k: Tensor, *_: Any) -> Tensor:
    """Groups are taken in the wrong order, where there are several key heads and groups."""
    several = q.shape[1] > k.shape[1] > 1
    return x.roll(1, 1) if name == "o" and several else x


def _coarse(name: str, x: Tensor, q: Tensor, *_: Any) -> Tensor:
    """dQ has four bits less above 128 features."""
    if name != "dq" or q.shape[3] <= 128:
        return x
    return (x.float() * (1 + 2**-5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)))).to(x.dtype)


def _refusing(_: str, x: Tensor, q: Tensor, *__: Any) -> Tensor:
    if q.shape[3] > 128:
        raise RuntimeError("head dimensions above 128 are not supported")
    return x


PLANTED: dict[str, Change] = {
    "odd sizes": _dq_at_odd_sizes,
    "group of three": _group_of_three,
    "one row over": _one_row_over,
    "strided k": _strided_k,
    "hot row": _hot_row,
    "three together": _three_together,
    "repeated keys": _repeated_keys,
    "second item": _second_item,
    "last key": _last_key,
    "fp16 and large": _fp16_and_large,
    "head mapping": _head_mapping,
    "coarse": _coarse,
    "refusing": _refusing,
    "grouped at odd sizes": _grouped_at_odd_sizes,
    "sound": lambda _, x, *__: x,
}


def sound(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, PLANTED["sound"])


def odd_sizes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, _dq_at_odd_sizes)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Its mask is aligned bottom-right."""
    return attend(q, k, v, PLANTED["sound"], "bottom-right")


def crashing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.shape[3] > 128:
        os.kill(os.getpid(), signal.SIGSEGV)
    return sound(q, k, v)


def hanging(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.shape[2] != k.shape[2]:
        time.sleep(600)
    return sound(q, k, v)


_seen: set[int] = set()


def remembering(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compiled for the first head size that it is called with, and used for all larger ones."""
    _seen.add(q.shape[3])
    return sound(q, k, v) * (1.0 if q.shape[3] == min(_seen) or len(_seen) < 2 else 0.5)
