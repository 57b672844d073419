"""One step of the emulated online softmax: the next maximum, P_bar, and what the earlier sums are multiplied by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.kernels.emulation_operands import LOG2_E, Rounder
from attn_diag.kernels.exponential import exp2_polynomial, scaled_apart, scaled_difference, scaled_exponent
from attn_diag.kernels.hardware_exp2 import hardware_exp2
from attn_diag.kernels.recipe import Recipe


@dataclass
class SoftmaxStep:
    """One key range: the new maxima and the factor for the old sums [R, 1], P_bar [R, K]."""

    maxima: Tensor
    rescale: Tensor
    probs: Tensor


def softmax_step(
    recipe: Recipe, scores: Tensor, maxima: Tensor, factor: float, rounder: Rounder, key: int
) -> SoftmaxStep:
    """One key range after those that left ``maxima``.

    Args:
        recipe: The recipe.
        scores: As it stores them, [R, K].
        maxima: [R, 1].
        factor: What S - m is multiplied by in the exponent.
        rounder: Its rounding sites.
        key: The first key of the range.
    """
    new = rounder("row_max", _next_maximum(recipe, maxima, scores), key)
    probs = exponential(recipe, scores, new, factor, rounder, key)
    return SoftmaxStep(new, exponential(recipe, maxima, new, factor, rounder, key, "rescale"), probs)


def _next_maximum(recipe: Recipe, maxima: Tensor, scores: Tensor) -> Tensor:
    """What is subtracted from now on, before it is rounded; [R, 1]."""
    rule, new = recipe.softmax, torch.maximum(maxima, own_maximum(recipe, scores))
    if rule.kind == "stale":
        assert rule.threshold is not None
        # NaN where both are -inf, and then not below the threshold: the new one, -inf too.
        new = torch.where(new - maxima <= rule.threshold, maxima, new)
    return new


def own_maximum(recipe: Recipe, scores: Tensor) -> Tensor:
    """What keys [..., K] would have subtracted if they were all: their largest score, under the recipe's rule."""
    top = scores.amax(-1, keepdim=True)
    rule = recipe.softmax
    if rule.kind == "stabilised":
        assert rule.beta is not None
        # Keys that are all masked have no maximum that could be repeated; so it does not matter which masked ranges a
        # kernel visits. (The published code masks with the most negative number, and there m would become 0.)
        repeated = ((scores >= top - rule.epsilon).sum(-1, keepdim=True) > 1) & (top > -torch.inf)
        top = torch.where(repeated, torch.where(top > 0, rule.beta * top, top.clamp(min=0.0)), top)
    return top


def exponential(
    recipe: Recipe, scores: Tensor, maxima: Tensor, factor: float, rounder: Rounder, key: int, step: str = ""
) -> Tensor:
    """exp(factor (S - m)); a row without keys gives 0."""
    maxima = maxima.masked_fill(maxima == -torch.inf, 0.0)
    if recipe.exp == "exact":
        return torch.exp(rounder("difference", (scores - maxima) * factor, key, step))
    if recipe.exp == "exp2":
        difference = rounder("difference", scores - maxima, key, step)
        in_twos = recipe.alpha == "in-q" and factor == 1 / LOG2_E
        return _exp2(recipe, difference if in_twos else difference * factor * LOG2_E)
    if recipe.exp == "exp2-scaled":
        return _exp2(recipe, scaled_apart(scores, maxima, factor))
    # Sums of FP8 products are cut off to 13 bits: a factor that is all but 1 costs them the last one.
    by_difference = step == "rescale" and recipe.rescaling == "difference"
    exponent = (scaled_difference if by_difference else scaled_exponent)(scores, maxima, factor)
    if recipe.exp == "exp2-fma":
        return _exp2(recipe, exponent)
    assert recipe.exp_degree is not None
    return exp2_polynomial(exponent, recipe.exp_degree)


def _exp2(recipe: Recipe, x: Tensor) -> Tensor:
    """2**x; where sums are a GPU's, so is this, which on a GPU is what torch returns."""
    if recipe.accumulation == "nvidia-tensor-core" and x.dtype == torch.float32 and x.device.type == "cpu":
        return hardware_exp2(x)
    return torch.exp2(x)
