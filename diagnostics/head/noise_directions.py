"""In how many directions a well-rounded kernel's errors of a row may point, however many elements the row has."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_diag.head.counterfactual import same_keys, together
from attn_diag.reference import AttentionHead, FloatFormat, reference_rows, ulp

_MOST_DIRECTIONS = 128
# So many weighted numbers are held at a time.
_AT_ONCE = 2**20


def directions(head: AttentionHead, fmt: FloatFormat, quantity: str, rows: Tensor) -> Tensor:
    """How many directions the expected noise of some rows of O or dQ has: (tr C)^2 / ||C||^2 of its covariance C.

    Args:
        head: The head.
        fmt: The format of P's and dS's casts.
        quantity: "o" or "dq".
        rows: Indices, [n].

    Returns:
        [n], at least 1; of more than ``_MOST_DIRECTIONS`` rows 1 for the rest.
    """
    result = torch.ones(len(rows), dtype=torch.float64)
    relative = 2.0 ** (-2 * fmt.precision) / 24
    block = reference_rows(head, rows[:_MOST_DIRECTIONS])
    weights, vectors, truth = head.drop(block.probs, block.rows, block.keys), head.v[block.keys], block.out
    if quantity == "dq":
        assert block.dscores is not None
        assert block.dq is not None
        weights, vectors, truth = block.dscores * head.scale, head.k[block.keys], block.dq
    if (alike := same_keys(head)) is not None:
        weights = weights * together(alike[block.keys], (block.unnormalised_probs > 0).to(weights.dtype)).sqrt()
    weights, own = weights.square() * relative, ulp(truth, fmt).square() / 12
    count = max(1, _AT_ONCE // max(vectors.numel(), 1))
    for start in range(0, len(weights), count):
        several = slice(start, min(start + count, len(weights)))
        covariance = (weights[several, :, None] * vectors).mT @ vectors
        diagonal = covariance.diagonal(dim1=1, dim2=2).add_(own[several])
        result[several] = (diagonal.sum(1).square() / covariance.square().sum((1, 2))).cpu()
    return result
