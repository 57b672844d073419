"""The noise of a recipe below 16 bits: what its outputs are off their mean where all its roundings are drawn."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.kernels import Recipe
from attn_diag.kernels.formats import Mode, base, parse
from attn_diag.kernels.quantizers import parse_quantizer
from attn_diag.kernels.recipe import FORMATS, QUANTIZERS


def dithered(recipe: Recipe, draw: int, but: Collection[str] = ()) -> Recipe:
    """The recipe with every quantiser and cast rounding stochastically, ``but`` these and the last, and fp32 sums."""
    changes: dict[str, str] = {}
    for name in FORMATS:
        rounding = parse(getattr(recipe, name))
        if rounding is not None and rounding.mode is Mode.NEAREST_EVEN and name not in ("input", "out", "dq", *but):
            changes[name] = f"{base(getattr(recipe, name))}:{Mode.STOCHASTIC}"
    for name in QUANTIZERS:
        text = getattr(recipe, name)
        by = parse_quantizer(text)
        if by is not None and name not in but:
            changes[name] = f"{text} elements={base(by.elements)}:{Mode.STOCHASTIC} ties=even"
    return replace(recipe, seed=draw + 1, accumulation="fp32-nearest", **changes)  # type: ignore[arg-type]


def drawn_noise(draws: Sequence[Tensor]) -> Tensor:
    """[N, n, D] or [N, n] fp32: what each draw is off their mean, so that its square is the noise's in the mean."""
    every = torch.stack([d.float() for d in draws])
    # Half of the variance of stochastic roundings; N - 1 of N for the mean.
    return (every - every.mean(0)) * math.sqrt(len(draws) / (2 * (len(draws) - 1)))


def smoothed_variance(noise: Tensor) -> Tensor:
    """The noise's variance, [n, D] or [n] float64: that of an element, or what its row and feature have on average."""
    variance = noise.double().square().mean(0)
    if variance.ndim == 1:
        return variance
    shared: Tensor = variance.mean(1, keepdim=True) * variance.mean(0) / variance.mean().clamp(min=1e-300)
    return torch.maximum(variance, shared)


def directions_of(noise: Tensor) -> Tensor:
    """tr^2 / ||C||^2 of the covariance of noise [N, m, w] over w, at least 1: [m]."""
    products = torch.einsum("amw,bmw->mab", noise.double(), noise.double())
    count = len(noise)
    trace = products.diagonal(dim1=1, dim2=2)
    # Of a != b: the products of the traces, and the squares whose mean is ||C||^2.
    traces = (trace.sum(1).square() - trace.square().sum(1)) / (count * (count - 1))
    square = (products.square().sum((1, 2)) - trace.square().sum(1)) / (count * (count - 1))
    # Draws about their own mean have a product of -tr / (N - 1) each.
    square = square - traces / (count - 1) ** 2
    found: Tensor = traces / square.clamp(min=1e-300)
    return found.clamp(1.0, noise.shape[2])
