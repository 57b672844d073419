"""Masks that hide keys by a finite number: what O then holds of the keys that it must not see.

With b in place of -inf a hidden key weighs e^b times what its score says. Let O_v, L_v be the attention of the keys
that a row sees, O_a, L_a of these and the hidden ones; h = exp(L_a - L_v) - 1 and H = exp(L_a - L_v) O_a - O_v. Then

    O (1 + w h) = O_v + w H,   w = e^b,

which is linear in w: weighted least squares, the weights 1 / (1 + w h)^2 of the step before, so that O's own errors
count alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# From the first guess, w = 0, a few steps end; one that does not end fits nothing.
_STEPS = 12
_SMALL = 1e-9


@dataclass(frozen=True)
class Leak:
    """Some rows with and without the keys that a mask hides, [n, D] and [n] float64."""

    out: Tensor
    """O_v."""
    lse: Tensor
    """L_v."""
    out_all: Tensor
    """O_a."""
    lse_all: Tensor
    """L_a."""

    def predicted(self, value: float) -> Tensor:
        """O where the mask adds ``value``, [n, D]."""
        hidden, weighed = self._sums()
        w = math.exp(value)
        return (self.out + w * weighed) / (1 + w * hidden)[:, None]

    def fitted(self, observed: Tensor, noise: Tensor | None = None) -> float | None:
        """The number that O fits best; None where it fits none below 0.

        Args:
            observed: O, [n, D].
            noise: Expected squared error of each row, [n]; None: alike.
        """
        hidden, weighed = self._sums()
        slope, off = weighed - hidden[:, None] * observed, observed - self.out
        good = slope.isfinite().all(1) & off.isfinite().all(1)
        slope, off, hidden = slope[good], off[good], hidden[good]
        scale = torch.ones_like(hidden) if noise is None else 1 / noise[good].clamp(min=1e-300)
        w = 0.0
        for _ in range(_STEPS):
            weight = scale / (1 + w * hidden).square()
            size = float((slope.square().sum(1) * weight).sum())
            if not size > 0 or not math.isfinite(size):
                return None
            before, w = w, min(1.0, max(0.0, float(((off * slope).sum(1) * weight).sum()) / size))
            if abs(w - before) <= _SMALL * w:
                return math.log(w) if 0 < w < 1 else None
        return None

    def _sums(self) -> tuple[Tensor, Tensor]:
        """H and h."""
        grown = (self.lse_all - self.lse).exp()
        return torch.expm1(self.lse_all - self.lse), grown[:, None] * self.out_all - self.out


def words_of(value: float) -> str:
    """What such a mask does, in words that follow "hides keys by"."""
    return f"adding {value:.3g} to their scores (weights times exp({value:.3g}), not 0)"
