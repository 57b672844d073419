"""A head's figures: what one sequence leaves behind of them, and how sequences are joined and thinned.

What is kept of a sequence is linear in its rows: two multiplicities and three squared norms a row. All else is counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.head.propagation import GradientParts
from attn_diag.head.stacks import inner
from attn_diag.results.figures import (
    Alignment,
    HeadFigures,
    PredictedError,
    RowRuns,
    RowStrip,
    UlpHistogram,
    UnitPositions,
)
from attn_diag.statistics.arrays import end_to_end

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
        return cls.each(errors[None])[0]

    @classmethod
    def each(cls, errors: Tensor) -> list[UlpCounts]:
        """The same of H heads, [H, ...]."""
        flat = errors.flatten(1)
        if not flat.shape[1]:
            return [cls(0, 0, np.zeros(0, dtype=np.int64))] * len(flat)
        squares = inner(flat, flat).tolist()
        for i, square in enumerate(squares):
            if not math.isfinite(square):
                squares[i] = inner(one := flat[i : i + 1].clamp_(-_LARGEST, _LARGEST), one).item()
        reaches = [_REACH * math.sqrt(square / flat.shape[1]) for square in squares]
        levels = [max(0, math.ceil(math.log(r / (_FINE_BINS * _FINE_WIDTH), 3))) if r else 0 for r in reaches]
        widths = flat.new_tensor([_FINE_WIDTH * 3**level for level in levels])[:, None]
        # Beyond the last bins on either side lies one more for what is outside.
        index, bins = flat.div_(widths).round_().clamp_(-_FINE_BINS - 1, _FINE_BINS + 1), 2 * _FINE_BINS + 3
        index = index.int().add_(_FINE_BINS + 1 + bins * torch.arange(len(flat), device=flat.device)[:, None])
        found = torch.bincount(index.flatten(), minlength=bins * len(flat)).view(-1, bins).cpu().numpy()
        inside, outside = found[:, 1:-1], found[:, [0, -1]].tolist()
        # Without empty bins at either end.
        full = inside > 0
        starts, ends = full.argmax(1).tolist(), (bins - 2 - full[:, ::-1].argmax(1)).tolist()
        return [
            cls(level, start - _FINE_BINS, counts[start:end].copy(), *beyond)
            if counts[start]
            else cls(level, 0, counts[:0], *beyond)
            for level, counts, beyond, start, end in zip(levels, inside, outside, starts, ends, strict=True)
        ]

    @property
    def total(self) -> int:
        """All elements."""
        return int(self.counts.sum()) + self.below + self.above

    def merged(self, factor: int) -> tuple[int, Ints]:
        """First index and counts of bins ``factor`` (odd) times as wide."""
        if not len(self.counts):
            return 0, self.counts
        last = self.first + len(self.counts) - 1
        # A wider bin than that around 0 holds them all, too; 3^level may be beyond 64 bits.
        factor = min(factor, 2 * max(abs(self.first), abs(last)) + 1)
        low, high = _nearest(self.first, factor), _nearest(last, factor)
        starts = np.arange(low, high + 1) * factor - factor // 2 - self.first
        starts[0] = 0
        return low, np.add.reduceat(self.counts, starts)

    @classmethod
    def join(cls, parts: Sequence[UlpCounts]) -> UlpCounts:
        """The elements of several sequences, in the widest of their bins."""
        if len(parts) == 1:
            return parts[0]
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
        so_far = np.cumsum(self.counts)
        spare, inside, last = math.floor(_TAIL * self.total), int(so_far[-1]), len(so_far) - 1
        # The first bin from either side with which more than the tail would be left out.
        low = self.first + min(int(np.searchsorted(so_far, spare - self.below, side="right")), last)
        high = self.first + min(int(np.searchsorted(so_far, inside + self.above - spare)), last)
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


Floats = npt.NDArray[np.float64]

_STRIP_GROUPS = 512
_POSITIONS = 512
_RUNS = 512
_ERROR_GROUPS = 128


@dataclass(frozen=True)
class _RowNorms:
    """Squared norms of a gradient's rows [n]: of its observed and predicted errors (None where unknown), and of it."""

    observed: Floats | None
    predicted: Floats | None
    reference: Floats

    @classmethod
    def of(cls, parts: GradientParts) -> _RowNorms | None:
        """None where neither the observed nor the predicted error is known."""
        delta = parts.parts["delta"]
        if parts.observed is None and delta is None:
            return None
        return cls(
            None if parts.observed is None else _squares(parts.observed - parts.reference),
            None if delta is None else _squares(delta),
            _squares(parts.reference),
        )


def _squares(values: Tensor) -> Floats:
    """Of every row, [..., n]."""
    return np.asarray(torch.linalg.vecdot(values, values).cpu().numpy(), dtype=np.float64)


def row_norms(error: Tensor | None, by_delta: Tensor | None, reference: Tensor) -> list[_RowNorms | None]:
    """Of dQ of H heads: its error and the true one [H, n, D], and the squared norms [H, n] of what delta makes of it.

    None where neither is known.
    """
    if error is None and by_delta is None:
        return [None] * len(reference)
    observed = None if error is None else _squares(error)
    predicted = None if by_delta is None else by_delta.cpu().numpy()
    return [
        _RowNorms(None if observed is None else observed[i], None if predicted is None else predicted[i], squares)
        for i, squares in enumerate(_squares(reference))
    ]


def aligned(contributions: Tensor) -> Floats:
    """Of dO * error of O of H heads, [H, n, Dv]: see ``FigureSums.aligned``, [H, 3, Dv]."""
    signs = contributions.sign()
    balance, nonzero = signs.sum(1), signs.abs_().sum(1)
    found = torch.stack([(balance + nonzero) / 2, nonzero, contributions.sum(1)], 1)
    return np.asarray(found.cpu().numpy(), dtype=np.float64)


@dataclass
class FigureSums:
    """One observation of one head and sequence, over its n usable rows.

    ``exact``, ``unit`` [n]: multiplicities of the row maximum. ``unit_rows`` (counted among the usable ones) and
    ``unit_keys``: where P_bar rounds to 1 in rows with several, at most 512 of ``unit_total``. ``aligned`` [3, Dv]:
    rows where dO * error is positive, where it is not 0, and its sum.
    """

    exact: npt.NDArray[np.int32]
    unit: npt.NDArray[np.int32]
    unit_rows: Ints
    unit_keys: Ints
    unit_total: int
    max_logit: float | None
    o_error: UlpCounts | None = None
    aligned: Floats | None = None
    dq: _RowNorms | None = None

    @classmethod
    def of(
        cls, exact: Ints, unit: Ints, unit_places: tuple[Ints, Ints], row_max: Floats, usable: npt.NDArray[np.bool_]
    ) -> FigureSums:
        """From the row maxima of a head, [Tq]: multiplicities by both definitions, and the maxima; ``usable`` rows.

        ``unit_places``: rows and keys of the second.
        """
        rows, keys = unit_places
        if len(rows):
            # A collector meets the rows in their order.
            order = np.flatnonzero(usable[rows])
            order = order[_evenly(len(order), _POSITIONS)]
            rows, keys = (np.cumsum(usable) - 1)[rows[order]], keys[order]
        multiplicity, kept = unit[usable], row_max[usable]
        return cls(
            exact=exact[usable].astype(np.int32),
            unit=multiplicity.astype(np.int32),
            unit_rows=rows,
            unit_keys=keys,
            unit_total=int(multiplicity[multiplicity > 1].sum()),
            max_logit=float(kept.max()) if len(kept) else None,
        )


def head_figures(
    parts: Sequence[FigureSums], batches: Sequence[int], rows: Sequence[Ints], dw_q: PredictedError | None
) -> HeadFigures:
    """The figures of one head from its sequences: their batch items, and the usable rows [n] of each."""
    errors = [p.o_error for p in parts if p.o_error is not None]
    logits = [p.max_logit for p in parts if p.max_logit is not None]
    return HeadFigures(
        rows=_runs(batches, rows),
        strip=_strip(parts),
        unit_positions=_unit_positions(parts),
        o_error=UlpCounts.join(errors).histogram() if len(errors) == len(parts) else None,
        alignment=_alignment([p.aligned for p in parts]),
        dq=_dq_errors([p.dq for p in parts]),
        dw_q=dw_q,
        max_logit=max(logits, default=None),
    )


def errors_by_feature(parts: GradientParts) -> PredictedError | None:
    """The figure of dW_Q, whose tensors are [D, C]; None where no error is known."""
    norms = _RowNorms.of(parts)
    return None if norms is None else _grouped(norms)


def _runs(batches: Sequence[int], rows: Sequence[Ints]) -> RowRuns:
    first: list[int] = []
    batch: list[int] = []
    row: list[int] = []
    count = 0
    for item, kept in zip(batches, rows, strict=True):
        if len(kept) and kept[-1] - kept[0] == len(kept) - 1:  # as ever: they follow each other
            starts = np.zeros(1, dtype=np.int64)
        else:
            starts = np.flatnonzero(np.diff(kept, prepend=-2) != 1)
        first += (starts + count).tolist()
        batch += [item] * len(starts)
        row += kept[starts].tolist()
        count += len(kept)
    return RowRuns(tuple(first[:_RUNS]), tuple(batch[:_RUNS]), tuple(row[:_RUNS]), count, len(first))


@lru_cache(maxsize=256)
def _group_starts(count: int, most: int) -> tuple[Ints, tuple[int, ...]]:
    """Where each of at most ``most`` groups of nearly equal size begins, as an array and as the figures have it."""
    groups = min(count, most)
    starts = np.arange(groups) * count // max(groups, 1)
    return starts, tuple(starts.tolist())


def _strip(parts: Sequence[FigureSums]) -> RowStrip:
    exact, unit = end_to_end([p.exact for p in parts]), end_to_end([p.unit for p in parts])
    starts, first = _group_starts(len(exact), _STRIP_GROUPS)
    if not first:
        return RowStrip((), (), ())

    def largest(values: npt.NDArray[np.int32]) -> tuple[int, ...]:
        if (most := int(values.max())) == values.min():  # as ever: no row has its maximum twice
            return (most,) * len(first)
        if len(values) % len(first) == 0:  # a maximum over columns takes a tenth of the time of one over short groups
            return tuple(values.reshape(len(first), -1).T.copy().max(0).tolist())
        return tuple(np.maximum.reduceat(values, starts).tolist())

    return RowStrip(first, largest(exact), largest(unit))


def _unit_positions(parts: Sequence[FigureSums]) -> UnitPositions:
    total = sum(p.unit_total for p in parts)
    if not any(len(p.unit_rows) for p in parts):
        return UnitPositions((), (), total)
    starts = accumulate((len(p.unit) for p in parts), initial=0)
    rows = end_to_end([p.unit_rows + start for p, start in zip(parts, starts, strict=False)])
    keys = end_to_end([p.unit_keys for p in parts])
    picked = _evenly(len(rows), _POSITIONS)
    return UnitPositions(tuple(rows[picked].tolist()), tuple(keys[picked].tolist()), total)


def _evenly(count: int, most: int) -> Ints:
    """At most ``most`` of ``count`` indices, evenly, with both ends."""
    return np.arange(count) if count <= most else np.linspace(0, count - 1, most).astype(np.int64)


def _alignment(sums: Sequence[Floats | None]) -> Alignment | None:
    known = [part for part in sums if part is not None]
    if len(known) < len(sums):
        return None
    positive, nonzero, contribution = known[0] if len(known) == 1 else np.sum(known, axis=0)
    if nonzero.all():
        fractions: list[float | None] = (positive / nonzero).tolist()
    else:
        fractions = [p / n if n else None for p, n in zip(positive.tolist(), nonzero.tolist(), strict=True)]
    return Alignment(tuple(fractions), tuple(contribution.tolist()))


def _dq_errors(parts: Sequence[_RowNorms | None]) -> PredictedError | None:
    norms = [part for part in parts if part is not None]
    if len(norms) < len(parts):
        return None
    observed, predicted = _all_known([n.observed for n in norms]), _all_known([n.predicted for n in norms])
    return _grouped(_RowNorms(observed, predicted, end_to_end([n.reference for n in norms])))


def _all_known(arrays: Sequence[Floats | None]) -> Floats | None:
    known = [a for a in arrays if a is not None]
    return end_to_end(known) if len(known) == len(arrays) else None


def _grouped(norms: _RowNorms) -> PredictedError:
    starts, first = _group_starts(len(norms.reference), _ERROR_GROUPS)

    def norm(squares: Floats | None) -> tuple[float, ...] | None:
        if squares is None:
            return None
        return tuple(np.sqrt(np.add.reduceat(squares, starts)).tolist()) if first else ()

    reference = norm(norms.reference)
    assert reference is not None
    return PredictedError(first, norm(norms.observed), norm(norms.predicted), reference)
