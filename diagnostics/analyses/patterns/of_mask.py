"""Rows of O with a share of the keys that the mask hides: a mask that adds a finite number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence, Guess
from attn_diag.head.bounded_mask import Leak, words_of
from attn_diag.reference import reference_rows


def bounded_mask(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
    """What the finite mask makes of O that fits best.

    Args:
        evidence: O.
        rows: Which n rows.
    """
    head = replace(evidence.heads[0], do=None)
    masking = head.masking
    stated = masking.mask
    if stated is not None and stated.is_floating_point():
        stated = stated.masked_fill(stated == float("-inf"), 0.0)
    else:
        stated = None
    bare = replace(masking, causal="none", window=None, mask=stated, positions=head.positions)
    seen, every = reference_rows(head, rows), reference_rows(replace(head, masking=bare), rows)
    leak = Leak(seen.out, seen.lse, every.out, every.lse)
    value = leak.fitted(evidence.observed[rows], evidence.noise[rows])
    if value is not None:
        yield Guess("mask", f"are what hiding keys by {words_of(value)} gives", leak.predicted(value), 1, fitted=1)
