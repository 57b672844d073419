"""``trace_dtypes``: every operation that turns tensors wider or narrower, with the user's line, while a model runs.

A torch function mode sees the calls as the user wrote them, before autocast and type promotion. What an operation does
to dtypes is told from what it was given and what came back, not from a list of operations: of operands with several
floating dtypes, a result of the widest was promoted silently; of operands of one dtype, a result of another was made
so on purpose, by autocast's policy, by the operation (softmax in fp32) or by a cast.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from attn_diag.drift.result import DtypeEvent, Kind, Operand
from attn_diag.drift.source import SourceLine, name_of, source_line, user_frame

_WIDTH = {torch.float64: 4, torch.float32: 3, torch.bfloat16: 2, torch.float16: 2}
_MAX_PATH = 64


@dataclass
class _Made:
    """How a tensor came to be: the operation's line, and the operands of its own dtype."""

    dtype: torch.dtype
    operation: str
    source: SourceLine | None
    event: tuple[object, ...] | None
    parents: tuple[_Made, ...]


@dataclass
class DtypeTrace:
    """Filled while the context runs. ``events``: by line and operation, in order of first appearance."""

    _events: dict[tuple[object, ...], DtypeEvent] = field(default_factory=dict)
    _made: Any = field(default_factory=WeakIdKeyDictionary)

    @property
    def events(self) -> tuple[DtypeEvent, ...]:
        """All of them."""
        return tuple(self._events.values())

    @property
    def findings(self) -> tuple[DtypeEvent, ...]:
        """Those that nobody asked for: silent promotion, and results narrower than the regime."""
        return tuple(e for e in self.events if e.kind != "policy")

    def path(self, tensor: Tensor) -> tuple[str, ...]:
        """From the operation that gave ``tensor`` its dtype to ``tensor``: one line each, the cause first."""
        made, steps = self._made.get(tensor), []
        while made is not None and len(steps) < _MAX_PATH:
            where = "" if made.source is None else f"{made.source}: {made.source.text}"
            steps.append(f"{made.operation} -> {_short(made.dtype)}  {where}".rstrip())
            if made.event is not None:
                break
            made = next((p for p in made.parents if p.dtype == made.dtype), None)
        return tuple(reversed(steps))

    def cause(self, tensor: Tensor) -> DtypeEvent | None:
        """The event that gave ``tensor`` its dtype, if it was made inside the context."""
        made = self._made.get(tensor)
        for _ in range(_MAX_PATH):
            if made is None or made.event is not None:
                break
            made = next((p for p in made.parents if p.dtype == made.dtype), None)
        return None if made is None or made.event is None else self._events[made.event]


@contextmanager
def trace_dtypes() -> Iterator[DtypeTrace]:
    """Watch the dtypes of everything that this thread computes.

        with torch.autocast("cuda", torch.float16), attn_diag.trace_dtypes() as t:
            model(x)
        for event in t.findings:
            print(event.sentence(), event.fix())

    Values are not touched. What runs inside a compiled graph or in the backward pass is not seen. Not for timing: it
    costs some microseconds a call.
    """
    trace = DtypeTrace()
    with _Mode(trace):
        yield trace


class _Mode(TorchFunctionMode):
    def __init__(self, trace: DtypeTrace) -> None:
        super().__init__()
        self._trace, self._thread = trace, threading.get_ident()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            results: Sequence[Tensor] = (result,)
        elif isinstance(result, (tuple, list)):
            results = [x for x in result if isinstance(x, Tensor)]
        else:
            return result
        floats = [x for x in results if x.dtype in _WIDTH]
        if floats:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dtype in _WIDTH]
            for x in floats:
                _note(self._trace, func, given, x)
        return result


def _note(trace: DtypeTrace, func: Callable[..., Any], given: list[Tensor], result: Tensor) -> None:
    if any(x is result for x in given) and len({x.dtype for x in given}) == 1:
        return
    regime = _regime(result.device.type)
    kind = _kind(given, result, regime)
    operation = resolve_name(func) or getattr(func, "__name__", "an operation")
    frame = user_frame()
    source = None if frame is None else source_line(frame)
    key = None
    if kind is not None:
        key = (kind, operation, result.dtype, source)
        known = trace._events.get(key)
        if known is not None:
            trace._events[key] = replace(known, count=known.count + 1)
        else:
            operands = tuple(Operand(name_of(x, frame), _short(x.dtype), tuple(x.shape)) for x in given)
            event = DtypeEvent(kind, operation, _short(result.dtype), regime and _short(regime), operands, source)
            trace._events[key] = event
    parents = tuple(made for x in given if (made := trace._made.get(x)) is not None)
    trace._made[result] = _Made(result.dtype, operation, source, key, parents)


def _kind(given: list[Tensor], result: Tensor, regime: torch.dtype | None) -> Kind | None:
    """None where nothing changes. A 0-dimensional tensor does not promote others."""
    dtypes = {x.dtype for x in given if x.ndim or result.ndim == 0}
    if not dtypes or dtypes == {result.dtype}:
        return None
    if len(dtypes) == 1:
        return "policy"
    widest = max(_WIDTH[d] for d in dtypes)
    if _WIDTH[result.dtype] >= widest and result.dtype != regime:
        return "widened"
    return "policy" if result.dtype == regime or regime is None else "narrowed"


def _regime(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
