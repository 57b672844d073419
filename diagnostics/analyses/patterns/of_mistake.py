"""A head with another ALiBi slope, or other dropout, than it should have: throughout, or in the backward alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import CLEAR, LEAVES, Evidence, Guess
from attn_diag.analyses.patterns.readings import Reading
from attn_diag.analyses.patterns.slab import open_slab
from attn_diag.head.unseen_dropout import in_size
from attn_diag.reference.fused import reference_of
from attn_diag.results.quality import MASK_UNSEEN, UNSEEN_DROPOUT, Pattern

# A head is streamed once more for every mistake only if it has at most so many scores.
_MOST_SCORES = 2**22
# Dropout leaves LSE right; scores in BF16 beside dropout of 1 % move it by less than so much of O's error.
_LSE_OF_DROPOUT = 0.1


def mistaken(evidence: Evidence) -> Iterator[Reading]:
    """The head with each of the mistakes that a kernel may have made in it."""
    for mistake in evidence.mistakes[0] if evidence.mistakes else ():
        yield Reading(mistake.kind, mistake.words, mistake.made(evidence.heads[0]))


def of_gradient(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
    """Guesses for some rows of dQ, or keys of dK and dV: a backward with a mistake.

    Args:
        evidence: The gradient.
        rows: Which n rows or keys.
    """
    heads, mistakes = evidence.heads, evidence.mistakes
    if len(mistakes) < len(heads) or len(heads[0].q) * len(heads[0].k) > _MOST_SCORES:
        return
    for place, mistake in enumerate(mistakes[0]):
        # Of several query heads each makes the same mistake.
        if any(len(own) <= place or own[place].of_several != mistake.of_several for own in mistakes):
            continue
        alone: list[Tensor] = []
        whole: list[Tensor] = []
        for head, reference, own in zip(heads, evidence.references, mistakes, strict=True):
            other = own[place].made(head)
            again = reference_of(other, key_gradients=False)
            assert reference.delta is not None
            assert again.delta is not None
            for found, lse, delta in ((alone, reference.lse, reference.delta), (whole, again.lse, again.delta)):
                slab = open_slab(other, evidence.quantity, rows, lse, delta)
                found.append(slab.total(slab.weights()))
        said = mistake.words if len(heads) == 1 else mistake.of_several
        where = f"in the backward alone ({mistake.forward_right})"
        yield Guess(mistake.kind, f"are what {said} {where} gives", torch.stack(alone).sum(0))
        yield Guess(mistake.kind, f"are what {said} throughout gives", torch.stack(whole).sum(0))


def unseen_dropout(evidence: Evidence) -> list[Pattern]:
    """That O's error has the size, row by row, that dropout of one p makes: which its mask alone could prove."""
    head, usable = replace(evidence.heads[0], do=None), evidence.usable
    # Dropout reaches every feature that V has.
    noise = LEAVES**2 * evidence.variance[usable].sum(0)
    error, truth = (t[usable].square().sum(0) for t in (evidence.error, evidence.truth))
    if head.dropout is not None or bool(((error <= noise) & (truth > CLEAR * noise)).any()):
        return []
    # It comes behind the softmax, whose LSE stays as it is.
    lse = evidence.captured[0].get("lse") if evidence.captured else None
    if lse is not None:
        moved = (lse - evidence.references[0].lse)[usable].square().mean().sqrt()
        if float(moved) > _LSE_OF_DROPOUT * float((error.sum() / truth.sum()).sqrt()):
            return []
    p = in_size(head, evidence.observed, usable.nonzero()[:, 0])
    if p is None:
        return []
    words = f"all rows are off at random as attention dropout with p near {p:.1g} makes them, {MASK_UNSEEN}"
    return [Pattern(UNSEEN_DROPOUT, words)]
