"""What a kernel with a given recipe would return, computed with vectorised torch on any device.

Arithmetic between rounding sites is fp32 (products of BF16 or FP16 operands are exact in it); a rounding
site is a cast to its format and back. Not modelled: the order of additions inside one tile's products and
sums, the tensor core's truncation, the hardware exp2's last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from attn_diag.kernels.recipe import Format, Recipe

_DTYPES: dict[Format, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


# As in attn_diag.reference.attention: a first call from several threads may be given a low-accuracy MKL function.
for _function in (torch.exp, torch.exp2, torch.log, torch.tanh):
    _function(torch.ones(1))
    _function(torch.ones(1, dtype=torch.float64))


class RecipeNotSupportedError(ValueError):
    """The recipe has a rounding site or rule that is not emulated; the message names it."""


class HeadLike(Protocol):
    """What is emulated: one head, tensors of any float dtype whose values fp32 can hold exactly.

    q [Tq, D], k [Tk, D], v [Tk, Dv], do [Tq, Dv] or None. ``visible_span`` and ``apply_mask`` as in
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
    def visible_span(self, rows: slice | Tensor) -> slice: ...  # noqa: D102
    def apply_mask(self, scores: Tensor, rows: slice | Tensor, keys: slice) -> None: ...  # noqa: D102


@dataclass
class EmulatedHead:
    """What the emulated kernel returns for one head: o [Tq, Dv] in the recipe's format, lse [Tq] fp32, and, with dO,
    delta [Tq] fp32, dq [Tq, D], dk [Tk, D], dv [Tk, Dv] in the recipe's dq format."""

    o: Tensor
    lse: Tensor
    delta: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


def check_supported(recipe: Recipe) -> None:
    """Raise RecipeNotSupportedError, naming the site, unless ``emulate_head`` can run the recipe."""
    formats = ("scores", "difference", "row_max", "probs", "row_sum", "range_pv", "accumulator", "out", "delta",
               "backward_probs", "dscores", "dq")  # fmt: skip
    unsupported = [f"{name}={getattr(recipe, name)}" for name in formats if getattr(recipe, name) not in _DTYPES]
    rules = {"exp": ("exact", "exp2-fma"), "accumulation": ("fp32-nearest",), "division": ("before-last-cast",),
             "probs_scale": (1.0,)}  # fmt: skip
    unsupported += [f"{n}={getattr(recipe, n)}" for n, known in rules.items() if getattr(recipe, n) not in known]
    if recipe.softmax.kind == "stale":
        unsupported.append(f"softmax={recipe.softmax}")
    if unsupported:
        raise RecipeNotSupportedError(f"recipe {recipe.name}: not emulated: {', '.join(unsupported)}")


def score_rounding(recipe: Recipe, scale: float) -> Callable[[Tensor], Tensor] | None:
    """The recipe's rounding of the scores as a monotonic function of the exact S = alpha q.k (float64 -> fp32).

    None if the format of the scores is not modelled.
    """
    if recipe.scores not in _DTYPES:
        return None

    def rounded(scores: Tensor) -> Tensor:
        return _scores(recipe, (scores / scale).float(), scale)

    return rounded


def emulate_head(recipe: Recipe, head: HeadLike) -> EmulatedHead:
    """Run the recipe on one head, forward and (where dO is given) backward.

    Raises RecipeNotSupportedError where the recipe asks for more than is modelled.
    """
    check_supported(recipe)
    with torch.no_grad(), torch.autocast(head.q.device.type, enabled=False):
        fp32 = _Operands(head)
        unrounded, lse = _forward(recipe, head, fp32)
        result = EmulatedHead(o=unrounded.to(_DTYPES[recipe.out]), lse=lse)
        if fp32.do is not None:
            _backward(recipe, head, fp32, result, unrounded)
        return result


def emulate_rows(recipe: Recipe, head: HeadLike, rows: Tensor) -> Tensor:
    """O of the query rows ``rows`` ([R] indices) alone, [R, Dv] in the recipe's format.

    Bit-equal to ``emulate_head`` unless the order of keys depends on the query block (diagonal-first).
    Raises RecipeNotSupportedError where the recipe asks for more than is modelled.
    """
    check_supported(recipe)
    with torch.no_grad(), torch.autocast(head.q.device.type, enabled=False):
        return _emulate_block(recipe, head, _Operands(head), rows)[0].to(_DTYPES[recipe.out])


class _Operands:
    """The head's tensors in fp32."""

    def __init__(self, head: HeadLike) -> None:
        self.q, self.k, self.v = head.q.float(), head.k.float(), head.v.float()
        self.do = None if head.do is None else head.do.float()


def _round(x: Tensor, fmt: Format) -> Tensor:
    return x if fmt == "fp32" else x.to(_DTYPES[fmt]).float()


def _scores(recipe: Recipe, products: Tensor, scale: float) -> Tensor:
    """Scores from q.k in fp32: scaled and rounded as the recipe says; left unscaled for "in-exponent"."""
    if recipe.alpha == "after-rounding":
        return _round(_round(products, recipe.scores) * scale, recipe.scores)
    return _round(products if recipe.alpha == "in-exponent" else products * scale, recipe.scores)


def _exponential(recipe: Recipe, scores: Tensor, maxima: Tensor, factor: float) -> Tensor:
    """exp(factor (S - m)); ``factor`` is alpha where left to the exponent, else 1. A row without keys gives 0."""
    maxima = maxima.masked_fill(maxima == -torch.inf, 0.0)
    if recipe.exp == "exp2-fma":
        # exp2(fma(S, c, -m c)), c = fp32(alpha log2 e): the product and sum are rounded together.
        c = float(torch.tensor(factor * math.log2(math.e), dtype=torch.float32))
        exponent = (scores.double() * c - (maxima * c).double()).float()
        return torch.exp2(exponent)
    return torch.exp(_round((scores - maxima) * factor, recipe.difference))


def _forward(recipe: Recipe, head: HeadLike, fp32: _Operands) -> tuple[Tensor, Tensor]:
    """O before its last rounding [Tq, Dv], and L [Tq]; fp32."""
    n, dv = len(fp32.q), fp32.v.shape[1]
    out, lse = fp32.q.new_empty(n, dv), fp32.q.new_empty(n)
    for start in range(0, n, recipe.schedule.query_block):
        rows = torch.arange(start, min(start + recipe.schedule.query_block, n), device=fp32.q.device)
        out[rows], lse[rows] = _emulate_block(recipe, head, fp32, rows)
    return out, lse


def _emulate_block(recipe: Recipe, head: HeadLike, fp32: _Operands, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(O, L) in fp32 of rows that walk the keys together."""
    ranges = recipe.schedule.ranges(head.visible_span(rows))
    parts = [_one_split(recipe, head, fp32, rows, tiles) for tiles in ranges]
    if parts:
        return _merge(parts)
    return fp32.q.new_zeros(len(rows), fp32.v.shape[1]), fp32.q.new_full((len(rows),), -torch.inf)


def _one_split(
    recipe: Recipe, head: HeadLike, fp32: _Operands, rows: Tensor, tiles: list[slice]
) -> tuple[Tensor, Tensor]:
    """Online softmax over one split's key ranges: (O in fp32, L)."""
    in_exponent = recipe.alpha == "in-exponent" and head.softcap is None and not _has_bias(head)
    factor = head.scale if in_exponent else 1.0
    maxima = fp32.q.new_full((len(rows), 1), -torch.inf)
    row_sum, exact_sum = torch.zeros_like(maxima), torch.zeros_like(maxima)
    accumulator = fp32.q.new_zeros(len(rows), fp32.v.shape[1])
    for keys in tiles:
        scores = _masked_scores(recipe, head, fp32, rows, keys, in_exponent=in_exponent)
        new_maxima = _round(torch.maximum(maxima, _tile_maximum(recipe, scores)), recipe.row_max)
        probs = _exponential(recipe, scores, new_maxima, factor)
        rescale = _exponential(recipe, maxima, new_maxima, factor)
        maxima = new_maxima
        cast = _round(probs, recipe.probs)
        tile_sum = (probs if recipe.row_sum_of == "fp32-probs" else cast).sum(1, keepdim=True)
        if recipe.row_sum_clamp is not None:
            tile_sum = tile_sum.clamp(min=recipe.row_sum_clamp)
        exact_sum = rescale * exact_sum + tile_sum
        row_sum = _round(rescale * row_sum + tile_sum, recipe.row_sum)
        product = _round(cast @ fp32.v[keys], recipe.range_pv)
        accumulator = _round(_round(accumulator * rescale, recipe.accumulator) + product, recipe.accumulator)
    # A row that saw no key; one whose l underflowed divides by zero, as the real kernel does.
    out = torch.where((maxima == -torch.inf) & (row_sum == 0), 0.0, accumulator * (1 / row_sum))
    used = row_sum if recipe.lse_from == "rounded-l" else exact_sum
    return out, (maxima * factor + used.log()).squeeze(1)


def _merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Independent splits weighted by exp(L_i - L), in fp32."""
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts])
    lse = torch.logsumexp(lses, 0)
    weights = torch.where(lses == -torch.inf, 0.0, torch.exp(lses - lse))
    return (weights[:, :, None] * torch.stack([out for out, _ in parts])).sum(0), lse


def _masked_scores(
    recipe: Recipe, head: HeadLike, fp32: _Operands, rows: Tensor, keys: slice, *, in_exponent: bool
) -> Tensor:
    products = fp32.q[rows] @ fp32.k[keys].T
    if recipe.alpha == "in-exponent" and not in_exponent:
        products = products * head.scale
    scores = _scores(recipe, products, head.scale)
    if head.softcap is not None:
        scores = _round(torch.tanh(scores / head.softcap) * head.softcap, recipe.scores)
    head.apply_mask(scores, rows, keys)
    return scores


def _has_bias(head: HeadLike) -> bool:
    mask = getattr(getattr(head, "masking", None), "mask", None)
    return mask is not None and mask.dtype != torch.bool


def _tile_maximum(recipe: Recipe, scores: Tensor) -> Tensor:
    maximum = scores.amax(1, keepdim=True)
    rule = recipe.softmax
    if rule.kind == "safe":
        return maximum
    assert rule.beta is not None
    repeated = (scores >= maximum - rule.epsilon).sum(1, keepdim=True) > 1
    moved = torch.where(maximum > 0, rule.beta * maximum, maximum.clamp(min=0.0))
    return torch.where(repeated, moved, maximum)


def _backward(recipe: Recipe, head: HeadLike, fp32: _Operands, result: EmulatedHead, unrounded: Tensor) -> None:
    """P = exp(S - L); dS = cast(P o (dP - delta)); dQ = alpha dS K; dK = alpha dS^T Q; dV = cast(P)^T dO."""
    assert fp32.do is not None
    again = recipe if recipe.backward_scores == "as-forward" else replace(recipe, scores="fp32")
    in_exponent = recipe.alpha == "in-exponent" and head.softcap is None and not _has_bias(head)
    factor = head.scale if in_exponent else 1.0
    dq, dk, dv = torch.empty_like(fp32.q), torch.zeros_like(fp32.k), torch.zeros_like(fp32.v)
    result.delta = fp32.q.new_empty(len(fp32.q))
    for start in range(0, len(fp32.q), recipe.schedule.query_block):
        rows = torch.arange(start, min(start + recipe.schedule.query_block, len(fp32.q)), device=fp32.q.device)
        keys = head.visible_span(rows)
        scores = _masked_scores(again, head, fp32, rows, keys, in_exponent=in_exponent)
        lse = result.lse[rows][:, None]
        probs = torch.exp(scores * factor - lse.masked_fill(lse == -torch.inf, 0.0))
        dprobs = fp32.do[rows] @ fp32.v[keys].T
        if recipe.delta_from == "dp":
            delta = _round((probs * dprobs).sum(1), recipe.delta)
        else:
            out = result.o[rows].float() if recipe.delta_from == "rounded-o" else unrounded[rows]
            delta = _round(_round(fp32.do[rows] * out, recipe.delta).sum(1), recipe.delta)
        result.delta[rows] = delta
        dscores = probs * (dprobs - delta[:, None])
        if head.softcap is not None:
            raw = fp32.q[rows] @ fp32.k[keys].T * head.scale
            dscores = dscores * (1 - torch.tanh(raw / head.softcap).square())
        dscores = _round(dscores, recipe.dscores)
        dq[rows] = dscores @ fp32.k[keys] * head.scale
        dk[keys] += dscores.T @ fp32.q[rows] * head.scale
        dv[keys] += _round(probs, recipe.backward_probs).T @ fp32.do[rows]
    result.dq, result.dk, result.dv = (g.to(_DTYPES[recipe.dq]) for g in (dq, dk, dv))
