"""The histogram of O's signed error: counted in fine bins by sequence, joined, and coarsened for a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.results.figures import UlpHistogram

Ints = npt.NDArray[np.int64]

_BINS = 64
# Fine bins of a sequence: this wide in ulp (or 3, 9, 27, … times, so that those of other sequences nest in them and
# both are centred on 0), so many on either side of 0.
_FINE_WIDTH = 1 / 32
_FINE_BINS = 2048
# The fine bins reach this many root mean squares: at most 1/1024 of the elements lie outside (Chebyshev).
_REACH = 32
# Errors, in ulp, whose squares can still be added: float64 outputs may be off by more.
_LARGEST = 1e140
# Fraction of the elements that the histogram may leave out on either side: where |O_ref| is next to nothing an error
# of any size is many ulp, and would leave the others a single bar.
_TAIL = 1e-2


@dataclass(frozen=True)
class UlpCounts:
    """Elements by round(error / width), from index ``first`` on, ``width`` = 3^``level`` / 32 ulp."""

    level: int
    first: int
    counts: Ints
    below: int = 0
    above: int = 0

    @classmethod
    def of(cls, errors: Tensor) -> UlpCounts:
        """Of errors in ulp, contiguous, any shape; float64; they are overwritten."""
        flat = errors.reshape(-1)
        if not len(flat):
            return cls(0, 0, np.zeros(0, dtype=np.int64))
        if not math.isfinite(square := float(torch.dot(flat, flat))):
            flat = flat.clamp(-_LARGEST, _LARGEST)
            square = float(torch.dot(flat, flat))
        reach = _REACH * math.sqrt(square / len(flat))
        level = max(0, math.ceil(math.log(reach / (_FINE_BINS * _FINE_WIDTH), 3))) if reach else 0
        # Beyond the last bins on either side lies one more for what is outside.
        index = flat.div_(_FINE_WIDTH * 3**level).round_().clamp_(-_FINE_BINS - 1, _FINE_BINS + 1)
        index = index.add_(_FINE_BINS + 1).int()
        counts = torch.bincount(index, minlength=2 * _FINE_BINS + 3).cpu().numpy()
        return cls(level, -_FINE_BINS, counts[1:-1], int(counts[0]), int(counts[-1])).trimmed()

    def trimmed(self) -> UlpCounts:
        """Without empty bins at either end."""
        full = np.flatnonzero(self.counts)
        if not len(full):
            return UlpCounts(self.level, 0, self.counts[:0], self.below, self.above)
        start, stop = int(full[0]), int(full[-1]) + 1
        return UlpCounts(self.level, self.first + start, self.counts[start:stop].copy(), self.below, self.above)

    @property
    def total(self) -> int:
        """All elements."""
        return int(self.counts.sum()) + self.below + self.above

    def merged(self, factor: int) -> tuple[int, Ints]:
        """First index and counts of bins ``factor`` (odd) times as wide."""
        if not len(self.counts):
            return 0, self.counts
        index = (np.arange(self.first, self.first + len(self.counts)) + factor // 2) // factor
        return int(index[0]), np.bincount(index - index[0], weights=self.counts).astype(np.int64)

    @classmethod
    def join(cls, parts: Sequence[UlpCounts]) -> UlpCounts:
        """The elements of several sequences, in the widest of their bins."""
        level = max(p.level for p in parts)
        merged = [p.merged(3 ** (level - p.level)) for p in parts]
        kept = [(first, counts) for first, counts in merged if len(counts)]
        below, above = sum(p.below for p in parts), sum(p.above for p in parts)
        if not kept:
            return cls(level, 0, np.zeros(0, dtype=np.int64), below, above)
        start, stop = min(first for first, _ in kept), max(first + len(counts) for first, counts in kept)
        total = np.zeros(stop - start, dtype=np.int64)
        for first, counts in kept:
            total[first - start : first - start + len(counts)] += counts
        return cls(level, start, total, below, above)

    def histogram(self) -> UlpHistogram | None:
        """At most 64 bins around what is there; None where nothing is."""
        if not len(self.counts):
            return None
        spare = _TAIL * self.total
        from_below, from_above = self.below + np.cumsum(self.counts), self.above + np.cumsum(self.counts[::-1])
        # The first bin from either side with which more than the tail would be left out.
        low = self.first + min(int(np.searchsorted(from_below, spare, side="right")), len(self.counts) - 1)
        high = self.first + len(self.counts) - 1
        high -= min(int(np.searchsorted(from_above, spare, side="right")), len(self.counts) - 1)
        factor = 1
        while _nearest(high, factor) - _nearest(low, factor) >= _BINS:
            factor += 2
        first, merged = self.merged(factor)
        start, stop = _nearest(low, factor) - first, _nearest(high, factor) + 1 - first
        width = _FINE_WIDTH * 3**self.level * factor
        return UlpHistogram(
            lowest=(first + start - 0.5) * width,
            width=width,
            counts=tuple(merged[start:stop].tolist()),
            below=self.below + int(merged[:start].sum()),
            above=self.above + int(merged[stop:].sum()),
        )


def _nearest(index: int, factor: int) -> int:
    """round(index / factor) for an odd factor, in integers: there are no ties."""
    return (index + factor // 2) // factor
