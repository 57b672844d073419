"""The emulated forward: a block of query rows that walks the keys in the recipe's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from attn_diag.kernels.accumulation import matmul
from attn_diag.kernels.exponential import exp2_polynomial, scaled_exponent
from attn_diag.kernels.formats import parse, round_to, site_seed
from attn_diag.kernels.recipe import Recipe

T = TypeVar("T")


class HeadLike(Protocol):
    """What is emulated: one head, tensors of any float dtype whose values fp32 can hold exactly.

    q [Tq, D], k [Tk, D], v [Tk, Dv], do [Tq, Dv] or None. ``sink``: a logit of the softmax's denominator, or None.
    ``visible_span`` and ``apply_mask`` as in
    ``attn_diag.reference.AttentionHead``.
    """

    @property
    def q(self) -> Tensor: ...  # noqa: D102 - described above, as the rest
    @property
    def k(self) -> Tensor: ...  # noqa: D102
    @property
    def v(self) -> Tensor: ...  # noqa: D102
    @property
    def do(self) -> Tensor | None: ...  # noqa: D102
    @property
    def scale(self) -> float: ...  # noqa: D102
    @property
    def softcap(self) -> float | None: ...  # noqa: D102
    @property
    def sink(self) -> float | None: ...  # noqa: D102
    def visible_span(self, rows: slice | Tensor) -> slice: ...  # noqa: D102
    def apply_mask(self, scores: Tensor, rows: slice | Tensor, keys: slice) -> None: ...  # noqa: D102


class Operands:
    """A head's tensors in the two precisions that recipes compute in."""

    def __init__(self, head: HeadLike) -> None:
        self.head = head
        self._tensors: dict[tuple[str, torch.dtype], Tensor] = {}
        mask = getattr(getattr(head, "masking", None), "mask", None)
        self.has_bias = mask is not None and mask.dtype != torch.bool

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        """q, k, v or do in fp32 or float64."""
        key = name, dtype
        if key not in self._tensors:
            self._tensors[key] = getattr(self.head, name).to(dtype)
        return self._tensors[key]

    def factor(self, recipe: Recipe) -> float:
        """What S - m is multiplied by in the exponent: alpha where the recipe leaves it there, else 1."""
        return self.head.scale if self.in_exponent(recipe) else 1.0

    def in_exponent(self, recipe: Recipe) -> bool:
        """Whether alpha waits for the exponent. Softcap and additive masks apply to scaled scores."""
        return recipe.alpha == "in-exponent" and self.head.softcap is None and not self.has_bias


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


def working_dtype(recipe: Recipe) -> torch.dtype:
    """The dtype in which the recipe computes between its rounding sites."""
    return torch.float64 if recipe.arithmetic == "fp64" else torch.float32


class Rounder:
    """A recipe's rounding sites as one function, for rows from ``row`` on."""

    def __init__(self, recipe: Recipe, row: int) -> None:
        self._recipe, self._row = recipe, row

    def __call__(self, site: str, x: Tensor, key: int = 0, step: str = "") -> Tensor:
        """``x`` as the recipe rounds it at ``site``; ``key`` and ``step`` tell random draws apart."""
        rounding = parse(getattr(self._recipe, site))
        if rounding is None:
            return x
        return round_to(x, rounding, site_seed(self._recipe.seed, site + step, self._row, key))


# What the scores, the softmax, and the cast P_bar depend on; recipes that agree in them share the work.
SCORES = ("scores", "alpha", "input", "arithmetic", "accumulation", "seed")
_SOFTMAX = (*SCORES, "difference", "row_max", "exp", "exp_degree", "softmax", "schedule")
_PROBS = (*_SOFTMAX, "probs", "probs_scale")
Key = tuple[object, ...]


def lse_key(recipe: Recipe) -> Key:
    """What L depends on, for a given head."""
    fields = [*_SOFTMAX, "row_sum_of", "row_sum_clamp", "lse_from"]
    if recipe.row_sum_of == "cast-probs":
        fields += ["probs", "probs_scale"]
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

    def shared(self, name: str, recipe: Recipe, depends_on: tuple[str, ...], place: Key, make: Callable[[], T]) -> T:
        """What ``make`` returns, made once for all recipes that agree in the fields ``depends_on``. Read-only."""
        key = name, place, *(getattr(recipe, f) for f in depends_on)
        if key not in self._shared:
            self._shared[key] = make()
        found: T = self._shared[key]
        return found

    def product(self, recipe: Recipe, left: str, right: str, keys: slice) -> Tensor:
        """``left`` [R, D] (q or do) times the transposed ``right`` (k or v) of ``keys``: [R, K]."""
        dtype = working_dtype(recipe)

        def make() -> Tensor:
            a, b = self.operands.get(left, dtype)[self.rows], self.operands.get(right, dtype)[keys]
            return matmul(a, b.T, recipe.accumulation, operands=recipe.input)

        return self.shared(left, recipe, ("input", "arithmetic", "accumulation"), (keys.start, keys.stop), make)


def round_scores(recipe: Recipe, products: Tensor, scale: float, rounder: Rounder, key: int = 0) -> Tensor:
    """Scores from q.k: scaled and rounded as the recipe says; left unscaled for "in-exponent"."""
    if recipe.alpha == "after-rounding":
        return rounder("scores", rounder("scores", products, key) * scale, key, "scaled")
    return rounder("scores", products if recipe.alpha == "in-exponent" else products * scale, key)


def masked_scores(recipe: Recipe, block: Block, keys: slice) -> Tensor:
    """S as the recipe stores it, [R, K]; -inf where masked. Shared: not to be changed."""

    def make() -> Tensor:
        rounder = Rounder(recipe, int(block.rows[0]))
        head = block.head
        products = block.product(recipe, "q", "k", keys)
        if recipe.alpha == "in-exponent" and not block.operands.in_exponent(recipe):
            products = products * head.scale
        scores = round_scores(recipe, products, head.scale, rounder, keys.start)
        if head.softcap is not None:
            scores = rounder("scores", torch.tanh(scores / head.softcap) * head.softcap, keys.start, "softcap")
        if scores is products:
            scores = scores.clone()  # the product is shared
        head.apply_mask(scores, block.rows, keys)
        return scores

    return block.shared("scores", recipe, SCORES, (keys.start, keys.stop), make)


def forward_rows(recipe: Recipe, block: Block, trace: list[RangeTrace] | None = None) -> ForwardRows:
    """Run the recipe's forward on a block; ``trace`` (of a block of one row) is filled range by range."""
    rounder = Rounder(recipe, int(block.rows[0]))
    splits = list(recipe.schedule.ranges(block.keys))
    # Of several splits none knows the whole row: the sink joins them as one more.
    sink = block.head.sink if len(splits) == 1 else None
    parts = [_one_split(recipe, block, tiles, rounder, split, trace, sink) for split, tiles in enumerate(splits)]
    if parts:
        out, lse = _merge(parts)
        if block.head.sink is not None and len(parts) > 1:
            out, lse = _with_sink(out, lse, block.head.sink)
    else:
        like = block.operands.get("q", working_dtype(recipe))
        out = like.new_zeros(len(block.rows), block.head.v.shape[1])
        lse = like.new_full((len(block.rows),), -torch.inf if block.head.sink is None else block.head.sink)
    return ForwardRows(out, rounder("out", out), lse)


def _one_split(
    recipe: Recipe, block: Block, tiles: Sequence[slice], rounder: Rounder, split: int, trace: list[RangeTrace] | None,
    sink: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Online softmax over one split's key ranges, and a sink after them: (O before its last rounding, L)."""
    dtype = working_dtype(recipe)
    factor = block.operands.factor(recipe)
    values = block.operands.get("v", dtype)
    first = values.new_full((len(block.rows), 1), -torch.inf)
    maxima, row_sum, exact_sum = first, torch.zeros_like(first), torch.zeros_like(first)
    accumulator = values.new_zeros(len(block.rows), values.shape[1])
    for i, keys in enumerate(tiles):
        place = split, i
        step = block.shared(
            "softmax", recipe, _SOFTMAX, place, partial(_softmax_step, recipe, block, keys, maxima, rounder)
        )
        maxima, rescale = step.maxima, step.rescale
        cast = block.shared(
            "cast", recipe, _PROBS, place, partial(_cast_probs, recipe, step.probs, rounder, keys.start)
        )
        tile_sum = (step.probs if recipe.row_sum_of == "fp32-probs" else cast).sum(1, keepdim=True)
        if recipe.row_sum_clamp is not None:
            tile_sum = tile_sum.clamp(min=recipe.row_sum_clamp)
        exact_sum = rescale * exact_sum + tile_sum
        row_sum = rounder("row_sum", rescale * row_sum + tile_sum, keys.start)
        if _chained(recipe):
            scaled = accumulator * rescale
            accumulator = matmul(cast, values[keys], recipe.accumulation, scaled, operands=recipe.input)
        else:
            multiply = partial(matmul, cast, values[keys], recipe.accumulation, operands=recipe.input)
            product = block.shared("product", recipe, _PROBS, place, multiply)
            scaled = rounder("accumulator", accumulator * rescale, keys.start, "rescale")
            accumulator = rounder("accumulator", scaled + rounder("range_pv", product, keys.start), keys.start)
        if trace is not None:
            scores = masked_scores(recipe, block, keys)
            found = RangeTrace(
                split=split, keys=keys, scores=scores[0].double(), probs=step.probs[0].double(),
                cast_probs=cast[0].double(), row_max=float(maxima), rescale=float(rescale), row_sum=float(row_sum),
            )  # fmt: skip
            trace.append(found)
    if sink is not None:
        maxima, shrink, own = _sink_step(sink, factor, maxima)
        accumulator, exact_sum = accumulator * shrink, exact_sum * shrink + own
        row_sum = rounder("row_sum", row_sum * shrink + own, block.keys.stop, "sink")
        if trace:
            trace[-1] = replace(trace[-1], row_sum=float(row_sum), sink=float(own))
    # A row that saw no key; one whose l underflowed divides by zero, as the real kernel does.
    numerator = rounder("out", accumulator, step="numerator") if recipe.division == "after-last-cast" else accumulator
    out = torch.where((maxima == -torch.inf) & (row_sum == 0), 0.0, numerator * (1 / row_sum))
    used = row_sum if recipe.lse_from == "rounded-l" else exact_sum
    return out, (maxima * factor + used.log()).squeeze(1)


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
    return out * torch.exp(lse - whole)[:, None], whole


@dataclass
class _SoftmaxStep:
    """One key range: the new maxima and the factor for the old sums [R, 1], P_bar [R, K]."""

    maxima: Tensor
    rescale: Tensor
    probs: Tensor


def _softmax_step(recipe: Recipe, block: Block, keys: slice, maxima: Tensor, rounder: Rounder) -> _SoftmaxStep:
    factor = block.operands.factor(recipe)
    scores = masked_scores(recipe, block, keys)
    new = rounder("row_max", _next_maximum(recipe, maxima, scores), keys.start)
    probs = _exponential(recipe, scores, new, factor, rounder, keys.start)
    return _SoftmaxStep(new, _exponential(recipe, maxima, new, factor, rounder, keys.start, "rescale"), probs)


def _next_maximum(recipe: Recipe, maxima: Tensor, scores: Tensor) -> Tensor:
    """What is subtracted from now on, before it is rounded; [R, 1]."""
    top = scores.amax(1, keepdim=True)
    rule = recipe.softmax
    if rule.kind == "stabilised":
        assert rule.beta is not None
        # Keys that are all masked have no maximum that could be repeated; so it does not matter which masked ranges a
        # kernel visits. (The published code masks with the most negative number, and there m would become 0.)
        repeated = ((scores >= top - rule.epsilon).sum(1, keepdim=True) > 1) & (top > -torch.inf)
        top = torch.where(repeated, torch.where(top > 0, rule.beta * top, top.clamp(min=0.0)), top)
    new = torch.maximum(maxima, top)
    if rule.kind == "stale":
        assert rule.threshold is not None
        # NaN where both are -inf, and then not below the threshold: the new one, -inf too.
        new = torch.where(new - maxima <= rule.threshold, maxima, new)
    return new


def _exponential(
    recipe: Recipe, scores: Tensor, maxima: Tensor, factor: float, rounder: Rounder, key: int, step: str = ""
) -> Tensor:
    """exp(factor (S - m)); a row without keys gives 0."""
    maxima = maxima.masked_fill(maxima == -torch.inf, 0.0)
    if recipe.exp == "exact":
        return torch.exp(rounder("difference", (scores - maxima) * factor, key, step))
    exponent = scaled_exponent(scores, maxima, factor)
    if recipe.exp == "exp2-fma":
        return torch.exp2(exponent)
    assert recipe.exp_degree is not None
    return exp2_polynomial(exponent, recipe.exp_degree)


def _cast_probs(recipe: Recipe, probs: Tensor, rounder: Rounder, key: int) -> Tensor:
    if recipe.probs_scale == 1.0:
        return rounder("probs", probs, key)
    return rounder("probs", probs * recipe.probs_scale, key) / recipe.probs_scale


def _chained(recipe: Recipe) -> bool:
    """Whether the hardware adds products into the accumulator itself, in the recipe's accumulation model."""
    return recipe.range_pv == "fp32" and recipe.accumulator == "fp32" and recipe.accumulation == "nvidia-tensor-core"


def _merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Independent splits weighted by exp(L_i - L)."""
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts])
    lse = torch.logsumexp(lses, 0)
    weights = torch.where(lses == -torch.inf, 0.0, torch.exp(lses - lse))
    return (weights[:, :, None] * torch.stack([out for out, _ in parts])).sum(0), lse
