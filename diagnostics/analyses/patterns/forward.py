"""How some rows of O may have come about: another scale, mask, head, or no normalisation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence, Guess
from attn_diag.analyses.patterns.lost_parts import lost_parts
from attn_diag.analyses.patterns.of_mistake import mistaken
from attn_diag.analyses.patterns.of_sink import other_sinks
from attn_diag.analyses.patterns.other_scale import other_factor, other_scale
from attn_diag.analyses.patterns.readings import (
    first_features,
    other_documents,
    other_heads,
    other_masks,
    other_softcap,
    shifted_keys,
)
from attn_diag.analyses.patterns.slab import slab_of
from attn_diag.head.bounded_mask import Leak, words_of
from attn_diag.head.slope_fit import fit_slope, with_slope
from attn_diag.reference import AttentionHead, reference_rows
from attn_diag.reference.masking import ABSORBS, adds, hides


def of_out(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
    """Guesses for some rows of O.

    Args:
        evidence: O.
        rows: Which n rows.
    """
    head = replace(evidence.heads[0], do=None)
    readings = (
        other_masks(head), other_softcap(head), shifted_keys(head), first_features(head), other_heads(evidence)
    )  # fmt: skip
    for reading in chain(*readings, other_documents(evidence), other_sinks(evidence), mistaken(evidence)):
        if reading.kind == "mask" and len(evidence.unseeing) and evidence.agrees(reading.head) is False:
            continue
        prediction = reference_rows(replace(reading.head, do=None), rows).out
        yield Guess(reading.kind, f"are what {reading.words} gives", prediction)
    yield from _bounded_mask(evidence, rows)
    yield from _mask_before_the_cap(head, rows)
    if head.masking.alibi is not None and (slope := fit_slope(head, rows, evidence.observed[rows])) is not None:
        words = f"are what an ALiBi slope of {slope:.4g}, not {head.masking.alibi.slope:.4g}, gives"
        yield Guess("alibi", words, reference_rows(with_slope(head, slope), rows).out, 1, fitted=1)
    yield from _behind_softmax(head, rows)
    block = reference_rows(head, rows)
    yield Guess("normalisation", "were not divided by the row sum", block.unnormalised_out)
    sum_scaled = block.unnormalised_out * block.row_max.clamp(max=60.0).exp()[:, None]
    yield Guess("normalisation", "are sums of exp(S) V, never normalised", sum_scaled)
    yield from other_scale(evidence, rows, lambda scale, at: reference_rows(replace(head, scale=scale), at).out)
    yield from other_factor(evidence, rows)
    yield from lost_parts(evidence, [slab_of(head, evidence.references[0], "o", rows)], rows)


def of_zeros(evidence: Evidence, rows: Tensor) -> str | None:
    """The mask under which rows of O that are zero see no key, where those that see none as stated show it."""
    if not len(evidence.unseeing):
        return None
    for reading in other_masks(replace(evidence.heads[0], do=None)):
        if bool((reference_rows(reading.head, rows).out == 0).all()) and evidence.agrees(reading.head):
            return f"are what {reading.words} gives"
    return None


def _bounded_mask(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
    """O with a share of the keys that the mask hides: of the finite numbers that it may add, what fits best."""
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


def _mask_before_the_cap(head: AttentionHead, rows: Tensor) -> Iterator[Guess]:
    """O where hidden scores go through the softcap too: what is -inf, or as low, becomes -c."""
    masking, cap = head.masking, head.softcap
    if cap is None:
        return
    hidden, mask = masking.hidden(head.positions[rows], slice(0, len(head.k))), masking.mask
    of_mask = None if mask is None else hides(mask)[rows]
    both = [x for x in (hidden, of_mask) if x is not None]
    if not both:
        return
    block, bias = reference_rows(head, rows), head.k.new_full((len(rows), len(head.k)), -cap)
    if (alibi := masking.alibi) is not None:
        alibi.add_to(bias, alibi.distances(head.positions[rows], slice(0, len(head.k)), len(head.k)))
    weight = torch.stack(both).any(0) * (bias - block.lse[:, None]).exp()
    out = (block.out + weight @ head.v) / (1 + weight.sum(1, keepdim=True))
    words = f"are what a mask that is applied before the softcap gives (hidden scores are then -{cap:g}, not -inf)"
    yield Guess("mask", words, torch.where(block.lse.isfinite()[:, None], out, block.out))


def _behind_softmax(head: AttentionHead, rows: Tensor) -> Iterator[Guess]:
    """O where a mask's numbers, or ALiBi's, are added to P instead of to the scores."""
    masking, mask, alibi = head.masking, head.masking.mask, head.masking.alibi
    if mask is not None and adds(mask):
        added, name = mask[rows].double(), "the mask"
        masking = replace(masking, mask=(mask > ABSORBS) & ~hides(mask))
    elif alibi is not None:
        added, name = torch.zeros(len(rows), len(head.k), dtype=torch.float64, device=head.k.device), "ALiBi's bias"
        alibi.add_to(added, alibi.distances(head.positions[rows], slice(0, len(head.k)), len(head.k)))
        masking = replace(masking, alibi=None)
    else:
        return
    block = reference_rows(replace(head, masking=masking), rows)
    added = added[:, block.keys].masked_fill(block.probs == 0, 0.0)
    prediction = block.out + added @ head.v[block.keys]
    yield Guess("mask", f"are what {name} gives that is added to P, behind the softmax", prediction)
