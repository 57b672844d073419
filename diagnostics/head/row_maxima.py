"""Rows whose maximum is repeated, by four definitions, and elements of O that swallowed all but one key.

A repeated maximum makes several unnormalised probabilities 1 at once, the trigger of the mechanism of
Qiu & Yao, arXiv 2510.04212, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.head.read import HeadInputs
from attn_diag.head.stacks import on_host
from attn_diag.kernels import Recipe, score_rounding
from attn_diag.kernels.formats import base, parse, rounds_monotonically
from attn_diag.reference import AttentionHead, FloatFormat, RowBlock, format_of, round_nearest_even
from attn_diag.reference.fused import KEPT_SCORES, FusedHeads
from attn_diag.reference.heads import scores_of, stacked

Ints = npt.NDArray[np.int64]

# A score within this distance of the row maximum counts as a repeat by the definition "window" (the
# published mitigation's own threshold).
WINDOW = 1e-3
DEFINITIONS = ("exact", "as_run", "window", "unit")
# Positions kept per row; an all-equal row would otherwise keep Tk of them.
MAX_POSITIONS = 16
# Candidates held before they are decided about: few, unless many scores are equal.
_MAX_PENDING = 2**20
# So many scores of rows near a repeat are held at a time: 256 MB on the GPU.
_AT_ONCE = 2**25


@dataclass
class Repeats:
    """One definition's result for one head: multiplicity of the maximum per row [Tq] (0 for a row without keys).

    ``rows``, ``keys`` [n]: where the maxima of the rows with more than one lie, at most 16 a row.
    """

    multiplicity: Tensor
    rows: Tensor
    keys: Tensor

    def values(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Sign and binary exponent of V (``v`` [Tk, Dv]) at every position: two tensors [n, Dv]."""
        at = v[self.keys]
        return at.sign(), torch.frexp(at)[1] - 1


class RowMaximaCollector:
    """Gathers repeated row maxima block by block while the reference streams.

    ``input_format`` is q's. ``round_scores`` is the recipe's own rounding of the scores, float64 -> float64
    and monotonic, None where it is unknown; ``score_format`` its format.
    """

    def __init__(
        self,
        q_length: int,
        device: torch.device,
        input_format: FloatFormat,
        round_scores: Callable[[Tensor], Tensor] | None = None,
        score_format: FloatFormat | None = None,
    ) -> None:
        self._format = input_format
        self._round_scores = round_scores
        # Whatever rounds to the same number as the maximum lies within a spacing of it (two for a recipe that
        # rounds before and after the scale), and a spacing is at most this fraction of it.
        self._relative_reach = 1.01 * max(_spacing(input_format), 2.5 * _spacing(score_format) if score_format else 0.0)
        self._reach = 1.01 * max(WINDOW, -input_format.rounds_to_one)
        self.definitions = tuple(d for d in DEFINITIONS if d != "as_run" or round_scores is not None)
        """Those that can be told."""
        # Of the rows that were looked at, [definitions, Tq]; None: of none.
        self._counts: Tensor | None = None
        self._positions: dict[str, list[tuple[Tensor, Tensor]]] = {d: [] for d in self.definitions}
        self._length, self._device = q_length, device
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []
        self._pending_count = 0

    # What follows is made where blocks come: the kernels bring their own.
    @cached_property
    def _index(self) -> Tensor:
        return torch.arange(self._length, device=self._device)

    @cached_property
    def _row_max(self) -> Tensor:
        return torch.full((self._length,), -torch.inf, dtype=torch.float64, device=self._device)

    @cached_property
    def _second_max(self) -> Tensor:
        return torch.full_like(self._row_max, -torch.inf)

    @cached_property
    def _top_key(self) -> Tensor:
        return torch.zeros(self._length, dtype=torch.int64, device=self._device)

    def add(self, block: RowBlock) -> None:
        """Take one block of the reference."""
        if not block.scores.shape[1]:
            return
        top, second = block.row_max, _second_max(block)
        self._row_max[block.rows], self._second_max[block.rows] = top, second
        self._top_key[block.rows] = block.top_key
        # Only rows with another score near the maximum are looked at; what counts as a repeat is decided later.
        threshold = self._threshold(top)
        near = (second > threshold).nonzero()[:, 0]
        if not len(near):
            return
        scores = block.scores[near]
        rows, columns = (scores > threshold[near, None]).nonzero(as_tuple=True)
        self._pending.append((self._index[block.rows][near[rows]], columns + block.keys.start, scores[rows, columns]))
        self._pending_count += len(rows)
        if self._pending_count > _MAX_PENDING:
            self._settle()

    @property
    def top_key(self) -> Tensor:
        """The first key with the row's largest score, int64 [Tq]; 0 in rows without keys."""
        return self._top_key.masked_fill(self._row_max == -torch.inf, 0)

    @property
    def row_max(self) -> Tensor:
        """The row's largest score, float64 [Tq]; -inf in rows without keys."""
        return self._row_max

    @property
    def several_keys(self) -> Tensor:
        """Whether a row sees two keys or more, bool [Tq]."""
        return self._second_max > -torch.inf

    def multiplicity(self) -> Tensor:
        """By each of ``definitions``, [definitions, Tq], see ``Repeats``."""
        self._settle()
        # Rows never looked at have their maximum once.
        once = (self._row_max > -torch.inf).to(torch.int64)
        if self._counts is None:
            return once.expand(len(self.definitions), -1)
        return torch.maximum(self._counts, once)

    def positions(self, definition: str) -> tuple[Tensor, Tensor]:
        """Rows and keys of one of ``definitions``, see ``Repeats``."""
        self._settle()
        parts = self._positions[definition] or [(self._index[:0], self._index[:0])]
        rows, keys = (torch.cat(column) if len(parts) > 1 else column[0] for column in zip(*parts, strict=True))
        return rows, keys

    def repeats(self, definition: str) -> Repeats | None:
        """The result for one definition; None for "as_run" where the recipe is unknown."""
        if definition not in self.definitions:
            return None
        return Repeats(self.multiplicity()[self.definitions.index(definition)], *self.positions(definition))

    def _threshold(self, top: Tensor) -> Tensor:
        """Below it no score counts as the row's largest, ``top``."""
        return top - top.abs().mul_(self._relative_reach).clamp_(min=self._reach)

    def _settle(self) -> None:
        _settle([self])


def take_maxima(collectors: Sequence[RowMaximaCollector], fused: FusedHeads) -> None:
    """Let the collectors of these heads, of one recipe, take all of them from the kernels, instead of blocks; rows with
    another score near the maximum are looked at again."""
    first, found, keys = collectors[0], fused.forward, len(fused.head.k)
    tops, top_keys = found.row_max.clone(), found.top_key.clone()
    numbers, rows = (found.second_max > first._threshold(tops)).nonzero(as_tuple=True)
    for i, one in enumerate(collectors):
        one._row_max, one._second_max, one._top_key = tops[i], found.second_max[i], top_keys[i]
    if not len(rows):
        return
    high = fused.scores_above(first._threshold(tops)[numbers, rows], numbers, rows)
    # Not all scores of the others were kept: those rows are looked at again.
    known = high.counts <= KEPT_SCORES
    held = torch.arange(KEPT_SCORES, device=rows.device) < torch.where(known, high.counts, 0)[:, None]
    at, slot = held.nonzero(as_tuple=True)
    _take(collectors, (numbers, rows), (at, high.keys[at, slot].long(), high.scores[at, slot]), (tops, top_keys))
    if bool(known.all()):
        return
    _settle(collectors)
    numbers, rows = numbers[~known], rows[~known]
    owners, positions = torch.stack([numbers, fused.head.positions[rows]]).cpu().numpy()
    ends = np.searchsorted(owners, np.arange(len(collectors) + 1)).tolist()
    for start in range(0, len(rows), step := max(1, _AT_ONCE // max(keys, 1))):
        some = range(start, min(start + step, len(rows)))
        parts = [slice(max(some.start, a), min(some.stop, b)) for a, b in pairwise(ends)]
        least, most = (int(of(positions[some.start : some.stop])) for of in (np.min, np.max))
        span = fused.head.masking.span(least, most, keys)
        scores = scores_of(fused.heads, [rows[part] for part in parts], span, least)
        places = numbers[some.start : some.stop], rows[some.start : some.stop]
        at, columns = (scores > first._threshold(tops[places])[:, None]).nonzero(as_tuple=True)
        _take(collectors, places, (at, columns + span.start, scores[at, columns]), (tops, top_keys))
        if sum(one._pending_count for one in collectors) > _MAX_PENDING:
            _settle(collectors)


def _take(
    collectors: Sequence[RowMaximaCollector],
    places: tuple[Tensor, Tensor],
    near: tuple[Tensor, Tensor, Tensor],
    tops: tuple[Tensor, Tensor],
) -> None:
    """Take scores near the maxima of some rows.

    Args:
        collectors: Of the heads.
        places: Head and row of every row, [R] each.
        near: Number of the row, key and score of every score, [n] each.
        tops: The largest score of each row, and the first key that has it, [H, Tq] each.
    """
    (numbers, rows), (at, keys, scores), (largest, first_keys) = places, near, tops
    # The largest of these scores, and the first key that has it: torch's products may round otherwise than a kernel's.
    top = largest[places].scatter_reduce(0, at, scores, "amax", include_self=False)
    first_key = torch.where(scores == top[at], keys, torch.iinfo(keys.dtype).max)
    largest[places] = top
    first_keys[places] = first_keys[places].scatter_reduce(0, at, first_key, "amin", include_self=False)
    sizes = torch.bincount(numbers[at], minlength=len(collectors)).tolist()
    pending = (torch.split(t, sizes) for t in (rows[at], keys, scores))
    for one, of_head in zip(collectors, zip(*pending, strict=True), strict=True):
        one._pending.append(of_head)
        one._pending_count += len(of_head[0])


@dataclass(frozen=True)
class MaximaOnHost:
    """What a collector knows of every row of a head, [Tq]."""

    row_max: npt.NDArray[np.float64]
    """See ``RowMaximaCollector.row_max``."""
    several_keys: npt.NDArray[np.bool_]
    """See ``RowMaximaCollector.several_keys``."""
    top_key: Ints
    """See ``RowMaximaCollector.top_key``."""
    multiplicity: Ints
    """See ``RowMaximaCollector.multiplicity``."""
    unit: tuple[Ints, Ints]
    """Positions of the definition "unit"."""


def maxima_on_host(collectors: Sequence[RowMaximaCollector]) -> list[MaximaOnHost]:
    """What these collectors know, copied from their device together; those of one recipe are settled together."""
    settle_alike(collectors)
    tops, seconds, top_keys = (on_host([get(c) for c in collectors]) for get in _BY_ROW)
    counted = [i for i, c in enumerate(collectors) if c._counts is not None]
    counts = dict(zip(counted, on_host([t for c in collectors if (t := c._counts) is not None]), strict=True))
    parts = [part for c in collectors for part in c._positions["unit"]]
    positions = np.zeros((2, 0), dtype=np.int64)
    if parts:
        positions = torch.stack([torch.cat(column) for column in zip(*parts, strict=True)]).cpu().numpy()
    ends = np.cumsum([sum(len(rows) for rows, _ in c._positions["unit"]) for c in collectors])[:-1]
    # Rows that the kernels left to torch come last.
    units = [unit[:, np.lexsort(unit[::-1])] for unit in np.split(positions, ends, 1)]
    found = dict[int, MaximaOnHost]()
    alike: dict[object, list[int]] = {}
    for i, one in enumerate(collectors):
        alike.setdefault((len(tops[i]), one.definitions, i in counts), []).append(i)
    for every in alike.values():
        row_max, second, top_key = (np.stack([of_all[i] for i in every]) for of_all in (tops, seconds, top_keys))
        there = row_max > -np.inf
        several = np.repeat(there[:, None].astype(np.int64), len(collectors[every[0]].definitions), 1)
        if every[0] in counts:
            np.maximum(several, np.stack([counts[i] for i in every]), out=several)
        by_row = row_max, second > -np.inf, np.where(there, top_key, 0), several
        for i, *of_head in zip(every, *by_row, strict=True):
            found[i] = MaximaOnHost(of_head[0], of_head[1], of_head[2], of_head[3], (units[i][0], units[i][1]))
    return [found[i] for i in range(len(collectors))]


_BY_ROW: tuple[Callable[[RowMaximaCollector], Tensor], ...] = (
    lambda one: one._row_max,
    lambda one: one._second_max,
    lambda one: one._top_key,
)


def top_keys(collectors: Sequence[RowMaximaCollector]) -> Tensor:
    """``RowMaximaCollector.top_key`` of heads of one length, [H, Tq]."""
    return stacked([c._top_key for c in collectors]).masked_fill(
        stacked([c._row_max for c in collectors]) == -torch.inf, 0
    )


def settle_alike(collectors: Sequence[RowMaximaCollector]) -> None:
    """Decide what these collectors of one recipe have gathered, of heads of one length in one go."""
    alike: dict[object, list[RowMaximaCollector]] = {}
    for one in collectors:
        alike.setdefault((one._length, one._format, one.definitions), []).append(one)
    for some in alike.values():
        _settle(some)


def _settle(collectors: Sequence[RowMaximaCollector]) -> None:
    """Decide about the candidates gathered so far; those of one row always come together."""
    first, count = collectors[0], collectors[0]._length
    found = [(part, h * count) for h, c in enumerate(collectors) for part in c._pending]
    if not found:
        return
    rows = torch.cat([rows + start for (rows, _, _), start in found])
    keys, scores = (torch.cat([part[i] for part, _ in found]) for i in (1, 2))
    row_top = torch.cat([c._row_max for c in collectors])[rows]
    tests = {
        "exact": round_nearest_even(scores, first._format) == round_nearest_even(row_top, first._format),
        "window": row_top - scores <= WINDOW,
        "unit": scores - row_top >= first._format.rounds_to_one,
    }
    if first._round_scores is not None:
        tests["as_run"] = first._round_scores(scores) == first._round_scores(row_top)
    repeats = {name: tests[name] for name in first.definitions}
    # Every definition has all rows of all heads to itself.
    number, at = torch.stack(list(repeats.values())).nonzero(as_tuple=True)
    places = number * (count * len(collectors)) + rows[at]
    counts = torch.bincount(places, minlength=len(repeats) * count * len(collectors))
    several = counts[places] > 1
    places, at = places[several], at[several]
    keep = torch.arange(len(places), device=places.device) - torch.searchsorted(places, places) < MAX_POSITIONS
    places, keys = places[keep], keys[at[keep]]
    starts = torch.arange(len(repeats) * len(collectors) + 1, device=places.device) * count
    ends = torch.searchsorted(places, starts).tolist()
    sizes = [end - start for start, end in pairwise(ends)]
    parts = list(zip(torch.split(places % count, sizes), torch.split(keys, sizes), strict=True))
    of_heads = counts.view(len(repeats), len(collectors), count).unbind(1)
    for h, collector in enumerate(collectors):
        collector._counts = of_heads[h] if collector._counts is None else collector._counts + of_heads[h]
        for i, name in enumerate(repeats):
            collector._positions[name].append(parts[i * len(collectors) + h])
    for collector in collectors:
        collector._pending, collector._pending_count = [], 0


def collector_of(inputs: HeadInputs, recipe: Recipe | None) -> RowMaximaCollector:
    """A collector of repeated maxima for this head, "as_run" included where the recipe's scores are known."""
    head = inputs.head
    if recipe is None or not plain_scores(head) or head.masking.alibi is not None or not _follows_scores(recipe):
        return RowMaximaCollector(len(head.q), head.q.device, inputs.input_format)
    arithmetic = format_of(torch.float64 if recipe.arithmetic == "fp64" else torch.float32)
    score_format = site_format(recipe.scores) or arithmetic
    rounding = score_rounding(recipe, head.scale)
    return RowMaximaCollector(len(head.q), head.q.device, inputs.input_format, rounding, score_format)


def _follows_scores(recipe: Recipe) -> bool:
    """Whether equal stored scores come from nearly equal ones: no random draws, no saturation at 448, q and k whole."""
    if {"quantize_q", "quantize_k"} & set(recipe.quantized) or recipe.smooth_k != "none":
        return False
    rounding = parse(recipe.scores)
    return rounds_monotonically(recipe.scores) and (rounding is None or not rounding.format.finite)


def site_format(text: str) -> FloatFormat | None:
    """The format that a recipe's site rounds to; None where it rounds nothing."""
    rounding = parse(text)
    if rounding is None:
        return None
    fmt = rounding.format
    return FloatFormat(base(text), fmt.mantissa_bits, fmt.min_exponent, fmt.largest, saturates=fmt.finite)


def plain_scores(head: AttentionHead) -> bool:
    """Whether nothing but ALiBi changes alpha q.k (softcap, additive mask): a recipe may store scores without alpha."""
    mask = head.masking.mask
    return head.softcap is None and (mask is None or mask.dtype == torch.bool)


def _spacing(fmt: FloatFormat) -> float:
    """The largest spacing of normal numbers relative to their size."""
    return 2.0**-fmt.precision


def _second_max(block: RowBlock) -> Tensor:
    """The largest score of each row but the one at ``top_key``, [R]; -inf where there is none."""
    at = (block.top_key - block.keys.start)[:, None]
    block.scores.scatter_(1, at, -torch.inf)
    second = block.scores.amax(1)
    block.scores.scatter_(1, at, block.row_max[:, None])
    return second


def swamped_elements(out: Tensor, reference_out: Tensor, v_top: Tensor) -> Tensor:
    """Where O_obs equals V of the row's maximal key exactly, though the true O does not. bool [..., Tq, Dv].

    ``out``, ``reference_out`` and ``v_top`` (V of each row's top key) [..., Tq, Dv]. A count, not a cause by itself.
    """
    found = torch.zeros_like(out, dtype=torch.bool)
    # Few rows hold such an element; to find those by a difference is cheaper than to compare every element.
    rows = ((out - v_top).abs_().amin(-1) == 0).nonzero(as_tuple=True)
    found[rows] = (out[rows] == v_top[rows]) & (reference_out[rows] != v_top[rows])
    return found
