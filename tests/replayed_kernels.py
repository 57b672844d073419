"""Kernels that a replay runs in processes of their own: sound ones, and each with one thing wrong."""

from __future__ import annotations

import math
import os
import signal
import time
from typing import Any

import torch
from torch import Tensor


def sound(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All in fp32, causal, O and gradients rounded once."""
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[3])
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.float()).to(q.dtype)


class _Backward(torch.autograd.Function):
    """What is returned is the input; its gradient goes through a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Any) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradients[0].clone()), None


def _zeroed(dq: Tensor) -> Tensor:
    dq[:, :, 64:] = 0
    return dq


def _died(_: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def wrong_dq(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The rows of dQ from 64 on are never written."""
    return sound(_Backward.apply(q, _zeroed), k, v)  # type: ignore[no-untyped-call]


def crashing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGSEGV)
    return sound(q, k, v)


def crashing_backward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sound(_Backward.apply(q, _died), k, v)  # type: ignore[no-untyped-call]


def exiting(*_: Tensor) -> Tensor:
    os._exit(7)


def hanging(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if os.fork() == 0:
        time.sleep(600)
    time.sleep(600)
    return sound(q, k, v)


def refusing(*_: Tensor) -> Tensor:
    raise RuntimeError("head dimension 24 is not supported")


def raising(*_: Tensor) -> Tensor:
    raise ZeroDivisionError("a division by zero")


def rows_first_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if any(x.is_contiguous() for x in (q, k, v)):
        raise ValueError("takes [B, T, H, D] in memory")
    return sound(q, k, v)


def overwriting(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        q.mul_(2)
    return sound(q / 2, k, v)


def transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sound(q, k, v).transpose(1, 2)


def talkative(*_: Tensor) -> Tensor:
    """Dies with a line of megabytes on its lips."""
    os.write(2, b"out of registers " * 200_000)
    os.abort()


def uncausal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[3])
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def coarse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores in BF16."""
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    scores = (q.float() @ k.float().mT / math.sqrt(q.shape[3])).bfloat16().float()
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.float()).to(q.dtype)


def nonfinite(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = sound(q, k, v)
    return torch.where(torch.arange(q.shape[2])[:, None] == 5, torch.full_like(o, torch.nan), o)


def restless(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A few other bits at every call: fp32's last ones differ, as with another order of adding, and some roundings."""
    return sound(q, k, (v.float() * (1 + 2**-14 * torch.randn_like(v, dtype=torch.float32))))
