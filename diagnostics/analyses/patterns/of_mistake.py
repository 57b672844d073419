"""A head with another ALiBi slope, or other dropout, than it should have: throughout, or in the backward alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import CLEAR, LEAVES, Evidence, Guess
from attn_diag.analyses.patterns.readings import Reading
from attn_diag.analyses.patterns.slab import Slab, open_slab
from attn_diag.head.unseen_dropout import drawn_size, in_size, in_weights
from attn_diag.reference.fused import reference_of
from attn_diag.results.quality import MASK_UNSEEN, UNSEEN_DROPOUT, Pattern

# A head is streamed once more for every mistake only if it has at most so many scores.
_MOST_SCORES = 2**22
# So many rows tell whether a mask was drawn anew; differences in standard errors, of which one must be so small a part.
_ROWS, _CHANCE, _TELLING = 256, 4.0, 0.15
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
        where = evidence.alone(mistake.forward_right)
        yield Guess(mistake.kind, f"are what {said} {where} gives", torch.stack(alone).sum(0))
        yield Guess(mistake.kind, f"are what {said} throughout gives", torch.stack(whole).sum(0))


def in_dscores(evidence: Evidence, slabs: Sequence[Slab], rows: Tensor) -> Iterator[Guess]:
    """Guesses for rows of dQ, or keys of dK, with dropout in another place of dS = P o (W o dP - delta).

    Args:
        evidence: The gradient.
        slabs: The rows in each query head that makes them.
        rows: Which n rows or keys.
    """
    if evidence.quantity not in ("dq", "dk") or slabs[0].head.dropout is None:
        return
    deltas = [s.delta for s in slabs if s.delta is not None]

    def total(weights: Sequence[Tensor]) -> Tensor:
        return torch.stack([s.total(w) for s, w in zip(slabs, weights, strict=True)]).sum(0)

    kept = [replace(s, probs=s.kept_probs).weights() for s in slabs]
    yield Guess("dropout", "use P after dropout in dS = P o (dP - delta)", total(kept))
    shares = [s.kept_probs / s.probs.clamp(min=1e-300) for s in slabs]
    with_delta = [s.weights(d * w) for s, d, w in zip(slabs, deltas, shares, strict=True)]
    yield Guess("dropout", "have delta dropped with dP", total(with_delta))
    if len(slabs[0].head.q) * len(slabs[0].head.k) <= _MOST_SCORES:
        bare = [reference_of(replace(s.head, dropout=None), key_gradients=False).delta for s in slabs]
        spread = [d[rows][:, None] if evidence.quantity == "dq" else d[None, :] for d in bare if d is not None]
        without = [s.weights(d) for s, d in zip(slabs, spread, strict=True)]
        yield Guess("dropout", "have the delta of an O without dropout", total(without))


def redrawn_dropout(evidence: Evidence) -> list[Pattern]:
    """That dQ, dK or dV is off at random, row by row, as a mask makes it that has nothing to do with the captured one.

    Less what it is without dropout in the backward, a row is then a sum of independent terms (W_tj - 1) x_tj, x of P dO
    in dV and of alpha (P o dP) K or Q in dQ and dK: of the size that the stated p makes, which is not fitted, and not
    along what the captured mask makes of it. Only the mask itself could prove it.
    """
    heads, dropout = evidence.heads, evidence.heads[0].dropout
    if not evidence.is_gradient or dropout is None or not dropout.p or len(heads[0].q) * len(heads[0].k) > _MOST_SCORES:
        return []
    rows = evidence.clear.nonzero()[:, 0]
    rows = rows[:: -(-len(rows) // _ROWS) or 1]
    plain, weights, values = torch.zeros_like(evidence.truth[rows]), [], []
    for head, reference in zip(heads, evidence.references, strict=True):
        slab = open_slab(replace(head, dropout=None), evidence.quantity, rows, reference.lse, reference.delta)
        plain += slab.total(slab.weights())
        weights.append(slab.weights(0.0).masked_fill(~slab.visible, 0.0))
        values.append(slab.vectors)
    drawn, own = evidence.observed[rows] - plain, evidence.truth[rows] - plain
    found = drawn_size(drawn, plain, torch.cat(weights, 1), torch.cat(values))
    if found is None:
        return []
    size, uncertain = found
    along = (drawn * own).sum(1) / own.square().sum(1).clamp(min=1e-300)
    shared, by_chance = float(along.mean()), float(along.square().sum().sqrt()) / len(along)
    if max(uncertain / size, by_chance) > _TELLING or abs(shared) > _CHANCE * by_chance:
        return []
    if abs(size - dropout.p * dropout.factor) > _CHANCE * uncertain:
        return []
    words = (
        f"all {evidence.unit} are off at random, by as much as another dropout mask of the same p = {dropout.p:.3g} "
        "makes them (drawn anew, or at another offset)"
    )
    return [Pattern("dropout", words)]


def unseen_dropout(evidence: Evidence) -> list[Pattern]:
    """That O's error has the size, row by row, that dropout of one p makes: which its mask alone could prove; or that
    probabilities are lost at random."""
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
    if (found := in_weights([(head, evidence.observed)], evidence.fmt, unscaled=True)) is not None:
        words = (
            f"where rows see few keys, each of {found.weights} probabilities is 0 or what it should be, as dropout "
            f"with p near {found.p:.1g} makes them that lacks the factor 1 / (1 - p)"
        )
        return [Pattern("dropout", words)]
    p = in_size(head, evidence.observed, usable.nonzero()[:, 0])
    if p is None:
        return []
    words = f"all rows are off at random as attention dropout with p near {p:.1g} makes them, {MASK_UNSEEN}"
    return [Pattern(UNSEEN_DROPOUT, words)]
