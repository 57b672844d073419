"""exp as kernels evaluate it, in fp32 or float64."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

# FlashAttention-4 (arXiv 2603.05451), degree 3 on [0, 1): its mean relative error is +8.2e-6.
_PUBLISHED = {3: (1.0, 0.695146143436431884765625, 0.227564394474029541015625, 0.077119089663028717041015625)}
MAX_DEGREE = 8


def exp2_polynomial(x: Tensor, degree: int) -> Tensor:
    """2**floor(x) p(x - floor(x)) with a polynomial p of ``degree``; Horner by fused multiply-adds in ``x``'s dtype."""
    x = x.clamp(min=-1100.0)  # 2**-1100 is 0 in float64 too; -inf has no fraction
    whole = x.floor()
    fraction = (x - whole).double()
    coefficients = _coefficients(degree)
    value = torch.full_like(fraction, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        value = (value * fraction + c).to(x.dtype).double()
    return (value * torch.exp2(whole.double())).to(x.dtype)


@cache
def _coefficients(degree: int) -> tuple[float, ...]:
    """Of the published polynomial, or of that with the least maximum relative error for which p(0) = 1."""
    if degree in _PUBLISHED:
        return _PUBLISHED[degree]
    if not 1 <= degree <= MAX_DEGREE:
        raise ValueError(f"exp_degree must lie between 1 and {MAX_DEGREE}, got {degree}")
    return (1.0, *_remez(degree))


def _remez(degree: int) -> list[float]:
    """Coefficients from the first power on, by Remez' exchange: the relative error's ``degree`` + 1 extrema are equal.

    (A linear program's solver stops at 1e-7, which is the error of degree 5.)
    """
    import numpy as np

    x = np.linspace(0.0, 1.0, 4001)[1:]  # at 0 the error is 0
    weighted = np.stack([x**i * np.exp2(-x) for i in range(1, degree + 1)], 1)
    offset = 1.0 - np.exp2(-x)
    signs = (-1.0) ** np.arange(degree + 1)
    # Chebyshev's extrema, on (0, 1].
    at = np.rint((1 - np.cos(np.pi * (np.arange(degree + 1) + 0.5) / (degree + 0.5))) / 2 * (len(x) - 1)).astype(int)
    coefficients = np.zeros(degree)
    for _ in range(20):
        coefficients = np.linalg.solve(np.column_stack([weighted[at], signs]), offset[at])[:degree]
        error = weighted @ coefficients - offset
        runs = np.split(np.arange(len(x)), np.flatnonzero(np.diff(np.sign(error))) + 1)
        peaks = np.array([run[np.abs(error[run]).argmax()] for run in runs])
        if len(peaks) != degree + 1 or (peaks == at).all():
            break
        at = peaks
    return [float(c) for c in coefficients]


def exponential(scores: Tensor, maxima: Tensor, factor: float) -> Tensor:
    """exp2(fma(S, c, -m c)), c = fp32(factor log2 e), in the dtype of ``scores``: what most kernels evaluate."""
    return torch.exp2(scaled_exponent(scores, maxima, factor))


def scaled_difference(earlier: Tensor, later: Tensor, factor: float) -> Tensor:
    """(m - m') factor log2 e as kernels rescale their sums: exactly 0 where the maximum stays."""
    return (earlier - later) * _in_twos(factor, earlier.dtype)


def scaled_exponent(scores: Tensor, maxima: Tensor, factor: float) -> Tensor:
    """(S - m) factor log2 e by one fused multiply-add: product and sum are rounded together."""
    if scores.dtype == torch.float64:
        return scaled_apart(scores, maxima, factor)
    c = _in_twos(factor, scores.dtype)
    return (scores.double() * c - (maxima * c).double()).float()


def scaled_apart(scores: Tensor, maxima: Tensor, factor: float) -> Tensor:
    """S c - m c, c = fp32(factor log2 e): each product is rounded by itself, and so is their difference."""
    c = _in_twos(factor, scores.dtype)
    return scores * c - maxima * c


@cache
def _in_twos(factor: float, dtype: torch.dtype) -> float:
    """factor log2 e, rounded once to fp32 unless the arithmetic is float64's."""
    return float(torch.tensor(factor * math.log2(math.e), dtype=dtype))
