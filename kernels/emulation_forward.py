"""The emulated forward: a block of query rows that walks the keys in the recipe's order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from attn_diag.kernels.emulation_block import PROBS, PRODUCT, SOFTMAX, Block, masked_scores, rounds_dropout
from attn_diag.kernels.emulation_operands import Factor, Rounder, values_product, working_dtype
from attn_diag.kernels.emulation_ranges import KeyRanges, launches, together, walked, walks_ahead
from attn_diag.kernels.emulation_softmax import SoftmaxStep, exponential, softmax_step
from attn_diag.kernels.quantize import quantize
from attn_diag.kernels.quantizers import Quantizer, parse_quantizer
from attn_diag.kernels.recipe import Recipe


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


def forward_rows(recipe: Recipe, block: Block, trace: list[RangeTrace] | None = None) -> ForwardRows:
    """Run the recipe's forward on a block; ``trace`` (of a block of one row) is filled range by range."""
    rounder = block.rounder(recipe)
    splits = list(recipe.schedule.ranges(block.keys))
    # Of several splits none knows the whole row: a sink that comes last joins them as one more.
    joins_last = recipe.sink_joins == "last"
    sink = block.head.sink if len(splits) == 1 or not joins_last else None
    if trace is None and sum(map(len, splits)) > 1 and launches(block.head.q) and walks_ahead(recipe, block.head):
        parts = [part for some in together(recipe, splits) for part in _at_once(recipe, block, some, rounder, sink)]
    else:
        parts = [
            _one_split(recipe, block, tiles, rounder, split, trace, sink if split == 0 else None)
            for split, tiles in enumerate(splits)
        ]
    if parts:
        out, lse = _merge(parts)
        if block.head.sink is not None and len(parts) > 1 and joins_last:
            out, lse = _with_sink(out, lse, block.head.sink)
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


def _at_once(
    recipe: Recipe, block: Block, splits: list[list[slice]], rounder: Rounder, sink: float | None
) -> list[tuple[Tensor, Tensor]]:
    """``_one_split`` of each."""
    factor = block.operands.factor(recipe)
    visited = None if recipe.keeps_sums else block.visited(recipe, [tile for split in splits for tile in split])
    sums = walked(recipe, block, KeyRanges(recipe, splits, rounder, factor, visited))
    out, lse = _divided(recipe, block, *sums, factor, rounder, sink)
    return list(zip(out.unbind(-3), lse.unbind(-2), strict=True))


def _one_split(
    recipe: Recipe, block: Block, tiles: Sequence[slice], rounder: Rounder, split: int, trace: list[RangeTrace] | None,
    sink: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Online softmax over one split's key ranges, a sink after or before them: (O before its last rounding, L)."""
    factor = block.operands.factor(recipe)
    v = block.operands.prepared(recipe).get(recipe, "v")
    values = v.values
    shape = *values.shape[:-2], len(block.rows)
    first = values.new_full((*shape, 1), -torch.inf)
    maxima, exact_sum = first, torch.zeros_like(first)
    starts = sink is not None and recipe.sink_joins == "first"
    if sink is not None and starts:
        maxima, exact_sum = torch.full_like(first, sink / factor), torch.ones_like(first)
    row_sum = exact_sum
    accumulator = values.new_zeros(*shape, values.shape[-1])
    visited = block.visited(recipe, tiles) if launches(values) and not recipe.keeps_sums else None
    for i, keys in enumerate(tiles):
        place = split, i
        scores = masked_scores(recipe, block, keys)
        follow = partial(softmax_step, recipe, scores, maxima, factor, rounder, keys.start)
        step = block.shared("softmax", recipe, SOFTMAX, place, follow)
        maxima, rescale = step.maxima, step.rescale
        if visited is not None:
            rescale = torch.where(visited[:, i, None], rescale, 1.0)
        follow_cast = partial(_cast_probs, recipe, block, step, rounder, keys)
        cast = block.shared("cast", recipe, PROBS, place, follow_cast)
        summed = step.probs if recipe.row_sum_of == "fp32-probs" else cast / recipe.probs_scale
        tile_sum = summed.sum(-1, keepdim=True)
        if recipe.row_sum_clamp is not None:
            tile_sum = tile_sum.clamp(min=recipe.row_sum_clamp)
            tile_sum = tile_sum if visited is None else torch.where(visited[:, i, None], tile_sum, 0.0)
        exact, rounded = exact_sum, row_sum
        exact_sum = rescale * exact + tile_sum
        # The same number until it is rounded.
        row_sum = rounder("row_sum", exact_sum if rounded is exact else rescale * rounded + tile_sum, keys.start)
        kept = block.multiplied(recipe, "probs", cast, keys, rounder)
        if _chained(recipe):
            add = partial(_add_products, recipe, kept, v.rows(keys), accumulator, rescale)
            accumulator = block.shared("sums of products", recipe, PRODUCT, place, add)
        else:
            multiply = partial(_range_pv, recipe, kept, v.rows(keys), rounder, keys.start)
            product = block.shared("product", recipe, PRODUCT, place, multiply)
            scaled = rounder("accumulator", accumulator * rescale, keys.start, "rescale")
            accumulator = rounder("accumulator", scaled + rounder("range_pv", product, keys.start), keys.start)
        if trace is not None:
            cast_probs, kept_probs = (x[0].double() / recipe.probs_scale for x in (cast, kept))
            found = RangeTrace(
                split=split, keys=keys, scores=scores[0].double(), probs=step.probs[0].double(), cast_probs=cast_probs,
                kept_probs=kept_probs, row_max=float(maxima), rescale=float(rescale), row_sum=float(row_sum),
            )  # fmt: skip
            trace.append(found)
    if sink is not None and starts:
        if trace:
            trace[-1] = replace(trace[-1], sink=math.exp(sink - float(maxima) * factor))
        sink = None
    if sink is not None and trace:
        _, shrink, own = _sink_step(sink, factor, maxima)
        joined = rounder("row_sum", row_sum * shrink + own, block.keys.stop, "sink")
        trace[-1] = replace(trace[-1], row_sum=float(joined), sink=float(own))
    return _divided(recipe, block, maxima, exact_sum, row_sum, accumulator, factor, rounder, sink)


def _divided(
    recipe: Recipe, block: Block, maxima: Tensor, exact_sum: Tensor, row_sum: Tensor, accumulator: Tensor,
    factor: float, rounder: Rounder, sink: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(O before its last rounding, L) from what the ranges leave, and a sink after them."""
    v = block.operands.prepared(recipe).get(recipe, "v")
    if sink is not None:
        maxima, shrink, own = _sink_step(sink, factor, maxima)
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


# Past this exp(s - m) comes close to fp32's largest number, and m moves to the sink.
_FAR_SINK = 64.0


def _sink_step(sink: float, factor: float, maxima: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m with a sink, what multiplies the old sums, and exp(s - m), [R, 1] each; as FlashAttention-4 has it."""
    difference = sink - maxima * factor  # inf in a row without keys
    far = difference > _FAR_SINK
    shrink = torch.where(far, torch.exp(-difference), 1.0)
    own = torch.where(far, 1.0, torch.exp(difference.clamp(max=_FAR_SINK)))
    return torch.where(far, sink / factor, maxima), shrink, own


def _with_sink(out: Tensor, lse: Tensor, sink: float) -> tuple[Tensor, Tensor]:
    """Merged splits with the sink as one more."""
    whole = torch.logaddexp(lse, lse.new_tensor(sink))
    return out * torch.exp(lse - whole)[..., None], whole


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


def _merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Independent splits weighted by exp(L_i - L)."""
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts])
    lse = torch.logsumexp(lses, 0)
    weights = torch.where(lses == -torch.inf, 0.0, torch.exp(lses - lse))
    return (weights[..., None] * torch.stack([out for out, _ in parts])).sum(0), lse
