"""Rotations of pairs of features, row by row (RoPE; Su et al., arXiv 2104.09864, eq. 34), measured from data.

A pair (a, b) is the complex number a + ib, and row t turns it by a factor of modulus 1. Nothing is assumed of the
angles: scaled, offset or multi-axis positions are all the same. All heads of a sequence share them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from attn_diag.reference import FloatFormat, Rows, ulp

Layout = Literal["rotate-half", "interleaved"]
ALL_ROWS = slice(None)


@dataclass(frozen=True)
class Pairs:
    """Which of ``head_dim`` features turn together: (i, i + features/2) or (2i, 2i + 1).

    Those from ``features`` on do not turn.
    """

    layout: Layout
    features: int
    head_dim: int

    @property
    def first(self) -> slice:
        """The pairs' first features."""
        return slice(0, self.features // 2) if self.layout == "rotate-half" else slice(0, self.features, 2)

    @property
    def second(self) -> slice:
        """The pairs' second features."""
        return slice(self.features // 2, self.features) if self.layout == "rotate-half" else slice(1, self.features, 2)

    @classmethod
    def of_partner(cls, partner: int, head_dim: int) -> Pairs:
        """The pairs, once it is known which feature turns with feature 0."""
        if partner == 1:
            return cls("interleaved", head_dim // 2 * 2, head_dim)
        return cls("rotate-half", 2 * partner, head_dim)

    @property
    def words(self) -> str:
        """The layout, and how many features turn where some do not."""
        part = "" if self.features == self.head_dim else f", {self.features} of {self.head_dim} features"
        return self.layout + part

    def join(self, values: Tensor) -> Tensor:
        """[n, D] real to [n, pairs] complex."""
        return torch.complex(values[:, self.first].contiguous(), values[:, self.second].contiguous())

    def sum(self, values: Tensor) -> Tensor:
        """The sums over pairs, [n, D] to [n, pairs]."""
        return values[:, self.first] + values[:, self.second]

    def spread(self, values: Tensor, like: Tensor) -> Tensor:
        """Both features' copies of [n, pairs], and ``like`` [n, D] in the features that do not turn."""
        result = like.clone()
        result[:, self.first] = values
        result[:, self.second] = values
        return result


@dataclass(frozen=True)
class Rotation:
    """R: row t's pair i is multiplied by ``turn[t, i]`` (complex128 of modulus 1).

    ``variance`` [T, pairs]: of the measured angle, in radians squared. ``seen`` [T, pairs]: False where the data say
    nothing about the angle (``turn`` is 1 there, or from elsewhere).
    """

    pairs: Pairs
    turn: Tensor
    variance: Tensor
    seen: Tensor

    @classmethod
    def measure(
        cls, pairs: Pairs, source: list[Tensor], target: list[Tensor], noise: list[Tensor] | None = None
    ) -> Rotation:
        """The R with target = R source, one [T, D] tensor a head: the angles of least squares over the heads.

        ``noise`` [T, D]: variances of the errors of ``target``, of which half lies across the product conj(s) t.
        """
        product = sum(pairs.join(s).conj() * pairs.join(t) for s, t in zip(source, target, strict=True))
        assert isinstance(product, Tensor)
        length = product.abs()
        seen = length > 0
        turn = torch.where(seen, product / length.where(seen, 1.0), torch.ones_like(product))
        variance = torch.zeros_like(length)
        if noise is not None:
            for s, n in zip(source, noise, strict=True):
                variance += pairs.sum(n) * pairs.sum(s.square()) / 2
            variance = torch.where(seen, variance / length.square().where(seen, 1.0), 0.0)
        return cls(pairs, turn, variance, seen)

    def inverse(self) -> Rotation:
        """R^T."""
        return replace(self, turn=self.turn.conj().resolve_conj())

    def filled_from(self, other: Rotation) -> Rotation:
        """With ``other``'s angles where this one has none; they stay marked as not seen."""
        return replace(self, turn=torch.where(self.seen, self.turn, other.turn))

    def back(self, values: Tensor, rows: Rows = ALL_ROWS) -> Tensor:
        """R^T values, [n, D] float64; ``rows``: which n rows of the sequence they are."""
        turned = self.turn[rows].conj() * self.pairs.join(values)
        result = values.clone()
        result[:, self.pairs.first], result[:, self.pairs.second] = turned.real, turned.imag
        return result

    def rounding(self, values: Tensor, fmt: FloatFormat) -> Tensor:
        """Squares of the largest errors of turning ``values`` [T, D] (either way) in ``fmt``, summed for every element.

        Rounded are the cosine, the sine and the two products; the last sum is left to the caller.
        """
        joined = self.pairs.join(values)
        found = torch.zeros_like(values)
        cos, sin = self.turn.real.contiguous(), self.turn.imag.contiguous()
        for near, far, place in (
            (joined.real, joined.imag, self.pairs.first),
            (joined.imag, joined.real, self.pairs.second),
        ):
            for factor, value in ((cos, near), (sin, far)):
                found[:, place] += half_ulp_square(factor, fmt) * value.square()
                found[:, place] += half_ulp_square(factor * value, fmt)
        return found

    def uncertainty(self, values: Tensor) -> Tensor:
        """What the angles' variance makes of R ``values`` or R^T ``values``, [T, D]: a variance, alike in a pair."""
        share = self.pairs.sum(values.square()) * self.variance / 2
        return self.pairs.spread(share, torch.zeros_like(values))

    def known(self, values: Tensor) -> Tensor:
        """Of which elements of ``values`` [T, D] the angle is known (bool)."""
        return self.pairs.spread(self.seen, torch.ones_like(values, dtype=torch.bool))


def half_ulp_square(values: Tensor, fmt: FloatFormat) -> Tensor:
    """The square of the largest error of rounding ``values`` (float64) to nearest in ``fmt``."""
    return ulp(values, fmt).square_().div_(4)
