"""On which stream copies are made, and how they lie in memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from attn_diag.watching.live.untraced import passed_by

whole = torch.contiguous_format


def stream_now(t: Tensor) -> int:
    """The current stream of a tensor's GPU."""
    return int(torch._C._cuda_getCurrentRawStream(t.get_device()))


def unrepeated(t: Tensor) -> Tensor:
    """What is repeated along an axis (expanded) is there once."""
    for axis in range(t.dim()):
        t = t.narrow(axis, 0, 1) if t.stride(axis) == 0 and t.shape[axis] else t
    return t


def copied_on(stream: int, device: torch.device) -> AbstractContextManager[Any]:
    """Be on the stream on which something was copied."""
    if device.type != "cuda" or torch._C._cuda_getCurrentRawStream(device.index) == stream:
        return nullcontext()
    if not stream:
        return torch.cuda.stream(torch.cuda.default_stream(device))
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device))  # type: ignore[no-untyped-call]


passed_by(stream_now.__code__)
