"""Hopper's approximate reciprocal, by which Triton divides fp32 numbers.

Triton's x / y is PTX's div.full.f32: the product, rounded to nearest, with what the hardware's MUFU.RCP gives for
1 / y. That is the nearest fp32 number for 86.8 % of all mantissas of y, one unit above it for 8.7 % and one below for
4.5 %; which, nobody publishes. ``reciprocals_hopper.xz`` holds it for all 2**23 of them as an H100 gave it
(``tests/test_low_bit_recipes.py`` asks a GPU again). The exponent changes nothing while the result is normal.
"""

from __future__ import annotations

import lzma
from functools import cache
from importlib import resources

import torch
from torch import Tensor

_MANTISSA = 0x7FFFFF


def hopper_reciprocal(y: Tensor) -> Tensor:
    """1 / y as the hardware gives it, of fp32 ``y`` of any shape; the nearest where y or the result is not normal."""
    nearest = y.reciprocal()
    units = _units(y.device)[(y.contiguous().view(torch.int32) & _MANTISSA).long()]
    normal = torch.finfo(torch.float32).tiny
    known = (nearest.abs() >= normal) & nearest.isfinite() & (y.abs() >= normal)
    return torch.where(known, (nearest.contiguous().view(torch.int32) + units).view(torch.float32), nearest)


def hopper_quotient(x: Tensor, y: Tensor) -> Tensor:
    """x / y of fp32 tensors, broadcast, as Triton's kernels divide on Hopper."""
    return x * hopper_reciprocal(y)


@cache
def _units(device: torch.device) -> Tensor:
    """By mantissa: units in the last place from the nearest reciprocal, int32 [2**23]."""
    packed = resources.files(__package__).joinpath("reciprocals_hopper.xz").read_bytes()
    return torch.frombuffer(bytearray(lzma.decompress(packed)), dtype=torch.int8).to(device, torch.int32)
