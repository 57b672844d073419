"""Correct rounding of float64 values to the low-precision formats, in one step.

Going through float32 first (as ``x.to(torch.bfloat16)`` does for a float64 ``x``) rounds twice:
1 + 2**-8 + 2**-40 becomes 1.0, where the nearest BF16 number is 1.0078125.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_EXPONENT_FIELD = 0x7FF << 52  # of a float64


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format with subnormals."""

    name: str
    """Its name, such as bf16."""
    precision: int
    """Explicit mantissa bits."""
    min_exponent: int
    """Exponent of the smallest normal number."""
    largest: float
    """The largest finite number."""
    saturates: bool = False
    """The format has no infinity; finite values that are too large become ``largest``."""

    @property
    def smallest_normal(self) -> float:
        """The smallest positive normal number, 2**min_exponent."""
        return 2.0**self.min_exponent

    @cached_property
    def rounds_to_one(self) -> float:
        """The largest x with exp(x) not rounding to 1: ln(1 - 2**-(precision + 2)); -0.001955 for BF16.

        Below 1 the spacing is 2**-(precision + 1), so 1 - 2**-(precision + 2) is the tie, and it goes to
        the even neighbour, 1.
        """
        return float(torch.log1p(torch.tensor(-(2.0 ** -(self.precision + 2)), dtype=torch.float64)))


BF16 = FloatFormat("bf16", 7, -126, (2 - 2.0**-7) * 2.0**127)
FP16 = FloatFormat("fp16", 10, -14, 65504.0)
FP32 = FloatFormat("fp32", 23, -126, (2 - 2.0**-23) * 2.0**127)
FP64 = FloatFormat("fp64", 52, -1022, torch.finfo(torch.float64).max)
E4M3 = FloatFormat("e4m3", 3, -6, 448.0, saturates=True)
E5M2 = FloatFormat("e5m2", 2, -14, 57344.0)
# OCP MX 1.0: no infinity, no NaN.
E3M2 = FloatFormat("e3m2", 2, -2, 28.0, saturates=True)
E2M3 = FloatFormat("e2m3", 3, 0, 7.5, saturates=True)
E2M1 = FloatFormat("e2m1", 1, 0, 6.0, saturates=True)

_FORMATS = {
    torch.bfloat16: BF16,
    torch.float16: FP16,
    torch.float32: FP32,
    torch.float64: FP64,
    torch.float8_e4m3fn: E4M3,
    torch.float8_e5m2: E5M2,
}


def format_of(dtype: torch.dtype) -> FloatFormat:
    """The format of a torch dtype; KeyError for one that is not a binary floating-point format we know."""
    return _FORMATS[dtype]


def round_nearest_even(x: Tensor, fmt: FloatFormat, *, wait: bool = True) -> Tensor:
    """Round once to a format, to nearest, ties to even.

    Subnormals are rounded to the format's smallest spacing, the sign of zero is kept, NaN and infinities stay. Finite
    values that round past ``fmt.largest`` become infinite, or ``fmt.largest`` where the format saturates.

    The rounding is one float64 addition: with C = 1.5 * 2**52 * spacing(x), the sum x + C has exactly that
    spacing, so IEEE addition itself rounds x to nearest-even, and subtracting C is exact. To fp32 the hardware's own
    conversion is that rounding.

    Args:
        x: float64, of any shape.
        fmt: The format.
        wait: Look whether anything is too large before dealing with it, which on a GPU makes the host wait. False does
            the same without looking, in three more passes.

    Returns:
        The rounded values, float64, of the shape of ``x``.

    Raises:
        TypeError: ``x`` is not float64.
    """
    if x.dtype != torch.float64:
        raise TypeError(f"round_nearest_even expects float64, got {x.dtype}; convert it first (exactly)")
    if fmt.precision >= 52:
        return x.clone()
    if fmt is FP32 and not x.requires_grad:  # whose gradient would be rounded too
        return x.float().double()
    # The power of two at or below |x|; as C is a multiple of it, both additions scale it themselves.
    power = (x.detach().view(torch.int64) & _EXPONENT_FIELD).view(torch.float64)
    # One binade above the largest number every value overflows, whatever its spacing is taken to be.
    top = 2.0 ** math.frexp(fmt.largest)[1]
    power.clamp_(fmt.smallest_normal, top)
    multiple = 1.5 * 2.0 ** (52 - fmt.precision)
    rounded = torch.add(x, power, alpha=multiple)
    rounded.sub_(power, alpha=multiple).copysign_(x)
    if rounded.numel() == 0:
        return rounded
    if wait:
        # Below the largest number's own binade nothing rounds past it.
        if not rounded.is_cuda and float(power.amax()) < top / 2:
            return rounded
        extremes = rounded.detach().aminmax()
        lowest, highest = torch.stack(extremes).tolist() if rounded.is_cuda else map(float, extremes)
        if lowest >= -fmt.largest and highest <= fmt.largest:  # not so where NaN hides the extremes
            return rounded
    limit = fmt.largest if fmt.saturates else torch.inf
    over = (rounded.abs() > fmt.largest) & x.isfinite()
    return torch.where(over, torch.full_like(x, limit).copysign_(x), rounded)


def ulp(x: Tensor, fmt: FloatFormat) -> Tensor:
    """Spacing of ``fmt`` at max(|x|, smallest normal number), float64, the shape of ``x`` (float64).

    Infinite where x is NaN or infinite.
    """
    magnitude = x.abs().clamp_(min=fmt.smallest_normal)
    magnitude.view(torch.int64).bitwise_and_(_EXPONENT_FIELD)  # leaves the power of two
    return magnitude.mul_(2.0**-fmt.precision)
