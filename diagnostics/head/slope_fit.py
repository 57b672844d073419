"""The ALiBi slope that a captured O fits best, found continuously.

    dO / dslope = (P o d) V - rowsum(P o d) O      d the distances that the slope multiplies

Gauss-Newton on it. One a few per cent off is much like another scale, or a softcap.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.reference import Alibi, AttentionHead, reference_rows

_STEPS = 8


def fit_slope(head: AttentionHead, rows: Tensor, observed: Tensor) -> float | None:
    """The slope of a head that has one, as fp32 holds it; None where O shows none.

    Args:
        head: The head, as it is stated.
        rows: Which R rows of O are looked at.
        observed: These, [R, Dv] float64; others than finite ones are left out.
    """
    stated = head.masking.alibi
    if stated is None:
        return None
    slope, good = stated.slope, observed.isfinite().all(1)
    for _ in range(_STEPS):
        block = reference_rows(with_slope(replace(head, do=None), slope), rows)
        far = stated.distances(head.positions[rows], block.keys, len(head.k)).double()
        weighted = block.probs * far
        along = (weighted @ head.v[block.keys] - weighted.sum(1, keepdim=True) * block.out)[good]
        size = float(along.square().sum())
        if not size > 0:
            return None
        change = float(((observed - block.out)[good] * along).sum()) / size
        most = max(abs(slope) / 2, abs(stated.slope) / 8)
        slope += max(-most, min(change, most))
    return float(torch.tensor(slope, dtype=torch.float32))


def with_slope(head: AttentionHead, slope: float) -> AttentionHead:
    """The head with another slope, counted from where its own is."""
    stated = head.masking.alibi
    assert stated is not None
    held = float(torch.tensor(slope, dtype=torch.float32))
    return replace(head, masking=replace(head.masking, alibi=Alibi(held, stated.origin)))
