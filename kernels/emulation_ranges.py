"""All key ranges of a block of query rows at once, where the online softmax can be told before it is walked.

With the safe rule, or the stabilised one, the maximum after a range is the largest of the ranges' own up to it. P_bar,
its cast and P_barV of every range follow in one operation each; what is left to walk are l and O_bar, [R] and [R, Dv].
For a GPU, which takes longer to be told of an operation than to do it for one range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from attn_diag.kernels.accumulation import matmul
from attn_diag.kernels.backend import compiles_for
from attn_diag.kernels.emulation_block import PROBS, PRODUCT, SOFTMAX, Block, masked_scores
from attn_diag.kernels.emulation_operands import HeadLike, Rounder
from attn_diag.kernels.emulation_softmax import exponential, own_maximum
from attn_diag.kernels.formats import base, parse, rounds_monotonically
from attn_diag.kernels.recipe import Recipe

# Sites that must not draw: the backward draws scores again range by range, and a maximum of draws is no draw of it.
_DETERMINISTIC = ("scores", "row_max")


def launches(tensor: Tensor) -> bool:
    """Whether it is where an operation takes longer to be told of than to be done for a range, or for a query block."""
    return tensor.is_cuda


def walks_ahead(recipe: Recipe, head: HeadLike) -> bool:
    """Whether ``KeyRanges`` has what the walk has, but for the order in which products add, and other random draws."""
    known = recipe.softmax.kind in ("safe", "stabilised") and recipe.accumulation != "nvidia-tensor-core"
    plain = known and not recipe.quantized and recipe.smooth_v == "none" and head.dropout is None
    return plain and all(rounds_monotonically(getattr(recipe, site)) for site in _DETERMINISTIC)


@dataclass
class Walked:
    """The ranges' softmax; tiles as they lie, or in the recipe's order."""

    probs: Tensor
    """P_bar, [..., R, tiles, K] as they lie; 0 where the first or last range ends within a tile."""
    maxima: Tensor
    """m after each range, [..., R, tiles] in order."""
    rescale: Tensor
    """What it multiplies the old sums by, likewise."""


class _Order(NamedTuple):
    """The order of key tiles, int64 [tiles]."""

    places: list[int]
    """Where the tile of each step lies."""
    lying: Tensor
    """The same."""
    steps: Tensor
    """The step of each tile as it lies."""


@lru_cache(maxsize=64)
def _order_of(starts: tuple[int, ...], device: torch.device) -> _Order:
    steps = torch.tensor(starts).argsort()
    lying = steps.argsort()
    return _Order(lying.tolist(), lying.to(device), steps.to(device))


@dataclass(frozen=True)
class KeyRanges:
    """The ranges of one split, in the recipe's order."""

    recipe: Recipe
    tiles: Sequence[slice]
    rounder: Rounder
    factor: float
    """What S - m is multiplied by in the exponent."""
    visited: Tensor | None = None
    """Whether a row's query block comes to each, bool [R, tiles] in order; None: it comes to all."""

    @cached_property
    def keys(self) -> slice:
        """All of them."""
        return slice(min(t.start for t in self.tiles), max(t.stop for t in self.tiles))

    @cached_property
    def _pads(self) -> tuple[int, int]:
        """Keys that the first and the last tile lack."""
        width = self.recipe.schedule.key_tile  # of several tiles; they begin at multiples of it
        return self.keys.start % width, -self.keys.stop % width

    def _order(self, device: torch.device) -> _Order:
        return _order_of(tuple(t.start for t in self.tiles), device)

    def walked(self, scores: Tensor) -> Walked:
        """From the scores of all keys, [..., R, keys]."""
        padded = torch.nn.functional.pad(scores, self._pads, value=-torch.inf) if any(self._pads) else scores
        by_tile = padded.view(*scores.shape[:-1], len(self.tiles), -1)
        order = self._order(scores.device)
        top = own_maximum(self.recipe, by_tile)[..., 0][..., order.lying]
        maxima = self.rounder("row_max", top, self.keys.start).cummax(-1).values
        before = torch.nn.functional.pad(maxima[..., :-1], (1, 0), value=-torch.inf)
        rescale = exponential(self.recipe, before, maxima, self.factor, self.rounder, self.keys.start, "rescale")
        if self.visited is not None:  # where m stays a fused multiply-add leaves a factor that is not quite 1
            rescale = rescale.masked_fill(~self.visited, 1.0)
        lying = maxima[..., order.steps, None]
        probs = exponential(self.recipe, by_tile, lying, self.factor, self.rounder, self.keys.start)
        return Walked(probs, maxima, rescale)

    def sums(self, summed: Tensor) -> Tensor:
        """What every range adds to l, [..., R, tiles] in order, from [..., R, tiles, K]."""
        found = summed.sum(-1)[..., self._order(summed.device).lying]
        if self.recipe.row_sum_clamp is not None:
            found = found.clamp(min=self.recipe.row_sum_clamp)
            found = found if self.visited is None else found.masked_fill(~self.visited, 0.0)
        return found

    def carried(
        self, factors: Tensor, terms: Tensor, rounded: Callable[[Tensor, int, str], Tensor] | None, *, lying: bool
    ) -> Tensor:
        """Sums carried from range to range, [..., R, D]: those before times their factor, plus a term.

        Args:
            factors: [..., R, tiles] in order.
            terms: [..., tiles, R, D].
            rounded: What rounds the product (step "rescale") and the sum (step ""), given x, the range's first key and
                the step; None: nothing.
            lying: Whether the terms lie as the tiles do, not in order.
        """
        order = self._order(terms.device)
        if rounded is None and compiles_for(terms.device):
            from attn_diag.kernels.triton_carried import carried

            return carried(factors, terms, order.lying if lying else None)
        total, by_tile = torch.zeros_like(terms.select(-3, 0)), terms.unbind(-3)
        in_order = [by_tile[place] for place in order.places] if lying else by_tile
        for keys, factor, term in zip(self.tiles, factors[..., None].unbind(-2), in_order, strict=True):
            total = total.mul_(factor) if rounded is None else rounded(total.mul_(factor), keys.start, "rescale")
            total = total.add_(term) if rounded is None else rounded(total.add_(term), keys.start, "")
        return total

    def products(self, cast: Tensor, v: Tensor) -> Tensor:
        """P_barV of every range as the recipe rounds it, [..., tiles, R, Dv] as they lie; ``v`` of all keys."""
        left, right = self._pads
        by_tile = torch.nn.functional.pad(v, (0, 0, left, right))
        by_tile = by_tile.view(*v.shape[:-2], len(self.tiles), -1, v.shape[-1])
        elements = base(self.recipe.probs)
        operands = elements if elements in ("bf16", "fp16") else self.recipe.input
        found = matmul(cast.transpose(-3, -2), by_tile, self.recipe.accumulation, operands=operands)
        key = self.keys.start
        return self.rounder("range_pv", self.rounder("pv_sums", found, key), key)


def walked(recipe: Recipe, block: Block, ranges: KeyRanges, split: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """m, l, l as it is rounded [R, 1] and O_bar [R, Dv] after all ranges, of recipes that ``walks_ahead`` knows."""
    rounder, place = ranges.rounder, (split, "ranges")

    def walk() -> Walked:
        return ranges.walked(masked_scores(recipe, block, ranges.keys))

    step = block.shared("softmax", recipe, SOFTMAX, place, walk)

    def cast_probs() -> Tensor:
        scaled = step.probs if recipe.probs_scale == 1.0 else step.probs * recipe.probs_scale
        return rounder("probs", scaled, ranges.keys.start)

    cast = block.shared("cast", recipe, PROBS, place, cast_probs)

    def sum_rows() -> tuple[Tensor, Tensor]:
        added = ranges.sums(step.probs if recipe.row_sum_of == "fp32-probs" else cast / recipe.probs_scale)
        carry = partial(ranges.carried, step.rescale, added.mT[..., None], lying=False)
        exact = carry(None)
        if parse(recipe.row_sum) is None:
            return exact, exact
        return exact, carry(lambda x, key, scaled: x if scaled else rounder("row_sum", x, key))

    fields = (*PROBS, "row_sum_of", "row_sum_clamp", "row_sum", "seed")
    exact_sum, row_sum = block.shared("row sums", recipe, fields, place, sum_rows)

    def add_up() -> Tensor:
        v = block.operands.prepared(recipe).get(recipe, "v").values[..., ranges.keys, :]
        products = block.shared("product", recipe, (*PRODUCT, "range_pv"), place, partial(ranges.products, cast, v))
        rounded = None if parse(recipe.accumulator) is None else partial(rounder, "accumulator")
        return ranges.carried(step.rescale, products, rounded, lying=True)

    accumulator = block.shared("sums of products", recipe, (*PRODUCT, "range_pv", "accumulator"), place, add_up)
    return step.maxima[..., -1:], exact_sum, row_sum, accumulator
