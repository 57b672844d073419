"""What ``attn_diag.capture`` makes: files that ``inspect`` reads, from a running model."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Container, Iterable
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

from torch import Tensor, nn

from attn_diag.captures.capture import Capture, Captures
from attn_diag.captures.hops import is_of_hop
from attn_diag.captures.places import place
from attn_diag.captures.sums import ASKED, RANKS
from attn_diag.errors import InputError
from attn_diag.printing import printable
from attn_diag.results.wording import plural
from attn_diag.watching.live import flex_graphs, intercept
from attn_diag.watching.live.call import AttentionCall, CallPlace, Part
from attn_diag.watching.live.choices import require_container, require_model
from attn_diag.watching.live.claim import IfTaken, claim
from attn_diag.watching.live.losses import Losses, reason_of
from attn_diag.watching.live.run import rank, run_id, world_size
from attn_diag.watching.live.sums import OutputSums, clones
from attn_diag.watching.live.untraced import passed_by, untraced
from attn_diag.watching.live.watch import Watch
from attn_diag.watching.live.writer import Shelf, Taken, Writer, bytes_of, file_name, newest

_log = logging.getLogger("attn_diag")
_GIB = 2**30
# Device memory that may wait for the host at one time.
_IN_FLIGHT = 4 * _GIB
_LAST_TIMEOUT = 60.0

Steps = Container[int] | Callable[[int], bool]

_open: list[Recorder] = []
# Of this module's list; a signal handler may come while it is held.
_lock = threading.RLock()
# In a forked child: what belongs to the parent. Nothing of it is freed, as a device's tensors cannot be there.
_of_parent: list[Any] = []


class Recorder:
    """See ``capture``.

    Attributes:
        dropped: why calls were not recorded, or not wholly -> how many.
    """

    def __init__(
        self,
        model: nn.Module | None,
        path: str | os.PathLike[str],
        *,
        steps: Steps | None,
        layers: Container[int] | None,
        heads: Iterable[int] | None,
        batch: Iterable[int] | None,
        calls: Container[int] | None,
        ring: int,
        max_bytes: int,
        first_step: int,
        if_taken: IfTaken,
        hops: bool,
        sums: bool,
    ) -> None:
        for name, chosen in (("layers", layers), ("calls", calls), ("steps", None if callable(steps) else steps)):
            require_container(name, chosen)
        require_model(model)
        if ring < 0 or max_bytes < 1:
            raise InputError(f"ring must be 0 or more and max_bytes 1 or more, got {ring} and {max_bytes}")
        if sums and model is None:
            raise InputError("sums of output projections are found in a model: give it, or leave sums out")
        if if_taken not in get_args(IfTaken):
            raise InputError(f'if_taken must be "stop" or "another", got {if_taken!r}')
        self._losses = Losses()
        self.dropped = self._losses.counts
        self._asked, self._if_taken = place(path), if_taken
        self._model, self._first_step, self._step = model, first_step, first_step
        self._steps, self._layers, self._calls = steps, layers, calls
        self._part, self._ring, self._hops = Part(heads, batch), ring, hops
        self._sums = OutputSums(self._take_sum) if sums else None
        if sums:  # what comes behind a call is seen where it runs
            self.may_be_late = False
        self._max_bytes, self._bytes, self._full = max_bytes, 0, False
        self._taken: dict[CallPlace, Taken] = {}
        self._shelf = Shelf(self._asked, ring, max_bytes, self._losses)
        self._writer = self._new_writer()
        self._run, self._chosen = "", False
        self._where: tuple[int, int] | None = None  # this rank, and of how many: asked once a step
        self._watch: Watch | None = None
        flex_graphs.prepare(self)  # the model may be compiled before start()

    # A context, or start() and close().

    def start(self) -> Self:
        """Begin.

        Raises:
            InputError: ``path`` cannot be written, or is another run's and ``if_taken`` is "stop"; ``RANK`` or
                ``WORLD_SIZE`` is no whole number.
        """
        if self._watch is not None:
            raise InputError(f"capturing into {self.folder} is running already; make another attn_diag.capture")
        # What a Capture imports when it is made: in the writer's thread that would hold up a captured step.
        import_module("attn_diag.captures.hardware")
        self._run = run_id(self._asked.name)
        self._shelf.claim = claimed = claim(self._asked, rank(), self._run, self._if_taken)
        self._shelf.folder = claimed.folder
        try:
            self._watch = Watch(self._model, self, self._first_step).start()
            if self._sums is not None and self._model is not None:
                self._sums.watch(self._model, self._watch.guarded)
        except BaseException:
            self._finish()
            raise
        self._writer.start()
        with _lock:
            _open.append(self)
        atexit.register(self._at_exit)
        return self

    def close(self) -> None:
        """Remove every hook and wait until what was captured is written."""
        watch, self._watch = self._watch, None
        flex_graphs.leave(self)
        if watch is None:
            self._finish()  # again, where Ctrl-C ended the wait
            return
        watch.stop()
        if self._sums is not None:
            self._sums.close()
        self._step = watch.step
        with _lock:
            _open.remove(self)
        self._submit_open()
        self._writer.call(self._shelf.step_over)
        self._finish()
        if not watch.tell_of_nothing() and not self._chosen:
            seen = ", ".join(map(str, watch.layers)) or f"none in the {watch.step} steps, of which none was chosen"
            _log.warning("nothing was captured: no call fitted steps, layers and calls; seen were layers %s", seen)

    def _finish(self) -> None:
        self._writer.close()
        if self._shelf.claim is not None:
            self._shelf.claim.release()
            self._shelf.claim = None
        atexit.unregister(self._at_exit)

    def forked(self) -> None:
        """Be closed, in a forked child, which has none of the parent's threads: all there is is the parent's."""
        global _lock
        _lock = threading.RLock()
        _open.clear()
        _of_parent.append((self._watch, self._writer, self._taken))
        self._watch, self._writer, self._taken = None, self._new_writer(), {}
        if self._shelf.claim is not None:
            self._shelf.claim.leave()
            self._shelf.claim = None
        atexit.unregister(self._at_exit)

    def _new_writer(self) -> Writer:
        return Writer(self._shelf.keep, _IN_FLIGHT, self._losses)

    def _at_exit(self) -> None:
        # After start() nobody tells of an exception; the interpreter keeps the one that ends the program.
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None:
            self._submit_open()
            self.dump(f"{type(error).__name__} was raised")
        self.close()

    def __enter__(self) -> Self:
        # Inside of a function that is compiled dynamo would trace all of this.
        started: Self = untraced(self.start)
        return started

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        untraced(self._leave, kind)

    def _leave(self, kind: type[BaseException] | None) -> None:
        if kind is not None and not issubclass(kind, GeneratorExit):
            self._submit_open()
            self.dump(f"{kind.__name__} was raised")
        self.close()

    def __repr__(self) -> str:
        state = "not started" if not self._run else "" if self._watch is not None else "closed at "
        parts = [state if not self._run else f"{state}step {self.step}"]
        parts += [f"{plural(len(self.written), 'file')} written"] if self._run else []
        # Written on a trigger alone: no file of it is no loss.
        parts += [f"a ring of {plural(self._ring, 'step')}"] if self._ring else []
        parts += [f"{plural(sum(self.dropped.values()), 'call')} dropped"] if self.dropped else []
        return printable(f"<capture into {self.folder}: {', '.join(parts)}>")

    @property
    def folder(self) -> Path:
        """Of the files; once started perhaps another than was asked for."""
        return self._shelf.folder

    @property
    def written(self) -> list[Path]:
        """The files so far: each is complete."""
        return list(self._shelf.written)

    @property
    def step(self) -> int:
        """The current step; once closed, the one that was."""
        return self._step if self._watch is None else self._watch.step

    def end_step(self) -> None:
        """Say that a step is over, where no torch.optim optimizer does."""
        if self._watch is not None:
            self._watch.end_step()

    def dump(self, reason: str) -> None:
        """Write what the ring holds; without a ring everything is written anyway. Returns at once."""
        if self._ring:
            self._writer.call(lambda: self._shelf.dump(reason))

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until everything captured so far is on disk (or in the ring); whether it was in time."""
        return self._writer.drain(timeout)

    # What the watch calls.

    @property
    def sequences(self) -> int | None:
        """All that is kept is of the first so many items of a batch; None: no such number."""
        return self._part.sequences

    may_be_late = may_wait = True

    def wants_step(self, step: int) -> bool:
        """Whether this step is captured."""
        if self._full:
            return False
        if self._steps is None:
            return True
        return bool(self._steps(step)) if callable(self._steps) else step in self._steps

    def wants(self, place: CallPlace) -> bool:
        """Whether this call is captured."""
        chosen = self._layers is None or place.layer in self._layers
        return chosen and (self._calls is None or place.call in self._calls) and self.wants_step(place.step)

    def failed(self, error: Exception) -> None:
        """Count it; the watch has told of it."""
        self._chosen = True
        self._losses.add(reason_of(error), told=True)

    def forward(self, call: AttentionCall) -> None:
        """Clone what is chosen of q, k, v, o, LSE, x and w_q."""
        self._chosen = True
        if reason := call.refused or self._part.missing(call):
            self._losses.add(f"{call.place.module or 'attention'}: {reason}")
            return
        tensors, metadata = self._part.clones(call, self._tensors(call)), self._metadata(call)
        size = bytes_of(tensors.values())
        if call.place.gradients:
            # Those to come: of q, k, v and o, and perhaps of the projection's output.
            late = ("q", "k", "v", "o", *(("q",) if call.x is not None else ()))
            size += bytes_of(tensors[name] for name in late)
            size += 3 * bytes_of(t for name, t in tensors.items() if is_of_hop(name))
        if self._bytes + size > self._max_bytes:
            self._full = True
            self._losses.add(f"the limit of {self._max_bytes / 2**20:,.4g} MiB is reached (max_bytes)")
            return
        self._bytes += size
        self._taken[call.place] = Taken(tensors, metadata, call.place.step, file_name(call.place, metadata["rank"]))
        if self._sums is not None:
            self._sums.expect(call)
        call.let_go()

    def backward(self, call: AttentionCall) -> None:
        """Clone what is chosen of the gradients, and hand the call over."""
        taken = self._taken.pop(call.place, None)
        if taken is not None:
            late = {name: t for name, t in self._tensors(call).items() if name in _LATE or is_of_hop(name)}
            taken.tensors |= self._part.clones(call, late)
            taken.metadata["notes"] = call.metadata_notes()
            self._submit(taken)

    def step_ended(self, step: int) -> None:  # noqa: ARG002 - the protocol
        """Hand over the calls without a backward, which are complete as they are."""
        self._submit_open()
        self._writer.call(self._shelf.step_over)
        self._where = None
        if self._ring:
            # The limit is that of every step here, and of the ring.
            self._bytes, self._full = 0, False

    # Ourselves.

    def _take_sum(self, call: AttentionCall, tensors: dict[str, Tensor], said: dict[str, str]) -> None:
        taken, size = self._taken.get(call.place), bytes_of(tensors.values())
        if taken is None:
            return
        if self._bytes + size > self._max_bytes:
            self._losses.add(f"the limit of {self._max_bytes / 2**20:,.4g} MiB is reached (max_bytes)")
            return
        self._bytes += size
        taken.tensors |= clones(call, self._part, tensors)
        taken.metadata["extra"] |= said
        ranks = said.get(RANKS, "").split(",")
        if call.head_offset == 0 and (number := str(taken.metadata["rank"])) in ranks[1:]:
            # Ranks whose parts are added up have other heads, though nothing that ran before told which.
            taken.metadata["head_offset"] += ranks.index(number) * call.q.shape[1]

    def _tensors(self, call: AttentionCall) -> dict[str, Tensor]:
        return call.tensors() | (call.hops.tensors() if self._hops and call.hops is not None else {})

    def _metadata(self, call: AttentionCall) -> dict[str, Any]:
        metadata = call.metadata()
        if self._where is None:
            self._where = rank(), world_size()
        number, count = self._where
        extra = {**metadata["extra"], "run": self._run, "world_size": str(count)}
        extra |= {ASKED: "yes"} if self._sums is not None else {}
        extra["batch_items"] = ",".join(map(str, self._part.items(call)))
        return {**metadata, "head_offset": call.head_offset + self._part.heads(call)[0], "rank": number, "extra": extra}

    def _submit_open(self) -> None:
        intercept.backlog.tell()
        for call in list(self._taken):
            if (taken := self._taken.pop(call, None)) is not None:  # another thread's backward may have come
                self._submit(taken)

    def _submit(self, taken: Taken) -> None:
        try:
            accepted = self._writer.submit(taken.seal())
        except Exception as error:  # the other calls of the step are none the worse
            self._losses.add(reason_of(error))
            return
        if not accepted:
            self._losses.add("the disk is slower than the captures: choose fewer steps, layers or batch items")


def last() -> list[Capture]:
    """The captures of the newest complete step, of whatever ``attn_diag.capture`` runs or ran; rings are written.

    For a debugger: ``attn_diag.inspect_captures(attn_diag.last())``. Empty where nothing was captured.
    """
    trigger("attn_diag.last() was called")
    with _lock:
        running = list(_open)
    for recorder in running:
        recorder.drain(_LAST_TIMEOUT)
    return Captures(newest())


def trigger(reason: str) -> None:
    """Have every running ``capture`` write its ring."""
    with _lock:
        running = list(_open)
    for recorder in running:
        recorder.dump(reason)


_LATE = ("do", "dq", "dk", "dv", "own_dk", "own_dv", "dq_pre", "dsinks", "dmask")


for _ours in (Recorder.__init__, Recorder.__enter__, Recorder.__exit__):
    passed_by(_ours.__code__)
