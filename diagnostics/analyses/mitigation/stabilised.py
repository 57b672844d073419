"""Where the stabilised softmax (Qiu & Yao, arXiv 2510.04212, section 4) stops being attention.

Where a row's maximum r > 0 is repeated, m = beta r is subtracted instead. Exact arithmetic does not mind, but P_bar's
largest element becomes exp(-(beta - 1) r): it underflows at (beta - 1) r = -ln(smallest number), and a lower limit of
1e-10 on l, as the published code has it, is reached at (beta - 1) r = -ln(1e-10) = 23.03.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attn_diag.kernels import Recipe, block_scores
from attn_diag.kernels.formats import NumberFormat, parse
from attn_diag.reference import AttentionHead

CLAMP_LOG = -math.log(1e-10)
_FP32 = NumberFormat(8, 23)


@dataclass(frozen=True)
class RepeatedMaxima:
    """Rows in which the rule acts, and the largest repeated maximum there (scaled scores; None: none above 0)."""

    rows: int
    largest: float | None


def repeated_maxima_as_run(recipe: Recipe, head: AttentionHead, epsilon: float) -> RepeatedMaxima:
    """Stream the head's scores as the recipe stores them, key range by key range, as the rule sees them.

    ``epsilon``: scores within it of the maximum repeat it, in the unit of the stored scores.
    """
    acted = torch.zeros(len(head.q), dtype=torch.bool, device=head.q.device)
    largest, factor = 0.0, 1.0
    for rows, scores, factor in block_scores(recipe, head):
        top = scores.amax(1, keepdim=True)
        repeated = ((scores >= top - epsilon).sum(1) > 1) & (top[:, 0] > -torch.inf) & (top[:, 0] != 0)
        acted[rows] |= repeated
        if bool(repeated.any()):
            largest = max(largest, float(top[repeated].max()) * factor)
    return RepeatedMaxima(int(acted.sum()), largest or None)


def beta_limits(recipe: Recipe, largest: float) -> tuple[float, float, float]:
    """The beta at which l meets a lower limit of 1e-10, and at which P_bar's largest element falls below the smallest
    normal, and the smallest subnormal, number; of P_bar's format where that is narrower than fp32."""
    rounding = parse(recipe.probs)
    fmt = rounding.format if rounding is not None and rounding.format.min_exponent > _FP32.min_exponent else _FP32
    normal = -fmt.min_exponent * math.log(2)
    subnormal = (fmt.mantissa_bits + 1 - fmt.min_exponent) * math.log(2)  # half the smallest rounds to 0
    return tuple(1 + limit / largest for limit in (CLAMP_LOG, normal, subnormal))  # type: ignore[return-value]
