"""``attn_diag.capture``: files that ``inspect`` reads, from a running model."""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from attn_diag.captures.capture import Capture, Captures
from attn_diag.errors import InputError
from attn_diag.watching.live.call import AttentionCall, CallPlace
from attn_diag.watching.live.choices import indices, require_container
from attn_diag.watching.live.notices import COMPILED, UNSEEN, UNSTEPPED
from attn_diag.watching.live.ranks import rank, run_id, world_size
from attn_diag.watching.live.watch import Watch
from attn_diag.watching.live.writer import Taken, Writer

_log = logging.getLogger("attn_diag")
_GIB = 2**30
# Device memory that may wait for the host at one time.
_IN_FLIGHT = 4 * _GIB
_LAST_TIMEOUT = 60.0

Steps = Container[int] | Callable[[int], bool]

_open: list[Recorder] = []
_newest: list[Capture] = []
_lock = threading.Lock()


class Recorder:
    """See ``capture``. ``written``: the files so far; ``dropped``: calls that were not recorded, and why."""

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
    ) -> None:
        for name, chosen in (("layers", layers), ("calls", calls), ("steps", None if callable(steps) else steps)):
            require_container(name, chosen)
        if model is not None and not isinstance(model, nn.Module):
            raise InputError(f"model must be a torch.nn.Module, or None for all calls, got {type(model).__name__}")
        if ring < 0 or max_bytes < 1:
            raise InputError(f"ring must be 0 or more and max_bytes 1 or more, got {ring} and {max_bytes}")
        self.folder = Path(path)
        self.written: list[Path] = []
        self.dropped: dict[str, int] = {}
        self._model, self._first_step = model, first_step
        self._steps, self._layers, self._calls = steps, layers, calls
        self._heads, self._batch = indices("heads", heads), indices("batch", batch)
        self._ring: deque[list[tuple[str, Capture]]] | None = deque(maxlen=ring) if ring else None
        self._max_bytes, self._bytes, self._full = max_bytes, 0, False
        self._taken: dict[tuple[int, int], Taken] = {}
        self._step: list[tuple[str, Capture]] = []
        self._writer = Writer(self._keep, limit=_IN_FLIGHT)
        self._run = ""
        self._chosen, self._broken = False, ""
        self._watch: Watch | None = None

    # A context, or start() and close().

    def start(self) -> Self:
        """Begin. Raises InputError where ``path`` cannot be written, or holds captures of this rank already."""
        if self._watch is not None:
            raise InputError(f"capturing into {self.folder} is running already; make another attn_diag.capture")
        _prepare(self.folder, rank())
        # What a Capture imports when it is made: in the writer's thread that would hold up a captured step.
        import_module("attn_diag.captures.hardware")
        self._run = run_id(self.folder.name)
        watch = Watch(self._model, self, self._first_step)
        watch.start()
        if watch.compiled:
            watch.warn_once(COMPILED)
        self._watch = watch
        self._writer.start()
        with _lock:
            _open.append(self)
        atexit.register(self._at_exit)
        return self

    def close(self) -> None:
        """Remove every hook and wait until what was captured is written."""
        watch, self._watch = self._watch, None
        if watch is None:
            self._writer.close()  # again, where Ctrl-C ended the wait
            return
        if watch.never_stepped:
            _log.warning(UNSTEPPED)
        watch.stop()
        with _lock:
            _open.remove(self)
        self._submit_open()
        self._writer.call(self._step_over)
        self._writer.close()
        atexit.unregister(self._at_exit)
        if not watch.calls_seen:
            _log.warning(UNSEEN)
        elif not self._chosen:
            seen = ", ".join(map(str, watch.layers))
            _log.warning("nothing was captured: no call fitted steps, layers and calls; seen were layers %s", seen)

    def _at_exit(self) -> None:
        # After start() nobody tells of an exception; the interpreter keeps the one that ends the program.
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None:
            self._submit_open()
            self.dump(f"{type(error).__name__} was raised")
        self.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None and not issubclass(kind, GeneratorExit):
            self._submit_open()
            self.dump(f"{kind.__name__} was raised")
        self.close()

    def __repr__(self) -> str:
        lost = f", {sum(self.dropped.values())} calls dropped" if self.dropped else ""
        return f"<capture into {self.folder}: step {self.step}, {len(self.written)} files written{lost}>"

    @property
    def step(self) -> int:
        """The current step."""
        return self._first_step if self._watch is None else self._watch.step

    def end_step(self) -> None:
        """Say that a step is over, where no torch.optim optimizer does."""
        if self._watch is not None:
            self._watch.end_step()

    def dump(self, reason: str) -> None:
        """Write what the ring holds; without a ring everything is written anyway. Returns at once."""
        if self._ring is not None:
            self._writer.call(lambda: self._empty_ring(reason))

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until everything captured so far is on disk (or in the ring); whether it was in time."""
        return self._writer.drain(timeout)

    # What the watch calls.

    def wants_step(self, step: int) -> bool:
        """Whether this step is captured."""
        if self._full:
            return False
        if self._steps is None:
            return True
        return bool(self._steps(step)) if callable(self._steps) else step in self._steps

    def wants(self, place: CallPlace) -> bool:
        """Whether this call is."""
        chosen = self._layers is None or place.layer in self._layers
        return chosen and (self._calls is None or place.call in self._calls) and self.wants_step(place.step)

    def forward(self, call: AttentionCall) -> None:
        """Clone what is chosen of q, k, v, o, LSE, x and w_q."""
        self._chosen = True
        if call.refused is not None:
            self._drop(f"{call.place.module or 'attention'}: {call.refused}")
            return
        for name, wanted, there in (("heads", self._heads, call.q.shape[1]), ("batch", self._batch, len(call.q))):
            if wanted is not None and wanted[0] >= there:
                self._drop(f"{call.place.module or 'attention'}: {name} {wanted}, but the call has 0 to {there - 1}")
                return
        tensors, metadata = self._select(call, call.tensors()), self._metadata(call)
        size = _bytes_of(tensors)
        if call.place.gradients:
            # Those to come: of q, k, v and o, and perhaps of the projection's output.
            late = ("q", "k", "v", "o", *(("q",) if call.x is not None else ()))
            size += _bytes_of({str(i): tensors[name] for i, name in enumerate(late)})
        if self._bytes + size > self._max_bytes:
            self._full = True
            self._drop(f"the limit of {self._max_bytes / 2**20:,.4g} MiB is reached (max_bytes)")
            return
        self._bytes += size
        self._taken[call.place.layer, call.place.call] = Taken(tensors, metadata, call.place.step, self._name(call))
        call.let_go()

    def backward(self, call: AttentionCall) -> None:
        """Clone what is chosen of the gradients, and hand the call over."""
        taken = self._taken.pop((call.place.layer, call.place.call), None)
        if taken is not None:
            late = {name: t for name, t in call.tensors().items() if name in _LATE}
            taken.tensors |= self._select(call, late)
            self._submit(taken)

    def step_ended(self, step: int) -> None:  # noqa: ARG002 - the protocol
        """Calls without a backward are complete as they are."""
        self._submit_open()
        self._writer.call(self._step_over)
        if self._ring is not None:
            # The limit is that of every step here, and of the ring.
            self._bytes, self._full = 0, False

    # Ourselves.

    def _select(self, call: AttentionCall, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Clones of the chosen part of the call's tensors ``given``."""
        batch, heads = call.q.shape[:2]
        group = heads // call.k.shape[1]
        items, (first, last) = self._chosen_items(call), self._chosen_heads(call)
        together = items == list(range(items[0], items[-1] + 1))
        parts: dict[str, Tensor] = {}
        for name, t in given.items():
            part = t
            if name == "w_q":
                parts[name] = _clone(t[first * call.q.shape[3] : last * call.q.shape[3]])
                continue
            if name == "mask":
                part = t[(None,) * (4 - t.dim())]
                # Expanded axes hold one mask.
                for axis in range(4):
                    part = part.narrow(axis, 0, 1) if part.stride(axis) == 0 else part
            if part.shape[0] == batch and (name != "mask" or batch > 1):
                part = part[items[0] : items[-1] + 1] if together else torch.stack([part[b] for b in items])
            if name in ("k", "v", "dk", "dv"):
                part = part[:, first // group : last // group]
            elif name != "x" and part.shape[1] == heads:
                part = part[:, first:last]
            parts[name] = _clone(part.to(call.x_dtype) if name == "x" else part)
        return parts

    def _chosen_items(self, call: AttentionCall) -> list[int]:
        batch = call.q.shape[0]
        return list(range(batch)) if self._batch is None else [b for b in self._batch if b < batch]

    def _chosen_heads(self, call: AttentionCall) -> tuple[int, int]:
        """The first, and the one after the last: whole groups, as a key head's gradient belongs to all of its group."""
        heads = call.q.shape[1]
        if not self._heads:
            return 0, heads
        group = heads // call.k.shape[1]
        first = self._heads[0] // group * group
        return first, min(-(-(self._heads[-1] + 1) // group) * group, heads)

    def _metadata(self, call: AttentionCall) -> dict[str, Any]:
        metadata = call.metadata()
        extra = {**metadata["extra"], "run": self._run, "world_size": str(world_size())}
        extra["batch_items"] = ",".join(map(str, self._chosen_items(call)))
        return {**metadata, "head_offset": self._chosen_heads(call)[0], "rank": rank(), "extra": extra}

    def _name(self, call: AttentionCall) -> str:
        where = call.place
        module = "" if where.module is None else "_" + re.sub(r"[^A-Za-z0-9.]+", "-", where.module or "model")
        return f"step{where.step:06d}_layer{where.layer:02d}{module}_call{where.call}_rank{rank()}.safetensors"

    def _submit_open(self) -> None:
        taken, self._taken = self._taken, {}
        for one in taken.values():
            self._submit(one)

    def _submit(self, taken: Taken) -> None:
        if not self._writer.submit(taken.seal()):
            self._drop("the disk is slower than the captures: choose fewer steps, layers or batch items")

    def _drop(self, reason: str) -> None:
        if reason not in self.dropped:
            _log.warning("not captured: %s", reason)
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    # In the writer's thread.

    def _keep(self, taken: Taken) -> None:
        capture = Capture.from_tensors(taken.tensors, **taken.metadata)
        if self._step and self._step[0][1].metadata.step != taken.step:
            self._step_over()
        self._step.append((taken.name, capture))
        if self._ring is None:
            self._write(taken.name, capture)
        elif not self._broken and (broken := _nonfinite(capture)):
            self._broken = f"{broken} of {taken.name} is not finite"

    def _step_over(self) -> None:
        if not self._step:
            return
        global _newest
        _newest = sorted((c for _, c in self._step), key=lambda c: (c.metadata.layer or 0, c.metadata.extra["call"]))
        if self._ring is not None:
            self._ring.append(self._step)
            self._make_room()
        self._step = []
        # Only now: the rest of the step belongs to it.
        if self._broken:
            reason, self._broken = self._broken, ""
            self._empty_ring(reason)

    def _make_room(self) -> None:
        assert self._ring is not None
        while len(self._ring) > 1 and sum(_size(c) for step in self._ring for _, c in step) > self._max_bytes:
            self._ring.popleft()

    def _empty_ring(self, reason: str) -> None:
        assert self._ring is not None
        self._step_over()
        steps = list(self._ring)
        self._ring.clear()
        for name, capture in (item for step in steps for item in step):
            notes = "; ".join(filter(None, (capture.metadata.notes, f"written because {reason}")))
            self._write(name, replace(capture, metadata=replace(capture.metadata, notes=notes)))

    def _write(self, name: str, capture: Capture) -> None:
        try:
            path = capture.save(self.folder / name)
            if path not in self.written:
                self.written.append(path)
        except InputError as error:
            self._drop(str(error))


def capture(
    model: nn.Module | None,
    path: str | os.PathLike[str],
    *,
    steps: Steps | None = None,
    layers: Container[int] | None = None,
    heads: Iterable[int] | None = None,
    batch: Iterable[int] | None = (0,),
    calls: Container[int] | None = (0,),
    ring: int = 0,
    max_bytes: int = _GIB,
    first_step: int = 0,
) -> Recorder:
    """Capture the attention calls of a model while it runs, as files that ``inspect`` reads.

        with attn_diag.capture(model, "captures/", steps=range(0, 10_000, 500), layers={2}):
            train(model)

    Seen are F.scaled_dot_product_attention (also by way of nn.MultiheadAttention and Hugging Face transformers),
    FlexAttention, flash_attn, transformers' own implementations (eager and registered ones) and
    ``attn_diag.attention``; of each q, k, v, o, the LSE where its kernel gives one, after the backward pass dO, dQ,
    dK, dV and, where the query projection is found, x, w_q and the gradient at its output. Outputs and gradients stay
    the same bits. Attention inside a compiled graph is not seen (a graph that calls it is compiled once more when a
    capture first starts). Where a kernel has no autograd node of its own (math, eager, FlexAttention), gradients are
    the tensors' own: the totals, where q, k or v is used elsewhere too; the file's notes say so.

    Args:
        model: whose calls; None: all calls of the process, without layers' names, x and w_q.
        path: a folder; one file for every step, layer, call and rank.
        steps: which (a container of numbers, or a function of one); None: all. A step ends with an optimizer's
            ``step()``; without any, every forward of the model is one; see ``Recorder.end_step``. Once a loop trains,
            evaluation without gradients is passed over: it neither counts nor is captured. A step that a loss scaler
            skips is none: its calls count to the next.
        layers: their numbers (as in the module's name).
        heads: query heads; the smallest range of whole key groups that holds them is taken.
        batch: which items of the batch; None: all.
        calls: which calls of a layer within a step (0: the first micro-batch); None: all.
        ring: keep the last so many captured steps in memory, and write them only on a trigger: ``attn_diag.last()``,
            ``dump()``, an alarm of ``attn_diag.Monitor``, NaN or Inf in what was captured, an exception.
        max_bytes: stop at so many bytes of captures (of the ring: forget older steps).
        first_step: the number of the first step.

    Returns:
        A context manager (also ``start()`` and ``close()``).

    Raises InputError, on entering, where the folder cannot be written or holds captures of this rank already. Later
    nothing is raised: what goes wrong is logged (logger "attn_diag") and counted in ``dropped``.
    """
    return Recorder(
        model, path, steps=steps, layers=layers, heads=heads, batch=batch, calls=calls, ring=ring,
        max_bytes=max_bytes, first_step=first_step,
    )  # fmt: skip


def last() -> list[Capture]:
    """The captures of the newest complete step, of whatever ``attn_diag.capture`` runs or ran; rings are written.

    For a debugger: ``attn_diag.inspect_captures(attn_diag.last())``. Empty where nothing was captured.
    """
    trigger("attn_diag.last() was called")
    with _lock:
        running = list(_open)
    for recorder in running:
        recorder.drain(_LAST_TIMEOUT)
    return Captures(_newest)


def trigger(reason: str) -> None:
    """Have every running ``capture`` write its ring."""
    with _lock:
        running = list(_open)
    for recorder in running:
        recorder.dump(reason)


def _prepare(folder: Path, rank: int) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = next(folder.glob(f"step*_rank{rank}.safetensors"), None)
    except OSError as error:
        raise InputError(f"cannot capture into {folder}: {error.strerror}; choose another folder") from None
    if not os.access(folder, os.W_OK):
        raise InputError(f"cannot capture into {folder}: no permission to write; choose another folder")
    if there is not None:
        raise InputError(f"{folder} holds captures of an earlier run ({there.name}, …); choose a new folder")


_LATE = ("do", "dq", "dk", "dv", "dq_pre")


def _clone(part: Tensor) -> Tensor:
    """A copy in order of its axes, on the current stream; the original's memory waits for that stream too."""
    if part.is_cuda:
        part.record_stream(torch.cuda.current_stream(part.device))
    return part.clone(memory_format=torch.contiguous_format)


def _nonfinite(capture: Capture) -> str | None:
    """The first output of the kernel that holds a NaN or Inf."""
    for name in ("o", "do", "dq", "dk", "dv"):
        tensor = capture.tensors.get(name)
        if tensor is not None and not bool(tensor[...].isfinite().all()):
            return name
    return None


def _bytes_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _size(capture: Capture) -> int:
    return sum(t[...].numel() * t[...].element_size() for t in capture.tensors.values())
