"""Several heads emulated at once: for a GPU, which takes longer to be told of an operation than to do it for a head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_diag.kernels.emulation import EmulatedRows, _places, _run_block, check_supported
from attn_diag.kernels.emulation_forward import Block
from attn_diag.kernels.emulation_operands import HeadLike, Operands
from attn_diag.kernels.recipe import Recipe


@dataclass(frozen=True)
class _Given:
    """A head with other tensors."""

    of: HeadLike
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)


def emulate_stack(recipes: Sequence[Recipe], heads: Sequence[HeadLike]) -> Iterator[tuple[Tensor, list[EmulatedRows]]]:
    """As ``emulate_blocks``, of H heads at once: every operation is one for all of them, and its results are [H, ...].

    Each head has what it has alone, up to the order in which products add; random roundings draw the same numbers for
    all, and other ones than alone where fewer rows are taken at a time.

    Args:
        recipes: Recipes with one query block, whose sums of products are not a tensor core's (``stackable``).
        heads: Of one shape, scale, softcap and masking, without sinks, ALiBi's slopes or dropout.
    """
    first, names = heads[0], ("q", "k", "v") if heads[0].do is None else ("q", "k", "v", "do")
    for recipe in recipes:
        check_supported(recipe, first)
    tensors = [torch.stack([getattr(head, name) for head in heads]) for name in names]
    nothing = [None] * len(recipes)
    for _, rows, keys in _places(recipes, first, len(heads)):

        def work(*given: Tensor, rows: Tensor = rows, keys: slice = keys) -> list[list[Tensor]]:
            found = _run_block(recipes, Block(Operands(_Given(first, *given)), rows, keys), nothing)[1]
            return [[t for t in vars(made).values() if t is not None] for made in found]

        found = torch.vmap(work, randomness="same")(*tensors)
        yield rows, [_rows_of(*made) for made in found]


def _rows_of(
    unrounded: Tensor, out: Tensor, lse: Tensor, delta: Tensor | None = None, dq: Tensor | None = None
) -> EmulatedRows:
    return EmulatedRows(unrounded, out, lse, delta, dq)


def stackable(recipe: Recipe) -> bool:
    """Whether ``emulate_stack`` takes it: a tensor core's sums look at their own exponents, number by number."""
    return recipe.accumulation != "nvidia-tensor-core" and not recipe.quantized
