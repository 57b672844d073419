"""Doing something in the user's own frame, as if it stood there: stop, or raise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_NOT_USERS = ("attn_diag", "torch", "threading", "concurrent")


def users_frame() -> FrameType | None:
    """The innermost frame of this thread that is neither ours nor torch's; None in a thread that has none of its own,
    as those of autograd.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_USERS:
        frame = frame.f_back
    return frame


def at_next_instruction(frame: FrameType, action: Callable[[], object]) -> None:
    """Have ``action`` run before the next instruction of ``frame``, a frame of this thread that is running.

    What it raises is raised there. A debugger that it starts stops there, with that frame's variables: on
    ``return attention(q, k, v)`` before the return, else on the line that follows. A trace function that was set is
    put back before (where ``action`` raises, Python itself drops it).
    """
    tracer, local_tracer, by_opcode = sys.gettrace(), frame.f_trace, frame.f_trace_opcodes

    def here(at: FrameType, event: str, argument: Any) -> None:  # noqa: ARG001 - a trace function's signature
        at.f_trace_opcodes = by_opcode
        at.f_trace = local_tracer
        sys.settrace(tracer)
        action()

    # In this order: what is set before sys.settrace holds for frames that are running already.
    frame.f_trace = here
    frame.f_trace_opcodes = True
    sys.settrace(_ignore_new_frames)


def _ignore_new_frames(*event: Any) -> None:  # noqa: ARG001 - a trace function's signature
    return None
