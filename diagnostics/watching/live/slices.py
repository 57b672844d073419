"""Which columns of a linear layer's output are q: by their values, as far as a norm and a rotation leave them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Rotations leave the norm of a row as it is; BF16 changes it by less than this.
_SAME_NORM = 0.02
# The right columns correlate by 0.7 to 1, others by as much as they share, or by chance: so many standard deviations.
_SAME_SIZES, _CHANCE = 0.5, 5.0


@dataclass(frozen=True)
class Slice:
    """Which columns of a linear layer's output are q."""

    heads: int
    dim: int
    groups: int = 0
    """0: all columns are, or the first Hq * D (q, k and v one after the other). Else the output is
    [groups, Hq / groups + 2, D]: k and v follow their own queries (GPT-NeoX, InternLM); or [Hq, 2, D]: a gate does."""

    def columns(self, width: int, device: torch.device) -> Tensor | slice:
        """Return the columns of q among ``width`` of them."""
        if not self.groups:
            return slice(0, self.heads * self.dim)
        numbers = torch.arange(width, device=device).view(self.groups, -1, self.dim)
        return numbers[:, : self.heads // self.groups].reshape(-1)

    def of(self, y: Tensor) -> Tensor:
        """Cut q [B, Hq, T, D] out of y [B, T, N]."""
        picked = y[..., self.columns(y.shape[-1], y.device)]
        return picked.reshape(*y.shape[:2], self.heads, self.dim).transpose(1, 2)


def slices(width: int, heads: int, dim: int) -> list[Slice]:
    """Where q [., heads, ., dim] may be in an output of ``width`` columns, the likeliest first."""
    if width < heads * dim:
        return []
    found = [Slice(heads, dim)]
    kv = width // dim - heads
    if width % dim == 0 and kv > 0 and kv % 2 == 0 and heads % (kv // 2) == 0:
        found.append(Slice(heads, dim, groups=kv // 2))
    return [*found, Slice(heads, dim, groups=heads)] if width == 2 * heads * dim else found  # Qwen3-Next: q and gate


def same_norms(one: Tensor, other: Tensor) -> bool:
    """Whether their rows are as long as each other's: a rotation may lie between."""
    norm = other.double().norm(dim=-1)
    return bool((one.double().norm(dim=-1) - norm).norm() / norm.norm() < _SAME_NORM)


def same_sizes(one: Tensor, other: Tensor) -> float:
    """How well features' sizes agree where a norm and a rotation may lie between; 0: no more than by chance.

    The correlation of log sizes of the pairs of features that rotate together, without what a row and a pair have in
    common. ``one``, ``other``: [B, H, R, D].
    """
    if one.shape[-1] % 2:
        return 0.0
    found = 0.0
    for pairs, axis in (((2, -1), -2), ((-1, 2), -1)):  # halves of a row, or neighbours
        a, b = (t.double().reshape(*t.shape[:-1], *pairs).norm(dim=axis).flatten(0, 2) for t in (one, other))
        a, b = (torch.log(t + 1e-30) for t in (a, b))
        a, b = (t - t.mean(0) - t.mean(1, keepdim=True) + t.mean() for t in (a, b))
        at = float((a * b).sum() / (a.norm() * b.norm()).clamp(min=1e-30))
        found = max(found, at if at > max(_SAME_SIZES, _CHANCE / a.numel() ** 0.5) else 0.0)
    return found
