"""A long piece of work: its progress, and independent heads of it on several CPU cores."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import TypeVar

import torch

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# Called with (done, total) in whatever units the work counts.
Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """Nobody listens."""


def part_of(progress: Progress | None, number: int, count: int) -> Progress | None:
    """For part ``number`` (from 0) of ``count`` equal ones, whatever units each counts in; None without a listener."""
    if progress is None:
        return None
    return lambda done, total: progress(100 * number + 100 * done // max(total, 1), 100 * count)


# New objects that make a collection of the young ones due (144 heads make 27,000, all of which stay, and no tensor is
# in a cycle); collections of these before a full one, which never comes.
_YOUNG, _NEVER = 50_000, 2**31 - 1


class _Collections:
    """The thresholds of garbage collections while some blocks of ``full_collections_later`` run."""

    def __init__(self) -> None:
        self.lock, self.blocks = Lock(), 0
        self.before = self.meanwhile = gc.get_threshold()

    def enter(self) -> None:
        with self.lock:
            if not self.blocks:
                self.before = young, middle, _ = gc.get_threshold()
                # 0 switches them off.
                gc.set_threshold(max(young, _YOUNG) if young else 0, middle, _NEVER)
                self.meanwhile = gc.get_threshold()
            self.blocks += 1

    def leave(self) -> None:
        with self.lock:
            self.blocks -= 1
            if not self.blocks and gc.get_threshold() == self.meanwhile:  # else somebody has set others since
                gc.set_threshold(*self.before)


_collections = _Collections()


@contextmanager
def full_collections_later() -> Iterator[None]:
    """Full garbage collections wait until the block ends, and those of young objects come less often.

    A full one looks at all that torch and others have imported, 400,000 objects in 0.2 s. Whoever has switched
    collections off keeps them off; of blocks that are nested, or run by several threads, the last puts the thresholds
    back.
    """
    _collections.enter()
    try:
        yield
    finally:
        _collections.leave()


def map_in_order(work: Callable[[_Item], _Result], items: Sequence[_Item], *, parallel: bool) -> Iterator[_Result]:
    """``work`` of every item, results in the items' order.

    Args:
        work: What is done with an item.
        items: The items; independent of each other.
        parallel: Spread them over as many threads as torch uses, each running torch single-threaded, which beats
            several threads inside each small operation; torch's number of threads is put back afterwards. Results do
            not depend on it beyond the order in which a matrix product adds.
    """
    threads = torch.get_num_threads()
    if not parallel or threads < 2 or len(items) < 2:
        yield from map(work, items)
        return
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(work, items)
    finally:
        torch.set_num_threads(threads)
