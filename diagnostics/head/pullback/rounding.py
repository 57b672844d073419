"""How far rounding lets a model's own forward and backward pass stray from the exact map.

Every operation of the most finely divided implementation counts (a kernel that fuses some rounds less often) with the
largest error that rounding to nearest can make, half an ulp. Different operations' and elements' errors are taken as
independent, so squares add up; a uniformly distributed error would be smaller by sqrt(3), which is the margin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.head.pullback.jacobian import MapRows, Pullback
from attn_diag.head.pullback.rotation import half_ulp_square
from attn_diag.reference import FloatFormat, format_of

# Sums of K products in fp32: sqrt(K) u per term (Higham & Mary, SIAM J. Sci. Comput. 41, 2019), and four times that
# because tensor cores truncate: measured on an H200, -190 u at K = 4096 and -28 u at K = 1024.
_SUM_ERROR = 4.0


@dataclass(frozen=True)
class Formats:
    """The model's working format (q's) and dq_pre's own."""

    working: FloatFormat
    dq_pre: FloatFormat


def product_variance(x: Tensor, w: Tensor, working: FloatFormat, given: tuple[torch.dtype, torch.dtype]) -> Tensor:
    """Squares of the largest errors of x w^T in the model, before its result is rounded; [T, D].

    ``x`` [T, C], ``w`` [D, C] float64; ``given``: their dtypes in the capture. Where one is wider than the working
    format, autocast may have rounded it.
    """
    fp64 = working.name == "fp64"
    unit = torch.finfo(torch.float64 if fp64 else torch.float32).eps / 2
    variance = (x.abs() @ w.abs().T).mul_(_SUM_ERROR * math.sqrt(x.shape[1]) * unit).square_()
    if format_of(given[0]).precision > working.precision:
        variance += half_ulp_square(x, working) @ w.square().T
    if format_of(given[1]).precision > working.precision:
        variance += x.square() @ half_ulp_square(w, working).T
    return variance


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
