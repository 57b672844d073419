"""From the device to files, in a thread of its own: brings tensors to the host, writes them or keeps them in a ring."""

from __future__ import annotations

import math
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.errors import InputError
from attn_diag.watching.live.call import CallPlace
from attn_diag.watching.live.claim import Claim, RemoteClaim
from attn_diag.watching.live.losses import Losses, reason_of
from attn_diag.watching.live.stream_capture import stay_out_of_graphs

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9.]+")
# So many bytes at most wait for the end of a step to be handed over.
_TOGETHER = 2**26
_newest: list[Taken] = []


@dataclass
class Taken:
    """Tensors taken from one call, already cloned."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]
    step: int
    name: str
    ready: torch.cuda.Event | None = None
    """After it they are complete on their device."""

    @property
    def bytes(self) -> int:
        """Size of the tensors."""
        return bytes_of(self.tensors.values())

    def capture(self) -> Capture:
        """What a file of it holds; made when somebody asks, as whatever a thread does holds up the training loop."""
        return Capture.from_tensors(self.tensors, **self.metadata)

    def seal(self) -> Taken:
        """Note on the current stream that everything has been enqueued."""
        device = next(iter(self.tensors.values())).device
        if device.type == "cuda":
            self.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.ready.record(torch.cuda.current_stream(device))
        return self


def file_name(place: CallPlace, rank: int) -> str:
    """What the file of a call is called."""
    module = "" if place.module is None else "_" + _NOT_IN_NAMES.sub("-", place.module or "model")
    return f"step{place.step:06d}_layer{place.layer:02d}{module}_call{place.call}_rank{rank}.safetensors"


@dataclass
class Writer:
    """A queue and the thread that works on it. The training loop only enqueues; it never waits."""

    keep: Callable[[Taken], None]
    limit: int
    losses: Losses = field(default_factory=Losses)
    # Its put() may interrupt itself, as a signal handler that dumps a ring does, and needs nobody's lock after a fork.
    _queue: queue.SimpleQueue[Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    _pending: int = 0
    # Each waking of the thread takes the interpreter from the training loop: several are handed over at a time.
    _together: deque[tuple[Taken, int]] = field(default_factory=deque)
    _held: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict)

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._work, name="attn-diag writer", daemon=True)
        self._thread.start()

    def submit(self, taken: Taken) -> bool:
        """Take it for ``hand_over``; False where more than ``limit`` bytes are waiting already, and it is not taken."""
        size = taken.bytes
        with self._lock:
            if self._pending + size > self.limit:
                return False
            self._pending += size
            self._together.append((taken, size))
            self._held += size
        if self._held > _TOGETHER:
            self.hand_over()
        return True

    def hand_over(self) -> None:
        """Enqueue what was submitted."""
        jobs: list[tuple[Taken, int]] = []
        self._held = 0
        # Not by iteration: a signal handler may come in between.
        with suppress(IndexError):
            while True:
                jobs.append(self._together.popleft())
        if jobs:
            self._queue.put(lambda: self._bring_all(jobs))

    def call(self, what: Callable[[], None]) -> None:
        """Have the thread do something, after what is submitted already."""
        self.hand_over()
        self._queue.put(what)

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until everything enqueued so far is done; whether it was in time."""
        if self._thread is None or threading.current_thread() is self._thread:
            return True
        done = threading.Event()
        self.call(done.set)
        return done.wait(timeout)

    def close(self) -> None:
        """Finish what is enqueued, and end the thread."""
        if self._thread is not None:
            self.hand_over()
            if self._thread.is_alive():  # not so in a forked child
                self.drain()  # an interrupted join() takes the thread for dead (CPython 3.11)
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job()
            except Exception as error:
                self.losses.add(reason_of(error))

    def _bring_all(self, jobs: list[tuple[Taken, int]]) -> None:
        for taken, size in jobs:
            try:
                self._bring(taken, size)
            except Exception as error:
                self.losses.add(reason_of(error))

    def _bring(self, taken: Taken, size: int) -> None:
        try:
            if taken.ready is not None:
                device = next(iter(taken.tensors.values())).device
                if device not in self._streams:
                    stay_out_of_graphs()
                    self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream = self._streams[device]
                with torch.cuda.stream(stream):
                    stream.wait_event(taken.ready)
                    # A blocking copy on a stream of our own: only this thread waits for it.
                    taken.tensors = {name: t.to("cpu") for name, t in taken.tensors.items()}
                taken.ready = None
        finally:
            with self._lock:
                self._pending -= size
        self.keep(taken)


class Shelf:
    """Where captures end up, in the writer's thread: in files, or in a ring that becomes files when somebody asks.

    Args:
        folder: of the files.
        ring: how many steps to keep in memory; 0: write everything.
        max_bytes: of the ring: older steps are forgotten.
        losses: what was not written.

    Attributes:
        written: the files so far, in order.
        claim: of the folder, once there is one.
    """

    def __init__(self, folder: Path, ring: int, max_bytes: int, losses: Losses) -> None:
        self.written: dict[Path, None] = {}
        self.folder = folder
        self.claim: Claim | RemoteClaim | None = None
        self._max_bytes, self._losses = max_bytes, losses
        self._ring: deque[list[Taken]] | None = deque(maxlen=ring) if ring else None
        self._step: list[Taken] = []
        self._broken = ""

    def keep(self, taken: Taken) -> None:
        """Take one call's tensors, which are on the host now."""
        if self._step and self._step[0].step != taken.step:
            self.step_over()
        self._step.append(taken)
        if self._ring is None:
            self._write(taken)
        elif not self._broken and (broken := _nonfinite(taken)):
            self._broken = f"{broken} of {taken.name} is not finite"

    def step_over(self) -> None:
        """Note that the newest step is complete."""
        if not self._step:
            return
        global _newest
        _newest = self._step
        if self._ring is not None:
            self._ring.append(self._step)
            self._make_room()
        self._step = []
        # Only now: the rest of the step belongs to it.
        if self._broken:
            reason, self._broken = self._broken, ""
            self.dump(reason)

    def _make_room(self) -> None:
        assert self._ring is not None

        def held(ring: Iterable[list[Taken]]) -> int:
            return sum(taken.bytes for step in ring for taken in step)

        while len(self._ring) > 1 and held(self._ring) > self._max_bytes:
            self._ring.popleft()

    def dump(self, reason: str) -> None:
        """Write what the ring holds; without a ring everything is written anyway."""
        if self._ring is None:
            return
        self.step_over()
        steps = list(self._ring)
        self._ring.clear()
        for taken in (taken for step in steps for taken in step):
            notes = "; ".join(filter(None, (taken.metadata.get("notes"), f"written because {reason}")))
            self._write(replace(taken, metadata={**taken.metadata, "notes": notes}))

    def _write(self, taken: Taken) -> None:
        path = self.folder / taken.name
        if self.claim is not None and self.claim.lost():
            self._losses.add(f"{self.folder} was removed, and is another run's now")
            return
        try:
            self.written[taken.capture().save(path)] = None
        except Exception as error:
            # Of a full disk there is one thing to say, not one for each file.
            self._losses.add(reason_of(error).replace(str(path), f"into {self.folder}"))


def newest() -> list[Capture]:
    """Return the captures of the newest complete step, of whatever captures or captured."""
    captures: list[Capture] = []
    for taken in _newest:
        with suppress(InputError):  # whoever looks in a debugger gets the others
            captures.append(taken.capture())
    return sorted(captures, key=lambda c: (c.metadata.layer or 0, c.metadata.extra["call"]))


def _nonfinite(taken: Taken) -> str | None:
    """Name the first output of the kernel that holds a NaN or Inf."""
    for name in ("o", "do", "dq", "dk", "dv"):
        tensor = taken.tensors.get(name)
        if tensor is None or not tensor.numel():
            continue
        # A NaN is both; one operation, where isfinite() is several and makes copies.
        low, high = tensor.aminmax()
        if not (math.isfinite(low) and math.isfinite(high)):
            return name
    return None


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Add up the tensors' sizes."""
    return sum(t.numel() * t.element_size() for t in tensors)
