"""L or delta of another row or head that a backward read in the place of its own: what the rows of dQ tell of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence, Guess
from attn_diag.reference import HeadReference
from attn_diag.reference.fused import reference_of

# Other heads are streamed only if they have at most so many scores.
_MOST_SCORES = 2**22


def other_references(evidence: Evidence) -> Iterator[tuple[str, HeadReference]]:
    """What is true of the other heads that have as many rows, without dK and dV."""
    head = evidence.heads[0]
    for name, read in evidence.others if len(head.q) * len(head.k) <= _MOST_SCORES else ():
        other = read()
        if other.do is not None and len(other.q) == len(head.q):
            yield name, reference_of(other, key_gradients=False)


def other_lse(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
    """Rows of dQ with L of other rows, or of another head: each a multiple exp(L - L') of the true one.

    Args:
        evidence: dQ.
        rows: Which n rows.
    """
    truth, lse = evidence.truth[rows], evidence.references[0].lse
    size = truth.square().sum(1)
    factor = (evidence.observed[rows] * truth).sum(1) / size.clamp(min=1e-300)
    if len(rows) < 2 or not bool((factor > 0).all()) or not bool(lse.isfinite().all()):
        return
    shift = nearest_shift(lse, lse[rows] - factor.log(), size, rows)
    others = {f"of {name}": reference.lse[rows] for name, reference in other_references(evidence)}
    if shift:
        others |= {rows_away(shift): lse[(rows + shift) % len(lse)]}
    for words, other in others.items():
        yield Guess("lse", f"use L {words}", truth * (lse[rows] - other).exp()[:, None], 1, len(lse))


def nearest_shift(true: Tensor, found: Tensor, weight: Tensor, rows: Tensor) -> int:
    """By how many rows ``true`` must be moved to be nearest to what was found of some rows; 0: it need not be."""
    count = len(true)
    shifts = torch.arange(1 - count, count, device=rows.device)
    index = rows[:, None] + shifts
    inside = (index >= 0) & (index < count)
    distance = (found[:, None] - true[index.clamp(0, count - 1)]).square()
    own = (found - true[rows]).square()[:, None]
    left = (torch.where(inside, distance, own) * weight[:, None]).sum(0)
    return int(shifts[int(left.argmin())])


def rows_away(shift: int) -> str:
    """In words: "of 64 rows before"."""
    return f"of {abs(shift)} row{'s' if abs(shift) > 1 else ''} {'further on' if shift > 0 else 'before'}"
