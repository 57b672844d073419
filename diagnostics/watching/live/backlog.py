"""Calls that are recorded where they run and read later: what that costs the run is little more than the copies.

A call of SDPA at a place that was read to its end in an earlier step brings nothing new but its tensors, and whether
somebody wants it is known before the step. So its way is short: who runs is read off the stack, what is wanted of the
tensors is copied below autograd, and a record is appended. At the end of the step (and before anything that is not
recorded so, and where records hold too many bytes) the records are told in their order, as the calls would have been.
Whatever is new, or of another kind, is told of at once.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor, compiler
from torch._C._dynamo import eval_frame

from attn_diag.errors import InputError
from attn_diag.watching.live.frames import Site, running
from attn_diag.watching.live.gradients_to_come import GradientToCome
from attn_diag.watching.live.kernels import FusedOperator
from attn_diag.watching.live.observer import Observer
from attn_diag.watching.live.operator_calls import Arguments, OperatorBackward, OperatorCall
from attn_diag.watching.live.places import MadeBy
from attn_diag.watching.live.records import KnownPlace, Record, RecordedBackward
from attn_diag.watching.live.sites import Fields
from attn_diag.watching.live.untraced import passed_by, untraced
from attn_diag.watching.live.whole_copies import stream_now, whole

# Copies of so many bytes may wait to be told of.
_MOST_BYTES = 2**28
# What is recorded: operators whose arguments begin with q, k and v, [B, H, T, D], and whose results are dq, dk, dv.
_FAMILY = "aten::_scaled_dot_product_"
_gradients_wanted, _task, _transforms = (
    torch.is_grad_enabled,
    torch._C._current_graph_task_id,
    torch._C._functorch.peek_interpreter_stack,
)
# What dynamo does about the frames that this thread calls; None: nothing.
_tracing = eval_frame.get_eval_frame_callback
_release: Callable[[int], None] = torch.UntypedStorage._free_weak_ref
_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


class Thread(threading.local):
    """What runs in this thread now.

    Attributes:
        tap: Of the attention function that runs, if it knows more than the operator underneath.
        site: Its kind.
        hops: Of a ring, the operators that ran.
        calls: How many calls were told of.
        above: The place of SDPA that runs now and is recorded, and what it was given; the operator underneath takes it.
        taken: The record of it, once the operator underneath has run.
        wanted: Whether somebody wants the call that is recorded.
        number: How many calls its place had recorded when that was asked.
    """

    tap: Any = None
    site: Any = None
    hops: Any = None
    calls: int = 0
    above: tuple[KnownPlace, tuple[Any, ...], dict[str, Any]] | None = None
    taken: Record | None = None
    wanted: bool = False
    number: int = 0


class Backlog:
    """Records calls, and has them told of later.

    Args:
        thread: What runs.
        observers: All there are at a time.
        looking: Those of them that want to be told now.
        forward: Told of a call: who made it, and what reads it if somebody wants it; returns who counts it.
        backward: Told of a backward.

    Attributes:
        open: whether calls are recorded now.
        telling: whether some are told of now.
    """

    def __init__(
        self,
        thread: Thread,
        observers: Sequence[Observer],
        looking: Sequence[Observer],
        forward: Callable[[MadeBy, Callable[[], Fields]], list[tuple[Observer, Any]]],
        backward: Callable[[OperatorBackward], None],
    ) -> None:
        self._thread, self._observers, self._looking = thread, observers, looking
        self._forward, self._backward = forward, backward
        self.open = self.telling = False
        self._places: dict[tuple[int, Site | None], KnownPlace] = {}
        self._records: deque[Record | RecordedBackward | GradientToCome] = deque()
        # By the identity of O's storage, which nobody else has while there is a weak reference: that, and the record.
        self._waiting: dict[int, tuple[int, Record]] = {}
        self._bytes = 0
        self._sequences: int | None = None
        self._lock, self._order = threading.RLock(), threading.RLock()

    # On the way of a call.

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether SDPA, which is about to run, is recorded by the operator underneath; then ``ended`` is to follow."""
        thread, q = self._thread, args[0]
        try:
            if thread.site is not None or thread.hops is not None or not _gradients_wanted() or q.dim() != 4:
                return False
            place = self._place(q, sys._getframe(1))
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            if place is None or not (mask is None or (type(mask) is Tensor and not mask.requires_grad)):
                return False
            thread.above = place, args, kwargs
        except Exception as error:  # never an exception in somebody's training
            untraced(self._failed, error)
            return False
        return True

    def ended(self, result: Any) -> bool:
        """Whether SDPA was recorded, which has returned ``result`` (None: it raised an exception)."""
        thread = self._thread
        record, above = thread.taken, thread.above
        thread.taken = thread.above = None
        if record is not None:
            record.awaits = result is not None and result.requires_grad
        return above is None

    def ran(
        self, operator: FusedOperator, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> bool:
        """Whether the operator, which has run, was recorded.

        Args:
            operator: Which.
            arguments: Its arguments with their defaults.
            args: The dispatcher's keys, and what it was given.
            kwargs: Likewise.
            result: What it returned.
        """
        thread = self._thread
        above, place = thread.above, None
        thread.above = None
        try:
            if above is not None:
                place = above[0]
            elif thread.tap is None and thread.site is None and thread.hops is None:
                place = self._place(args[1], sys._getframe(1))
            if place is None or not operator.name.startswith(_FAMILY):
                return False
            # Calls are told of in the order of their numbers.
            with self._order:
                wanted = thread.wanted
                if place.calls != thread.number:  # another thread's call came between
                    wanted = untraced(place.asks)
                    if wanted and not place.ready:
                        untraced(self._unknown)
                        return False
                place.calls += 1
                record = Record()
                record.place, record.wanted, record.awaits, record.stream = place, wanted, True, 0
                o = result[operator.o]
                if wanted:
                    append, failed = self._records.append, self._failed
                    record.copy(operator, arguments, args, kwargs, result, above, self._sequences, append, failed)
                    self._bytes += place.bytes
                for observer, _, _ in place.told:
                    observer.projections.passed()
                thread.taken = None if above is None else record
                storage = o.untyped_storage()
                if (known := self._waiting.get(storage._cdata)) is not None:
                    _release(known[0])
                self._waiting[storage._cdata] = storage._weak_ref(), record
                self._records.append(record)
                thread.calls += 1
        except Exception as error:  # never an exception in somebody's training
            untraced(self._failed, error)
            return False
        return True

    def went_back(self, o: Any, args: tuple[Any, ...], result: Any) -> bool:
        """Whether the backward, which has run, was that of a recorded call; it is recorded then.

        Args:
            o: The O that it was given.
            args: The dispatcher's keys, dO, and more.
            result: What it returned.
        """
        try:
            entry = self._waiting.pop(o.untyped_storage()._cdata, None)
            if entry is None:
                return False
            _release(entry[0])
            record = entry[1]
            if not record.wanted:
                return True
            do = args[1]
            if do.is_cuda and _capturing():
                return False
            first, n = (do, *result[:3]), self._sequences
            if n is not None and do.shape[0] > n:
                first = tuple(None if t is None else t[:n] for t in first)
            back = RecordedBackward()
            back.record = record
            back.gradients = tuple([None if t is None else t.clone(memory_format=whole) for t in first])
            back.stream = stream_now(do) if do.is_cuda else 0
            self._records.append(back)
            if record.to_come is not None and record.place.made_with is not None:
                record.place.made_with.goes_back(record.to_come)
        except Exception as error:  # never an exception in somebody's training
            untraced(self._failed, error)
            return False
        return True

    def _place(self, q: Any, frame: FrameType) -> KnownPlace | None:
        if compiler._is_compiling_flag or _task() != -1 or _transforms() is not None or (q.is_cuda and _capturing()):
            return None
        if self._bytes > _MOST_BYTES:
            untraced(self.tell)
        if (found := running(frame)) is None:
            return None
        place = self._places.get((id(found[0]), found[1]))
        if place is None or place.module is not found[0]:
            return None
        # Another thread may run at this place too.
        self._thread.number = place.calls
        self._thread.wanted = wanted = place.asks() if _tracing() is None else untraced(place.asks)
        if wanted and not place.ready:
            untraced(self._unknown)
            return None
        return place

    # Off the way.

    def learn(self, frame: FrameType, met: Sequence[tuple[Observer, Any]], operator: OperatorCall | None) -> None:
        """Record calls at this place from now on, if one that was met and told of shows that this is all there is."""
        try:
            self._learn(frame, met, operator)
        except Exception as error:  # never an exception in somebody's training
            self._failed(error)

    def _learn(self, frame: FrameType, met: Sequence[tuple[Observer, Any]], operator: OperatorCall | None) -> None:
        if not self.open or operator is None or not operator.name.startswith(_FAMILY) or not met:
            return
        if operator.given.get("dropout_p"):  # what it kept is asked of the operator, not of a record
            return
        if (found := running(frame)) is None:
            return
        module, site = found
        learned = [(observer, one, observer.learns(one)) for observer, one in met]
        caller = met[0][1].caller
        inner = None if module is None else module._modules.get("_orig_mod", module)
        if caller.site != site or caller.owner not in (module, inner):
            return
        if any(how is None or one.caller != caller for _, one, how in learned):
            return
        place = KnownPlace(module, MadeBy(caller, recomputing=False, gradients=True))
        place.told = [(observer, one.place.layer, one.place.module) for observer, one, _ in learned]
        made = [how[1] for _, _, how in learned if how is not None and how[1] is not None]
        place.ready = all(how is not None and how[0] for _, _, how in learned)
        place.made_with = made[0] if made else None
        for one in made:
            one.serves(place)
        place.ready &= all(one.layer is made[0].layer for one in made)
        place.calls = met[0][1].place.call + 1
        q, k, v = operator.inputs
        with_gradient = 4 if place.made_with is None or place.made_with.through is None else 5
        place.bytes = (with_gradient * q.nbytes + 2 * k.nbytes + 2 * v.nbytes) // len(q)
        place.bytes *= len(q) if self._sequences is None else min(len(q), self._sequences)
        self._places[id(module), site] = place

    def begin(self) -> None:
        """A step begins, or others look."""
        self.tell()
        with suppress(KeyError):  # it is empty; another thread's backward may take one meanwhile
            while True:
                _release(self._waiting.popitem()[1][0])
        self.open = bool(self._looking) and all(observer.may_be_late for observer in self._observers)
        for place in list(self._places.values()):  # another thread may learn of one meanwhile
            place.open = self.open
        if self.open:
            wanted = [observer.sequences for observer in self._looking]
            self._sequences = None if None in wanted else max((n for n in wanted if n is not None), default=None)
            places = list(self._places.values())
            for place in places:
                place.calls, place.first = 0, None
            if any(not place.ready and place.asks() for place in places):
                self._unknown()

    def _unknown(self) -> None:
        for observer in self._looking:
            observer.projections.unknown()

    def forget(self) -> None:
        """Know no place any more: who is there has changed."""
        self.tell()
        self._forget()

    def drop(self) -> None:
        """Be empty, in a forked child: nothing there is told of."""
        self.open = False
        self._lock, self._order = threading.RLock(), threading.RLock()
        self._records.clear()
        self._places.clear()
        self._waiting.clear()

    def tell(self) -> None:
        """Tell of what has been recorded."""
        if not self._records:
            return
        with self._lock, torch.no_grad():
            if self.telling:
                return
            told = self._thread.calls
            self._bytes, self.telling = 0, True
            try:
                while self._records:
                    record = self._records.popleft()
                    try:
                        self._tell(record)
                    except Exception as error:  # never an exception in somebody's training
                        self._failed(error)
            finally:
                self._thread.calls, self.telling = told, False

    def _tell(self, record: Record | RecordedBackward | GradientToCome) -> None:
        with record.stream_of_copies():
            if isinstance(record, Record):
                self._tell_forward(record)
            elif isinstance(record, GradientToCome):
                record.tell()
            else:
                self._backward(record.back())

    def _tell_forward(self, record: Record) -> None:
        place = record.place
        met = self._forward(place.made_by, record.fields if record.wanted else _lost)
        lost = any(one.wanted for _, one in met) and not record.wanted
        if record.wanted and record.to_come is not None:
            record.to_come.leave()  # where nobody waits
        places = {(observer, one.place.layer, one.place.module) for observer, one in met}
        if lost or not places <= set(place.told):
            self._forget()

    def _forget(self) -> None:
        for place in list(self._places.values()):
            place.open = False
        self._places.clear()

    def _failed(self, error: Exception) -> None:
        self._thread.above = self._thread.taken = None
        self._forget()
        for observer in tuple(self._looking):
            observer.failed(error)


def _lost() -> Fields:
    """Instead of reading a call without copies, which was not to be wanted."""
    raise InputError("a call that is wanted came where none was in the steps before")


for _ours in (
    Backlog.begins, Backlog.ended, Backlog.ran, Backlog.went_back, Backlog._place,
):  # fmt: skip
    passed_by(_ours.__code__)
