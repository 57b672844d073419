"""The transposed Jacobian of what lies between the projection and the attention.

The projection gives y_t = x_t w_q^T, attention reads q_t = R_t (g o n(y_t) + b): n nothing, RMSNorm or LayerNorm over
the head's D features, g and b its weight and bias (or a factor and the projection's bias), R_t a rotation of pairs of
features (RoPE). With J_t the Jacobian of row t, dW_Q = sum over rows of (J_t^T dQ_t) (x) x_t, and errors of dQ carry
over by the same J_t. With c the centring of a LayerNorm (else nothing), s the root mean square of c(y) and u = c(y)/s
(Zhang & Sennrich, arXiv 1910.07467, eq. 4, differentiated):

    J^T e = c(v - u <u, v> / D) / s    with v = g o R^T e

The norm's epsilon is neglected: beside a mean square of y of 1e-3 or more the usual 1e-6 is below BF16's roundings.

The variances say how far rounding lets a model's own forward and backward pass stray from this map: every operation of
the most finely divided implementation counts (a kernel that fuses some rounds less often) with the largest error that
rounding to nearest can make, half an ulp. Errors of different operations and elements are taken as independent, so
squares add up; a uniformly distributed error would be smaller by sqrt(3), which is the margin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attn_diag.head.pullback.rotation import ALL_ROWS, Rotation, half_ulp_square
from attn_diag.reference import FloatFormat, Rows

Norm = Literal["none", "rms", "layer"]


@dataclass
class MapRows:
    """One head of one sequence: what goes into the map and comes out of it, forward and backward; [T, D] float64.

    ``y`` = x w_q^T recomputed; ``y_variance``: squares of what it may be off the model's own y before that is rounded.
    ``dq`` and ``dq_pre`` (the gradient of y) as captured, or None. ``usable`` [T]: rows that are finite in all of
    them; the others are 0.
    """

    q: Tensor
    y: Tensor
    y_variance: Tensor
    usable: Tensor
    dq: Tensor | None = None
    dq_pre: Tensor | None = None


@dataclass(frozen=True)
class Pullback:
    """J^T of one head of one sequence, as a function of dQ's errors. ``gain``, ``bias`` [D]: g and b.

    With a norm ``unit`` [T, D] is u and ``size`` [T, 1] is s; without, u is y and s is 1.
    """

    norm: Norm
    rotation: Rotation | None
    gain: Tensor
    bias: Tensor
    unit: Tensor
    size: Tensor

    def __call__(self, errors: Tensor, rows: Rows = ALL_ROWS) -> Tensor:
        """J_t^T e_t for every row of ``errors`` [n, D] float64; ``rows``: which n rows of the sequence they are."""
        pulled = self.gain * self.unrotate(errors, rows)
        if self.norm == "none":
            return pulled
        unit = self.unit[rows]
        pulled = pulled - unit * (unit * pulled).mean(1, keepdim=True)
        if self.norm == "layer":
            pulled = pulled - pulled.mean(1, keepdim=True)
        return pulled / self.size[rows]

    def unrotate(self, values: Tensor, rows: Rows = ALL_ROWS) -> Tensor:
        """R^T ``values``, [n, D]."""
        return values if self.rotation is None else self.rotation.back(values, rows)


def normalise(y: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """u [T, D] and s [T, 1] of ``y`` [T, D]; s is 1 in rows where it would be 0."""
    if norm == "none":
        return y, y.new_ones(len(y), 1)
    centred = y - y.mean(1, keepdim=True) if norm == "layer" else y
    size = centred.square().mean(1, keepdim=True).sqrt()
    size = torch.where(size > 0, size, 1.0)
    return centred / size, size


@dataclass(frozen=True)
class Formats:
    """The model's working format (q's) and dq_pre's own."""

    working: FloatFormat
    dq_pre: FloatFormat


def forward_variance(pullback: Pullback, head: MapRows, working: FloatFormat) -> Tensor:
    """Squares of the largest errors of R^T q - (g o n(y) + b), [T, D]; those of R's angles are left out."""
    z = pullback.unrotate(head.q)
    # n(y) or y + b, then g: two roundings of about z's size.
    variance = 2 * half_ulp_square(z, working) + (pullback.gain / pullback.size).square() * _y_variance(head, working)
    if pullback.rotation is not None:
        variance += pullback.rotation.rounding(z, working) + half_ulp_square(head.q, working)
    return variance


def backward_variance(pullback: Pullback, head: MapRows, formats: Formats) -> Tensor:
    """Squares of the largest errors of dq_pre - J^T dq, [T, D]; those of R's angles are left out."""
    assert head.dq is not None
    working = formats.working
    turned = pullback.unrotate(head.dq)
    variance = torch.zeros_like(turned)
    if pullback.rotation is not None:
        variance += pullback.rotation.rounding(head.dq, working) + half_ulp_square(turned, working)
    variance *= pullback.gain.square()
    weighted, pulled = pullback.gain * turned, pullback(head.dq)
    if pullback.norm != "none":
        d = weighted.shape[1]
        # The projection off u makes no norm larger, so the roundings before it count in full.
        variance += half_ulp_square(weighted, working)
        # u moves with y: once as the direction that is taken out, once as the factor <u, v>, once in s.
        moved = _y_variance(head, working) / pullback.size.square()
        along = (weighted * pullback.unit).mean(1, keepdim=True)
        variance += along.square() * moved
        variance += pullback.unit.square() * (weighted.square() * moved).sum(1, keepdim=True) / d**2
        variance /= pullback.size.square()
        variance += pulled.square() * (pullback.unit.square() * moved).sum(1, keepdim=True) / d**2
    # A factor (or a cast on the way) and the result.
    return variance + half_ulp_square(pulled, working) + half_ulp_square(pulled, formats.dq_pre)


def _y_variance(head: MapRows, working: FloatFormat) -> Tensor:
    return head.y_variance + half_ulp_square(head.y, working)
