"""``check_qkv``: the assertion that should stand before every attention."""

from __future__ import annotations

from torch import Tensor

from attn_diag.drift.trace import DtypeTrace
from attn_diag.errors import InputError


def check_qkv(q: Tensor, k: Tensor, v: Tensor, trace: DtypeTrace | None = None) -> None:
    """Raise InputError unless q, k and v share a floating dtype and a device.

    ``trace``: of a ``trace_dtypes`` under which they were made; the message then names the line at which the odd one
    changed. A mixed call is otherwise noticed far away, in the kernel, or not at all.
    """
    tensors = {"q": q, "k": k, "v": v}
    for name, x in tensors.items():
        if not x.is_floating_point():
            raise InputError(f"{name} must be a floating-point tensor, got {x.dtype}")
    if len({x.device for x in tensors.values()}) > 1:
        listed = ", ".join(f"{n}: {x.device}" for n, x in tensors.items())
        raise InputError(f"q, k and v must be on one device, got {listed}")
    if len({x.dtype for x in tensors.values()}) == 1:
        return
    dtypes = [x.dtype for x in tensors.values()]
    common = max(set(dtypes), key=lambda d: (dtypes.count(d), -d.itemsize))
    odd = [name for name, x in tensors.items() if x.dtype != common]
    listed = ", ".join(f"{n}: {str(x.dtype).removeprefix('torch.')}" for n, x in tensors.items())
    message = f"q, k and v must have one dtype, got {listed}."
    for name in odd:
        event = trace.cause(tensors[name]) if trace is not None else None
        if event is not None:
            message += f" {name} became {event.result} at {event.sentence()}. {event.fix()}"
        else:
            other = "qkv"[dtypes.index(common)]
            message += f" Cast {name} ({name}.to({other}.dtype)); attn_diag.trace_dtypes finds where it changed."
    raise InputError(message)
