"""``trace_dtypes``: every operation that turns tensors wider or narrower, with the user's line, while a model runs.

A torch function mode sees the calls as the user wrote them, before autocast and type promotion. ``check_qkv`` is the
assertion that should stand before every attention.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attn_diag.captures.validity import short
from attn_diag.errors import InputError
from attn_diag.results.dtypes import DtypeDrift, DtypeEvent, Step
from attn_diag.watching.drift.calls import CallLog
from attn_diag.watching.drift.forwards import Forward, forwards_met
from attn_diag.watching.drift.history import History, autocast_dtype, expected_dtype
from attn_diag.watching.drift.summary import event_of, listed, summarise

_ACTIVE = threading.local()
_LOCK = threading.Lock()
_WHOLE_PROCESS = ExitStack()
_TRACES = 0


class DtypeTrace:
    """Filled while the context runs; ``result()`` at any time. Keeps no tensor alive."""

    def __init__(self, source: str = "the traced block") -> None:
        self._source, self._history = source, History()
        self._calls = CallLog(self._history)
        self._error: str | None = None

    @property
    def findings(self) -> tuple[DtypeEvent, ...]:
        """What nobody asked for, and what mixes the dtypes of q, k and v; these first."""
        return self.result().findings

    def path(self, tensor: Tensor) -> tuple[Step, ...]:
        """From the operation that gave ``tensor`` its dtype to ``tensor``; empty if it was made outside the trace."""
        made = self._history.of(tensor)
        return () if made is None else made.path()

    def cause(self, tensor: Tensor) -> DtypeEvent | None:
        """The operation that changed the dtype to that of ``tensor``, if there was one inside the context."""
        made = self._history.of(tensor)
        return None if made is None or not made.changes else event_of(made.changes[0])

    def result(self) -> DtypeDrift:
        """What was seen so far, with JSON and a report."""
        return summarise(self._source, self._history, self._calls, self._error)

    def report(self, width: int = 100) -> str:
        """The terminal report as plain text."""
        return self.result().report(width)

    def __repr__(self) -> str:
        return f"<DtypeTrace: {self._history.operations} operations; print(t.report()) shows it>"

    def _repr_html_(self) -> str:
        return self.result()._repr_html_()


@contextmanager
def trace_dtypes(source: str = "the traced block") -> Iterator[DtypeTrace]:
    """Watch the dtypes of everything that this thread computes.

        with torch.autocast("cuda", torch.float16), attn_diag.trace_dtypes() as t:
            model(x)
        print(t.report())

    Values are not touched, but two kinds of code take another route here: functions wrapped by torch.compile run
    eagerly (the report names them; inside a graph nothing could be seen), and nn.MultiheadAttention and encoder layers
    in eval mode leave their fused path. Not seen: other threads (a backward pass on a GPU), and what operators,
    TorchScript and nn.MultiheadAttention compute inside. Attention is met as a function or operator of that name, and
    as an autograd Function whose forward takes q, k and v; any other is found if it raises, and
    ``attn_diag.check_qkv`` before it makes it known in any case. Some microseconds a call; the first trace of a process
    imports torch._dynamo, a second or two.

    Args:
        source: what the report is headed with.

    Returns:
        A context manager that gives a ``DtypeTrace``.
    """
    trace = DtypeTrace(source)
    outer = _active_traces()
    _ACTIVE.traces = (*outer, trace)
    try:
        with _whole_process(), _Mode(trace):
            yield trace
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            # sys.exit(0) is how many scripts end.
            raise
        trace._error = "".join(traceback.format_exception_only(error)).strip().split("\n")[0]
        if isinstance(error, Exception):
            trace._calls.note_error(error)
        raise
    finally:
        _ACTIVE.traces = outer


def active_trace() -> DtypeTrace | None:
    """The innermost trace that is running in this thread."""
    return next(reversed(_active_traces()), None)


def _active_traces() -> tuple[DtypeTrace, ...]:
    traces: tuple[DtypeTrace, ...] = getattr(_ACTIVE, "traces", ())
    return traces


class _Mode(TorchFunctionMode):
    def __init__(self, trace: DtypeTrace) -> None:
        super().__init__()
        self._history, self._note, self._calls = trace._history, trace._history.note, trace._calls

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except Exception as error:
            self._calls.note(func, args, kwargs, error)
            raise
        if isinstance(result, Tensor):
            self._calls.note(func, args, kwargs)
            self._note(func, args, kwargs, result)
        elif result is None:  # it writes into what it is given, as x[i] = y does
            self._calls.note(func, args, kwargs)
            if args and isinstance(args[0], Tensor):
                self._history.note_written(func, args, kwargs, args[0])
        elif isinstance(result, (tuple, list)) and result.__class__ is not torch.Size:
            if getattr(func, "__name__", "").startswith("_foreach"):
                # An optimizer's: hundreds of tensors at once, and each keeps its dtype.
                return result
            self._calls.note(func, args, kwargs)
            for x in result:
                if isinstance(x, Tensor):
                    self._note(func, args, kwargs, x)
        return result


def _around(forward: Forward, places: tuple[int, int, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the forward of an autograd Function, and have the traces of this thread know it for attention."""
    seen = [(trace._calls, trace._calls.seen) for trace in _active_traces()]
    result = forward(*args, **kwargs)
    for calls, before in seen:
        # What it calls may have said so, with what that was given.
        if calls.seen == before:
            calls.note_forward(forward, places, args)
    return result


@contextmanager
def _whole_process() -> Iterator[None]:
    """No compiled graph runs inside, in any thread, and forwards are met. Imports torch._dynamo: a second or two.

    Under a torch function mode Dynamo would break every graph into single operations, or refuse (``fullgraph=True``).
    Both are one for the whole process: the first trace sets them, and the last to end gives back what it found.
    """
    global _TRACES
    with _LOCK:
        if _TRACES == 0:
            _WHOLE_PROCESS.enter_context(torch.compiler.set_stance("force_eager"))
            _WHOLE_PROCESS.enter_context(forwards_met(_around))
        _TRACES += 1
    try:
        yield
    finally:
        with _LOCK:
            _TRACES -= 1
            if _TRACES == 0:
                _WHOLE_PROCESS.close()


def check_qkv(q: Tensor, k: Tensor, v: Tensor, trace: DtypeTrace | None = None) -> None:
    """Require that q, k and v share a floating dtype and a device.

    A mixed call is otherwise noticed far away, in the kernel, or not at all. Inside ``trace_dtypes`` the trace learns
    that here is an attention. Costs a microsecond; inside a compiled graph it is checked once, while compiling.

    Args:
        q, k, v: what an attention is about to be given.
        trace: the one under which they were made, where it is not running any more; the message then names the line at
            which the odd one changed.

    Raises:
        InputError: they do not; or one is no floating-point tensor.
    """
    tensors = {"q": q, "k": k, "v": v}
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise InputError(f"{name} must be a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if len({x.device for x in tensors.values()}) > 1:
        got = ", ".join(f"{n}: {x.device}" for n, x in tensors.items())
        raise InputError(f"q, k and v must be on one device, got {got}")
    running = None if torch.compiler.is_compiling() else active_trace()
    error = None
    if len({x.dtype for x in tensors.values()}) > 1:
        error = InputError(_message(tensors, trace or running))
    if running is not None:
        running._calls.check((q, k, v), error)
    if error is not None:
        raise error


def _message(tensors: dict[str, Tensor], trace: DtypeTrace | None) -> str:
    dtypes = [x.dtype for x in tensors.values()]
    expected = expected_dtype(dtypes, autocast_dtype(tensors["q"].device.type))
    like = "qkv"[dtypes.index(expected)]
    odd = tuple(name for name, x in tensors.items() if x.dtype != expected)
    got = ", ".join(f"{n}: {short(x.dtype)}" for n, x in tensors.items())
    parts = [f"q, k and v must have one dtype, got {got}."]
    for name in odd:
        event = trace.cause(tensors[name]) if trace is not None else None
        if event is not None:
            line = "" if event.source is None else f"\n    {event.source.text}\n"
            parts.append(f"{name}: {event.sentence()}:{line}{event.fix}")
    if len(parts) == 1:
        casts = ", ".join(f"{name}.to({like}.dtype)" for name in odd)
        parts.append(f"Cast {listed(odd)} ({casts}); attn_diag.trace_dtypes finds where it changed.")
    return " ".join(parts)
