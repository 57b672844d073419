"""CUDA's capture of streams into graphs: whether one runs, and threads that must not break it."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

import torch

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_RELAXED = 2


def in_cuda_graph() -> bool:
    """Whether a CUDA graph is being recorded: what we add would be recorded too, and replayed."""
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def stay_out_of_graphs() -> None:
    """Let this thread allocate on a GPU, copy and wait while another one records a CUDA graph.

    In the mode "global", ``torch.cuda.graph``'s own, a recording breaks where any thread does one of these that has not
    said so before (CUDA driver API: cuThreadExchangeStreamCaptureMode).
    """
    with suppress(OSError, AttributeError):  # another maker's GPU
        ctypes.CDLL(_DRIVER).cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
