"""How far O may move where its scores are rounded to 16 bits, as plain torch rounds them: much in hot rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_diag.reference import AttentionHead, FloatFormat, RowBlock, ulp
from attn_diag.reference.rounding import BF16, FP16

# Keys of the shortest range after which a kernel is taken to round its sums.
_RANGE = 64


def moved_by_scores(head: AttentionHead, block: RowBlock, fmt: FloatFormat) -> Tensor:
    """How far, at most, rows of O move where each step that makes a score is rounded to 16 bits.

    Plain torch rounds q times alpha (or q and k times its root), and the score once or twice: with
    A = alpha sum_d |q_d k_d| and the score S, it errs by no more than 2 (A + |S|) of a rounding's unit, which is x in
    the worst key. Then P_j is between exp(-2x) and exp(2x) of itself, and O, as P sums to 1, moves by no more than
    sum_j min(1, (exp(2x) - 1) P_j) |V_j - O|.

    Args:
        head: The head.
        block: R of its rows.
        fmt: The inputs' format; scores are taken to be rounded to FP16 where it is that, and else to BF16.

    Returns:
        The bound for each row, a norm, [R].
    """
    unit = 2.0 ** -((FP16 if fmt == FP16 else BF16).precision + 1)
    k, v, hidden = head.k[block.keys], head.v[block.keys], block.scores.isneginf()
    sizes = abs(head.scale) * head.q[block.rows].abs() @ k.abs().T + block.scores.abs()
    x = 2 * unit * sizes.masked_fill(hidden, 0.0).amax(1, keepdim=True).clamp(min=1e-300)
    # ln(exp(2x) - 1) - L, which added to S is ln((exp(2x) - 1) P)
    grown = 2 * x + (-torch.expm1(-2 * x)).log() - block.lse[:, None]
    away, size = torch.cdist(block.out, v), block.out.norm(dim=1)
    if head.dropout is not None:  # a kept V_j is as many times larger, one that is not is 0
        away = head.dropout.factor * (away + size[:, None])
    moved = ((block.scores + grown).masked_fill(hidden, -math.inf).clamp(max=0.0).exp() * away).sum(1)
    if block.sink is not None:  # a sink has a V of 0
        moved += (block.sink + grown[:, 0]).clamp(max=0.0).exp() * size
    return moved


def expected_by_scores(head: AttentionHead, block: RowBlock, fmt: FloatFormat) -> Tensor:
    """The squared error of O, as expected, where each step that makes a score is rounded to 16 bits by itself.

    Three roundings of a relative unit u, each of variance u^2/3 at most: of alpha q (a term sum_d (alpha q_d k_d)^2),
    and of the score twice. To first order O moves by sum_j P_j e_j (V_j - O), whose square is
    sum_j P_j^2 var(e_j) |V_j - O|^2.

    Args:
        head: The head.
        block: R of its rows.
        fmt: As of ``moved_by_scores``.

    Returns:
        By row, [R].
    """
    unit = 2.0 ** -((FP16 if fmt == FP16 else BF16).precision + 1)
    k, v = head.k[block.keys], head.v[block.keys]
    terms = head.scale**2 * head.q[block.rows].square() @ k.square().T
    variance = unit**2 / 3 * (terms + 2 * block.scores.masked_fill(block.probs == 0, 0.0).square())
    return (block.probs.square() * variance * torch.cdist(block.out, v).square()).sum(1)


def expected_of_coarse_kernels(head: AttentionHead, block: RowBlock, fmt: FloatFormat, out: FloatFormat) -> Tensor:
    """The squared error of O, as expected, where all that a kernel stores on the way is rounded to 16 bits.

    ``expected_by_scores``; P cast, eps^2 P^2 V^2 with eps^2 = 2^(-2p) / 24 as of ``counterfactual``; O_bar and l after
    every range of 64 keys, 2 eps^2 O^2 each; and the last rounding.

    Args:
        head: The head, without dropout.
        block: R of its rows.
        fmt: The inputs' format; all is taken to be rounded to FP16 where it is that, to BF16 where it is no coarser.
        out: O's format.

    Returns:
        By row, [R].
    """
    precision = FP16.precision if fmt == FP16 else min(fmt.precision, BF16.precision)
    relative = 2.0 ** (-2 * precision) / 24
    ranges = -(-len(head.k[block.keys]) // _RANGE)
    cast = (block.probs.square() @ head.v[block.keys].square()).sum(1) + 2 * ranges * block.out.square().sum(1)
    last = ulp(block.out, out).square().sum(1) / 12
    return expected_by_scores(head, block, fmt) + relative * cast + last
