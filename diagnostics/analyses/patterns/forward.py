"""How some rows of O may have come about: another scale, mask, head, or no normalisation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence, Guess
from attn_diag.analyses.patterns.lost_parts import lost_parts
from attn_diag.analyses.patterns.numbers import named, scales
from attn_diag.analyses.patterns.readings import other_heads, other_masks, other_softcap
from attn_diag.analyses.patterns.slab import slab_of
from attn_diag.head.quality import LOSSY
from attn_diag.reference import AttentionHead, reference_rows
from attn_diag.results.wording import number

# Roundings of scores, truncations too, look like a change of the scale by up to 2^-8.
_SCALE_FROM = 0.005
# A small change of it needs many rows: in a few, coarse scores look like one.
SMALL_SCALE, _MANY = 0.05, 16
_STEPS, _SAMPLE = 8, 64


def of_out(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
    """Guesses for some rows of O.

    Args:
        evidence: O.
        rows: Which n rows.
    """
    head = replace(evidence.heads[0], do=None)
    for reading in (*other_masks(head), *other_softcap(head), *other_heads(evidence)):
        prediction = reference_rows(replace(reading.head, do=None), rows).out
        yield Guess(reading.kind, f"are what {reading.words} gives", prediction)
    block = reference_rows(head, rows)
    yield Guess("normalisation", "were not divided by the row sum", block.unnormalised_out)
    sum_scaled = block.unnormalised_out * block.row_max.clamp(max=60.0).exp()[:, None]
    yield Guess("normalisation", "are sums of exp(S) V, never normalised", sum_scaled)
    yield from other_scale(evidence, head, rows)
    yield from lost_parts(evidence, [slab_of(head, evidence.references[0], "o", rows)], rows)


def other_scale(evidence: Evidence, head: AttentionHead, rows: Tensor) -> Iterator[Guess]:
    """O with the scale that fits best, found from the known ones by Gauss-Newton steps.

    alpha dO / d alpha = (P o S) V - rowsum(P o S) O, S without the mask's part; softcap: S times its slope.
    """
    if not head.scale > 0 or (head.masking.mask is not None and head.masking.mask.is_floating_point()):
        return
    known = scales(head.scale, head.q.shape[1])
    noise = evidence.noise[rows].clamp(min=1e-300)[:, None]
    observed = evidence.observed[rows]
    starts = dict.fromkeys((head.scale, *known.values()), 0.0)
    for value in starts:
        block = reference_rows(replace(head, scale=value), rows)
        starts[value] = float(((observed - block.out).square() / noise).sum())
    scale = min(starts, key=lambda value: starts[value])
    for _ in range(_STEPS):
        block = reference_rows(replace(head, scale=scale), rows)
        visible = block.probs > 0
        scores = block.scores.masked_fill(~visible, 0.0)
        if block.slope is not None:
            assert head.softcap is not None
            scores = (scores / head.softcap).clamp(-1 + 1e-15, 1 - 1e-15).atanh() * head.softcap * block.slope
        weighted = block.probs * scores
        derivative = weighted @ head.v[block.keys] - weighted.sum(1, keepdim=True) * block.out
        size = float((derivative.square() / noise).sum())
        if not size or not math.isfinite(size):
            return
        step = float(((observed - block.out) * derivative / noise).sum()) / size
        scale *= 1 + max(-0.5, min(step, 0.5))
        if abs(step) < 1e-6:
            break
    off = scale / head.scale - 1
    if abs(off) < _SCALE_FROM or (abs(off) < SMALL_SCALE and len(rows) < _MANY):
        return
    if abs(off) < SMALL_SCALE:
        usable = evidence.usable.nonzero()[:, 0]
        everywhere = usable[:: -(-len(usable) // _SAMPLE)]
        fit = evidence.fit(everywhere, reference_rows(replace(head, scale=scale), everywhere).out)
        if fit.remaining > LOSSY:
            return  # dropped small P look like it in the rows that stand out
    uncertain = 4 / size**0.5
    name = named(scale, known, max(1e-3 * abs(off), min(uncertain, abs(off) / 4)))
    said = f"{number(scale, 5)}{f' ({name})' if name else ''} instead of {number(head.scale, 5)}"
    prediction = reference_rows(replace(head, scale=scale), rows).out
    yield Guess("scale", f"are what the scale {said} gives", prediction, 1)
