"""All key ranges of a block of query rows at once, where the online softmax can be told before it is walked.

With the safe rule, or the stabilised one, the maximum after a range is the largest of the ranges' own up to it. P_bar,
its cast and P_barV of every range follow in one operation each; what is left to walk are l and O_bar, [R] and [R, Dv].
Splits of the keys, each with a maximum of its own, are walked side by side. For a GPU, which takes longer to be told of
an operation than to do it for one range.
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
    known = known and (head.sink is None or recipe.sink_joins == "last")
    plain = known and not recipe.quantized and recipe.smooth_v == "none" and head.dropout is None
    return plain and all(rounds_monotonically(getattr(recipe, site)) for site in _DETERMINISTIC)


@dataclass
class Walked:
    """The ranges' softmax; tiles as they lie, or in the recipe's order."""

    probs: Tensor
    """P_bar, [..., R, S N, K] as they lie; 0 where the first or last range ends within a tile."""
    maxima: Tensor
    """m after each range, [..., R, S, N] in order."""
    rescale: Tensor
    """What it multiplies the old sums by, likewise."""


class _Order(NamedTuple):
    """The order of key tiles, int64."""

    lying: Tensor
    """Where the tile of each step lies, [S, N]."""
    steps: Tensor
    """The step of each tile as it lies, counted over all splits, [S N]."""


@lru_cache(maxsize=256)  # copies to a GPU, which are the same for many recipes and blocks
def _order_of(places: tuple[tuple[int, ...], ...], device: torch.device) -> _Order:
    lying = torch.tensor(places)
    return _Order(lying.to(device), lying.flatten().argsort().to(device))


@dataclass(frozen=True)
class KeyRanges:
    """The ranges of S splits of N tiles, in the recipe's order; tiles that a split lacks come last in it."""

    recipe: Recipe
    splits: Sequence[Sequence[slice]]
    """One after the other; several are whole tiles each."""
    rounder: Rounder
    factor: float
    """What S - m is multiplied by in the exponent."""
    visited: Tensor | None = None
    """Whether a row's query block comes to each, bool [R, tiles] in order; None: it comes to all."""

    @cached_property
    def keys(self) -> slice:
        """All of them."""
        tiles = [tile for split in self.splits for tile in split]
        return slice(min(t.start for t in tiles), max(t.stop for t in tiles))

    @cached_property
    def _pads(self) -> tuple[int, int]:
        """Keys that the first and the last tile lack, or the first and the last split."""
        schedule = self.recipe.schedule  # of several tiles; they begin at multiples of it
        width = schedule.key_tile if len(self.splits) == 1 else schedule.split_keys or 0
        return self.keys.start % width, -self.keys.stop % width

    @cached_property
    def _steps(self) -> int:
        """N."""
        length: int = self.keys.stop - self.keys.start + sum(self._pads)
        return length // self.recipe.schedule.key_tile // len(self.splits)

    def _order(self, device: torch.device) -> _Order:
        begin, width, count = self.keys.start - self._pads[0], self.recipe.schedule.key_tile, self._steps
        places = []
        for number, split in enumerate(self.splits):
            there = [(tile.start - begin) // width for tile in split]
            every = range(number * count, (number + 1) * count)
            places.append((*there, *(sorted({*every} - {*there}) if len(there) < count else ())))
        return _order_of(tuple(places), device)

    @cached_property
    def _visits(self) -> Tensor | None:
        """Whether a row comes to each tile, bool [R, S, N], or [S, N] for all rows; None: they come to all."""
        lengths, count = [len(split) for split in self.splits], self._steps
        if self.visited is None and min(lengths) == count:
            return None
        there = [number * count + step for number, length in enumerate(lengths) for step in range(length)]
        shape = () if self.visited is None else (len(self.visited),)
        found = torch.zeros(*shape, len(lengths) * count, dtype=torch.bool)
        if self.visited is not None:
            found = found.to(self.visited.device)
        found[..., there] = True if self.visited is None else self.visited
        return found.view(*shape, len(lengths), count)

    def _where_visited(self, x: Tensor, otherwise: float) -> Tensor:
        return x if self._visits is None else x.masked_fill(~self._visits.to(x.device), otherwise)

    def walked(self, scores: Tensor) -> Walked:
        """From the scores of all keys, [..., R, keys]."""
        padded = torch.nn.functional.pad(scores, self._pads, value=-torch.inf) if any(self._pads) else scores
        by_tile = padded.view(*scores.shape[:-1], -1, self.recipe.schedule.key_tile)
        order, start = self._order(scores.device), self.keys.start
        top = own_maximum(self.recipe, by_tile)[..., 0][..., order.lying]
        maxima = self.rounder("row_max", top, start).cummax(-1).values
        before = torch.nn.functional.pad(maxima[..., :-1], (1, 0), value=-torch.inf)
        rescale = exponential(self.recipe, before, maxima, self.factor, self.rounder, start, "rescale")
        # Where m stays a fused multiply-add leaves a factor that is not quite 1.
        rescale = self._where_visited(rescale, 1.0)
        lying = maxima.flatten(-2)[..., order.steps, None]
        return Walked(exponential(self.recipe, by_tile, lying, self.factor, self.rounder, start), maxima, rescale)

    def sums(self, summed: Tensor) -> Tensor:
        """What every range adds to l, [..., R, S, N] in order, from [..., R, S N, K]."""
        found = summed.sum(-1)[..., self._order(summed.device).lying]
        if self.recipe.row_sum_clamp is not None:
            found = self._where_visited(found.clamp(min=self.recipe.row_sum_clamp), 0.0)
        return found

    def carried(
        self, factors: Tensor, terms: Tensor, rounded: Callable[[Tensor, int, str], Tensor] | None, *, lying: bool
    ) -> Tensor:
        """Sums carried from range to range, [..., S, R, D]: those before times their factor, plus a term.

        Args:
            factors: [..., R, S, N] in order.
            terms: [..., S N, R, D].
            rounded: What rounds the product (step "rescale") and the sum (step ""), given x, a range's first key and
                the step; None: nothing.
            lying: Whether the terms lie as the tiles do, not in order.
        """
        order, factors = self._order(terms.device).lying, factors.transpose(-3, -2)
        if rounded is None and compiles_for(terms.device):
            from attn_diag.kernels.triton_carried import carried

            return carried(factors, terms, order if lying else None)
        by_split = terms.view(*terms.shape[:-3], len(self.splits), -1, *terms.shape[-2:])
        total = terms.new_zeros(*factors.shape[:-1], terms.shape[-1])
        longest: Sequence[slice] = max(self.splits, key=len)
        for step, keys in enumerate(longest):
            term = terms[..., order[:, step], :, :] if lying else by_split[..., step, :, :]
            scaled = total.mul_(factors[..., step, None])
            scaled = scaled if rounded is None else rounded(scaled, keys.start, "rescale")
            total = scaled.add_(term) if rounded is None else rounded(scaled.add_(term), keys.start, "")
        return total

    def products(self, cast: Tensor, v: Tensor) -> Tensor:
        """P_barV of every range as the recipe rounds it, [..., S N, R, Dv] as they lie; ``v`` of all keys."""
        left, right = self._pads
        by_tile = torch.nn.functional.pad(v, (0, 0, left, right))
        by_tile = by_tile.view(*v.shape[:-2], -1, self.recipe.schedule.key_tile, v.shape[-1])
        elements = base(self.recipe.probs)
        operands = elements if elements in ("bf16", "fp16") else self.recipe.input
        found = matmul(cast.transpose(-3, -2), by_tile, self.recipe.accumulation, operands=operands)
        key = self.keys.start
        return self.rounder("range_pv", self.rounder("pv_sums", found, key), key)


def together(recipe: Recipe, splits: list[list[slice]]) -> list[list[list[slice]]]:
    """The splits that are walked side by side."""
    of_whole_tiles = (
        recipe.schedule.split_keys is not None and recipe.schedule.split_keys % recipe.schedule.key_tile == 0
    )
    return [splits] if len(splits) < 2 or of_whole_tiles else [[split] for split in splits]


def walked(recipe: Recipe, block: Block, ranges: KeyRanges) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """m, l, l as it is rounded [..., S, R, 1] and O_bar [..., S, R, Dv] after all ranges, of recipes that
    ``walks_ahead`` knows."""
    rounder, place = ranges.rounder, (ranges.keys.start, "ranges")

    def walk() -> Walked:
        return ranges.walked(masked_scores(recipe, block, ranges.keys))

    step = block.shared("softmax", recipe, SOFTMAX, place, walk)

    def cast_probs() -> Tensor:
        scaled = step.probs if recipe.probs_scale == 1.0 else step.probs * recipe.probs_scale
        return rounder("probs", scaled, ranges.keys.start)

    cast = block.shared("cast", recipe, PROBS, place, cast_probs)

    def sum_rows() -> tuple[Tensor, Tensor]:
        added = ranges.sums(step.probs if recipe.row_sum_of == "fp32-probs" else cast / recipe.probs_scale)
        carry = partial(ranges.carried, step.rescale, added.flatten(-2).mT[..., None], lying=False)
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
    return step.maxima[..., -1:].transpose(-3, -2), exact_sum, row_sum, accumulator
