"""The softmax scale that a captured O fits best, found continuously.

    alpha dO / d alpha = (P o S) V - rowsum(P o S) O      S without an additive mask; under softcap times its slope

Gauss-Newton on it: a scale of 1/sqrt(65) for D = 64 moves O by less than any check of its norm would notice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.head.counterfactual import NoiseCollector
from attn_diag.head.read import HeadInputs
from attn_diag.reference import AttentionHead, RowBlock, reference_rows
from attn_diag.results.wording import number, percent

_ROWS = 256
_STEPS = 8
# Roundings of scores to BF16, truncations too, look like a change of the scale by up to 2^-8.
_FROM = 2.0**-8
# The other scale must take this part of the squared error away.
_EXPLAINS = 0.5
# Where it explains O, rounding is left: 0.7 to 0.9 times what is expected, where a softcap of 50 leaves 1.9 times and
# more. Coarse kernels (plain torch leaves 1.5 to 3.5 times) must have no more than a hundredth left.
_LEFT, _ALL = 1.25, 0.99
# And its standard errors from the stated one are at least so many.
_SIGNIFICANT = 6.0


@dataclass(frozen=True)
class ScaleFit:
    """Another scale that explains an O."""

    scale: float
    """The scale."""
    stated: float
    """The one that was stated."""
    standard_error: float
    """Of ``scale``, over rows."""
    explained: float
    """The part of O's squared error that it takes away."""
    left: float
    """The rms of what it leaves over what one rounding at each site of a well-rounded kernel leaves there."""

    @property
    def alone(self) -> bool:
        """Whether it explains O: an O that is too large, or a softcap, is another scale's by half, and no more."""
        return self.left <= _LEFT or self.explained >= _ALL

    @property
    def named(self) -> str:
        """The scale, as 1/sqrt of a whole number where it is one: "0.124035 (1/sqrt(65))"."""
        root = one_over_root(self.scale, 4 * self.standard_error)
        name = f" ({root})" if root else ""
        return f"{number(self.scale, 6)}{name}"

    @property
    def words(self) -> str:
        """In a sentence."""
        off = self.scale / self.stated - 1
        return (
            f"O fits a softmax scale of {self.named}, {percent(abs(off), '.2g')} {'above' if off > 0 else 'below'} the "
            f"{number(self.stated, 6)} stated: that takes away {percent(self.explained, '.3g')} of its squared error"
        )


def one_over_root(scale: float, uncertain: float) -> str | None:
    """A scale as "1/sqrt(65)"; None where no whole number lies within its uncertainty, or several do."""
    if scale < 0.01:  # no whole number can be told from the next
        return None
    whole = scale**-2
    either = max(uncertain / scale, 4e-5) * 2 * whole
    return f"1/sqrt({round(whole)})" if abs(whole - round(whole)) <= either < 0.25 else None


def scale_derivative(head: AttentionHead, block: RowBlock) -> Tensor:
    """alpha dO / d alpha of a block of rows, [R, Dv]."""
    visible = block.probs > 0
    scores = (head.q[block.rows] @ head.k[block.keys].T) * head.scale
    if block.slope is not None:
        scores = scores * block.slope
    weighted = block.probs * scores.masked_fill(~visible, 0.0)
    kept = head.drop(weighted, block.rows, block.keys)
    return kept @ head.v[block.keys] - weighted.sum(1, keepdim=True) * block.out


def fit_scale(inputs: HeadInputs, observed: Tensor) -> ScaleFit | None:
    """The scale that O fits best.

    Args:
        inputs: The head.
        observed: O, [Tq, Dv] float64.

    Returns:
        None where the stated scale fits as well as any, or where no other explains most of the error.
    """
    head = replace(inputs.head, do=None)
    if not head.scale > 0:
        return None
    rows = torch.linspace(0, len(observed) - 1, min(len(observed), _ROWS), device=observed.device).long()
    scale, before, error = head.scale, math.nan, math.nan
    for step in range(_STEPS + 1):
        changed = replace(head, scale=scale)
        block = reference_rows(changed, rows)
        inputs.mark_rows(block)
        good = ~inputs.unusable[rows] & observed[rows].isfinite().all(1) & ~block.fully_masked
        off = (observed[rows] - block.out)[good]
        before = float(off.square().sum()) if step == 0 else before
        slope = scale_derivative(changed, block)[good]
        size = float(slope.square().sum())
        if not size or not math.isfinite(size) or not before:
            return None
        change = float((off * slope).sum()) / size
        by_row = (off * slope).sum(1) - change * slope.square().sum(1)
        error = float(by_row.square().sum().sqrt()) / size
        if step == _STEPS or abs(change) < 1e-7:
            break
        scale *= 1 + max(-0.5, min(change, 0.5))
    explained = 1 - float(off.square().sum()) / before
    away = abs(scale / head.scale - 1)
    if away < _FROM or explained < _EXPLAINS or away < _SIGNIFICANT * error:
        return None
    noise = NoiseCollector(changed, inputs.input_format, inputs.input_format)
    noise.add(block)
    expected = float(noise.variance["o"][rows][good].sum())
    left = math.sqrt(float(off.square().sum()) / expected) if expected else math.inf
    return ScaleFit(scale, head.scale, error * scale, explained, left)
