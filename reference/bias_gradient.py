"""The gradient of a bias that is added to the scores, of a block of query rows, with a bound of its own error.

    dBias = P o (dP - delta)        no slope: the bias is added behind softcap        summed where it is broadcast

P's relative error is at most twice L's absolute one (rho, and rho + gamma(n_l), of ``reference.certificate``), so

    |error of dBias| <= P (error of dP + error of delta) (1 + 2 e_L) + (2 e_L + 8 u) |dBias|
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_diag.reference.attention import AttentionHead, RowBlock
from attn_diag.reference.certificate import UNIT
from attn_diag.reference.head_bounds import HeadBounds
from attn_diag.reference.magnitudes import SLACK, upper_norm


def bias_gradient(head: AttentionHead, bounds: HeadBounds, block: RowBlock) -> tuple[Tensor, Tensor]:
    """dBias of a block, and a bound of its error.

    Args:
        head: The head, with dO.
        bounds: Of its reference.
        block: Some rows, with dP kept.

    Returns:
        [R, K] each.

    Raises:
        ValueError: There is no dO, or dP was not kept.
    """
    if head.do is None or block.dprobs is None or block.delta is None or bounds.delta is None:
        raise ValueError("the gradient of a bias needs dO, and a block with dP")
    probs = block.probs
    found = probs * (block.dprobs - block.delta[:, None])
    terms = head.v.shape[1] + 1
    largest = upper_norm(head.v[block.keys], 1).amax() if found.shape[1] else found.new_zeros(())
    of_dprobs = terms * UNIT / (1 - terms * UNIT) * upper_norm(head.do[block.rows], 1) * largest
    if head.dropout is not None:
        of_dprobs = of_dprobs * (head.dropout.factor * SLACK)
    of_lse = 2 * bounds.lse[block.rows].masked_fill(block.fully_masked, 0.0)
    drift = (of_dprobs + bounds.delta[block.rows]) * (1 + of_lse)
    bound = probs * drift[:, None] + found.abs() * (of_lse + 8 * UNIT)[:, None]
    return found, bound.nan_to_num(nan=torch.inf, posinf=torch.inf)
