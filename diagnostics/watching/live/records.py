"""What is kept of a call that is recorded where it runs, and of the place in somebody's code that makes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from attn_diag.watching.live.call import CallPlace
from attn_diag.watching.live.gradients_to_come import GradientToCome
from attn_diag.watching.live.kernels import FusedOperator
from attn_diag.watching.live.linear_layers import MadeWith
from attn_diag.watching.live.observer import Observer
from attn_diag.watching.live.operator_calls import Arguments, OperatorBackward, OperatorCall
from attn_diag.watching.live.places import MadeBy
from attn_diag.watching.live.sites import SDPA, Fields, bind
from attn_diag.watching.live.tap import Tap
from attn_diag.watching.live.untraced import passed_by, untraced
from attn_diag.watching.live.whole_copies import copied_on, stream_now, unrepeated, whole

COPIED = frozenset({"q", "k", "v", "o", "lse", "mask", "x", "w_q"})


class KnownPlace:
    """A place in somebody's code whose calls are recorded.

    Attributes:
        module: The module that runs.
        made_by: Who makes its calls.
        told: Who counts them, under which layer's number and module's name.
        open: Whether they are in this step.
        first: The first call of this step, as those see it who count it.
        calls: How many were recorded in this step.
        ready: Whether it is known what makes its q.
        made_with: That; None: nothing that is kept.
        bytes: Of a record's copies, as far as is known.
    """

    __slots__ = (
        "bytes",
        "calls",
        "first",
        "made_by",
        "made_with",
        "module",
        "open",
        "ready",
        "told",
    )

    def __init__(self, module: nn.Module | None, made_by: MadeBy) -> None:
        self.module, self.made_by = module, made_by
        self.told: list[tuple[Observer, int, str | None]] = []
        self.ready, self.open, self.calls, self.bytes = False, True, 0, 0
        self.made_with: MadeWith | None = None
        self.first: list[tuple[Observer, CallPlace]] | None = None

    def asks(self) -> bool:
        """Whether somebody wants the next call."""
        places = self.first
        if self.calls or places is None:
            number = self.calls
            places = [(one, CallPlace(one.step, layer, name, number, gradients=True)) for one, layer, name in self.told]
            self.first = self.first if number else places
        # By hand: it is asked on the way of every call.
        for observer, place in places:
            try:
                if observer.would_want(place):
                    return True
            except Exception as error:
                observer.failed(error)
        return False


class Record:
    """One call, with copies of what is wanted of its tensors; of one that nobody wants, none.

    Attributes:
        place: Who made it.
        wanted: Whether there are copies.
        awaits: Whether autograd may ask for its gradients.
        call: Of the operator, arguments' defaults, arguments and results, the tensors of interest copied.
        above: Of SDPA, what only it knows: features of q and of v, the mask, and its further arguments.
        made: x as its product saw it, w_q (None: it is sharded), and whether a bias alone is added; None: not known.
        to_come: Where more lies between that product and q: the gradient there.
        version: Of O, when it had been made.
        stream: On which the copies are made.
    """

    __slots__ = ("above", "awaits", "call", "made", "place", "stream", "to_come", "version", "wanted")

    place: KnownPlace
    wanted: bool
    awaits: bool
    call: tuple[FusedOperator, Arguments, tuple[Any, ...], dict[str, Any], list[Any]]
    above: tuple[int, int, Tensor | None, tuple[Any, ...], dict[str, Any]] | None
    made: tuple[Tensor, Tensor | None, bool] | None
    to_come: GradientToCome | None
    version: int
    stream: int

    def copy(
        self,
        operator: FusedOperator,
        arguments: Arguments,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        above: tuple[KnownPlace, tuple[Any, ...], dict[str, Any]] | None,
        n: int | None,
        keep: Callable[[GradientToCome], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Copy what is wanted of a call's tensors, below autograd.

        Args:
            operator: What has run.
            arguments: Its arguments with their defaults.
            args: The dispatcher's keys, and what it was given.
            kwargs: Likewise.
            result: What it returned.
            above: Of SDPA the place, and what it was given.
            n: So many sequences are wanted; None: all.
            keep: Given the gradient at the projection, when it comes.
            failed: Told of a failure of ours until then.
        """
        _, q, k, v, *rest = args
        o, lse, made = result[operator.o], result[operator.lse], self.place.made_with
        batch, rows = q.shape[0], q.shape[2]
        self.version, self.made, self.to_come, self.above = o._version, None, None, None
        if made is not None and (found := made.ran()) is not None:
            x, y, width, dtype, ours = found
            if x.dim() == 2 and x.shape[0] == batch * rows:
                x = x.view(batch, rows, -1)
            if type(x) is Tensor and x.dim() == 3 and x.shape[0] == batch and x.shape[1] == rows:
                if q.is_cuda and not ours:  # made earlier, perhaps on another stream
                    x.record_stream(torch.cuda.current_stream(x.device))
                if n is not None and batch > n:
                    x, ours = x[:n], False
                if x.dtype is not dtype:
                    x = x.to(dtype)
                elif not ours:
                    x = x.clone(memory_format=whole)
                w_q = made.weight(width)
                through = made.through
                biased = made.biased and through is None
                self.made = x, None if w_q is None else w_q.clone(memory_format=whole), biased
                if through is not None:
                    to_come = GradientToCome(through, rows * (batch if n is None else n), keep, failed)
                    self.to_come = to_come if made.hands_over(y, to_come) else None
        if n is not None and batch > n:
            q, k, v, o, lse = q[:n], k[:n], v[:n], o[:n], lse[:n]
        others = kwargs
        if above is not None:
            _, args, more = above
            mask = args[3] if len(args) > 3 else more.get("attn_mask")
            if mask is not None:
                mask, rest = untraced(_copied, mask, n, batch), [None if type(t) is Tensor else t for t in rest]
                others = {name: None if type(t) is Tensor else t for name, t in kwargs.items()}
                more = {name: t for name, t in more.items() if name != "attn_mask"}
            self.above = args[0].shape[3], args[2].shape[3], mask, args[4:], more
        else:
            for t in (*rest, *kwargs.values()):
                if type(t) is Tensor:
                    rest = [untraced(_copied, t, n, batch) if type(t) is Tensor else t for t in rest]
                    others = {
                        name: untraced(_copied, t, n, batch) if type(t) is Tensor else t for name, t in kwargs.items()
                    }
                    break
        given = (q.clone(memory_format=whole), k.clone(memory_format=whole), v.clone(memory_format=whole), *rest)
        results = [None] * len(result)
        results[operator.o] = o.clone(memory_format=whole)
        results[operator.lse] = lse.clone(memory_format=whole)
        self.call = operator, arguments, given, others, results
        if q.is_cuda:
            self.stream = stream_now(q)

    def fields(self) -> Fields:
        """What an ``AttentionCall`` holds of it, and the operator's call."""
        call = OperatorCall(*self.call)
        call.recorded(self, differentiable=self.awaits, to_come=self.to_come)
        more: Fields = {"operator": call, "projection": self.made, "copied": COPIED}
        if self.above is None:
            return call.fields() | more
        d, dv, mask, args, kwargs = self.above
        q, k, v = call.inputs
        given = bind(SDPA.read, SDPA, (q[..., :d], k[..., :d], v[..., :dv], mask, *args), kwargs)
        tap = Tap()
        tap.operator = call
        found = SDPA.read(given, call.o[..., :dv], tap) or {}
        del found["graph"], found["within"]
        return found | more

    def stream_of_copies(self) -> AbstractContextManager[Any]:
        """The stream on which they were made: whoever hands them on notes there that they are complete."""
        return copied_on(self.stream, self.call[2][0].device) if self.wanted else nullcontext()


class RecordedBackward:
    """The backward of a recorded call, with copies of its tensors."""

    __slots__ = ("gradients", "record", "stream")

    record: Record
    gradients: tuple[Tensor | None, ...]
    """do, dq, dk and dv."""
    stream: int

    def stream_of_copies(self) -> AbstractContextManager[Any]:
        """As that of ``Record``."""
        return copied_on(self.stream, self.record.call[2][0].device)

    def back(self) -> OperatorBackward:
        """What the operator's backward would have told."""
        do, *gradients = self.gradients
        operator, _, _, _, results = self.record.call
        assert do is not None
        found = OperatorBackward.known(results[operator.o], results[operator.lse], do, gradients)
        found.forward = self.record
        return found


def _copied(t: Tensor, sequences: int | None, batch: int) -> Tensor:
    """A copy of the first sequences of a mask; what is repeated along an axis is there once."""
    t = unrepeated(t)
    if sequences is not None and t.dim() > 2 and t.shape[0] == batch > sequences:
        t = t[:sequences]
    return t.clone(memory_format=whole)


for _ours in (KnownPlace.asks, Record.copy):
    passed_by(_ours.__code__)
