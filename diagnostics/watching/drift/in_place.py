"""What a call writes into a tensor that it was given, and whether that rounds: ``+=``, ``copy_``, out=, x[i] = y."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16, *_FP8)
# Complex numbers count as their parts: rotary embeddings pass through complex64 without a change of precision.
_PARTS = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}
PRECISION = {dtype: dtype for dtype in _FLOATING} | _PARTS

# These go on from what the tensor held, so that their rounding adds up.
_UPDATES = frozenset(
    {"add_", "sub_", "subtract_", "mul_", "multiply_", "div_", "divide_", "true_divide_", "addcmul_", "addcdiv_"}
)
# These replace it.
_COPIES = frozenset({"copy_", "__setitem__"})

Part = tuple[int, int, torch.Size]
"""The tensor whose memory it is, by id; where it begins there, and its shape."""


@dataclass(frozen=True)
class Writing:
    """A call that writes into a tensor that it was given."""

    values: tuple[Tensor, ...]
    """What it was given beside that tensor, without numbers."""
    holder: Tensor
    """The tensor whose memory is written."""
    part: Part
    """What of it."""
    rounds: bool
    """Whether some of the values are wider than that tensor."""
    updates: bool
    """Whether it goes on from what was there."""


def writing_of(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, into: Tensor
) -> Writing | None:
    """What a call that returned ``into``, or nothing, wrote into it; None where nothing is known to be written."""
    name = str(getattr(func, "__name__", "")).partition(".")[0]
    out = kwargs is not None and kwargs.get("out") is into
    if not out and name not in _UPDATES and name not in _COPIES:
        return None
    # A 0-dimensional tensor is a number, as in a promotion.
    values = [x for x in tensors(args, kwargs) if x is not into and (x.ndim or not into.ndim)]
    rounds = any(is_rounded(x.dtype, into.dtype) for x in values)
    if not values or (name in _UPDATES and not rounds):
        return None
    written = into
    if name == "__setitem__" and not tensors(args[1:2], None):
        with torch._C.DisableTorchFunction():
            written = into[args[1]]
    updates = name in _UPDATES or (out and any(x is into for x in args))
    return Writing(tuple(values), holder(into), part(written), rounds, updates)


def holder(x: Tensor) -> Tensor:
    """The tensor whose memory it is: of a view its base."""
    with torch._C.DisableTorchFunction():  # else an outer trace would see the look
        return x if x._base is None else x._base


def part(x: Tensor) -> Part:
    """Which memory it is; sparse and nested tensors, and those inside vmap, are one part each."""
    try:
        return id(holder(x)), int(x.storage_offset()), x.shape
    except RuntimeError:
        return id(x), 0, torch.Size()


def tensors(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Tensor]:
    """The tensors among the arguments of a call, also in its lists."""
    found = []
    for x in chain(args, kwargs.values()) if kwargs else args:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += tensors(x, None)
    return found


def is_rounded(given: torch.dtype, into: torch.dtype) -> bool:
    """Whether a dtype has values that another cannot hold."""
    wide, narrow = PRECISION.get(given), PRECISION.get(into)
    return wide is not None and narrow is not None and wide is not narrow and wide.itemsize >= narrow.itemsize
