"""The attention calls of a trace, and what each says of the changes that reach its q, k and v."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch

from attn_diag.results.dtypes import Outcome, SourceLine, Step
from attn_diag.watching.drift.attention import Triple, is_attention, is_sdpa, mixed_in_traceback, qkv_of
from attn_diag.watching.drift.dtypes import autocast_dtype, expected_dtype
from attn_diag.watching.drift.history import DtypeChange, History
from attn_diag.watching.drift.source import operation_name, source_line


class Call:
    """Attention calls at one place with q, k and v of the same dtypes, which are not one, or not autocast's."""

    def __init__(
        self,
        operation: str,
        dtypes: dict[str, torch.dtype],
        regime: torch.dtype | None,
        outcome: Outcome,
        source: SourceLine | None,
    ) -> None:
        self.operation, self.dtypes, self.regime = operation, dtypes, regime
        self.outcome, self.source, self.count = outcome, source, 0
        self.expected = expected_dtype(list(dtypes.values()), regime)
        one = len(set(dtypes.values())) == 1
        self.differing = () if one else tuple(n for n, d in dtypes.items() if d != self.expected)
        self.paths: dict[str, tuple[Step, ...]] = {}
        self.causes: dict[str, tuple[DtypeChange, ...]] = {}


class CallLog:
    """Every attention call counts; those whose q, k and v are not all of autocast's dtype are kept."""

    def __init__(self, history: History) -> None:
        self.seen = 0
        self.calls: dict[tuple[object, ...], Call] = {}
        self._history = history
        self._known: dict[Callable[..., Any], bool] = {}
        # By id: an exception that is held would hold its frames.
        self._noted_error: int | None = None

    def note(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        """A call that returned, if it is attention."""
        known = self._known.get(func)
        if known is None:
            known = self._known[func] = is_attention(func)
        if known and (qkv := qkv_of(args, kwargs)) is not None:
            hidden = is_sdpa(func) and autocast_dtype(qkv[0].device.type) is not None
            self.add(operation_name(func), qkv, "autocast" if hidden else "accepted", *self._place())

    def note_raised(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, error: Exception
    ) -> None:
        """A call that raised, if it is attention."""
        if is_attention(func) and (qkv := qkv_of(args, kwargs)) is not None:
            self.add(operation_name(func), qkv, "raised", *self._place())
            self._noted_error = id(error)

    def note_error(self, error: Exception) -> None:
        """What ended the trace: perhaps a kernel's assertion about q, k and v."""
        if id(error) != self._noted_error and (found := mixed_in_traceback(error.__traceback__)) is not None:
            operation, qkv, frame, instruction = found
            self.add(operation, qkv, "raised", frame.f_code, instruction)

    def check(self, qkv: Triple, error: Exception | None) -> None:
        """What ``check_qkv`` was given, and said."""
        self.add("check_qkv", qkv, "accepted" if error is None else "raised", *self._place())
        self._noted_error = None if error is None else id(error)

    def add(self, operation: str, qkv: Triple, outcome: Outcome, code: CodeType | None, instruction: int) -> None:
        """One call, at that place."""
        self.seen += 1
        regime = autocast_dtype(qkv[0].device.type)
        dtypes = dict(zip("qkv", (x.dtype for x in qkv), strict=True))
        if set(dtypes.values()) <= {regime or qkv[0].dtype}:
            return
        key = (operation, outcome, regime, *dtypes.values(), id(code), instruction)
        call = self.calls.get(key)
        if call is None:
            source = None if code is None else source_line(code, instruction)
            call = self.calls[key] = Call(operation, dtypes, regime, outcome, source)
        call.count += 1
        for name, x in zip("qkv", qkv, strict=True):
            made = self._history.of(x)
            if made is None:
                continue
            if call.count == 1:
                call.paths[name] = made.path()
                call.causes[name] = made.changes
            if name in (call.differing or "qkv"):
                for change in made.changes:
                    (change.reaches_mixed if call.differing else change.reaches_alike).add(name)

    def _place(self) -> tuple[CodeType | None, int]:
        frame = self._history.user_frame()
        return (None, -1) if frame is None else (frame.f_code, frame.f_lasti)
