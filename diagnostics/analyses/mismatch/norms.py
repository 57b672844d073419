"""Whether x, or q or k, of one run is the other's times a factor a token, as another epsilon of a norm makes it.

A norm divides by sqrt(mean(h^2) + epsilon): with another epsilon every feature of a token is multiplied by the same
factor, in every token to the same side of 1 (Zhang & Sennrich, "Root Mean Square Layer Normalization", arXiv
1910.07467, eq. 4). Rounding moves x in all directions: of what it does, little lies along x, and on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attn_diag.analyses.mismatch.rows import RunRows
from attn_diag.analyses.mismatch.storage import few_levels
from attn_diag.results.wording import number

# Standard errors of the mean factor: as many layers and tries as in ``fit``.
_SIGNIFICANT = 4.4
# Tokens on the mean's side of 1, and how near the factor along x and that of the norm must be to each other.
_SAME_SIDE, _AGREE = 0.9, 0.5
_FEWEST = 8


@dataclass(frozen=True)
class NormFactor:
    """That a tensor of rollout is train's times a factor a token."""

    which: Literal["x", "q", "k"]
    """Which tensor."""
    mean: float
    """The mean factor."""
    low: float
    """Of a twentieth of the tokens it is below."""
    high: float
    """And of a twentieth above."""

    @property
    def words(self) -> str:
        """In a sentence."""
        spread = f"{number(self.mean, 4)} ({number(self.low, 4)} to {number(self.high, 4)} by token)"
        if self.which == "x":
            how = "the norm before attention has another epsilon, or its weight is multiplied by a constant"
            return f"the attention's input x of rollout is train's times {spread}: {how}"
        how = f"the norm of {self.which} has another epsilon or weight, or a scale is folded into {self.which}"
        return f"{self.which} of rollout is train's times {spread}, and what is projected is not: {how}"


def find_norm(
    streams: Sequence[tuple[Tensor, Tensor]], heads: Sequence[tuple[RunRows, RunRows]], unit: float
) -> NormFactor | None:
    """The factor of a layer; None where there is none.

    Args:
        streams: x of the same tokens in train and in rollout, [n, C] each.
        heads: The rows of every head in both.
        unit: The largest relative error of one rounding: a denominator that is rounded is off by no more.
    """
    of_heads = {name: [(getattr(a, name), getattr(b, name)) for a, b in heads] for name in "qkv"}
    if streams:
        found = _factor("x", streams, unit)
    else:
        # What x does, q, k and v do alike.
        every = [_factor("x", both, unit) for both in of_heads.values()]
        found = every[-1]
        if found is not None and any(o is None or abs(o.mean / found.mean - 1) > unit for o in every):
            return None
    if found is not None:
        return found
    for which in ("q", "k"):
        if (found := _factor(which, of_heads[which], unit)) is not None:
            return found
    return None


def _factor(which: Literal["x", "q", "k"], both: Sequence[tuple[Tensor, Tensor]], unit: float) -> NormFactor | None:
    a, b = (torch.cat([pair[side] for pair in both]) for side in (0, 1))
    size = a.square().sum(1)
    a, b, size = a[size > 0], b[size > 0], size[size > 0]
    if len(a) < _FEWEST:
        return None
    along = (a * b).sum(1) / size - 1
    apart = (b - (1 + along)[:, None] * a).square().sum(1) / size
    longer = float((b.square().sum(1) / size).sqrt().mean()) - 1
    mean, error = float(along.mean()), float(along.std()) / math.sqrt(len(along))
    # What is added to x and normed again shortens it along x by half the square of what was added.
    least = max(unit, float(apart.mean()), _SIGNIFICANT * error)
    one_side = float((along * mean > 0).double().mean())
    # Numbers of few bits on either side are rounded by more than such a factor: their grids are others.
    if float(apart.mean()) > mean**2 and (few_levels(a) or few_levels(b)):
        return None
    if abs(mean) <= least or one_side < _SAME_SIDE or abs(longer - mean) > _AGREE * abs(mean):
        return None
    low, high = (float(1 + along.quantile(at)) for at in (0.05, 0.95))
    return NormFactor(which, 1 + mean, low, high)
