"""The user's line behind a torch call, and what its tensors are called there."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

_OURS = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class SourceLine:
    """Where a call stands: ``text`` is the line, stripped."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def user_frame() -> FrameType | None:
    """The innermost frame that is neither torch's nor this package's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _OURS)):
        frame = frame.f_back
    return frame


def source_line(frame: FrameType) -> SourceLine:
    """The line that ``frame`` is at."""
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals).strip()
    return SourceLine(code.co_filename, frame.f_lineno, code.co_qualname, text)


def name_of(tensor: Tensor, frame: FrameType | None) -> str | None:
    """What the frame calls a tensor: a variable, or an attribute of one (a module's parameter or buffer)."""
    if frame is None:
        return None
    for name, value in frame.f_locals.items():
        if value is tensor:
            return name
    for owner, value in frame.f_locals.items():
        for name, member in _members(value):
            if member is tensor:
                return f"{owner}.{name}"
    return None


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        yield from value.named_parameters()
        yield from value.named_buffers()
    if hasattr(value, "__dict__") and not isinstance(value, type):
        yield from vars(value).items()
