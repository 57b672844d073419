"""Which calls are attention, and what their q, k and v are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from attn_diag.watching.drift.source import is_users

_NAME = re.compile("attention|attn|sdpa", re.IGNORECASE)
# These take what q, k and v are computed from (multi_head_attention_forward), or gradients.
_NOT = re.compile("multi_head|encoder_layer|backward|mask", re.IGNORECASE)
_KEYWORDS = (("query", "key", "value"), ("q", "k", "v"))
# Linear attention calls its query a receptance.
_LOCALS = (*_KEYWORDS, ("r", "k", "v"))

# Not through torch.nn.functional: somebody may have put a wrapper there.
_SDPA = torch._C._nn.scaled_dot_product_attention

Triple = tuple[Tensor, Tensor, Tensor]


def is_attention(func: Callable[..., Any]) -> bool:
    """By its name: PyTorch's, FlashAttention's and others' operators all say so."""
    # Of an OpOverload the operator's name, without the overload's.
    name = str(getattr(getattr(func, "_schema", None), "name", None) or getattr(func, "__name__", ""))
    return bool(_NAME.search(name)) and not _NOT.search(name)


def is_sdpa(func: Callable[..., Any]) -> bool:
    """Is it PyTorch's, all of whose inputs autocast casts?"""
    return func is _SDPA


def qkv_of(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Triple | None:
    """q, k and v of a call: the keywords of these names, else the first three tensors; None where there are none."""
    named = kwargs or {}
    chosen: list[Any] = [x for x in args if isinstance(x, Tensor)][:3]
    for names in _KEYWORDS:
        chosen += [named[name] for name in names[len(chosen) :] if name in named]
    return _triple(chosen)


def mixed_in_traceback(traceback: TracebackType | None) -> tuple[str, Triple, FrameType, int] | None:
    """The innermost function of a traceback whose q, k and v (by name) have several dtypes.

    Kernels behind an ``autograd.Function`` make no call that a trace could see, but they raise where they meet a mixed
    call. Returns the function's name, q, k and v, and frame and instruction (``f_lasti``) of the user's code there.
    """
    frames = [(t.tb_frame, t.tb_lasti) for t in _chain(traceback)]
    for i in reversed(range(len(frames))):
        frame = frames[i][0]
        for names in _LOCALS:
            found = _triple([frame.f_locals.get(name) for name in names])
            if found is None or len({x.dtype for x in found}) == 1:
                continue
            while i and not is_users(frames[i][0].f_code):
                i -= 1
            return frame.f_code.co_qualname, found, *frames[i]
    return None


def _triple(found: Sequence[Any]) -> Triple | None:
    if len(found) != 3 or not all(isinstance(x, Tensor) and x.is_floating_point() and x.ndim >= 2 for x in found):
        return None
    q, k, v = found
    return q, k, v


def _chain(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
