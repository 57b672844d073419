"""Several heads emulated at once: for a GPU, which takes longer to be told of an operation than to do it for a head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_diag.kernels.emulation import Done, check_supported, places_of, run_place
from attn_diag.kernels.emulation_operands import HeadLike, Operands
from attn_diag.kernels.recipe import SMOOTHING, Recipe


@dataclass(frozen=True)
class _SideBySide:
    """Heads as one whose tensors are [H, T, D]; all else is the first one's."""

    first: HeadLike
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.first, name)


def emulate_stack(recipes: Sequence[Recipe], heads: Sequence[HeadLike]) -> Iterator[Done]:
    """As ``emulate_blocks``, of H heads at once: every operation is one for all of them, and its results are [H, ...].

    Each head has what it has alone, up to the order in which products add; random roundings draw the same numbers for
    all, and other ones than alone where fewer rows are taken at a time.

    Args:
        recipes: Recipes with one query block that are ``stackable``.
        heads: Of one shape, scale, softcap and masking, without sinks, ALiBi's slopes or dropout.
    """
    first, names = heads[0], ("q", "k", "v") if heads[0].do is None else ("q", "k", "v", "do")
    for recipe in recipes:
        check_supported(recipe, first)
    stack = _SideBySide(first, *(torch.stack([getattr(head, name) for head in heads]) for name in names))
    operands = Operands(stack)
    for place in places_of(recipes, first, len(heads)):
        yield from run_place(recipes, operands, place)


def stackable(recipe: Recipe) -> bool:
    """Whether ``emulate_stack`` takes it: a tensor core's sums, means and scales are made of one head."""
    plain = all(getattr(recipe, name) == "none" for name in SMOOTHING)
    return plain and recipe.accumulation != "nvidia-tensor-core" and not recipe.quantized
