"""Float64 tensors with a proven bound of their error, carried through every operation.

u = 2**-53, gamma(n) = n u / (1 - n u): a sum of n products is off by at most gamma(n) times the sum of their sizes, in
whatever order (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., eq. 3.5). exp, sqrt, log and tanh are
taken to be within 2 ulp, at most 4 u, as in ``certificate``. The bounds are themselves computed in float64; ``SLACK``
covers that, and ``TINY`` what an underflow loses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.reference.certificate import UNIT

FUNCTION = 4.5 * UNIT
SLACK = 1 + 2.0**-20
TINY = 2.0**-1000


def gamma(n: int) -> float:
    """What n roundings may change a term by, relative to it."""
    return n * UNIT / (1 - n * UNIT)


@dataclass(frozen=True)
class Bounded:
    """A float64 tensor, and how far it may be from the truth."""

    value: Tensor
    """Any shape."""
    bound: Tensor
    """|value - truth| at most; broadcasts to the shape of ``value``."""

    @classmethod
    def exact(cls, value: Tensor) -> Bounded:
        """A tensor that is the truth, as a kernel's inputs are."""
        return cls(value.double(), torch.zeros((), dtype=torch.float64, device=value.device))

    def __add__(self, other: Bounded) -> Bounded:
        value = self.value + other.value
        return Bounded(value, self.bound + other.bound + UNIT * value.abs())

    def __sub__(self, other: Bounded) -> Bounded:
        return self + -other

    def __neg__(self) -> Bounded:
        return Bounded(-self.value, self.bound)

    def __mul__(self, other: Bounded) -> Bounded:
        value = self.value * other.value
        moved = self.value.abs() * other.bound + other.value.abs() * self.bound + self.bound * other.bound
        return Bounded(value, moved + UNIT * value.abs() + TINY)

    def reciprocal(self) -> Bounded:
        """1 / x; the bound is inf where x may be 0."""
        value = self.value.reciprocal()
        room = self.value.abs() - self.bound
        moved = torch.where(room > 0, self.bound * value.abs() / room.clamp(min=TINY), torch.inf)
        return Bounded(value, moved + 2 * UNIT * value.abs() + TINY)

    def exp(self) -> Bounded:
        """e**x."""
        value = self.value.exp()
        return Bounded(value, value * (torch.expm1(self.bound) + 2 * FUNCTION) + TINY)

    def rsqrt(self) -> Bounded:
        """1 / sqrt(x); the bound is inf where x may be 0 or less."""
        value = self.value.sqrt().reciprocal()
        room = self.value - self.bound
        moved = torch.where(room > 0, self.bound / room.clamp(min=TINY), torch.inf)
        return Bounded(value, value * (moved + 2 * FUNCTION) + TINY)

    def sum(self, dim: int, *, keepdim: bool = False) -> Bounded:
        """The sum along one dimension."""
        n, bound = self.value.shape[dim], self.bound.expand_as(self.value)
        moved = bound.sum(dim, keepdim) + gamma(n) * self.value.abs().sum(dim, keepdim)
        return Bounded(self.value.sum(dim, keepdim), moved)

    def map(self, change: str, *arguments: object) -> Bounded:
        """A change of shape (a method of Tensor by name), done to the value and its bound."""
        bound = self.bound.expand_as(self.value)
        return Bounded(getattr(self.value, change)(*arguments), getattr(bound, change)(*arguments))

    def columns(self, start: int, stop: int) -> Bounded:
        """A range of the last dimension."""
        return Bounded(self.value[..., start:stop], self.bound.expand_as(self.value)[..., start:stop])

    def settled(self) -> Tensor:
        """The bound with what covers its own rounding; inf where nothing is known."""
        bound = (self.bound.expand_as(self.value) * SLACK + TINY).nan_to_num(nan=torch.inf, posinf=torch.inf)
        return torch.where(self.value.isfinite(), bound, torch.inf)
