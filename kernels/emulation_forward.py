"""The emulated forward: a block of query rows that walks the keys in the recipe's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from attn_diag.kernels.accumulation import matmul
from attn_diag.kernels.emulation_merging import merge, sink_step, with_sink
from attn_diag.kernels.emulation_operands import (
    OF_SCORES,
    OF_VALUES,
    Factor,
    HeadLike,
    Operands,
    Rounder,
    values_product,
    working_dtype,
)
from attn_diag.kernels.emulation_ranges import Ranges, Walked, walks_ahead
from attn_diag.kernels.emulation_softmax import SoftmaxStep, exponential, softmax_step
from attn_diag.kernels.formats import parse, round_to, rounds_monotonically
from attn_diag.kernels.quantize import quantize
from attn_diag.kernels.quantizers import Quantizer, parse_quantizer
from attn_diag.kernels.recipe import Recipe

T = TypeVar("T")


@dataclass
class RangeTrace:
    """One row's passage through one key range of K keys; float64."""

    split: int
    """The independent part of the keys that the range belongs to."""
    keys: slice
    """The range."""
    scores: Tensor
    """[K], as stored: unscaled where alpha is left to the exponent."""
    probs: Tensor
    """P_bar before its cast, [K]."""
    cast_probs: Tensor
    """P_bar after its cast, [K]."""
    kept_probs: Tensor
    """The same with 0 where dropout has dropped it, [K]."""
    row_max: float
    """m after the range."""
    rescale: float
    """What the old sums were multiplied by."""
    row_sum: float
    """l after the range, and after a sink where it is the last."""
    sink: float = 0.0
    """What a sink added to l, after the last range."""


@dataclass
class ForwardRows:
    """O before its last rounding and after it [R, Dv], L [R]; in the recipe's arithmetic."""

    unrounded: Tensor
    out: Tensor
    lse: Tensor


# What the scores, the softmax, and the cast P_bar depend on; recipes that agree in them share the work.
SCORES = ("scores", *OF_SCORES)
_SOFTMAX = (*SCORES, "difference", "row_max", "exp", "exp_degree", "rescaling", "softmax", "schedule")
_PROBS = (*_SOFTMAX, "probs", "probs_scale", "quantize_probs")
_PRODUCT = (*_PROBS, "dropout_factor", *OF_VALUES, "pv_sums")
Key = tuple[object, ...]


# attrgetter for the same fields again and again.
_getter = cache(lambda fields: attrgetter(*fields))


def softmax_key(recipe: Recipe) -> Key:
    """What P_bar before its cast depends on, for a given head."""
    found: Key = _getter(_SOFTMAX)(recipe)
    return found


def lse_key(recipe: Recipe) -> Key:
    """What L depends on, for a given head."""
    fields = [*_SOFTMAX, "row_sum_of", "row_sum_clamp", "lse_from"]
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

        return self.shared("q k", recipe, OF_SCORES, (self._query_block(recipe),), make)[..., self.within(keys)]

    def within(self, keys: slice) -> slice:
        """Where some of the keys are in tensors of all of them."""
        return slice(keys.start - self.keys.start, keys.stop - self.keys.start)

    def keep_scores(self) -> None:
        """Forget what is shared but the scores, which recipes with other schedules share too."""
        self._shared = {key: found for key, found in self._shared.items() if key[0] in ("q k", "scores")}

    def dprobs(self, recipe: Recipe, keys: slice) -> Tensor:
        """dO of the rows times the transposed v of ``keys``, as given: [R, K]."""
        dtype = working_dtype(recipe)

        def make() -> Tensor:
            a, b = self.operands.get("do", dtype)[..., self.rows, :], self.operands.get("v", dtype)[..., keys, :]
            return matmul(a, b.mT, recipe.accumulation, operands=recipe.input)

        return self.shared("do v", recipe, ("input", "arithmetic", "accumulation"), (keys.start, keys.stop), make)

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
        return scores

    if not masked:
        return make(keys)

    if not rounds_monotonically(recipe.scores):  # every range draws its own numbers
        return block.shared("scores", recipe, SCORES, (keys.start, keys.stop), partial(make, keys))
    return block.shared("scores", recipe, SCORES, (), partial(make, block.keys))[..., block.within(keys)]


def forward_rows(recipe: Recipe, block: Block, trace: list[RangeTrace] | None = None) -> ForwardRows:
    """Run the recipe's forward on a block; ``trace`` (of a block of one row) is filled range by range."""
    rounder = block.rounder(recipe)
    splits = list(recipe.schedule.ranges(block.keys))
    # Of several splits none knows the whole row: the sink joins them as one more.
    sink = block.head.sink if len(splits) == 1 else None
    parts = [_one_split(recipe, block, tiles, rounder, split, trace, sink) for split, tiles in enumerate(splits)]
    if parts:
        out, lse = merge(parts)
        if block.head.sink is not None and len(parts) > 1:
            out, lse = with_sink(out, lse, block.head.sink)
    else:
        like = block.operands.get("q", working_dtype(recipe))
        shape = *like.shape[:-2], len(block.rows)
        out = like.new_zeros(*shape, block.head.v.shape[-1])
        lse = like.new_full(shape, -torch.inf if block.head.sink is None else block.head.sink)
    if recipe.smooth_v != "none":
        out = torch.where(lse[:, None] == -torch.inf, 0.0, out + block.operands.prepared(recipe).mean_value())
    if recipe.smooth_k != "none":
        lse = lse + block.operands.prepared(recipe).shift(recipe, block.rows)
    return ForwardRows(out, rounder("out", out), lse)


def _one_split(
    recipe: Recipe, block: Block, tiles: Sequence[slice], rounder: Rounder, split: int, trace: list[RangeTrace] | None,
    sink: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Online softmax over one split's key ranges, and a sink after them: (O before its last rounding, L)."""
    factor = block.operands.factor(recipe)
    v = block.operands.prepared(recipe).get(recipe, "v")
    values = v.values
    if trace is None and len(tiles) > 1 and _at_once(values) and walks_ahead(recipe, block.head):
        walked = _walked(recipe, block, Ranges(recipe, tiles, rounder, factor), split)
        return _divided(recipe, block, *walked, factor, rounder, sink)
    shape = *values.shape[:-2], len(block.rows)
    first = values.new_full((*shape, 1), -torch.inf)
    maxima, exact_sum = first, torch.zeros_like(first)
    row_sum = exact_sum
    accumulator = values.new_zeros(*shape, values.shape[-1])
    for i, keys in enumerate(tiles):
        place = split, i
        scores = masked_scores(recipe, block, keys)
        follow = partial(softmax_step, recipe, scores, maxima, factor, rounder, keys.start)
        step = block.shared("softmax", recipe, _SOFTMAX, place, follow)
        maxima, rescale = step.maxima, step.rescale
        follow_cast = partial(_cast_probs, recipe, block, step, rounder, keys)
        cast = block.shared("cast", recipe, _PROBS, place, follow_cast)
        summed = step.probs if recipe.row_sum_of == "fp32-probs" else cast / recipe.probs_scale
        tile_sum = summed.sum(-1, keepdim=True)
        if recipe.row_sum_clamp is not None:
            tile_sum = tile_sum.clamp(min=recipe.row_sum_clamp)
        exact, rounded = exact_sum, row_sum
        exact_sum = rescale * exact + tile_sum
        # The same number until it is rounded.
        row_sum = rounder("row_sum", exact_sum if rounded is exact else rescale * rounded + tile_sum, keys.start)
        kept = block.multiplied(recipe, "probs", cast, keys, rounder)
        if _chained(recipe):
            add = partial(_add_products, recipe, kept, v.rows(keys), accumulator, rescale)
            accumulator = block.shared("sums of products", recipe, _PRODUCT, place, add)
        else:
            multiply = partial(_range_pv, recipe, kept, v.rows(keys), rounder, keys.start)
            product = block.shared("product", recipe, _PRODUCT, place, multiply)
            scaled = rounder("accumulator", accumulator * rescale, keys.start, "rescale")
            accumulator = rounder("accumulator", scaled + rounder("range_pv", product, keys.start), keys.start)
        if trace is not None:
            cast_probs, kept_probs = (x[0].double() / recipe.probs_scale for x in (cast, kept))
            found = RangeTrace(
                split=split, keys=keys, scores=scores[0].double(), probs=step.probs[0].double(), cast_probs=cast_probs,
                kept_probs=kept_probs, row_max=float(maxima), rescale=float(rescale), row_sum=float(row_sum),
            )  # fmt: skip
            trace.append(found)
    if sink is not None and trace:
        _, shrink, own = sink_step(sink, factor, maxima)
        joined = rounder("row_sum", row_sum * shrink + own, block.keys.stop, "sink")
        trace[-1] = replace(trace[-1], row_sum=float(joined), sink=float(own))
    return _divided(recipe, block, maxima, exact_sum, row_sum, accumulator, factor, rounder, sink)


def _at_once(values: Tensor) -> bool:
    """Whether launches take longer than what they compute of one range."""
    return values.is_cuda


def _walked(recipe: Recipe, block: Block, ranges: Ranges, split: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """m, l, l as it is rounded [R, 1] and O_bar [R, Dv] after all ranges, of recipes that ``walks_ahead`` knows."""
    rounder, place = ranges.rounder, (split, "ranges")

    def walk() -> Walked:
        return ranges.walked(masked_scores(recipe, block, ranges.keys))

    step = block.shared("softmax", recipe, _SOFTMAX, place, walk)

    def cast_probs() -> Tensor:
        scaled = step.probs if recipe.probs_scale == 1.0 else step.probs * recipe.probs_scale
        return rounder("probs", scaled, ranges.keys.start)

    cast = block.shared("cast", recipe, _PROBS, place, cast_probs)

    def sum_rows() -> tuple[Tensor, Tensor]:
        added = ranges.sums(step.probs if recipe.row_sum_of == "fp32-probs" else cast / recipe.probs_scale)
        exact = rounded = torch.zeros_like(step.maxima[..., :1])
        for i, keys in enumerate(ranges.tiles):
            rescale, own = step.rescale[..., i : i + 1], added[..., i : i + 1]
            before, exact = exact, rescale * exact + own
            rounded = rounder("row_sum", exact if rounded is before else rescale * rounded + own, keys.start)
        return exact, rounded

    fields = (*_PROBS, "row_sum_of", "row_sum_clamp", "row_sum", "seed")
    exact_sum, row_sum = block.shared("row sums", recipe, fields, place, sum_rows)

    def add_up() -> Tensor:
        v = block.operands.prepared(recipe).get(recipe, "v").values[..., ranges.keys, :]
        products = block.shared("product", recipe, (*_PRODUCT, "range_pv"), place, partial(ranges.products, cast, v))
        total = torch.zeros_like(products[..., 0, :, :])
        for i, keys in enumerate(ranges.tiles):
            scaled = rounder("accumulator", total * step.rescale[..., i : i + 1], keys.start, "rescale")
            total = rounder("accumulator", scaled + products[..., i, :, :], keys.start)
        return total

    accumulator = block.shared("sums of products", recipe, (*_PRODUCT, "range_pv", "accumulator"), place, add_up)
    return step.maxima[..., -1:], exact_sum, row_sum, accumulator


def _divided(
    recipe: Recipe, block: Block, maxima: Tensor, exact_sum: Tensor, row_sum: Tensor, accumulator: Tensor,
    factor: float, rounder: Rounder, sink: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(O before its last rounding, L) from what the ranges leave, and a sink after them."""
    v = block.operands.prepared(recipe).get(recipe, "v")
    if sink is not None:
        maxima, shrink, own = sink_step(sink, factor, maxima)
        accumulator, exact_sum = accumulator * shrink, exact_sum * shrink + own
        row_sum = rounder("row_sum", row_sum * shrink + own, block.keys.stop, "sink")
    if recipe.probs_scale != 1.0:
        accumulator = accumulator / recipe.probs_scale
    if v.scale is not None:
        accumulator = accumulator * v.scale
    if block.head.dropout is not None and not rounds_dropout(recipe, block.head):
        accumulator = accumulator * block.head.dropout.factor
    # A row that saw no key; one whose l underflowed divides by zero, as the real kernel does.
    numerator = rounder("out", accumulator, step="numerator") if recipe.division == "after-last-cast" else accumulator
    out = torch.where((maxima == -torch.inf) & (row_sum == 0), 0.0, numerator * (1 / row_sum))
    used = row_sum if recipe.lse_from == "rounded-l" else exact_sum
    return out, (maxima * factor + used.log()).squeeze(-1)


def _cast_probs(recipe: Recipe, block: Block, step: SoftmaxStep, rounder: Rounder, keys: slice) -> Tensor:
    """P_bar times ``probs_scale`` as it is multiplied with v, [R, K]."""
    scaled = step.probs if recipe.probs_scale == 1.0 else step.probs * recipe.probs_scale
    cast = rounder("probs", scaled, keys.start)
    by = parse_quantizer(recipe.quantize_probs)
    if by is None:
        return cast
    amax = _before_the_mask(recipe, by, block, step, rounder, keys) if by.masked else None
    return quantize(cast, by, amax=amax, seed=recipe.seed).values.to(cast.dtype)


def _before_the_mask(
    recipe: Recipe, by: Quantizer, block: Block, step: SoftmaxStep, rounder: Rounder, keys: slice
) -> Tensor:
    """The amax of P_bar's blocks, [R, blocks], with the keys that are masked afterwards."""
    scores = masked_scores(recipe, block, keys, masked=False)
    every = exponential(recipe, scores, step.maxima, block.operands.factor(recipe), rounder, keys.start)
    width = min(by.block_shape((1, every.shape[1]))[1], every.shape[1])
    parts = torch.nn.functional.pad(every * recipe.probs_scale, (0, -every.shape[1] % width))
    return parts.view(len(every), -1, width).amax(2)


def _range_pv(recipe: Recipe, cast: Tensor, v: Factor, rounder: Rounder, key: int) -> Tensor:
    """P_bar V of one key range by itself."""
    product = values_product(recipe, cast, v)
    return product if recipe.accumulation == "nvidia-tensor-core" else rounder("pv_sums", product, key)


def _add_products(recipe: Recipe, cast: Tensor, v: Factor, accumulator: Tensor, rescale: Tensor) -> Tensor:
    """The rescaled accumulator with P_bar V of one key range added by the hardware."""
    return values_product(recipe, cast, v, accumulator * rescale)


def _chained(recipe: Recipe) -> bool:
    """Whether the hardware adds products into the accumulator itself, in the recipe's accumulation model."""
    hardware = recipe.accumulation == "nvidia-tensor-core" and recipe.pv_levels == "one"
    return hardware and recipe.range_pv == "fp32" and recipe.accumulator == "fp32"
