"""A long piece of work: its progress, and independent heads of it on several CPU cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
