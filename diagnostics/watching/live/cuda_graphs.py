"""Attention operators inside CUDA graphs: met once, while a graph is recorded, and told of whenever it is replayed.

A replay runs no code of ours. So copies of what an operator was given and returned are recorded with it, into memory of
our own, as the graph's is used again before a replay is over. They stay in the graph, whoever listens. Met are graphs
that are recorded while somebody listens: those of torch.compile, as with mode="reduce-overhead", and a user's own. What
torch.compile runs before, to warm up, lives in the graph's memory already, where torch forbids that anything of ours
stays: that too is copied, and told of at the end of the step.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attn_diag.watching.live.frames import in_cuda_graphs_memory
from attn_diag.watching.live.operator_calls import OperatorBackward, OperatorCall
from attn_diag.watching.live.places import MadeBy
from attn_diag.watching.live.stream_capture import in_cuda_graph, stay_out_of_graphs
from attn_diag.watching.live.whole_copies import unrepeated

_METHODS = ("capture_begin", "capture_end", "replay")
# The attribute of a graph that was recorded while we were there: what to do after a replay, in the order of its calls.
_RECORD = "_attn_diag_record"


@dataclass
class _Record:
    tells: list[Callable[[], object]] = field(default_factory=list)
    """Of calls and of backwards, for whoever looks."""
    others: list[tuple[Audience, Callable[[], None]]] = field(default_factory=list)
    """For one that is there, whether it looks or not."""


class Audience(Protocol):
    """Who watches a model. Nothing here raises."""

    @property
    def sequences(self) -> int | None:
        """So many sequences, the first of a batch, are all that it looks at; None: it looks at every one."""
        ...

    def made_by(self, module: str = "") -> MadeBy | None:
        """Who makes the call that is running, if it may be of interest.

        Args:
            module: Who makes it, from the compiled module on, where a graph says it.
        """
        ...

    def failed(self, error: Exception) -> None:
        """Something could not be recorded."""
        ...


class GraphRecordings:
    """Stands before the methods of ``torch.cuda.CUDAGraph`` between ``install`` and ``remove``.

    Args:
        observers: All there are at a time.
        looking: Those of them that want to be told now.
        changed: Called when a recording has begun or ended: during one, operators are to be met.
        forward: Told of a forward, and of who made it.
        backward: Told of a backward.
    """

    def __init__(
        self,
        observers: Sequence[Audience],
        looking: Sequence[Audience],
        changed: Callable[[], None],
        forward: Callable[[OperatorCall, MadeBy], object],
        backward: Callable[[OperatorBackward], None],
    ) -> None:
        self._observers, self._looking = observers, looking
        self._changed, self._forward, self._backward = changed, forward, backward
        self._theirs: dict[str, Callable[..., Any]] = {}
        # By thread; a backward that is recorded with its forward runs in another one.
        self._records: dict[int, _Record] = {}
        self._warm_ups = _Record()
        # Forwards by where their O is: their backward is given it there.
        self._by_address: WeakValueDictionary[int, OperatorCall] = WeakValueDictionary()

    @property
    def running(self) -> bool:
        """Whether a graph is being recorded."""
        return bool(self._records)

    def install(self) -> None:
        """Begin."""
        if self._theirs:
            return
        graphs: Any = torch.cuda.CUDAGraph
        for name in _METHODS:
            self._theirs[name] = getattr(graphs, name)
            setattr(graphs, name, _before(self._theirs[name], getattr(self, f"_{name}")))

    def remove(self) -> None:
        """Leave the methods as they were. What is in graphs stays there."""
        graphs: Any = torch.cuda.CUDAGraph
        while self._theirs:
            setattr(graphs, *self._theirs.popitem())
        self._warm_ups = _Record()

    def takes(self) -> bool:
        """Whether what runs on a GPU now is copied, to be told of later."""
        return bool(self._theirs) and (in_cuda_graph() or (bool(self._looking) and in_cuda_graphs_memory()))

    def tell_of_warm_ups(self) -> None:
        """Tell of what ran since the last time."""
        warm_ups, self._warm_ups = self._warm_ups, _Record()
        for tell in warm_ups.tells:
            tell()

    def at_replays(self, observer: Audience, what: Callable[[], None]) -> None:
        """Do something for an observer, as long as it is there, whenever the graph that is recorded is replayed."""
        if (record := self._record()) is not None:
            record.others.append((observer, what))

    def forward(self, call: OperatorCall) -> None:
        """Have a forward told of later, at each replay of the graph that is recorded."""
        self._harmless(self._record_forward, call)

    def backward(self, back: OperatorBackward) -> None:
        """The same of a backward."""
        self._harmless(self._record_backward, back)

    def _harmless(self, what: Callable[..., None], *args: Any) -> None:
        try:
            what(*args)
        except Exception as error:  # never an exception in somebody's training
            for observer in tuple(self._observers):
                observer.failed(error)

    def _copies(self) -> _Copies:
        wanted = [observer.sequences for observer in tuple(self._observers)]
        return _Copies(None if None in wanted else max((n for n in wanted if n is not None), default=None))

    def _record_forward(self, call: OperatorCall) -> None:
        everybody = tuple(self._observers)
        made_by = next((found for observer in everybody if (found := observer.made_by(call.module))), None)
        if made_by is None or (record := self._record()) is None:
            return
        address, copies = call.o.data_ptr(), self._copies()
        told = call.copied(copies.of, copies.whole)
        copies.make()
        self._by_address[address] = told
        record.tells.append(lambda: self._forward(told, made_by))

    def _record_backward(self, back: OperatorBackward) -> None:
        if (record := self._record()) is None:
            return
        copies = self._copies()
        forward = self._by_address.get(back.o.data_ptr())
        # Which forward's it is, is told by that one's own tensors.
        o = copies.of(back.o) if forward is None else forward.o
        lse = back.lse if forward is None else forward.lse
        lse = copies.of(lse) if lse is not None and forward is None else lse
        told = back.copied(copies.of, o, lse)
        copies.make()
        record.tells.append(lambda: self._backward(told))

    def _record(self) -> _Record | None:
        """Of the graph that is being recorded, or of what runs to warm up."""
        if not in_cuda_graph():
            return self._warm_ups
        only = next(iter(self._records.values())) if len(self._records) == 1 else None
        return self._records.get(threading.get_ident(), only)

    def _capture_begin(
        self, theirs: Callable[..., Any], graph: Any, pool: Any = None, capture_error_mode: str = "global", **more: Any
    ) -> Any:
        self._records[threading.get_ident()] = _Record()
        self._changed()
        return theirs(graph, pool=pool, capture_error_mode=capture_error_mode, **more)

    def _capture_end(self, theirs: Callable[..., Any], graph: Any) -> Any:
        record = self._records.pop(threading.get_ident(), None)
        try:
            return theirs(graph)
        finally:
            if record is not None:
                setattr(graph, _RECORD, record)
                self._changed()

    def _replay(self, theirs: Callable[..., Any], graph: Any) -> Any:
        result = theirs(graph)
        record: _Record | None = getattr(graph, _RECORD, None)
        if self._looking:
            self.tell_of_warm_ups()  # they came before
            for tell in [] if record is None else record.tells:
                tell()
        for observer, what in [] if record is None else record.others:
            if observer in self._observers:
                what()
        return result


def _before(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def run(graph: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(theirs, graph, *args, **kwargs)

    return run


class _Copies:
    """Copies of the first sequences of tensors [B, H, …]; in a graph that is recorded, every replay makes them anew."""

    def __init__(self, sequences: int | None) -> None:
        self._sequences = sequences
        self._pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}

    def of(self, t: Tensor) -> Tensor:
        """Where the copy of the first sequences will be."""
        return self.whole(t[: self._sequences] if t.dim() > 2 else t)  # a mask [Tq, Tk] is that of all

    def whole(self, t: Tensor) -> Tensor:
        """Where the copy of all of it will be."""
        part = unrepeated(t.detach())
        copy = _outside_the_graphs_memory(part)
        copies, parts = self._pairs.setdefault(part.dtype, ([], []))
        copies.append(copy)
        parts.append(part)
        return copy

    def make(self) -> None:
        """Copy."""
        with torch.no_grad():
            for copies, parts in self._pairs.values():
                torch._foreach_copy_(copies, parts)
        self._pairs.clear()


def _outside_the_graphs_memory(like: Tensor) -> Tensor:
    """Memory that no graph uses: another thread, which records none, gets it."""
    made: list[Tensor] = []

    def make() -> None:
        stay_out_of_graphs()
        with torch.no_grad(), torch.cuda.device(like.device):
            # No torch.empty: under deterministic algorithms that is filled, on a stream that nobody waits for.
            storage = torch.UntypedStorage(like.nbytes, device=like.device)  # type: ignore[no-untyped-call]
            made.append(torch.empty(0, dtype=like.dtype, device=like.device).set_(storage).view(like.shape))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]
