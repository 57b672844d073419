"""How each tensor came by its dtype: the record that a trace keeps while it runs, made for speed.

Nothing here looks up a name or a line before somebody asks: an operation costs a look at its operands, a walk to the
user's frame, and one ``Made``. Tensors are held weakly. What an operation did to dtypes is told from what it was given
and what came back, not from a list of operations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from attn_diag.captures.validity import short
from attn_diag.results.dtypes import Kind, SourceLine, Step, TracedOperand
from attn_diag.watching.drift.in_place import PRECISION, Part, Writing, is_rounded, part, tensors, writing_of
from attn_diag.watching.drift.source import compiled_function, is_users, name_of, operation_name, source_line

_CASTS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16", "cfloat", "cdouble", "chalf"})

_LONGEST_PATH = 64
# A residual stream goes back to all of its additions; this many are kept.
_MOST_CHANGES = 16
# From a state back to itself: it is widened, meets other operands in 16 bits, and is cast.
_MOST_CHANGES_AGO = 4


@dataclass(eq=False, slots=True)
class DtypeChange:
    """One call in the user's code that changes dtypes: counted, and marked by the attention calls that it reaches."""

    kind: Kind
    func: Callable[..., Any]
    result: torch.dtype
    regime: torch.dtype | None
    """Autocast's dtype; None where it is off."""
    operands: tuple[TracedOperand, ...]
    source: SourceLine | None
    written: TracedOperand | None = None
    """The tensor that was written into; None: a new one was made."""
    rounds: bool = False
    """Whether some operand was wider than the result."""
    count: int = 0
    read: dict[Part, tuple[int, int]] = field(default_factory=dict)
    """What the last such call was given, and what that was made of: after how many operations, how many changes ago."""
    states: dict[Part, tuple[ref[Tensor], int, bool]] = field(default_factory=dict)
    """Where such calls wrote what was made of what stood there: in which tensor, after how many operations, and whether
    what they had written was read for it."""
    reaches_mixed: set[str] = field(default_factory=set)
    """Which of q, k and v it reaches in attention calls that mix dtypes."""
    reaches_alike: set[str] = field(default_factory=set)
    """Which it reaches in calls whose q, k and v have one dtype, but not autocast's."""
    alone: tuple[DtypeChange, ...] = field(init=False)
    """(self,): the history of a tensor that this change made."""

    def __post_init__(self) -> None:
        self.alone = (self,)


@dataclass(eq=False, slots=True)
class Made:
    """How a tensor was made."""

    tensor: ref[Tensor]
    dtype: torch.dtype
    func: Callable[..., Any]
    code: CodeType | None
    """Where in the user's code the call of ``func`` stands; None where that is not known."""
    instruction: int
    previous: Made | None
    """The operand whose dtype it took; None after a change."""
    changes: tuple[DtypeChange, ...]
    """Those that its dtype goes back to, along every operand of that dtype, the first along ``previous``."""
    depth: int = 0

    def __post_init__(self) -> None:
        if self.previous is not None:
            self.depth = self.previous.depth + 1
            if self.depth > _LONGEST_PATH:
                # A recurrent state has no shorter history: keep its origin, let go of what lies between.
                self.previous, self.depth = self.previous.origin(), 1

    def origin(self) -> Made:
        """Where the dtype came from: a change, or the first tensor that the trace saw."""
        made = self
        while made.previous is not None:
            made = made.previous
        return made

    def path(self) -> tuple[Step, ...]:
        """List the operations from the origin to this tensor."""
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
        return [change for change in self._changes.values() if change is not None and change.count]

    def of(self, tensor: Tensor) -> Made | None:
        """How a tensor was made; None where that was not inside the trace."""
        made = self._made.get(id(tensor))
        return made if made is not None and made.tensor() is tensor else None

    def note(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, result: Tensor
    ) -> None:
        """Record one result of one call."""
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
                self.note_written(func, args, kwargs, result)
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
                change.read = self._read(given) | dict.fromkeys(map(part, given), (self.operations, 0))
                previous, changes = None, change.alone
        table[id(result)] = Made(ref(result), dtype, func, code, instruction, previous, changes)

    def note_written(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, into: Tensor
    ) -> None:
        """Record that a call wrote into a tensor that it was given, where that rounds wider values to its dtype."""
        if (writing := writing_of(func, args, kwargs, into)) is None:
            return
        read_at, _ = self._read(writing.values).get(writing.part, (None, 0))
        if writing.rounds and any(part(x) == writing.part for x in writing.values):
            read_at = self.operations
        origins = self._origins(writing.values)
        cast = next((c for c in origins if c.rounds and writing.part in c.read), None)  # just before
        if not writing.rounds and (cast is None or read_at is None):
            return
        frame = self.user_frame()
        operands = writing.values if writing.rounds or cast is None else cast.operands
        # Of 16 bits and fewer: what float32 loses of float64 is no drift.
        narrow = into.dtype.itemsize <= 2
        if writing.updates and narrow:
            self._change_written("narrowed", func, writing, into, operands, frame).count += 1
            return
        copies = self._change_written("cast", func, writing, into, operands, frame)
        again = 0 if read_at is None else self._again(copies, writing, read_at)
        if again and narrow:
            self._change_written("narrowed", func, writing, into, operands, frame).count += again
            copies.count -= writing.rounds and again > 1  # the first one was no cast either
        else:
            copies.count += writing.rounds  # a cast just before counts by itself

    def _change_written(
        self, kind: Kind, func: Callable[..., Any], writing: Writing, into: Tensor,
        operands: tuple[Tensor | TracedOperand, ...], frame: FrameType | None,
    ) -> DtypeChange:  # fmt: skip
        """The record of such calls at this place, of which some may be casts and others the updates of a state."""
        code, instruction = (None, -1) if frame is None else (frame.f_code, frame.f_lasti)
        key = ("written", kind, func, id(code), instruction, into.dtype)
        change = self._changes.get(key)
        if change is None:
            change = self._changes[key] = DtypeChange(
                kind=kind,
                func=func,
                result=PRECISION[into.dtype],
                regime=autocast_dtype(into.device.type),
                operands=tuple(
                    x if isinstance(x, TracedOperand) else self._operand(x, frame)
                    for x in operands
                    if isinstance(x, TracedOperand) or x.dtype in PRECISION
                ),
                source=None if frame is None else source_line(frame.f_code, frame.f_lasti),
                written=self._operand(writing.holder, frame),
            )
        return change

    def _again(self, change: DtypeChange, writing: Writing, read_at: int) -> int:
        """How many such calls are found to have updated a state: 0 of the first, which may be a cast, and then 2.

        What is written was made of what such a call wrote there before. A master weight in fp32 was made of its weight
        too, but before all that was written there.
        """
        written, at, known = change.states.get(writing.part, (None, 0, False))
        again = written is not None and written() is writing.holder and read_at > at
        change.states[writing.part] = ref(writing.holder), self.operations, again
        return again + (again and not known)

    def _origins(self, given: Iterable[Tensor]) -> list[DtypeChange]:
        return [change for x in given if (made := self.of(x)) is not None for change in made.changes]

    def _read(self, given: Iterable[Tensor]) -> dict[Part, tuple[int, int]]:
        """What tensors were made of by the last changes of dtype, and when that was read."""
        origins = self._origins(given)
        return {x: (at, n + 1) for c in origins for x, (at, n) in c.read.items() if n < _MOST_CHANGES_AGO}

    def _operand(self, x: Tensor, frame: FrameType | None) -> TracedOperand:
        shape = () if x.is_nested else tuple(x.shape)  # nested tensors have none, or one of symbols
        return TracedOperand(name_of(x, frame), short(x.dtype), shape, self._line(x))

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
        kind = _kind_of_change(func, args, kwargs, floating, result, regime)
        if kind is None:
            return None
        operands = tuple(self._operand(x, frame) for x in floating)
        source = None if frame is None else source_line(frame.f_code, frame.f_lasti)
        rounds = any(is_rounded(x.dtype, result.dtype) for x in floating)
        return DtypeChange(kind, func, PRECISION[result.dtype], regime, operands, source, rounds=rounds)

    def _line(self, tensor: Tensor) -> SourceLine | None:
        made = self.of(tensor)
        return None if made is None or made.code is None else source_line(made.code, made.instruction)

    def user_frame(self) -> FrameType | None:
        """The innermost frame that is neither torch's nor this package's."""
        frame: FrameType | None = sys._getframe().f_back
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


def _kind_of_change(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    given: Iterable[Tensor],
    result: Tensor,
    regime: torch.dtype | None,
) -> Kind | None:
    """Classify a change of dtype (None: no change). A 0-dimensional tensor is left out: it promotes no other."""
    after = PRECISION[result.dtype]
    before = {PRECISION[x.dtype] for x in given if x.ndim or result.ndim == 0}
    if before <= {after}:
        return None
    if getattr(func, "__name__", "") in _CASTS or torch.dtype in map(type, (*args, *kwargs.values())):
        return "cast"
    if len(before) == 1 or after == regime:
        return "policy"
    if after.itemsize >= max(d.itemsize for d in before):
        return "widened"
    return "policy" if regime is None or after.itemsize >= regime.itemsize else "narrowed"


def autocast_dtype(device: str) -> torch.dtype | None:
    """Autocast's dtype on that type of device; None where it is off, or where the device has none (meta)."""
    try:
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    except RuntimeError:
        return None


def expected_dtype(dtypes: Sequence[torch.dtype], regime: torch.dtype | None) -> torch.dtype:
    """What q, k and v should have: autocast's dtype where one of them has it, else the narrowest, then the commonest.

    Not the majority: a rotary embedding with fp32 cos and sin promotes two of the three.
    """
    if regime is not None and regime in dtypes:
        return regime
    return min(dtypes, key=lambda d: (d.itemsize, -dtypes.count(d)))


def short_or_none(dtype: torch.dtype | None) -> str | None:
    """``short`` of a regime that may be off."""
    return None if dtype is None else short(dtype)
