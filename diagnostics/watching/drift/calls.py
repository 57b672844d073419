"""The attention calls of a trace: which calls are attention, and which changes of dtype reach their q, k and v."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from attn_diag.results.dtypes import Outcome, SourceLine, Step
from attn_diag.watching.drift.history import DtypeChange, History, autocast_dtype, expected_dtype
from attn_diag.watching.drift.source import is_users, operation_name, source_line

_NAME = re.compile("attention|attn|sdpa", re.IGNORECASE)
# These take what q, k and v are computed from (multi_head_attention_forward), or gradients.
_NOT = re.compile("multi_head|encoder_layer|backward|mask", re.IGNORECASE)
_KEYWORDS = (("query", "key", "value"), ("q", "k", "v"))
_LOCALS = (*_KEYWORDS, ("r", "k", "v"))  # linear attention calls its query a receptance

# PyTorch's own, not through torch.nn.functional: somebody may have put a wrapper there.
_SDPA = torch._C._nn.scaled_dot_product_attention

Function = Callable[..., Any]
Keywords = Mapping[str, Any] | None
Triple = tuple[Tensor, Tensor, Tensor]


@dataclass(eq=False)
class Call:
    """Attention calls at one place with q, k and v of the same dtypes, which are not one, or not autocast's."""

    operation: str
    dtypes: dict[str, torch.dtype]
    regime: torch.dtype | None
    outcome: Outcome
    source: SourceLine | None
    paths: dict[str, tuple[Step, ...]]
    causes: dict[str, tuple[DtypeChange, ...]]
    count: int = 0

    def __post_init__(self) -> None:
        self.expected = expected_dtype(list(self.dtypes.values()), self.regime)
        self.differing = tuple(n for n, d in self.dtypes.items() if d != self.expected)


class CallLog:
    """Every attention call counts; those whose q, k and v are not all of autocast's dtype are kept."""

    def __init__(self, history: History) -> None:
        self.seen = 0
        self.calls: dict[tuple[object, ...], Call] = {}
        self._history = history
        self._is_attention = cache(is_attention)
        # By id: an exception that is held would hold its frames.
        self._noted_error: int | None = None

    def note(self, func: Function, args: Sequence[Any], kwargs: Keywords, error: Exception | None = None) -> None:
        """Record a call that returned, or raised ``error``, if it is attention."""
        if not self._is_attention(func) or (qkv := _qkv_of(func, args, kwargs)) is None:
            return
        # Of PyTorch's own autocast casts all inputs but those in float64.
        autocast = func is _SDPA and all(autocast_dtype(x.device.type) and x.dtype != torch.float64 for x in qkv)
        outcome: Outcome = "raised" if error is not None else "autocast" if autocast else "accepted"
        self.add(operation_name(func), qkv, outcome, *self._place())
        if error is not None:
            self._noted_error = id(error)

    def note_forward(self, forward: Function, places: tuple[int, int, int], args: Sequence[Any]) -> None:
        """Record a forward of an autograd Function that returned, with where q, k and v stand among its arguments."""
        qkv = _triple([args[place] for place in places if place < len(args)])
        if qkv is None:
            return
        # One whose inputs autocast casts (custom_fwd) says so on its context, and not to what.
        cast = autocast_dtype(qkv[0].device.type) is not None and not getattr(args[0], "_fwd_used_autocast", True)
        if not cast:
            self.add(forward.__qualname__, qkv, "accepted", *self._place())

    def note_error(self, error: Exception) -> None:
        """Record what ended the trace, if it was a kernel's assertion about q, k and v."""
        if id(error) != self._noted_error and (found := _mixed_in_traceback(error.__traceback__)) is not None:
            operation, qkv, frame, instruction = found
            self.add(operation, qkv, "raised", frame.f_code, instruction)

    def check(self, qkv: Triple, error: Exception | None) -> None:
        """Record what ``check_qkv`` was given, and the error that it is about to raise."""
        self.add("check_qkv", qkv, "accepted" if error is None else "raised", *self._place())
        self._noted_error = None if error is None else id(error)

    def add(self, operation: str, qkv: Triple, outcome: Outcome, code: CodeType | None, instruction: int) -> None:
        """Count one call at a place in the user's code."""
        self.seen += 1
        regime = autocast_dtype(qkv[0].device.type)
        dtypes = dict(zip("qkv", (x.dtype for x in qkv), strict=True))
        if set(dtypes.values()) <= {regime or qkv[0].dtype}:
            return
        key = (operation, outcome, regime, *dtypes.values(), id(code), instruction)
        traced = {name: made for name, x in zip("qkv", qkv, strict=True) if (made := self._history.of(x)) is not None}
        if key not in self.calls:
            source = None if code is None else source_line(code, instruction)
            paths, causes = {n: m.path() for n, m in traced.items()}, {n: m.changes for n, m in traced.items()}
            self.calls[key] = Call(operation, dtypes, regime, outcome, source, paths, causes)
        call = self.calls[key]
        call.count += 1
        for name, made in traced.items():
            if name in (call.differing or "qkv"):
                for change in made.changes:
                    (change.reaches_mixed if call.differing else change.reaches_alike).add(name)

    def _place(self) -> tuple[CodeType | None, int]:
        frame = self._history.user_frame()
        return (None, -1) if frame is None else (frame.f_code, frame.f_lasti)


def is_attention(func: Function) -> bool:
    """Tell attention by its name: PyTorch's, FlashAttention's and others' operators all say so."""
    # Of an OpOverload the operator's name, without the overload's.
    name = str(getattr(getattr(func, "_schema", None), "name", None) or getattr(func, "__name__", ""))
    return bool(_NAME.search(name)) and not _NOT.search(name)


def _qkv_of(func: Function, args: Sequence[Any], kwargs: Keywords) -> Triple | None:
    """q, k and v of a call: the keywords of these names, else the first three tensors; None where there are none.

    What an operator writes into is none of them.
    """
    named = kwargs or {}
    # Of an operator that was called without an overload's name, the usual one's.
    schema = getattr(func, "_schema", None) or getattr(getattr(func, "default", None), "_schema", None)
    stated = getattr(schema, "arguments", ())
    written = {i for i, x in enumerate(stated) if x.alias_info is not None and x.alias_info.is_write}
    chosen: list[Any] = [x for i, x in enumerate(args) if isinstance(x, Tensor) and i not in written][:3]
    for names in _KEYWORDS:
        chosen += [named[name] for name in names[len(chosen) :] if name in named]
    return _triple(chosen)


def _mixed_in_traceback(traceback: TracebackType | None) -> tuple[str, Triple, FrameType, int] | None:
    """The innermost function of a traceback whose q, k and v (by name) have several dtypes.

    Kernels behind an ``autograd.Function`` make no call that a trace could see, but they raise where they meet a mixed
    call. Returns the function's name, q, k and v, and frame and instruction (``f_lasti``) of the user's code there.
    """
    frames: list[tuple[FrameType, int]] = []
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lasti))
        traceback = traceback.tb_next
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
    return found[0], found[1], found[2]
