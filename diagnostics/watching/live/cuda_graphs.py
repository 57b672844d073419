"""Attention operators inside CUDA graphs: met once, while a graph is recorded, and told of whenever it is replayed.

A replay runs no code of ours. So copies of what an operator was given and returned are recorded with it, into memory of
our own, as the graph's is used again before a replay is over. They stay in the graph, whoever listens. Met are graphs
that are recorded while somebody listens, in another capture mode than "global" (which forbids any allocation
meanwhile): those of torch.compile, as with mode="reduce-overhead".
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attn_diag.watching.live.operators import OperatorBackward, OperatorCall
from attn_diag.watching.live.places import MadeBy

_METHODS = ("capture_begin", "capture_end", "replay")
# The attribute of a graph that was recorded while we were there.
_RECORD = "_attn_diag_record"


class Audience(Protocol):
    """Who hears of graphs."""

    def recording_begins(self) -> None:
        """A graph is about to be recorded: its operators are to be met."""
        ...

    def recording_ended(self) -> None:
        """It is recorded."""
        ...

    def listens(self) -> bool:
        """Whether to tell of what is replayed now."""
        ...

    def replayed(self, call: OperatorCall, made_by: MadeBy) -> None:
        """A forward has run."""
        ...

    def went_back(self, back: OperatorBackward) -> None:
        """A backward has run."""
        ...


@dataclass
class _Record:
    """What a graph holds of ours, in the order in which it runs."""

    told: list[Callable[[], None]] = field(default_factory=list)


class GraphRecordings:
    """Stands before the methods of ``torch.cuda.CUDAGraph`` between ``install`` and ``remove``.

    Args:
        audience: Who is told.

    Attributes:
        unknown: Replays of graphs that were not met when they were recorded.
    """

    def __init__(self, audience: Audience) -> None:
        self._audience = audience
        self.unknown = 0
        self._theirs: dict[str, Callable[..., Any]] = {}
        # By thread; a backward that is recorded with its forward runs in another one.
        self._records: dict[int, _Record] = {}
        # Forwards by where their O is: their backward is given it there.
        self._by_address: WeakValueDictionary[int, OperatorCall] = WeakValueDictionary()

    def install(self) -> None:
        """Begin."""
        if self._theirs:
            return
        self.unknown = 0
        graphs: Any = torch.cuda.CUDAGraph
        for name in _METHODS:
            self._theirs[name] = getattr(graphs, name)
            setattr(graphs, name, self._before(self._theirs[name], getattr(self, f"_{name}")))

    def remove(self) -> None:
        """Leave the methods as they were. What is in graphs stays there."""
        graphs: Any = torch.cuda.CUDAGraph
        while self._theirs:
            setattr(graphs, *self._theirs.popitem())

    @staticmethod
    def _before(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(theirs)
        def run(graph: Any, *args: Any, **kwargs: Any) -> Any:
            return ours(theirs, graph, *args, **kwargs)

        return run

    def _capture_begin(
        self,
        theirs: Callable[..., Any],
        graph: Any,
        pool: Any = None,
        capture_error_mode: str = "global",
        **more: Any,
    ) -> Any:
        if capture_error_mode != "global":
            self._audience.recording_begins()
            self._records[threading.get_ident()] = _Record()
        return theirs(graph, pool=pool, capture_error_mode=capture_error_mode, **more)

    def _capture_end(self, theirs: Callable[..., Any], graph: Any) -> Any:
        record = self._records.pop(threading.get_ident(), None)
        try:
            return theirs(graph)
        finally:
            if record is not None:
                setattr(graph, _RECORD, record)
                self._audience.recording_ended()

    def _replay(self, theirs: Callable[..., Any], graph: Any) -> Any:
        result = theirs(graph)
        record: _Record | None = getattr(graph, _RECORD, None)
        self.unknown += record is None
        if record is not None and record.told and self._audience.listens():
            for tell in record.told:
                tell()
        return result

    @property
    def _record(self) -> _Record | None:
        """Of the graph that is being recorded."""
        only = next(iter(self._records.values())) if len(self._records) == 1 else None
        return self._records.get(threading.get_ident(), only)

    def forward(self, call: OperatorCall, made_by: MadeBy, sequences: int | None) -> None:
        """Have a forward that is being recorded told of at each replay.

        Args:
            call: It.
            made_by: Who makes it.
            sequences: So many of the batch are looked at; None: all.
        """
        if (record := self._record) is None:
            return
        copies = _Copies(sequences)
        told = call.with_tensors(copies.of)
        copies.record()
        self._by_address[call.o.data_ptr()] = told
        record.told.append(lambda: self._audience.replayed(told, made_by))

    def backward(self, back: OperatorBackward, sequences: int | None) -> None:
        """The same of a backward."""
        if (record := self._record) is None:
            return
        copies = _Copies(sequences)
        o, lse = back.given["o"], back.given["lse"]
        forward = self._by_address.get(o.data_ptr())
        # Which forward's it is, is told by that one's own tensors.
        known = (copies.of(o), copies.of(lse)) if forward is None else (forward.o, forward.lse)
        told = back.with_tensors(copies.of, *known)
        copies.record()
        record.told.append(lambda: self._audience.went_back(told))


class _Copies:
    """Copies of the first sequences of tensors [B, H, …], made anew by every replay of the graph being recorded."""

    def __init__(self, sequences: int | None) -> None:
        self._sequences = sequences
        self._pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}

    def of(self, t: Tensor | None) -> Tensor | None:
        """Where the copy will be."""
        if t is None:
            return None
        part = t.detach()[: self._sequences] if t.dim() > 2 else t.detach()
        for axis in range(part.dim()):  # what is repeated along an axis is there once
            part = part.narrow(axis, 0, 1) if part.stride(axis) == 0 else part
        copy = _outside_the_graphs_memory(part)
        copies, parts = self._pairs.setdefault(part.dtype, ([], []))
        copies.append(copy)
        parts.append(part)
        return copy

    def record(self) -> None:
        """Have the graph make them."""
        for copies, parts in self._pairs.values():
            torch._foreach_copy_(copies, parts)


def _outside_the_graphs_memory(like: Tensor) -> Tensor:
    """Memory that no graph uses: another thread, which records none, gets it."""
    made: list[Tensor] = []

    def make() -> None:
        with torch.no_grad(), torch.cuda.device(like.device):
            made.append(torch.empty_like(like))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]
