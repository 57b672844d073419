"""How much of P_bar its cast rounds to 0, counted and predicted; what another scale or order of keys would leave.

P_bar = exp(s - m), with the running maximum m, becomes 0 where S P_bar is at most half the smallest number of its
format: with t = -ln of that (E4M3: 10 ln 2 = 6.93) where s <= m - t - ln S. A kernel that meets an attention sink first
has the sink's m for all keys after it. With scores of mean mu and deviation sigma besides the sink (the first four
keys),

    fraction = Phi((m - mu - t - ln S) / sigma)                   row by row, mu and sigma of a key range's scores
    fraction = Phi((gap + d sigma - t - ln S) / sigma)            of a head: the closed form, mu and sigma of a row's

with gap = the mean score of the first four keys less mu, and d = 1.03, what the largest of four normal numbers exceeds
their mean by. With sigma = 1 the latter is arXiv 2606.06521's Phi(Delta + delta_k - 6.93 - ln S), whose scores have one
mean. Scores of real heads have another mean near the query than far from it; there it may be far off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attn_diag.kernels import Recipe, block_scores
from attn_diag.kernels.formats import parse
from attn_diag.kernels.recipe import Order
from attn_diag.reference import AttentionHead
from attn_diag.results.what_if import ProbsUnderflow

SINK_KEYS = 4
# The mean of the largest of four standard normal numbers.
LARGEST_OF_SINKS = 1.0293753730039641
# Fewer scores have no deviation of their own to go by; those of the whole row are taken.
_FEW = 16
# The scale that reaches furthest of those that are exact (arXiv 2606.06521, section 5; FlashAttention-3).
BEST_SCALE = 256.0


def probs_underflow(recipe: Recipe, head: AttentionHead) -> tuple[ProbsUnderflow, ...]:
    """What of the recipe's P_bar becomes 0, first as it is; then with S = 256, with the keys reversed, and with both.

    Empty where P_bar is not cast to fewer exponent bits than fp32's, or comes in splits or blocks with scales.
    """
    rounding = parse(recipe.probs)
    if rounding is None or rounding.format.exponent_bits > 5 or recipe.schedule.split_keys is not None:
        return ()
    if recipe.softmax.kind != "safe" or "quantize_probs" in recipe.quantized:
        return ()
    fmt = rounding.format
    threshold = -(fmt.min_exponent - fmt.mantissa_bits - 1) * math.log(2)
    reverse: Order = "ascending" if recipe.schedule.order == "descending" else "descending"
    variants = [_Variant(recipe, "as it is")]
    if recipe.probs_scale != BEST_SCALE:
        variants.append(_Variant(replace(recipe, probs_scale=BEST_SCALE), f"times {BEST_SCALE:g}"))
    if len(head.k) > recipe.schedule.key_tile:
        schedule = replace(recipe.schedule, order=reverse)
        variants += [_Variant(replace(v.recipe, schedule=schedule), f"{v.words}, keys {reverse}") for v in variants]
    gaps, deviations, weights = [], [], []
    for keys, scores in _rows_of_scores(recipe, head):
        seen = scores > -torch.inf
        first = torch.arange(keys.start, keys.stop, device=scores.device) < SINK_KEYS
        row = _moments(scores, seen & ~first)
        enough = (row.count >= _FEW) & (seen & first).any(1)
        if bool(enough.any()):
            gap = _moments(scores, seen & first).mean - row.mean
            gaps.append(float(gap[enough].sum()))
            deviations.append(float(row.deviation[enough].square().sum()))
            weights.append(int(enough.sum()))
        for variant in variants:
            variant.add(scores, seen, first, row, keys, threshold)
    rows = max(sum(weights), 1)
    sigma = math.sqrt(sum(deviations) / rows) or 1.0
    return tuple(v.found(sum(gaps) / rows, sigma, threshold) for v in variants)


def _rows_of_scores(recipe: Recipe, head: AttentionHead) -> Iterator[tuple[slice, Tensor]]:
    """Block of rows by block of rows: the keys that the query block sees, and the scaled scores of all of them."""
    size = recipe.schedule.query_block
    whole = replace(recipe, schedule=replace(recipe.schedule, key_tile=2**20, order="ascending"))
    for rows, scores, factor in block_scores(whole, head):
        number = int(rows[0]) // size
        keys = head.visible_span(slice(number * size, min((number + 1) * size, len(head.q))))
        yield keys, scores.double() * factor


@dataclass(frozen=True)
class _Moments:
    """Of some scores of every row, [R] each."""

    mean: Tensor
    deviation: Tensor
    count: Tensor

    def where_enough(self, other: _Moments) -> _Moments:
        """The other's where there are too few."""
        few = self.count < _FEW
        mean, deviation = (torch.where(few, getattr(other, n), getattr(self, n)) for n in ("mean", "deviation"))
        return _Moments(mean, deviation, self.count)


def _moments(scores: Tensor, which: Tensor) -> _Moments:
    count = which.sum(1)
    mean = scores.masked_fill(~which, 0.0).sum(1) / count.clamp(min=1)
    squares = (scores - mean[:, None]).masked_fill(~which, 0.0).square().sum(1)
    return _Moments(mean, (squares / (count - 1).clamp(min=1)).sqrt(), count)


@dataclass
class _Variant:
    """One scale and order of keys, counted."""

    recipe: Recipe
    words: str
    zeros: int = 0
    seen: int = 0
    expected: float = field(default=0.0)

    def add(self, scores: Tensor, seen: Tensor, first: Tensor, row: _Moments, keys: slice, threshold: float) -> None:
        """A block of rows: scores and seen [R, K], first [K]."""
        maxima = scores.new_full((len(scores),), -torch.inf)
        limit = threshold + math.log(self.recipe.probs_scale)
        for tiles in self.recipe.schedule.ranges(keys):
            for tile in tiles:
                part = slice(tile.start - keys.start, tile.stop - keys.start)
                here, visible = scores[:, part], seen[:, part]
                maxima = torch.maximum(maxima, here.amax(1))
                margin = (maxima - limit)[:, None]
                zero = (here <= margin) & visible
                self.zeros += int(zero.sum())
                self.seen += int(visible.sum())
                # The first keys are what the others are held against: they are counted as they are.
                body = visible & ~first[part]
                self.expected += float((zero & first[part]).sum())
                normal = _moments(here, body).where_enough(row)
                # Without spread all scores are at the mean.
                depth = (margin[:, 0] - normal.mean) / normal.deviation.clamp(min=1e-12)
                self.expected += float((torch.special.ndtr(depth).nan_to_num(0.0) * body.sum(1)).sum())

    def found(self, gap: float, sigma: float, threshold: float) -> ProbsUnderflow:
        """The result; ``gap`` and ``sigma`` of the closed form."""
        closed = None
        if self.recipe.schedule.order == "ascending":
            depth = (gap + LARGEST_OF_SINKS * sigma - threshold - math.log(self.recipe.probs_scale)) / sigma
            closed = 0.5 * math.erfc(-depth / math.sqrt(2))
        return ProbsUnderflow(
            words=self.words,
            scale=self.recipe.probs_scale,
            order=self.recipe.schedule.order,
            counted=self.zeros / max(self.seen, 1),
            predicted=self.expected / max(self.seen, 1),
            closed_form=closed,
        )
