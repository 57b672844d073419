"""How far the float64 reference of a head may be off, element by element."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass
class HeadBounds:
    """Bounds of |reference - truth|: ``out`` [Tq, Dv], ``lse`` [Tq]; with dO also ``delta`` [Tq], ``dq`` [Tq, D].

    ``dsink`` [Tq] where there is a sink too.
    """

    out: Tensor
    lse: Tensor
    delta: Tensor | None
    dq: Tensor | None
    dsink: Tensor | None = None

    @cached_property
    def known_rows(self) -> Tensor:
        """Where every bound is finite, [Tq]: elsewhere float64 says nothing of the truth."""
        return _known(self.out, self.lse, self.delta, self.dq)


def _known(out: Tensor, lse: Tensor, delta: Tensor | None, dq: Tensor | None) -> Tensor:
    """Where every bound is finite, of the shape of ``lse``."""
    known = out.isfinite().all(-1) & lse.isfinite()
    return known if delta is None or dq is None else known & delta.isfinite() & dq.isfinite().all(-1)


def each_head(out: Tensor, lse: Tensor, *others: Tensor | None) -> list[HeadBounds]:
    """The bounds of every head, from those of all; ``others``: delta, dq and dsink."""
    known, by_head = _known(out, lse, *others[:2]), (None if t is None else t.unbind() for t in (out, lse, *others))
    found = [HeadBounds(*of_head) for of_head in zip(*(t or [None] * len(out) for t in by_head), strict=True)]
    for one, of_head in zip(found, known.unbind(), strict=True):
        one.known_rows = of_head
    return found
