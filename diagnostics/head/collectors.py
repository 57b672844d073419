"""The collector of repeated row maxima that fits a head and the recipe that made its scores."""

from __future__ import annotations

import torch

from attn_diag.head.read import HeadInputs
from attn_diag.head.row_maxima import RowMaximaCollector
from attn_diag.kernels import Recipe, score_rounding
from attn_diag.kernels.formats import base, parse, rounds_monotonically
from attn_diag.reference import FloatFormat, format_of


def collector_of(inputs: HeadInputs, recipe: Recipe | None) -> RowMaximaCollector:
    """A collector of repeated maxima for this head, "as_run" included where the recipe's scores are known."""
    head = inputs.head
    if recipe is None or not _plain_scores(inputs) or not _follows_scores(recipe):
        return RowMaximaCollector(len(head.q), head.q.device, inputs.input_format)
    rounding = score_rounding(recipe, head.scale)
    return RowMaximaCollector(len(head.q), head.q.device, inputs.input_format, rounding, _score_format(recipe))


def _follows_scores(recipe: Recipe) -> bool:
    """Whether equal stored scores come from nearly equal ones: no random draws, no saturation at 448."""
    rounding = parse(recipe.scores)
    return rounds_monotonically(recipe.scores) and (rounding is None or not rounding.format.finite)


def _score_format(recipe: Recipe) -> FloatFormat:
    rounding = parse(recipe.scores)
    if rounding is None:
        return format_of(torch.float64 if recipe.arithmetic == "fp64" else torch.float32)
    fmt = rounding.format
    return FloatFormat(base(recipe.scores), fmt.mantissa_bits, fmt.min_exponent, fmt.largest, saturates=fmt.finite)


def _plain_scores(inputs: HeadInputs) -> bool:
    """Whether the stored scores are alpha q.k alone, so that a recipe's rounding of them is known."""
    mask = inputs.head.masking.mask
    return inputs.head.softcap is None and (mask is None or mask.dtype == torch.bool)
