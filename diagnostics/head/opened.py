"""Which rows of an observation count, and what is known of them without their errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.head import judging
from attn_diag.head.figure_sums import FigureSums
from attn_diag.head.measurement import HeadMeasurement, RepeatSums
from attn_diag.head.read import all_finite
from attn_diag.head.row_maxima import DEFINITIONS
from attn_diag.head.shared import rows_alike
from attn_diag.head.streaming import ObservedHead, StreamedHead
from attn_diag.reference import Rows

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
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


def opened_head(passed: StreamedHead, seen: ObservedHead, batch: int, head: int) -> OpenedHead:
    """Open one observation of a head that was streamed; ``batch`` and ``head`` are its indices in the capture."""
    inputs, reference, maxima = passed.truth.inputs, passed.truth.reference, passed.maxima[seen.name]
    on_host = inputs.unusable, reference.fully_masked, passed.bounds.known_rows, maxima.several_keys
    unusable, masked, known, several_keys = (t.cpu().numpy() for t in on_host)
    finite = ~unusable
    before = usable = finite & ~masked & known
    broken = {name: bad for name, values in seen.outputs.items() if (bad := _broken_rows(values)) is not None}
    for bad in broken.values():
        usable = usable & ~bad
    kept = np.flatnonzero(usable)
    # All rows usable: a slice spares copies of every tensor.
    rows = slice(None) if len(kept) == len(usable) else torch.from_numpy(kept).to(passed.truth.head.q.device)
    repeats = {name: maxima.repeats(name) for name in DEFINITIONS}
    counts = {name: None if r is None else r.multiplicity.cpu().numpy() for name, r in repeats.items()}
    exact, unit, places = counts["exact"], counts["unit"], repeats["unit"]
    assert exact is not None
    assert unit is not None
    assert places is not None
    of_unit = places.rows.cpu().numpy(), places.keys.cpu().numpy()
    result = HeadMeasurement(
        batch=batch,
        head=head,
        rows=kept,
        rows_fully_masked=int((masked & finite).sum()),
        rows_unknown=int((finite & ~masked & ~known).sum()),
        rows_nonfinite=int(unusable.sum()) + int(before.sum()) - len(kept),
        rows_eligible=int((usable & several_keys).sum()),
        repeats={name: _repeat_sums(count, usable) for name, count in counts.items()},
        tested=kept,
        top_key=maxima.top_key.cpu().numpy()[usable],
        alike=rows_alike(inputs.head),
        figures=FigureSums.of(exact, unit, of_unit, maxima.row_max.cpu().numpy(), usable),
        broken_outputs={name: count for name, bad in broken.items() if (count := int((bad & before).sum()))},
        without_keys=judging.rows_without_keys(seen, masked & finite),
        nearly_uniform=passed.nearly_uniform(usable),
    )
    return OpenedHead(passed, seen, result, rows, usable, several_keys)


def _repeat_sums(multiplicity: npt.NDArray[np.int64] | None, usable: Bools) -> RepeatSums | None:
    if multiplicity is None:
        return None
    kept = multiplicity[usable]
    return RepeatSums(int((kept > 1).sum()), int(kept.max(initial=0)))


def _broken_rows(values: Tensor) -> Bools | None:
    """Rows with NaN or Inf, bool [Tq]; None: no row."""
    if all_finite(values):
        return None
    broken = ~values.isfinite()
    found: Bools = (broken.any(1) if broken.ndim == 2 else broken).cpu().numpy()
    return found
