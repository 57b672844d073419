"""A head with another ALiBi slope than it should have: throughout, or in the backward alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence, Guess
from attn_diag.analyses.patterns.readings import Reading
from attn_diag.analyses.patterns.slab import open_slab
from attn_diag.head.other_slopes import OtherSlope
from attn_diag.reference import AttentionHead
from attn_diag.reference.fused import reference_of

# A head is streamed once more only if it has at most so many scores.
_MOST_SCORES = 2**22


def other_slopes(evidence: Evidence) -> Iterator[Reading]:
    """The head without its slope, with that of another head, or with a mistaken one."""
    for slope in evidence.slopes[0] if evidence.slopes else ():
        yield Reading("alibi", slope.words, _with(evidence.heads[0], slope))


def of_gradient(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
    """Guesses for some rows of dQ, or keys of dK and dV: scores of the backward with another slope.

    Args:
        evidence: The gradient.
        rows: Which n rows or keys.
    """
    heads, slopes = evidence.heads, evidence.slopes
    if len(slopes) < len(heads) or len(heads[0].q) * len(heads[0].k) > _MOST_SCORES:
        return
    for place, slope in enumerate(slopes[0]):
        words = slope.words
        # Of several query heads each has the same mistake made to its own slope.
        if any(len(own) <= place or (own[place].words != words and "of head" not in words) for own in slopes):
            continue
        alone: list[Tensor] = []
        whole: list[Tensor] = []
        for head, reference, own in zip(heads, evidence.references, slopes, strict=True):
            other = _with(head, own[place])
            again = reference_of(other, key_gradients=False)
            assert reference.delta is not None
            assert again.delta is not None
            for found, lse, delta in ((alone, reference.lse, reference.delta), (whole, again.lse, again.delta)):
                slab = open_slab(other, evidence.quantity, rows, lse, delta)
                found.append(slab.total(slab.weights()))
        said = words if len(heads) == 1 or "of head" not in words else "the ALiBi slopes of other heads"
        where = "in the backward alone (the forward's LSE has the right one)"
        yield Guess("alibi", f"are what {said} {where} gives", torch.stack(alone).sum(0))
        yield Guess("alibi", f"are what {said} throughout gives", torch.stack(whole).sum(0))


def _with(head: AttentionHead, slope: OtherSlope) -> AttentionHead:
    return replace(head, masking=replace(head.masking, alibi=slope.alibi))
