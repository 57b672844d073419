"""Sums and products of float64 tensors by parts, so that no term passes many roundings."""

from __future__ import annotations

import math

from torch import Tensor

# Keys that one product sums; longer sums go by parts. It divides the bound of a long sum's error by up to 8 at 0 to
# 10 % of a product's time; fewer keys cost more and gain little.
SUM_KEYS = 128
# The same for a row sum, whose parts cost next to nothing.
SUM_TERMS = 32


def is_power_of_two(value: float) -> bool:
    """Whether a product with ``value`` rounds nothing (but underflow)."""
    return math.frexp(abs(value))[0] == 0.5


def product_in_parts(weights: Tensor, values: Tensor) -> Tensor:
    """``weights`` [..., R, K] times ``values`` [..., K, D], 128 keys at a time: no sum of over 128 + K/128 terms."""
    keys = weights.shape[-1]
    count = keys // SUM_KEYS
    if count < 2:
        return weights @ values
    whole = count * SUM_KEYS
    left = weights[..., :whole].view(*weights.shape[:-1], count, SUM_KEYS).transpose(-3, -2)  # [..., C, R, 128]
    right = values[..., :whole, :].view(*values.shape[:-2], count, SUM_KEYS, values.shape[-1])
    result = (left @ right).sum(-3)
    return result.add_(weights[..., whole:] @ values[..., whole:, :]) if whole < keys else result


def sum_in_parts(values: Tensor) -> Tensor:
    """Row sums of ``values`` [R, K], 32 terms at a time, and those sums likewise."""
    count = values.shape[1] // SUM_TERMS
    if count < 2:
        return values.sum(1)
    whole = count * SUM_TERMS
    result = sum_in_parts(values[:, :whole].view(len(values), count, SUM_TERMS).sum(2))
    return result.add_(values[:, whole:].sum(1)) if whole < values.shape[1] else result


def product_depth(keys: int) -> int:
    """How many roundings a term of ``product_in_parts`` passes at most, its own product's among them."""
    count = keys // SUM_KEYS
    return keys if count < 2 else SUM_KEYS + count


def sum_depth(keys: int) -> int:
    """How many roundings a term of ``sum_in_parts`` passes at most."""
    count = keys // SUM_TERMS
    return max(keys - 1, 0) if count < 2 else SUM_TERMS + sum_depth(count)
