"""Correct rounding by looking a value up in the sorted table of all the format's numbers.

Nothing is computed from the value's own bits, so that this shares no arithmetic with the roundings it judges. The
table is the definition of the format (IEEE 754-2019, 3.4; OCP OFP8 1.0, section 5 for E4M3; OCP MX 1.0, 5.3.2 and
5.3.3 for FP6 and FP4), pattern for pattern,

    exponent field 0:  mantissa * 2**(1 - bias - mantissa_bits)
    otherwise:         (2**mantissa_bits + mantissa) * 2**(field - bias - mantissa_bits)

and the midpoint of two neighbours is exact in float64. Meant for formats of up to 20 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

TableMode = Literal["nearest-even", "toward-zero", "up", "down"]
Top = Literal["infinity", "nan", "numbers"]


@dataclass(frozen=True)
class RoundingTable:
    """The non-negative numbers of a format, ascending: float64 [patterns]; an index is a bit pattern.

    The last entry is no number of the format. It is the first pattern after the largest number (infinity; in a format
    without one, NaN or none) read by the same rule: where the next number would lie, and so where overflow begins.
    """

    numbers: Tensor
    finite: bool

    @classmethod
    def of(
        cls, exponent_bits: int, mantissa_bits: int, *, top: Top = "infinity", device: torch.device | str = "cpu"
    ) -> RoundingTable:
        """The table of a format.

        Args:
            exponent_bits: Bits of its exponent.
            mantissa_bits: Explicit bits of its significand.
            top: What the patterns of its largest exponent hold: infinity and NaN; numbers and, all ones, NaN (E4M3);
                numbers alone (E2M1, E2M3, E3M2).
            device: Where the table lies.

        Raises:
            ValueError: The format has more than 20 bits.
        """
        if exponent_bits + mantissa_bits > 19:
            raise ValueError(
                f"a table is for formats of up to 20 bits, sign included, got e{exponent_bits}m{mantissa_bits}"
            )
        bias = 2 ** (exponent_bits - 1) - 1
        patterns = 2 ** (exponent_bits + mantissa_bits)
        first_beyond = {"infinity": patterns - 2**mantissa_bits, "nan": patterns - 1, "numbers": patterns}[top]
        numbers = []
        for pattern in range(first_beyond + 1):
            field, mantissa = divmod(pattern, 2**mantissa_bits)
            # (Past the last pattern of E2M1 and its like the field goes on by itself.)
            significand = mantissa if field == 0 else mantissa + 2**mantissa_bits
            numbers.append(math.ldexp(significand, max(field, 1) - bias - mantissa_bits))
        return cls(torch.tensor(numbers, dtype=torch.float64, device=device), top != "infinity")

    def bracket(self, x: Tensor) -> Bracket:
        """``x`` (float64, any shape, on the table's device) between its two neighbours."""
        if x.dtype != torch.float64:
            raise TypeError(f"the table expects float64, got {x.dtype}; convert it first (exactly)")
        # NaN and everything past the last entry land on the last entry.
        return Bracket(self, x, torch.searchsorted(self.numbers, x.abs(), right=True, out_int32=True) - 1)


@dataclass(frozen=True)
class Bracket:
    """Values and, for each, the pattern of the largest number of the format that is not above its magnitude."""

    table: RoundingTable
    x: Tensor
    below: Tensor

    def round(self, mode: TableMode) -> Tensor:
        """``x`` rounded in ``mode``, float64. NaN and infinities stay; zero keeps its sign."""
        numbers, x = self.table.numbers, self.x
        beyond = len(numbers) - 1
        magnitude, low = x.abs(), numbers[self.below]
        if mode == "nearest-even":
            middle = (low + numbers[(self.below + 1).clamp_(max=beyond)]) / 2
            # Neighbouring patterns differ in their last bit: the even one wins a tie.
            away = (magnitude > middle) | ((magnitude == middle) & (self.below % 2 == 1))
        elif mode == "toward-zero":
            away = torch.zeros_like(x, dtype=torch.bool)
        else:
            away = (magnitude != low) & ((x > 0) if mode == "up" else (x < 0))
        pattern = self.below + away
        rounded = numbers[pattern.clamp(max=beyond - 1)]  # the largest number, where it overflows
        if not self.table.finite and mode != "toward-zero":
            to_infinity = pattern >= beyond
            if mode != "nearest-even":
                to_infinity &= (x > 0) if mode == "up" else (x < 0)
            rounded = torch.where(to_infinity, torch.inf, rounded)
        return torch.where(x.isfinite(), rounded.copysign(x), x)
