"""``trace_dtypes``: every operation that turns tensors wider or narrower, with the user's line, while a model runs.

A torch function mode sees the calls as the user wrote them, before autocast and type promotion.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attn_diag.results.dtypes import DtypeDrift, DtypeEvent, Step
from attn_diag.watching.drift.calls import CallLog
from attn_diag.watching.drift.eager import eagerly
from attn_diag.watching.drift.history import History
from attn_diag.watching.drift.summary import event_of, summarise

_ACTIVE = threading.local()


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

    ``source``: what the report is headed with. Values are not touched, but two kinds of code take another route here:
    functions wrapped by torch.compile run eagerly (the report names them; inside a graph nothing could be seen), and
    nn.MultiheadAttention and encoder layers in eval mode leave their fused path. Not seen: other threads (a backward
    pass on a GPU), and what operators, autograd Functions and nn.MultiheadAttention compute inside. An attention of
    that kind is found if it raises; ``attn_diag.check_qkv`` before it makes it known in any case. Some microseconds a
    call; the first trace of a process imports torch._dynamo, a second or two.
    """
    trace = DtypeTrace(source)
    outer = active_trace()
    _ACTIVE.trace = trace
    try:
        with eagerly(), _Mode(trace):
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
        _ACTIVE.trace = outer


def active_trace() -> DtypeTrace | None:
    """The innermost trace that is running in this thread."""
    trace: DtypeTrace | None = getattr(_ACTIVE, "trace", None)
    return trace


class _Mode(TorchFunctionMode):
    def __init__(self, trace: DtypeTrace) -> None:
        super().__init__()
        self._note, self._calls = trace._history.note, trace._calls

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
            self._calls.note_raised(func, args, kwargs, error)
            raise
        if isinstance(result, Tensor):
            self._calls.note(func, args, kwargs)
            self._note(func, args, kwargs, result)
        elif isinstance(result, (tuple, list)) and result.__class__ is not torch.Size:
            if getattr(func, "__name__", "").startswith("_foreach"):
                # An optimizer's: hundreds of tensors at once, and each keeps its dtype.
                return result
            self._calls.note(func, args, kwargs)
            for x in result:
                if isinstance(x, Tensor):
                    self._note(func, args, kwargs, x)
        return result
