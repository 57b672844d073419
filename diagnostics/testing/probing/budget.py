"""How far O and L may be off: bounds for a kernel that keeps everything in fp32 but the inputs, P_bar and O."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.reference import AttentionHead, FloatFormat, RowBlock, ulp

# One fp32 operation, whichever way it rounds (tensor cores truncate).
_FP32 = 2.0**-23
# fp32 below its normal numbers is zero where subnormals are flushed: ex2.approx.ftz on GPUs, vectorised exp on CPUs.
_FLUSHED = 2.0**-126


@dataclass(frozen=True)
class ErrorBudget:
    """The largest |observed - reference| of a block's rows: of O [R, D], of L [R]. float64."""

    o: Tensor
    lse: Tensor


def error_budget(
    head: AttentionHead, block: RowBlock, fmt: FloatFormat, out: FloatFormat, lse: FloatFormat
) -> tuple[ErrorBudget, ErrorBudget]:
    """What every rounding may make, and what fp32 arithmetic alone may (P_bar uncast), of a block's rows.

    P_bar_j may change by the factors 1 +- u (its cast to ``fmt``, u half a spacing relative to its number),
    exp(+-d_t), d_t = (D + 8) 2^-23 max_j alpha sum |q_i k_i| (a dot product of D terms, its scaling, S - m and
    exp's argument; Higham, Accuracy and Stability, eq. 3.5), and 1 +- (T + 8) 2^-23 (exp itself, rescaling, and
    sums over T keys); l likewise, whether it sums P_bar before or after the cast. With f the product of them less 1,
    |N'/l' - N/l| <= f / (1 - f) (P|V| + |O|). A P_bar below fmt's normal numbers is off by half its smallest
    spacing more, or by 2^-126 where fp32 flushes what lies below; of O_bar's T partial sums and of O each may lose
    2^-126 likewise. The last rounding of O, to ``out``, adds half a spacing at the largest value it may be given
    (without casts a whole one: a bound of mean errors must hold for every way to round).

    L = m + ln l moves by d_t with its scores, by at most -ln(1 - f') with l, f' the product of l's other factors less
    1 and T P_bars' tiny errors over l, by 4 2^-23 (|m| + ln l) in m's unit, the logarithm's, their sum and its scaling
    to base e, and by its own rounding to ``lse``.
    """
    q, k, v = head.q[block.rows], head.k[block.keys], head.v[block.keys].abs()
    keys = len(k)
    magnitude = (q.abs() * head.scale) @ k.abs().T
    largest = magnitude.masked_fill_(block.scores == -torch.inf, 0.0).amax(1)
    shift = largest * (q.shape[1] + 8) * _FP32
    sums = 1 + (keys + 8) * _FP32
    reach, weight, inverse = block.probs @ v + block.out.abs(), v.sum(0), block.inverse_row_sum
    logs = 4 * _FP32 * (block.row_max.abs() + block.row_sum.log())
    smallest = float(ulp(torch.zeros(1, dtype=torch.float64), fmt)) / 2

    def bounds(casts: float, tiny: float, last: float) -> ErrorBudget:
        f = (casts * sums * shift.exp() - 1)[:, None]
        # Where f reaches 1 (scores of many thousands) nothing is promised.
        inner = torch.where(f < 1, f / (1 - f).clamp(min=1e-300) * reach, torch.inf)
        lost = tiny * (weight + block.out.abs() * keys) + _FLUSHED * keys
        inner = inner + lost * inverse[:, None] + _FLUSHED
        o = inner + last * ulp((block.out.abs() + inner).clamp(max=out.largest), out)
        of_l = casts * sums - 1 + tiny * keys * inverse
        moved = shift - torch.log1p(-of_l.clamp(max=1.0)) + logs
        return ErrorBudget(o, moved + last * ulp((block.lse.abs() + moved).clamp(max=lse.largest), lse))

    return (
        bounds(1 + 2.0 ** -(fmt.precision + 1), max(smallest, _FLUSHED), 0.5),
        bounds(1.0, _FLUSHED, 1.0),
    )
