"""The user's line behind a torch call, and what its tensors are called there."""

from __future__ import annotations

import linecache
import os
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from attn_diag import errors
from attn_diag.results.dtypes import SourceLine

_TORCH = str(Path(torch.__file__).parent) + os.sep
_NOT_THE_USERS = (_TORCH, str(Path(errors.__file__).parent) + os.sep)
_EVAL_FRAME = str(Path(_TORCH, "_dynamo", "eval_frame.py"))
_FLEX = str(Path(_TORCH, "nn", "attention", "flex_attention.py"))


def is_users(code: CodeType) -> bool:
    """Neither torch's code nor this package's."""
    return not code.co_filename.startswith(_NOT_THE_USERS)


def compiled_function(frame: FrameType) -> str | None:
    """The function wrapped by torch.compile, inside which a frame runs; None elsewhere.

    Also None for the wrappers of ``torch.compiler.disable``, and for the one that an eager ``flex_attention`` makes of
    itself: the user compiled nothing there.
    """
    wrapped, inner, outer = frame, frame, frame.f_back
    while outer is not None:
        if outer.f_code.co_filename == _EVAL_FRAME and not outer.f_code.co_qualname.startswith("DisableContext."):
            return None if inner.f_code.co_filename == _FLEX else wrapped.f_code.co_qualname
        if is_users(outer.f_code):
            wrapped = outer
        inner, outer = outer, outer.f_back
    return None


def source_line(code: CodeType, instruction: int) -> SourceLine:
    """The line of an instruction (``frame.f_lasti``). Not cached by code: equal code may stand in several files."""
    line = next((n for start, end, n in code.co_lines() if start <= instruction < end and n), code.co_firstlineno)
    return SourceLine(code.co_filename, line, code.co_qualname, linecache.getline(code.co_filename, line).strip())


def name_of(tensor: Tensor, frame: FrameType | None) -> str | None:
    """What the frame calls a tensor: a variable, or an attribute of one (a module's parameter or buffer)."""
    if frame is None:
        return None
    variables = list(frame.f_locals.items())
    for name, value in variables:
        if value is tensor:
            return name
    for owner, value in variables:
        if (path := _path_to(tensor, value)) is not None:
            return f"{owner}.{path}"
    return None


def _path_to(tensor: Tensor, owner: object) -> str | None:
    """The attribute of a variable (of a module: also of its submodules) that is the tensor. Builds no name in vain."""
    if isinstance(owner, (Tensor, type)) or not hasattr(owner, "__dict__"):
        return None
    for name, value in list(vars(owner).items()):
        if value is tensor:
            return str(name)
    if isinstance(owner, torch.nn.Module):
        for table in (owner._parameters, owner._buffers):
            for name, value in table.items():
                if value is tensor:
                    return name
        for name, child in owner._modules.items():
            if child is not None and (path := _path_to(tensor, child)) is not None:
                return f"{name}.{path}"
    return None


def operation_name(func: Any) -> str:
    """As the user would write it: "Tensor.addcmul", "linear", "aten.mul.Tensor"."""
    if isinstance(func, torch._ops.OpOverload):
        return str(func)
    name = str(getattr(func, "__name__", func))
    if name == "__get__":
        # A property's getter is bound to its descriptor.
        return f"Tensor.{getattr(func.__self__, '__name__', 'a property')}"
    return f"Tensor.{name}" if getattr(Tensor, name, None) is func else name
