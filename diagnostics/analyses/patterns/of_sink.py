"""A head with another sink than it should have: throughout, or in the backward alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence, Guess
from attn_diag.analyses.patterns.readings import Reading
from attn_diag.analyses.patterns.slab import open_slab
from attn_diag.reference.fused import reference_of

# A head is streamed once more only if it has at most so many scores.
_MOST_SCORES = 2**24


def other_sinks(evidence: Evidence) -> Iterator[Reading]:
    """The head without its sink, with that of another head, or with a mistaken logit."""
    for sink in evidence.sinks[0] if evidence.sinks else ():
        yield Reading("sink", sink.words, replace(evidence.heads[0], sink=sink.logit))


def of_gradient(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
    """Guesses for some rows of dQ, or keys of dK and dV: P (and delta) as another sink makes them.

    Args:
        evidence: The gradient.
        rows: Which n rows or keys.
    """
    first = evidence.heads[0]
    if len(evidence.sinks) < len(evidence.heads) or len(first.q) * len(first.k) > _MOST_SCORES:
        return
    bare = [reference_of(replace(head, sink=None, do=None)).lse for head in evidence.heads]
    wordings = [[sink.words for sink in own] for own in evidence.sinks]
    for place, words in enumerate(wordings[0]):
        # Of several query heads each has the same mistake made to its own sink.
        if any(len(own) <= place or (own[place] != words and "head" not in own[place]) for own in wordings):
            continue
        alone: list[Tensor] = []
        whole: list[Tensor] = []
        in_delta: list[Tensor] = []
        for head, reference, lse, sinks in zip(evidence.heads, evidence.references, bare, evidence.sinks, strict=True):
            assert reference.delta is not None
            logit = sinks[place].logit
            other = lse if logit is None else torch.logaddexp(lse, lse.new_tensor(logit))
            delta = reference.delta * (reference.lse - other).exp().nan_to_num(0.0, 0.0, 0.0)  # O grows as P does
            ways = ((alone, other, reference.delta), (whole, other, delta), (in_delta, reference.lse, delta))
            for found, own_lse, own_delta in ways:
                slab = open_slab(head, evidence.quantity, rows, own_lse, own_delta)
                found.append(slab.total(slab.weights()))
        where = evidence.alone(
            "the sink is in O, not in the gradients" if words.startswith("no sink") else "O has the right one"
        )
        said = words if len(evidence.heads) == 1 or "head" not in words else "sinks of other heads"
        yield Guess("sink", f"are what {said} {where} gives", torch.stack(alone).sum(0))
        if evidence.quantity != "dv":
            yield Guess("sink", f"are what {said} throughout the backward gives", torch.stack(whole).sum(0))
            yield Guess("sink", f"are what {said} in delta alone gives", torch.stack(in_delta).sum(0))
