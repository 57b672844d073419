"""``check_qkv``: the assertion that should stand before every attention."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_diag.errors import InputError
from attn_diag.watching.drift.dtypes import autocast_dtype, expected_dtype, short
from attn_diag.watching.drift.trace import DtypeTrace, active_trace
from attn_diag.watching.drift.words import listed


def check_qkv(q: Tensor, k: Tensor, v: Tensor, trace: DtypeTrace | None = None) -> None:
    """Raise InputError unless q, k and v share a floating dtype and a device.

    A mixed call is otherwise noticed far away, in the kernel, or not at all. Inside ``trace_dtypes`` (or with the
    ``trace`` under which they were made) the message names the line at which the odd one changed, and the trace learns
    that here is an attention. Costs a microsecond; inside a compiled graph it is checked once, while compiling.
    """
    tensors = {"q": q, "k": k, "v": v}
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise InputError(f"{name} must be a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if len({x.device for x in tensors.values()}) > 1:
        got = ", ".join(f"{n}: {x.device}" for n, x in tensors.items())
        raise InputError(f"q, k and v must be on one device, got {got}")
    running = None if torch.compiler.is_compiling() else active_trace()
    error = None
    if len({x.dtype for x in tensors.values()}) > 1:
        error = InputError(_message(tensors, trace or running))
    if running is not None:
        running._calls.check((q, k, v), error)
    if error is not None:
        raise error


def _message(tensors: dict[str, Tensor], trace: DtypeTrace | None) -> str:
    dtypes = [x.dtype for x in tensors.values()]
    expected = expected_dtype(dtypes, autocast_dtype(tensors["q"].device.type))
    like = "qkv"[dtypes.index(expected)]
    odd = tuple(name for name, x in tensors.items() if x.dtype != expected)
    got = ", ".join(f"{n}: {short(x.dtype)}" for n, x in tensors.items())
    parts = [f"q, k and v must have one dtype, got {got}."]
    for name in odd:
        event = trace.cause(tensors[name]) if trace is not None else None
        if event is not None:
            line = "" if event.source is None else f"\n    {event.source.text}\n"
            parts.append(f"{name}: {event.sentence()}:{line}{event.fix}")
    if len(parts) == 1:
        casts = ", ".join(f"{name}.to({like}.dtype)" for name in odd)
        parts.append(f"Cast {listed(odd)} ({casts}); attn_diag.trace_dtypes finds where it changed.")
    return " ".join(parts)
