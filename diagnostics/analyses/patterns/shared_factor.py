"""A factor near 1 that all rows share and that is all that is wrong: a constant off by 1/256, a 1/(1-p) in 16 bits."""

from __future__ import annotations

import math

import torch

from attn_diag.analyses.patterns.evidence import Evidence
from attn_diag.head.quality import AS_GOOD
from attn_diag.results.quality import Pattern

_SAMPLE = 64
# By chance one number explains as much with probability exp(-_NATS) at most.
_NATS = 7.0


def shared_factor(evidence: Evidence, factor: float) -> Pattern | None:
    """The factor, where what is left without it is as good as a well-rounded kernel's.

    Args:
        evidence: A quantity that is merely coarse.
        factor: Its error over a well-rounded kernel's.
    """
    rows = evidence.usable.nonzero()[:, 0]
    truth, error = evidence.truth[rows], evidence.error[rows]
    own = float((error * truth).sum() / truth.square().sum().clamp(min=1e-300))
    before, left = float(error.square().sum()), float((error - own * truth).square().sum())
    if not before > 0 or (remaining := factor * math.sqrt(left / before)) > AS_GOOD:
        return None
    sample = rows[torch.linspace(0, len(rows) - 1, min(_SAMPLE, len(rows)), device=rows.device).long()]
    numbers = evidence.dimensions(sample) * len(rows) / len(sample)
    if numbers / 2 * math.log(before / max(left, 1e-12 * before)) < _NATS:
        return None
    but_for = "and but for that as good as a well-rounded kernel's"
    words = f"all {evidence.unit} are {1 + own:.5g} times the true ones, {but_for}"
    return Pattern("shared factor", words, 1 - left / before, remaining)
