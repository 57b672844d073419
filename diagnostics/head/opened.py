"""Which rows of an observation count, and what is known of them without their errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    of_rows = [
        _RowsOnHost(*arrays) for arrays in zip(*(on_host([get(p) for p in passes]) for get in _OF_ROWS), strict=True)
    ]
    alike_rows = rows_alike([p.inputs.head for p in passes])
    known = zip(maxima_on_host(maxima), of_rows, alike_rows, strict=True)
    return [
        _opened(passed, own, place, collector, *on_the_host)
        for passed, own, place, collector, on_the_host in zip(passes, seen, places, maxima, known, strict=True)
    ]


_OF_ROWS: tuple[Callable[[StreamedHead], Tensor], ...] = (
    lambda passed: passed.inputs.unusable,
    lambda passed: passed.truth.reference.fully_masked,
    lambda passed: passed.bounds.known_rows,
    lambda passed: passed.visible,
    lambda passed: passed.truth.reference.row_sum,
)


@dataclass(frozen=True)
class _RowsOnHost:
    """What is asked of every row of a head, [Tq], in the order of ``_OF_ROWS``."""

    unusable: Bools
    fully_masked: Bools
    known: Bools
    visible: Ints
    row_sum: npt.NDArray[np.float64]


def nearly_uniform(visible: Ints, row_sum: npt.NDArray[np.float64], usable: Bools) -> bool:
    """Whether half of the usable rows attend to all their keys nearly alike; how many keys each row sees, and l."""
    several = usable & (visible > 1)
    return bool(several.any()) and int(2 * (several & (row_sum >= visible / 2)).sum()) >= int(several.sum())


def _opened(
    passed: StreamedHead, seen: ObservedHead, place: tuple[int, int], collector: RowMaximaCollector,
    maxima: MaximaOnHost, of_rows: _RowsOnHost, alike_rows: Ints,
) -> OpenedHead:  # fmt: skip
    finite = ~of_rows.unusable
    masked, known, several_keys = of_rows.fully_masked, of_rows.known, maxima.several_keys
    before = usable = finite & ~masked & known
    broken = {name: _broken_rows(values) for name, values in seen.outputs.items() if name not in seen.finite}
    for bad in broken.values():
        usable = usable & ~bad
    kept = np.flatnonzero(usable)
    # All rows usable: a slice spares copies of every tensor.
    rows = slice(None) if len(kept) == len(usable) else torch.from_numpy(kept).to(passed.truth.head.q.device)
    counts = dict(zip(collector.definitions, maxima.multiplicity, strict=True))
    result = HeadMeasurement(
        batch=place[0],
        head=place[1],
        rows=kept,
        rows_fully_masked=int((masked & finite).sum()),
        rows_unknown=int((finite & ~masked & ~known).sum()),
        rows_nonfinite=int(of_rows.unusable.sum()) + int(before.sum()) - len(kept),
        rows_eligible=int((usable & several_keys).sum()),
        repeats={name: _repeat_sums(counts.get(name), usable) for name in DEFINITIONS},
        tested=kept,
        top_key=maxima.top_key[usable],
        alike=alike_rows,
        figures=FigureSums.of(counts["exact"], counts["unit"], maxima.unit, maxima.row_max, usable),
        broken_outputs={name: count for name, bad in broken.items() if (count := int((bad & before).sum()))},
        without_keys=judging.rows_without_keys(seen, masked & finite),
        nearly_uniform=nearly_uniform(of_rows.visible, of_rows.row_sum, usable),
    )
    return OpenedHead(passed, seen, result, rows, usable, several_keys)


def _repeat_sums(multiplicity: npt.NDArray[np.int64] | None, usable: Bools) -> RepeatSums | None:
    if multiplicity is None:
        return None
    kept = multiplicity[usable]
    return RepeatSums(int((kept > 1).sum()), int(kept.max(initial=0)))


def _broken_rows(values: Tensor) -> Bools:
    """Rows with NaN or Inf, bool [Tq]."""
    broken = ~values.isfinite()
    found: Bools = (broken.any(1) if broken.ndim == 2 else broken).cpu().numpy()
    return found
