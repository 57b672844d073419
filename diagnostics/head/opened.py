"""Which rows of an observation count, and what is known of them without their errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.head import judging
from attn_diag.head.figure_sums import FigureSums
from attn_diag.head.measurement import HeadMeasurement, RepeatSums
from attn_diag.head.row_maxima import DEFINITIONS, MaximaOnHost, RowMaximaCollector, maxima_on_host
from attn_diag.head.shared import SharedRows, rows_alike
from attn_diag.head.stacks import on_host
from attn_diag.head.streaming import ObservedHead, StreamedHead
from attn_diag.reference import Rows

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass
class OpenedHead:
    """One observation of one head, and which of its rows count."""

    passed: StreamedHead
    """The pass over the head."""
    seen: ObservedHead
    """What was observed."""
    result: HeadMeasurement
    """What is known without its errors."""
    rows: Rows
    """The usable rows; all of them as a slice."""
    usable: Bools
    """Which they are, [Tq]."""
    several_keys: Bools
    """Rows that see several keys, [Tq]."""
    shared: SharedRows | None = None
    """What it has in common with earlier sequences; the rows count once."""

    @property
    def eligible(self) -> Bools:
        """Those of the usable rows with several keys, [n]."""
        return self.several_keys[self.usable]

    @property
    def kind(self) -> object:
        """What heads agree in that are measured side by side."""
        head, seen = self.passed.truth.head, self.seen
        shapes = head.q.shape, head.k.shape, head.v.shape
        known = seen.want_keys, seen.assumed_lse is None, self.passed.truth.projection is None
        return shapes, tuple(seen.formats.items()), seen.declared, known


def alike(opened: Sequence[OpenedHead]) -> list[list[OpenedHead]]:
    """Heads that can be measured side by side: all rows of each are usable, as ever but for masked or non-finite ones,
    and they were captured alike. Others are alone."""
    found: dict[object, list[OpenedHead]] = {}
    for one in opened:
        found.setdefault(one.kind if isinstance(one.rows, slice) else id(one), []).append(one)
    return list(found.values())


def open_heads(
    passes: Sequence[StreamedHead], seen: Sequence[ObservedHead], places: Sequence[tuple[int, int]]
) -> list[OpenedHead]:
    """Open one observation of heads that were streamed; ``places``: indices of batch item and head in the capture."""
    maxima = [p.maxima[s.name] for p, s in zip(passes, seen, strict=True)]
    of_rows = zip(*(on_host([get(p) for p in passes]) for get in _OF_ROWS), strict=True)
    known = zip(maxima_on_host(maxima), of_rows, rows_alike([p.inputs.head for p in passes]), strict=True)
    alike: dict[object, list[int]] = {}
    heads = [_Head(*of_head) for of_head in zip(passes, seen, places, maxima, *zip(*known, strict=True), strict=True)]
    for i, one in enumerate(heads):
        alike.setdefault((len(one.alike), one.collector.definitions), []).append(i)
    found = dict[int, OpenedHead]()
    for every in alike.values():
        found |= zip(every, _opened([heads[i] for i in every]), strict=True)
    return [found[i] for i in range(len(heads))]


@dataclass(frozen=True)
class _Head:
    """One that is opened, and what the host knows of its rows."""

    passed: StreamedHead
    seen: ObservedHead
    place: tuple[int, int]
    collector: RowMaximaCollector
    maxima: MaximaOnHost
    of_rows: Sequence[npt.NDArray[Any]]
    """In the order of ``_OF_ROWS``."""
    alike: Ints
    """See ``rows_alike``."""


_OF_ROWS: tuple[Callable[[StreamedHead], Tensor], ...] = (
    lambda passed: passed.inputs.unusable,
    lambda passed: passed.truth.reference.fully_masked,
    lambda passed: passed.bounds.known_rows,
    lambda passed: passed.visible,
    lambda passed: passed.truth.reference.row_sum,
)


def nearly_uniform(visible: Ints, row_sum: npt.NDArray[np.float64], usable: Bools) -> Bools:
    """Whether half of the usable rows attend to all their keys nearly alike; how many keys each row sees, and l.

    All [..., Tq]; returns [...].
    """
    several = usable & (visible > 1)
    count = several.sum(-1)
    return np.asarray((count > 0) & (2 * (several & (row_sum >= visible / 2)).sum(-1) >= count))


def _opened(heads: Sequence[_Head]) -> list[OpenedHead]:
    """Heads of one length, with row maxima by the same definitions."""
    unusable, fully_masked, known, visible, row_sum = map(np.stack, zip(*(one.of_rows for one in heads), strict=True))
    masked, before = fully_masked & ~unusable, ~(unusable | fully_masked) & known
    broken = [_broken_rows(one.seen) for one in heads]
    usable = before.copy()
    for of_head, bad in zip(usable, broken, strict=True):
        for rows in bad.values():
            of_head &= ~rows
    several_keys = np.stack([one.maxima.several_keys for one in heads])
    several = _repeat_sums(np.stack([one.maxima.multiplicity for one in heads]), usable)
    counts = (of_each.sum(1).tolist() for of_each in (
        masked, ~(unusable | fully_masked | known), unusable, before, usable & several_keys,
    ))  # fmt: skip
    by_head = zip(
        heads, usable, masked, broken, before, several, nearly_uniform(visible, row_sum, usable).tolist(),
        zip(*counts, strict=True), strict=True,
    )  # fmt: skip
    return [_of_head(*of_head) for of_head in by_head]


def _of_head(
    one: _Head, usable: Bools, masked: Bools, broken: dict[str, Bools], before: Bools, repeats: list[RepeatSums],
    uniform: bool, counts: tuple[int, ...],
) -> OpenedHead:  # fmt: skip
    """``counts``: of rows that are fully masked, unknown, not finite, whole as inputs, and eligible."""
    kept, maxima = np.flatnonzero(usable), one.maxima
    whole = len(kept) == len(usable)
    # All rows usable: a slice spares copies of every tensor.
    rows = slice(None) if whole else torch.from_numpy(kept).to(one.passed.truth.head.q.device)
    definitions = one.collector.definitions
    by_name = dict(zip(definitions, maxima.multiplicity, strict=True))
    fully_masked, unknown, unusable, sound, eligible = counts
    result = HeadMeasurement(
        batch=one.place[0],
        head=one.place[1],
        rows=kept,
        rows_fully_masked=fully_masked,
        rows_unknown=unknown,
        rows_nonfinite=unusable + sound - len(kept),
        rows_eligible=eligible,
        repeats=dict.fromkeys(DEFINITIONS) | dict(zip(definitions, repeats, strict=True)),
        tested=kept,
        top_key=maxima.top_key[usable],
        alike=one.alike,
        figures=FigureSums.of(by_name["exact"], by_name["unit"], maxima.unit, maxima.row_max, usable),
        broken_outputs={name: count for name, bad in broken.items() if (count := int((bad & before).sum()))},
        finite_beside_nan=_finite_beside_nan(one, broken, masked_rows=one.of_rows[1]),
        without_keys=judging.rows_without_keys(one.seen, masked) if fully_masked else {},
        nearly_uniform=uniform,
    )
    return OpenedHead(one.passed, one.seen, result, rows, usable, maxima.several_keys)


def _repeat_sums(multiplicity: Ints, usable: Bools) -> list[list[RepeatSums]]:
    """Of H heads, [H, definitions, Tq] and [H, Tq]: by definition."""
    kept = np.where(usable[:, None], multiplicity, 0)
    sums = zip((kept > 1).sum(2).tolist(), kept.max(2, initial=0).tolist(), strict=True)
    return [[RepeatSums(*of_each) for of_each in zip(*of_head, strict=True)] for of_head in sums]


def _finite_beside_nan(one: _Head, broken: dict[str, Bools], masked_rows: npt.NDArray[Any]) -> int:
    """See ``HeadMeasurement``."""
    if (nan := one.passed.inputs.nan_rows) is None or "o" not in one.seen.outputs:
        return 0
    rows = nan.cpu().numpy() & ~masked_rows
    return int((rows & ~broken["o"]).sum() if "o" in broken else rows.sum())


def _broken_rows(seen: ObservedHead) -> dict[str, Bools]:
    """Rows with NaN or Inf, bool [Tq], in each output that is not known to be finite."""
    found: dict[str, Bools] = {}
    for name in (n for n in seen.outputs if n not in seen.finite):
        broken = ~seen.outputs[name].isfinite()
        found[name] = (broken.any(1) if broken.ndim == 2 else broken).cpu().numpy()
    return found
