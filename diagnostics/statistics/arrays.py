"""Arrays of several data sets: renumbered labels, and sets of one size as one array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_Number = TypeVar("_Number", bound=np.generic)

# Up to so many times as many numbers as labels are counted instead of sorted, which takes a few times as long.
_SPARSE = 16
# So many numbers are computed at once: they stay in a core's cache, and each array of them is below the 128 KiB from
# which on the allocator asks the system for fresh pages, whose faults cost some ten times as much as the arithmetic.
_AT_ONCE = 2**13


def dense(labels: Ints) -> Ints:
    """The labels [n] renumbered from 0 in their order, without gaps: ``np.unique``'s inverse."""
    low, high = (int(labels.min()), int(labels.max())) if len(labels) else (0, -1)
    if high - low >= _SPARSE * len(labels):
        return np.unique(labels, return_inverse=True)[1]
    places = labels - low
    there = np.zeros(high - low + 1, dtype=np.bool_)
    there[places] = True
    return (np.cumsum(there) - 1)[places]


def side_by_side(arrays: Sequence[Array]) -> Iterator[tuple[list[int], Array]]:
    """Arrays [n] of one length as one, [m, n], and which they are."""
    alike: dict[int, list[int]] = {}
    for i, array in enumerate(arrays):
        alike.setdefault(len(array), []).append(i)
    for n, every in alike.items():
        step = max(1, _AT_ONCE // max(n, 1))
        for start in range(0, len(every), step):
            places = every[start : start + step]
            yield places, stacked([arrays[i] for i in places])


def padded(array: Array | Ints) -> Array:
    """With zeros at the end, which change no sum, so that there are few lengths: eight or fewer between powers of 2.

    A length depends on no other array, and so does the order in which numbers are added.
    """
    step = 1 << max(len(array).bit_length() - 4, 0)
    missing = -len(array) % step
    return np.concatenate([array, np.zeros(missing)]) if missing else array.astype(np.float64, copy=False)


def stacked(arrays: Sequence[Array]) -> Array:
    """Arrays [n] as one, [m, n]; a single one is not copied."""
    return np.concatenate(arrays).reshape(len(arrays), -1) if len(arrays) > 1 else arrays[0][None]


def end_to_end(arrays: Sequence[npt.NDArray[_Number]]) -> npt.NDArray[_Number]:
    """Arrays [n] one behind the other; a single one is not copied."""
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]


def in_parts(n: int, sets: int = 1) -> Iterator[slice]:
    """Slices of the n numbers of each of some data sets that are computed at once."""
    step = max(1, _AT_ONCE // max(sets, 1))
    return (slice(start, min(start + step, n)) for start in range(0, n, step))
