"""Coarse and wrong ways to round, for planted defects; all take and return fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from verdicts.inputs import in_blocks

BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
_INTEGERS = {1: torch.int8, 2: torch.int16}


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To the nearest number of ``dtype``, ties to even."""
    return x.to(dtype).to(x.dtype)


def truncate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Toward zero."""
    near = x.to(dtype)
    bits = near.view(_INTEGERS[near.element_size()])
    # One less in sign and magnitude: the next number toward zero.
    return torch.where(near.to(x.dtype).abs() > x.abs(), (bits - 1).view(dtype), near).to(x.dtype)


def stochastic(x: Tensor, dtype: torch.dtype, uniform: Tensor, bias: float = 0.0) -> Tensor:
    """Up or down with the probability that keeps the mean; ``bias`` is added to the probability of going up.

    Args:
        x (Tensor): What to round, fp32.
        dtype (torch.dtype): The format.
        uniform (Tensor): Random numbers in [0, 1), of x's shape.
        bias (float): What a bad generator adds, 0.05 for five in a hundred.
    """
    low = truncate(x, dtype)
    stored = low.to(dtype)
    high = (stored.view(_INTEGERS[stored.element_size()]) + 1).view(dtype).to(x.dtype)
    share = (x - low).abs() / (high - low).abs()
    up = (uniform < share + bias) & (x != low)
    return torch.where(up & high.isfinite(), high, low)


def to_bits(x: Tensor, bits: int) -> Tensor:
    """To ``bits`` significant bits, nearest, any exponent."""
    mantissa, exponent = torch.frexp(x)
    rounded = torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)
    return torch.where(x.isfinite(), rounded, x)


def to_int8(x: Tensor) -> Tensor:
    """To 255 levels between minus and plus the largest size of 128 rows by all features."""
    blocks = in_blocks(torch.nn.functional.pad(x, (0, 0, 0, -x.shape[-2] % 128)), x.ndim - 2, 128)
    unit = blocks.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30) / 127
    return ((blocks / unit).round() * unit).flatten(-3, -2)[..., : x.shape[-2], :]


def to_fp8(x: Tensor) -> Tensor:
    """To E4M3 with one factor per head that maps the largest number to 448."""
    unit = x.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30) / 448
    return nearest(x / unit, E4M3) * unit


def flush(x: Tensor, below: float) -> Tensor:
    """Numbers smaller than ``below`` become zero."""
    return x.masked_fill(x.abs() < below, 0)


# Interpolation of 2^f at the Chebyshev nodes of [-1/2, 1/2]: relative errors up to 1.0e-4 and 2.3e-3.
EXP2_DEGREE_3 = (0.99992456, 0.69313673, 0.24263948, 0.05583828)
EXP2_DEGREE_2 = (1.0, 0.70360118, 0.24203533)


def exp2_polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """2^x as a polynomial of its fraction in [-1/2, 1/2], times a power of two; 0 below 2^-140."""
    bounded = x.clamp(min=-150)
    whole = bounded.round()
    total = torch.zeros_like(bounded)
    for coefficient in reversed(coefficients):
        total = total * (bounded - whole) + coefficient
    return torch.ldexp(total, whole).masked_fill(x < -140, 0)
