"""The emulated backward of a block of query rows.

P = exp(S - L);  delta = rowsum(dO o O) or rowsum(P o dP);  dS = P o (dP - delta)  (softcap: times 1 - (S/c)^2)
dQ = alpha dS K;  dK = alpha dS^T Q;  dV = P^T dO

Dropout makes O = (P o W) V, dP = W o (dO V^T) and dV = (P o W)^T dO; operands of products are 0 where it dropped, and
1 / (1 - p) multiplies sums in the recipe's arithmetic, as in FlashAttention-2, unless the recipe rounds it
(``dropout_factor``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from attn_diag.kernels.accumulation import matmul
from attn_diag.kernels.emulation_block import SCORES, Block, dropout_factor, lse_key, masked_scores, rounds_dropout
from attn_diag.kernels.emulation_forward import ForwardRows
from attn_diag.kernels.emulation_operands import Rounder, core_of, working_dtype
from attn_diag.kernels.formats import rounds_monotonically
from attn_diag.kernels.quantize import quantize
from attn_diag.kernels.quantizers import parse_quantizer
from attn_diag.kernels.recipe import BACKWARD, SMOOTHING, Recipe

# What delta, and dQ before its last rounding, depend on besides the forward.
_BEFORE_LAST_ROUNDING = tuple(name for name in BACKWARD if name != "dq")


@dataclass
class BackwardRows:
    """delta [R] and dQ [R, D], in the recipe's arithmetic."""

    delta: Tensor
    dq: Tensor


class KeyGradients:
    """dK [Tk, D] and dV [Tk, Dv] of a recipe, summed over blocks of query rows."""

    def __init__(self, recipe: Recipe, block: Block) -> None:
        k, v = (block.operands.get(name, working_dtype(recipe)) for name in ("k", "v"))
        self.dk, self.dv = torch.zeros_like(k), torch.zeros_like(v)
        self._dk, self._dv = torch.zeros_like(k), torch.zeros_like(v)

    def add(self, keys: slice, dk: Tensor, dv: Tensor) -> None:
        """Add what some rows of the present query block contribute."""
        self._dk[keys] += dk
        self._dv[keys] += dv

    def end_query_block(self, rounder: Rounder) -> None:
        """Round the query block's contributions, and their sums, to the recipe's ``gradient_accumulator``."""
        for name, total, part in (("dk", self.dk, self._dk), ("dv", self.dv, self._dv)):
            part.copy_(rounder("gradient_accumulator", part, step=name))
            total.copy_(rounder("gradient_accumulator", total + part, step=f"{name} sum"))
            part.zero_()


def backward_rows(recipe: Recipe, block: Block, forward: ForwardRows, gradients: KeyGradients | None) -> BackwardRows:
    """Run the recipe's backward on a block, adding to ``gradients`` where dK and dV are wanted."""

    def make() -> BackwardRows:
        return _before_last_rounding(recipe, block, forward, gradients)

    if gradients is None:
        found = block.shared("backward", recipe, _BEFORE_LAST_ROUNDING, (recipe.forward_json,), make)
    else:
        found = make()
    return BackwardRows(found.delta, block.rounder(recipe)("dq", found.dq, step="dq"))


def _before_last_rounding(
    recipe: Recipe, block: Block, forward: ForwardRows, gradients: KeyGradients | None
) -> BackwardRows:
    """delta, and dQ before its last rounding."""
    dtype = working_dtype(recipe)
    rounder = block.rounder(recipe)
    do, k, q = (block.operands.get(name, dtype) for name in ("do", "k", "q"))
    do, prepared = do[..., block.rows, :], block.operands.prepared(recipe)
    if recipe.backward_operands == "quantized":
        k, q = prepared.unscaled(recipe, "k"), prepared.unscaled(recipe, "q")
    q = q[..., block.rows, :]
    delta = None
    if recipe.delta_from != "dp":
        out = forward.out if recipe.delta_from == "rounded-o" else forward.unrounded
        delta = rounder("delta", rounder("delta_products", do * out).sum(-1))
    # Without roundings between them the ranges need not be told apart, unless random scores are to be drawn again.
    redrawn = recipe.backward_scores == "as-forward" and not rounds_monotonically(recipe.scores)
    whole = recipe.gradient_accumulator == "fp32" and not redrawn
    ranges = [block.keys] if whole else [keys for split in recipe.schedule.ranges(block.keys) for keys in split]
    if delta is None:
        delta = torch.zeros_like(forward.lse)
        for keys in ranges:
            delta += (_probs(recipe, block, forward, keys) * _dprobs(recipe, block, keys, rounder)).sum(-1)
        delta = rounder("delta", delta)
    scale = block.head.scale
    dq = torch.zeros_like(q)
    before_cast = recipe.alpha_in_backward == "before-cast"
    for keys in ranges:
        probs = _probs(recipe, block, forward, keys)
        dscores = _dprobs(recipe, block, keys, rounder) - delta[..., None]
        used = probs
        if recipe.dscores_from == "cast-probs" or gradients is not None:
            cast = rounder("backward_probs", probs, keys.start)
            used = cast if recipe.dscores_from == "cast-probs" else probs
        dscores = (used * scale if before_cast else used) * dscores
        if block.head.softcap is not None:
            raw = block.scores(_with_plain_scores(recipe), keys) * block.operands.unit(recipe)
            dscores = dscores * (1 - torch.tanh(raw / block.head.softcap).square())
        dscores = _in_blocks(recipe, "quantize_dscores", rounder("dscores", dscores, keys.start))
        part = matmul(dscores, k[..., keys, :], recipe.accumulation, operands=recipe.input, core=core_of(recipe))
        part = part if before_cast else part * scale
        if whole:
            dq = part
        else:
            dq = rounder(
                "gradient_accumulator", dq + rounder("gradient_accumulator", part, keys.start, "dq"), keys.start
            )
        if gradients is not None:
            dk = matmul(dscores.mT, q, recipe.accumulation, operands=recipe.input, core=core_of(recipe))
            probs = _in_blocks(recipe, "quantize_backward_probs", cast)
            probs = block.multiplied(recipe, "backward_probs", probs, keys, rounder)
            of_dv = prepared.get(recipe, "do").rows(block.rows).whole
            dv = matmul(probs.mT, of_dv, recipe.accumulation, operands=recipe.input, core=core_of(recipe))
            if block.head.dropout is not None and not rounds_dropout(recipe, block.head):
                dv = dv * block.head.dropout.factor
            gradients.add(keys, dk if before_cast else dk * scale, dv)
    return BackwardRows(delta, dq)


def _probs(recipe: Recipe, block: Block, forward: ForwardRows, keys: slice) -> Tensor:
    """P = exp(S - L), from scores rounded as in the forward or not."""
    again = recipe if recipe.backward_scores == "as-forward" else _with_plain_scores(recipe)

    def make() -> Tensor:
        scores, lse = masked_scores(again, block, keys), forward.lse[..., None]
        if again.smooth_k != "none":
            lse = lse - block.operands.prepared(again).shift(again, block.rows)[:, None]
        return torch.exp(scores * block.operands.factor(recipe) - lse.masked_fill(lse == -torch.inf, 0.0))

    return block.shared("P", again, SCORES, (keys.start, keys.stop, lse_key(recipe)), make)


@cache
def _with_plain_scores(recipe: Recipe) -> Recipe:
    plain = dict.fromkeys(("quantize_q", "quantize_k", *SMOOTHING), "none")
    return replace(recipe, scores="fp32", **plain)  # type: ignore[arg-type]


def _in_blocks(recipe: Recipe, field: str, x: Tensor) -> Tensor:
    """[R, K] as a field of the recipe quantises it; blocks begin at the first row and key that are there."""
    by = parse_quantizer(getattr(recipe, field))
    return x if by is None else quantize(x, by, seed=recipe.seed).values.to(x.dtype)


def _dprobs(recipe: Recipe, block: Block, keys: slice, rounder: Rounder) -> Tensor:
    """dP of what is kept, times 1 / (1 - p) under dropout."""
    kept = block.kept(rounder("dprobs", block.dprobs(recipe, keys), keys.start), keys)
    return kept if block.head.dropout is None else kept * dropout_factor(recipe, block.head)
