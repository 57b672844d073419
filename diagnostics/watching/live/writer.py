"""Brings tensors from the device to the host and hands them on, in a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger("attn_diag")


@dataclass
class Taken:
    """Tensors taken from one call, already cloned; ``ready`` after which they are complete on their device."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]
    step: int
    name: str
    ready: torch.cuda.Event | None = None

    @property
    def bytes(self) -> int:
        """Their size."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def seal(self) -> Taken:
        """Note, on the current stream, that everything has been enqueued."""
        device = next(iter(self.tensors.values())).device
        if device.type == "cuda":
            self.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.ready.record(torch.cuda.current_stream(device))
        return self


@dataclass
class Writer:
    """A queue and the thread that works on it. The training loop only enqueues; it never waits."""

    keep: Callable[[Taken], None]
    limit: int
    _queue: queue.Queue[Callable[[], None] | None] = field(default_factory=queue.Queue)
    _pending: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict)

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._work, name="attn-diag writer", daemon=True)
        self._thread.start()

    def submit(self, taken: Taken) -> bool:
        """Enqueue; False where more than ``limit`` bytes are waiting already, and nothing is enqueued."""
        size = taken.bytes
        with self._lock:
            if self._pending + size > self.limit:
                return False
            self._pending += size
        self._queue.put(lambda: self._bring(taken, size))
        return True

    def call(self, what: Callable[[], None]) -> None:
        """Have the thread do something, after what is enqueued already."""
        self._queue.put(what)

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until everything enqueued so far is done; whether it was in time."""
        if self._thread is None or threading.current_thread() is self._thread:
            return True
        done = threading.Event()
        self._queue.put(done.set)
        return done.wait(timeout)

    def close(self) -> None:
        """Finish what is enqueued, and end the thread."""
        if self._thread is not None:
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
                _log.warning("a capture was lost, training goes on: %s: %s", type(error).__name__, error)

    def _bring(self, taken: Taken, size: int) -> None:
        try:
            if taken.ready is not None:
                device = next(iter(taken.tensors.values())).device
                if device not in self._streams:
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
