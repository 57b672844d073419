"""What rounding P makes of a gradient by one number a row, where the backward takes rowsum(P o dP) by itself.

With r_j the relative error of a cast P_j, that sum is off by e = sum_j P_j r_j dP_j, of variance eps^2 sum P^2 dP^2.
The variance in ``counterfactual`` has sum dO^2 var O in its place, as though the features of V had nothing in common:
of a V with a mean e is several times larger, and O's last rounding, which may undo it in a captured O, is no part of
it. A backward that makes delta of an O in fp32 so moves dQ along P K, and one that goes through a row maximum that was
not detached (plain torch, by autograd) gives the row's sum of dS, which is e, to the key with the largest score:

    dQ    alpha e P K, and alpha e K of the top key
    dK    of var e    alpha^2 (P^2 + [top])^T Q^2
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attn_diag.head.propagation import sloped
from attn_diag.reference import AttentionHead, FloatFormat, RowBlock, reference_rows

# e is a sum of many roundings; dP may be cast, too, which makes as much again.
_CASTS, _DEVIATIONS = 2, 5.0
_CHUNK = 256
# The squared sine of the angle between rows that count as parallel.
_PARALLEL = 1e-12


def without_row_sums(head: AttentionHead, fmt: FloatFormat, observed: Tensor, truth: Tensor, rows: Tensor) -> Tensor:
    """dQ [Tq, D] without what e may have made of these rows, [n]; the rest of it as it was."""
    found = observed.clone()
    for block, top, deviation in _blocks(head, fmt, rows):
        k = head.k[block.keys]
        along = [weights @ k * head.scale for weights in (sloped(block, block.probs), top)]
        most = _DEVIATIONS * deviation
        for times, one in zip(_times((observed - truth)[block.rows], *along), along, strict=True):
            found[block.rows] -= times.clamp(-most, most)[:, None] * one
    return found


def _times(error: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """How often a and b, [n, D], are in an error, by least squares, [n]; of parallel ones the smallest numbers."""
    aa, bb, ab, ae, be = (torch.linalg.vecdot(x, y) for x, y in ((a, a), (b, b), (a, b), (a, error), (b, error)))
    determinant = aa * bb - ab.square()
    apart, both = determinant > _PARALLEL * aa * bb, (aa + bb).clamp(min=1e-300)
    safe = determinant.where(apart, 1.0)
    one, other = (bb * ae - ab * be) / safe, (aa * be - ab * ae) / safe
    return one.where(apart, ae / both), other.where(apart, be / both)


def key_variance(head: AttentionHead, fmt: FloatFormat) -> Tensor:
    """Of dK, what e makes in it, [Tk, D]."""
    found = torch.zeros_like(head.k)
    for block, top, deviation in _blocks(head, fmt, torch.arange(len(head.q), device=head.q.device)):
        weights = (sloped(block, block.probs).square() + top.square()) * deviation.square()[:, None]
        found[block.keys] += weights.T @ (head.scale * head.q[block.rows]).square()
    return found


def _blocks(head: AttentionHead, fmt: FloatFormat, rows: Tensor) -> Iterator[tuple[RowBlock, Tensor, Tensor]]:
    """Some rows with where their largest scores are (times the slope, equal ones as one), and e's deviation, [n]."""
    relative = (_CASTS * 2.0 ** (-2 * fmt.precision) / 24) ** 0.5
    for part in torch.split(rows, _CHUNK) if len(rows) else ():
        block = reference_rows(head, part)
        assert block.dprobs is not None
        top = (block.scores == block.row_max[:, None]).double()
        top /= top.sum(1, keepdim=True).clamp(min=1.0)
        yield block, sloped(block, top), relative * (block.probs * block.dprobs).norm(dim=1)
