"""How each tensor came by its dtype: the record that a trace keeps while it runs, made for speed.

Nothing here looks up a name or a line before somebody asks: an operation costs a look at its operands, a walk to the
user's frame, and one ``Made``. Tensors are held weakly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from attn_diag.results.dtypes import Kind, SourceLine, Step, TracedOperand
from attn_diag.watching.drift.dtypes import PRECISION, autocast_dtype, kind_of_change, short
from attn_diag.watching.drift.source import compiled_function, is_users, name_of, operation_name, source_line

_LONGEST_PATH = 64
# A residual stream goes back to all of its additions; this many are kept.
_MOST_CHANGES = 16


class DtypeChange:
    """One call in the user's code that changes dtypes: counted, and marked by the attention calls that it reaches."""

    __slots__ = (
        "alone",
        "count",
        "func",
        "kind",
        "operands",
        "reaches_alike",
        "reaches_mixed",
        "regime",
        "result",
        "source",
    )

    def __init__(
        self,
        kind: Kind,
        func: Callable[..., Any],
        result: torch.dtype,
        regime: torch.dtype | None,
        operands: tuple[TracedOperand, ...],
        source: SourceLine | None,
    ) -> None:
        self.kind, self.func, self.result, self.regime = kind, func, result, regime
        self.operands, self.source, self.count = operands, source, 0
        self.reaches_mixed: set[str] = set()
        self.reaches_alike: set[str] = set()
        self.alone = (self,)


class Made:
    """How a tensor was made: the call, the operand whose dtype it took, and the changes of dtype behind its own.

    ``previous`` is None after a change; ``changes`` are those that its dtype goes back to, along every operand of that
    dtype, the first along ``previous``.
    """

    __slots__ = ("changes", "code", "depth", "dtype", "func", "instruction", "previous", "tensor")

    def __init__(
        self,
        tensor: ref[Tensor],
        dtype: torch.dtype,
        func: Callable[..., Any],
        code: CodeType | None,
        instruction: int,
        previous: Made | None,
        changes: tuple[DtypeChange, ...],
    ) -> None:
        self.tensor, self.dtype, self.func, self.code, self.instruction = tensor, dtype, func, code, instruction
        self.previous, self.changes, self.depth = previous, changes, 0
        if previous is not None:
            self.depth = previous.depth + 1
            if self.depth > _LONGEST_PATH:
                # A recurrent state has no shorter history: keep its origin, let go of what lies between.
                self.previous, self.depth = previous.origin(), 1

    def origin(self) -> Made:
        """Where the dtype came from: a change, or the first tensor that the trace saw."""
        made = self
        while made.previous is not None:
            made = made.previous
        return made

    def path(self) -> tuple[Step, ...]:
        """From the origin to this tensor."""
        steps: list[Step] = []
        made: Made | None = self
        while made is not None:
            source = None if made.code is None else source_line(made.code, made.instruction)
            steps.append(Step(operation_name(made.func), short(made.dtype), source))
            made = made.previous
        return tuple(reversed(steps))


class History:
    """What a trace has seen so far."""

    def __init__(self) -> None:
        self.operations = 0
        self.compiled: dict[str, None] = {}
        # By call and dtypes; None where these change nothing.
        self._changes: dict[tuple[object, ...], DtypeChange | None] = {}
        self._made: dict[int, Made] = {}
        # By id, with the code itself to keep it: hashing a code object hashes all of its constants.
        self._users: dict[int, tuple[bool, CodeType]] = {}

    @property
    def changes(self) -> list[DtypeChange]:
        """All changes of dtype, in order of appearance."""
        return [change for change in self._changes.values() if change is not None]

    def of(self, tensor: Tensor) -> Made | None:
        """How a tensor was made; None where that was not inside the trace."""
        made = self._made.get(id(tensor))
        return made if made is not None and made.tensor() is tensor else None

    def note(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, result: Tensor
    ) -> None:
        """One result of one call."""
        dtype = PRECISION.get(result.dtype)
        if dtype is None:
            return
        self.operations += 1
        previous, mixed, table = None, False, self._made
        changes: tuple[DtypeChange, ...] = ()
        given = tensors(args, kwargs)
        for x in given:
            if x is result:
                # In place, or returned as it came: its dtype has the history it had.
                return
            other = PRECISION.get(x.dtype)
            if other is not dtype:
                mixed = mixed or other is not None
            elif (made := table.get(id(x))) is not None and made.tensor() is x:
                if previous is None or (made.changes and not changes):
                    previous, changes = made, made.changes
                elif made.changes is not changes:
                    changes = _union(changes, made.changes)
        frame, change = self.user_frame(), None
        code, instruction = (None, -1) if frame is None else (frame.f_code, frame.f_lasti)
        if mixed:
            # The same call with the same dtypes did the same: only the first is looked at closely.
            signature = [(x.dtype, x.ndim == 0) for x in given]
            key = (func, id(code), instruction, dtype, *signature)
            if key not in self._changes:
                self._changes[key] = self._change(func, args, kwargs or {}, given, result, frame)
            change = self._changes[key]
            if change is not None:
                change.count += 1
                previous, changes = None, change.alone
        table[id(result)] = Made(ref(result), dtype, func, code, instruction, previous, changes)

    def _change(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: list[Tensor],
        result: Tensor,
        frame: FrameType | None,
    ) -> DtypeChange | None:
        floating = [x for x in given if x.dtype in PRECISION]
        regime = autocast_dtype(result.device.type)
        kind = kind_of_change(func, args, kwargs, floating, result, regime)
        if kind is None:
            return None
        operands = tuple(
            TracedOperand(name_of(x, frame), short(x.dtype), tuple(x.shape), self._line(x)) for x in floating
        )
        source = None if frame is None else source_line(frame.f_code, frame.f_lasti)
        return DtypeChange(kind, func, PRECISION[result.dtype], regime, operands, source)

    def _line(self, tensor: Tensor) -> SourceLine | None:
        made = self.of(tensor)
        return None if made is None or made.code is None else source_line(made.code, made.instruction)

    def user_frame(self) -> FrameType | None:
        """The innermost frame that is neither torch's nor this package's."""
        frame: FrameType | None = sys._getframe(1)
        users = self._users
        while frame is not None:
            code = frame.f_code
            known = users.get(id(code))
            if known is None:
                known = users[id(code)] = (is_users(code), code)
                if known[0] and (name := compiled_function(frame)) is not None:
                    self.compiled.setdefault(name)
            if known[0]:
                return frame
            frame = frame.f_back
        return None


def _union(some: tuple[DtypeChange, ...], others: tuple[DtypeChange, ...]) -> tuple[DtypeChange, ...]:
    return (*some, *(change for change in others if change not in some))[:_MOST_CHANGES]


def tensors(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Tensor]:
    """The tensors among the arguments of a call, also in its lists."""
    found = []
    for x in chain(args, kwargs.values()) if kwargs else args:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += tensors(x, None)
    return found
