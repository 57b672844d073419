"""Progress of a long piece of work, and of one part of it among several."""

from __future__ import annotations

from collections.abc import Callable

# Called with (done, total) in whatever units the work counts.
Progress = Callable[[int, int], None]


def part_of(progress: Progress | None, number: int, count: int) -> Progress | None:
    """For part ``number`` (from 0) of ``count`` equal ones, whatever units each counts in; None without a listener."""
    if progress is None:
        return None
    return lambda done, total: progress(100 * number + 100 * done // max(total, 1), 100 * count)
