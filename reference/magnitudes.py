"""How large, how long and how finely divided the numbers of a tensor are, as bounds need it."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

# So a square that underflows takes less than 2**-511 from a norm, and n of them sqrt(n) times that.
LOST_SQUARE = 2.0**-509
_PART_ELEMENTS = 2**15
# Bits of a significand, most common first: BF16, FP16, FP32, FP64.
_SIGNIFICANDS = (8, 11, 24, 53)
SLACK = 1 + 2.0**-20


def parts(values: Tensor) -> list[slice]:
    """Rows of ``values`` [H, n, d] a few at a time on a CPU, where fresh memory costs more than arithmetic."""
    heads, count, width = values.shape
    rows = count if values.is_cuda else max(1, _PART_ELEMENTS // max(heads * width, 1))
    return [slice(start, start + rows) for start in range(0, count, max(rows, 1))]


def quantum_of(values: Tensor) -> Tensor:
    """e such that every element of a row of [H, n, d] is a multiple of 2**e; int64 [H, n]."""
    significand = _significand(values)
    found = exponent_of(_smallest(values)) - significand
    if bool((half := significand == 11).any()):
        whole = half.clone()
        for part in parts(values):
            whole &= ~(values[:, part] * 2.0**24).frac().any(2).any(1, keepdim=True)
        found = torch.where(whole, found.clamp(min=-24), found)  # FP16: its subnormal numbers have fewer bits
    return found


def _smallest(values: Tensor) -> Tensor:
    """The smallest size of a nonzero element of each row, [H, n]; inf where there is none."""
    found = values.new_full(values.shape[:2], torch.inf)
    if values.shape[2]:
        for part in parts(values):
            sizes = values[:, part].abs()
            smallest = sizes.amin(2)
            if not bool(smallest.amin() > 0):
                smallest = sizes.masked_fill_(sizes == 0, torch.inf).amin(2)
            found[:, part] = smallest
    return found


def exponent_of(sizes: Tensor) -> Tensor:
    """e with size < 2**e, size >= 2**(e - 1) where normal; int64. A size of inf (no element) gives a large e."""
    return ((sizes.view(torch.int64) >> 52) - 1022).masked_fill_(sizes == torch.inf, 10**6)


def _significand(values: Tensor) -> Tensor:
    """How many significant bits every element of a head has at most, int64 [H, 1]: 8 where all are BF16 numbers, ..."""
    found = torch.full((len(values), 1), _SIGNIFICANDS[0], device=values.device)
    for fewer, more in pairwise(_SIGNIFICANDS):
        lost = torch.zeros_like(found, dtype=torch.bool)
        for part in parts(values) if values.shape[2] else []:
            bits = values[:, part].contiguous().view(torch.int64)
            lost |= (bits & ((1 << (53 - fewer)) - 1)).amax((1, 2))[:, None] != 0
        if not bool(lost.any()):
            break
        found[lost] = more
    return found


def upper_norm(values: Tensor, dim: int) -> Tensor:
    """At least the Euclidean norm along ``dim``."""
    norm: Tensor = torch.linalg.vector_norm(values, dim=dim) * SLACK
    return norm.add_(LOST_SQUARE * values.shape[dim] ** 0.5)
