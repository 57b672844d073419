"""Elements that no floating-point format has: integers, and numbers of a list, which are bitsandbytes' 4-bit types.

A list's largest number is 1, so that a block's scale is its amax. A number becomes the nearest one of the list; half
way between two it becomes the lower one, as in bitsandbytes' kernels (``dQuantizeNF4``: a code is the number of
thresholds that are smaller).

Sources: Dettmers et al., "QLoRA", arXiv 2305.14314, appendix E, for NF4; bitsandbytes 0.50.2,
``functional.get_4bit_type``, for the numbers of both: of FP4 the smallest is 0.0625 / 12 where E2M1 has 1 / 12.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.kernels.formats import Mode

_FP4 = tuple(n / 12 for n in (0.0625, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0))
_NUMBERS: dict[str, tuple[float, ...]] = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "bnb-fp4": (*(-n for n in reversed(_FP4)), 0.0, *_FP4),
}  # fmt: skip


@dataclass(frozen=True)
class Integers:
    """Signed integers of so many bits."""

    bits: int
    """With the sign, 2 to 8."""
    narrow: bool
    """Without -2**(bits - 1), so that both signs reach as far."""
    mode: Mode = Mode.NEAREST_EVEN
    """How is rounded to them."""

    @property
    def lowest(self) -> int:
        """The lowest one."""
        return -(1 << (self.bits - 1)) + self.narrow

    @property
    def highest(self) -> int:
        """The highest one."""
        return (1 << (self.bits - 1)) - 1


@dataclass(frozen=True)
class CodeBook:
    """A list of numbers that elements are rounded to, to nearest."""

    name: str
    """Its name."""
    mode: Mode = Mode.NEAREST_EVEN
    """To nearest: no other rounding is known."""

    @property
    def numbers(self) -> tuple[float, ...]:
        """The numbers, the lowest first."""
        return _NUMBERS[self.name]

    def tensor(self, like: Tensor) -> Tensor:
        """The numbers as fp32 has them, in ``like``'s dtype and on its device."""
        return torch.tensor(self.numbers, dtype=torch.float32, device=like.device).to(like.dtype)

    def rounded(self, x: Tensor) -> Tensor:
        """``x``'s nearest numbers; NaN stays NaN."""
        numbers = self.tensor(x)
        nearest = numbers[torch.bucketize(x.nan_to_num(), (numbers[1:] + numbers[:-1]) / 2)]
        return torch.where(x.isnan(), x, nearest)

    def spacing(self, x: Tensor) -> Tensor:
        """The distance of the two numbers about each of ``x``, of which the outer ones have one neighbour."""
        numbers = self.tensor(x)
        upper = torch.bucketize(x, numbers).clamp(1, len(numbers) - 1)
        return numbers[upper] - numbers[upper - 1]


def code_book(elements: str) -> CodeBook | None:
    """The code book of this name; None: there is none. Raises ValueError for a rounding that it has not."""
    name, _, mode = elements.partition(":")
    if name not in _NUMBERS:
        return None
    if mode not in ("", Mode.NEAREST_EVEN):
        raise ValueError(f"{name} is rounded to nearest, got {mode!r}")
    return CodeBook(name)
