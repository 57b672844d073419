"""Keeps torch.compile off our own code.

Where a graph breaks, dynamo compiles whatever Python runs between its parts: ours too, called back from an operator or
a hook. That costs seconds, counts as graph breaks of the user's, and what we do would be traced instead of done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch._C._dynamo import eval_frame

_skip = eval_frame.set_code_exec_strategy
_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)


def passed_by(code: CodeType) -> None:
    """Have dynamo leave a function of ours alone where it is called out of eager code; not what that one calls."""
    _skip(code, _SKIP)


def untraced(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` with all that it calls left alone by dynamo."""
    prior = eval_frame.set_eval_frame(None)
    try:
        return function(*args)
    finally:
        eval_frame.set_eval_frame(prior)


def backward_is_compiled() -> bool:
    """Whether compiled autograd runs the backward, as far as a forward knows.

    Hooks of ours would be in its graph, which is compiled once more for them, and tell nothing there.
    """
    found = sys.modules.get("torch._dynamo.compiled_autograd")
    return found is not None and (found.compiled_autograd_enabled or torch._dynamo.config.compiled_autograd)


def has_compiled() -> bool:
    """Whether dynamo has compiled anything: a function around a model tells the model nothing."""
    found = sys.modules.get("torch._dynamo.utils")
    return found is not None and found.counters["frames"]["ok"] > 0


def traced_again(function: Callable[..., Any]) -> Callable[..., Any]:
    """The user's ``function``, which ``untraced`` code of ours is to call as it would have been called without us."""
    prior = eval_frame.get_eval_frame_callback()
    if prior is None:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        ours = eval_frame.set_eval_frame(prior)
        try:
            return function(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(ours)

    return run


for _ours in (untraced, traced_again):
    passed_by(_ours.__code__)
