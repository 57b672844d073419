"""How large, how long and how finely divided the numbers of a tensor are, as bounds need it."""

from __future__ import annotations

import torch
from torch import Tensor

# So a square that underflows takes less than 2**-511 from a norm, and n of them sqrt(n) times that.
LOST_SQUARE = 2.0**-509
_PART_ELEMENTS = 2**15
# Bits of a significand, most common first: BF16, FP16, FP32, FP64.
_SIGNIFICANDS = (8, 11, 24, 53)
SLACK = 1 + 2.0**-20


def parts(values: Tensor) -> list[slice]:
    """Rows of ``values`` a few at a time on a CPU, where fresh memory for temporaries costs more than arithmetic."""
    rows = len(values) if values.is_cuda else max(1, _PART_ELEMENTS // max(values.shape[1], 1))
    return [slice(start, start + rows) for start in range(0, len(values), max(rows, 1))]


def quantum_of(values: Tensor) -> Tensor:
    """e such that every element of a row is a multiple of 2**e; int64 [n]."""
    significand = _significand(values)
    found = exponent_of(_smallest(values)) - significand
    if significand == 11 and all(not bool((values[part] * 2.0**24).frac().any()) for part in parts(values)):
        found.clamp_(min=-24)  # FP16: its subnormal numbers have fewer bits
    return found


def _smallest(values: Tensor) -> Tensor:
    """The smallest size of a nonzero element of each row, [n]; inf where there is none."""
    found = values.new_full((len(values),), torch.inf)
    if values.shape[1]:
        for part in parts(values):
            sizes = values[part].abs()
            torch.amin(sizes, 1, out=found[part])
            if not bool(found[part].amin() > 0):
                found[part] = sizes.masked_fill_(sizes == 0, torch.inf).amin(1)
    return found


def exponent_of(sizes: Tensor) -> Tensor:
    """e with size < 2**e, size >= 2**(e - 1) where normal; int64. A size of inf (no element) gives a large e."""
    return ((sizes.view(torch.int64) >> 52) - 1022).masked_fill_(sizes == torch.inf, 10**6)


def _significand(values: Tensor) -> int:
    """How many significant bits every element has at most: 8 where all are BF16 numbers, and so on."""
    needed = 0
    for part in parts(values):
        bits = values[part].contiguous().view(torch.int64)
        while needed < len(_SIGNIFICANDS) - 1 and bits.numel():
            if not bool((bits & ((1 << (53 - _SIGNIFICANDS[needed])) - 1)).amax()):
                break
            needed += 1
    return _SIGNIFICANDS[needed]


def upper_norm(values: Tensor, dim: int) -> Tensor:
    """At least the Euclidean norm along ``dim``."""
    norm: Tensor = torch.linalg.vector_norm(values, dim=dim) * SLACK
    return norm.add_(LOST_SQUARE * values.shape[dim] ** 0.5)
