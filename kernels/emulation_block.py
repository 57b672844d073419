"""A block of query rows of the emulation, its scores, and what recipes share of the work on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from attn_diag.kernels.accumulation import matmul
from attn_diag.kernels.emulation_operands import (
    OF_PRODUCT,
    OF_SCORES,
    OF_VALUES,
    HeadLike,
    Operands,
    Rounder,
    core_of,
    working_dtype,
)
from attn_diag.kernels.formats import parse, round_to, rounds_monotonically
from attn_diag.kernels.recipe import Recipe

T = TypeVar("T")


# What the scores, the softmax, and the cast P_bar depend on; recipes that agree in them share the work.
SCORES = ("scores", *OF_SCORES)
SOFTMAX = (*SCORES, "difference", "row_max", "exp", "exp_degree", "rescaling", "sink_joins", "softmax", "schedule")
PROBS = (*SOFTMAX, "probs", "probs_scale", "quantize_probs")
PRODUCT = (*PROBS, "dropout_factor", *OF_VALUES, "pv_sums")
Key = tuple[object, ...]
# Hugging Face hides keys by a format's lowest number, which times log2(e) leaves fp32 and makes inf - inf.
_LOWEST = -(2.0**100)


# attrgetter for the same fields again and again.
_getter = cache(lambda fields: attrgetter(*fields))


def softmax_key(recipe: Recipe) -> Key:
    """What P_bar before its cast depends on, for a given head."""
    found: Key = _getter(SOFTMAX)(recipe)
    return found


def lse_key(recipe: Recipe) -> Key:
    """What L depends on, for a given head."""
    fields = [*SOFTMAX, "row_sum_of", "row_sum_clamp", "lse_from"]
    if recipe.row_sum_of == "cast-probs":
        fields += ["probs", "probs_scale", "quantize_probs"]
    if recipe.lse_from == "rounded-l":
        fields.append("row_sum")
    return tuple(getattr(recipe, f) for f in fields)


@dataclass
class Block:
    """Query rows that walk the keys together, and the intermediates that recipes share.

    ``rows`` [R] indices; ``keys``: what any row of their query block may see.
    """

    operands: Operands
    rows: Tensor
    keys: slice
    _shared: dict[Key, Any] = field(default_factory=dict)

    @property
    def head(self) -> HeadLike:
        """The head they belong to."""
        return self.operands.head

    @cached_property
    def _first_row(self) -> int:
        return int(self.rows[0])

    def rounder(self, recipe: Recipe) -> Rounder:
        """The recipe's rounding sites in these rows."""
        return Rounder(recipe, self._first_row, self.head.q.ndim - 2)

    def shared(self, name: str, recipe: Recipe, depends_on: tuple[str, ...], place: Key, make: Callable[[], T]) -> T:
        """What ``make`` returns, made once for all recipes that agree in the fields ``depends_on``. Read-only."""
        key = name, place, _getter(depends_on)(recipe)
        if key not in self._shared:
            self._shared[key] = make()
        found: T = self._shared[key]
        return found

    def scores(self, recipe: Recipe, keys: slice) -> Tensor:
        """q of the rows times the transposed k of ``keys``, as the recipe quantises them: [R, K]. Read-only."""

        def make() -> Tensor:
            return self.operands.prepared(recipe).scores(recipe, self.rows, self.keys)

        place = self._query_block(recipe), recipe.alpha == "in-q"
        return self.shared("q k", recipe, OF_PRODUCT, place, make)[..., self.within(keys)]

    def within(self, keys: slice) -> slice:
        """Where some of the keys are in tensors of all of them."""
        return slice(keys.start - self.keys.start, keys.stop - self.keys.start)

    def visited(self, recipe: Recipe, tiles: Sequence[slice]) -> Tensor | None:
        """Whether each row's query block comes to these key ranges, bool [R, tiles]; None for rows of one block."""
        size = recipe.schedule.query_block
        first, last = self._first_row // size, int(self.rows[-1]) // size
        if first == last:
            return None
        blocks = [slice(n * size, min((n + 1) * size, self.head.q.shape[-2])) for n in range(first, last + 1)]
        spans = [self.head.visible_span(block) for block in blocks]
        found = [[tile.start < span.stop and tile.stop > span.start for tile in tiles] for span in spans]
        return torch.tensor(found, device=self.rows.device)[self.rows // size - first]

    def keep_scores(self) -> None:
        """Forget what is shared but the scores, which recipes with other schedules share too."""
        self._shared = {key: found for key, found in self._shared.items() if key[0] in ("q k", "scores")}

    def dprobs(self, recipe: Recipe, keys: slice) -> Tensor:
        """dO of the rows times the transposed v of ``keys``, as given: [R, K]."""
        dtype = working_dtype(recipe)

        def make() -> Tensor:
            a, b = self.operands.get("do", dtype)[..., self.rows, :], self.operands.get("v", dtype)[..., keys, :]
            return matmul(a, b.mT, recipe.accumulation, operands=recipe.input, core=core_of(recipe))

        return self.shared(
            "do v", recipe, ("input", "arithmetic", "accumulation", "mma_k"), (keys.start, keys.stop), make
        )

    def kept(self, x: Tensor, keys: slice) -> Tensor:
        """[R, K] with 0 where dropout has dropped a probability."""
        dropout = self.head.dropout
        return x if dropout is None else x * dropout.kept[self.rows, keys]

    def multiplied(self, recipe: Recipe, site: str, cast: Tensor, keys: slice, rounder: Rounder) -> Tensor:
        """P_bar or P as it is multiplied with v or dO: ``cast`` at ``site``, and under dropout what the recipe adds."""
        kept = self.kept(cast, keys)
        if not rounds_dropout(recipe, self.head):
            return kept
        return rounder(site, kept * dropout_factor(recipe, self.head), keys.start, "dropout")

    @staticmethod
    def _query_block(recipe: Recipe) -> int:
        """What the scores depend on besides, where q's means are of query blocks."""
        return recipe.schedule.query_block if recipe.smooth_q != "none" else 0


def rounds_dropout(recipe: Recipe, head: HeadLike) -> bool:
    """Whether P_bar is multiplied by a rounded 1 / (1 - p) before its product."""
    return head.dropout is not None and recipe.dropout_factor != "fp32"


def dropout_factor(recipe: Recipe, head: HeadLike) -> float:
    """1 / (1 - p) as the recipe rounds it; 1 without dropout."""
    if head.dropout is None:
        return 1.0
    factor = torch.tensor(head.dropout.factor, dtype=torch.float64)
    return float(round_to(factor, parse(recipe.dropout_factor)))


def round_scores(recipe: Recipe, products: Tensor, scale: float, rounder: Rounder, key: int = 0) -> Tensor:
    """Scores from q.k: scaled and rounded as the recipe says; left unscaled for "in-exponent"."""
    if recipe.alpha == "after-rounding":
        return rounder("scores", rounder("scores", products, key) * scale, key, "scaled")
    waits = recipe.alpha in ("in-exponent", "in-q")
    return rounder("scores", products if waits else products * scale, key)


def masked_scores(recipe: Recipe, block: Block, keys: slice, *, masked: bool = True) -> Tensor:
    """S as the recipe stores it, [R, K]; -inf where masked, if ``masked``. Shared: not to be changed."""

    def make(keys: slice) -> Tensor:
        rounder = block.rounder(recipe)
        head = block.head
        products = block.scores(recipe, keys)
        if recipe.alpha in ("in-exponent", "in-q") and not block.operands.in_exponent(recipe):
            products = products * block.operands.unit(recipe)
        scores = round_scores(recipe, products, head.scale, rounder, keys.start)
        if head.softcap is not None:
            scores = rounder("scores", torch.tanh(scores / head.softcap) * head.softcap, keys.start, "softcap")
        if scores is products:
            scores = scores.clone()  # the product is shared
        if masked:
            head.apply_mask(scores, block.rows, keys, block.operands.factor(recipe))
            if block.operands.has_bias:
                scores.masked_fill_((scores < _LOWEST) & (scores > -torch.inf), _LOWEST)
        return scores

    if not masked:
        return make(keys)

    if not rounds_monotonically(recipe.scores):  # every range draws its own numbers
        return block.shared("scores", recipe, SCORES, (keys.start, keys.stop), partial(make, keys))
    return block.shared("scores", recipe, SCORES, (), partial(make, block.keys))[..., block.within(keys)]
