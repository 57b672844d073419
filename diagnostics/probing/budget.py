"""How far O may be off: a bound for a kernel that keeps everything in fp32 but the inputs, P_bar and O."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_diag.reference import AttentionHead, FloatFormat, RowBlock, ulp

# One fp32 operation, whichever way it rounds (tensor cores truncate).
_FP32 = 2.0**-23


def error_budget(head: AttentionHead, block: RowBlock, fmt: FloatFormat, out: FloatFormat) -> Tensor:
    """The largest |O_obs - O_ref| of the block's rows, [R, D] float64.

    P_bar_j may change by the factors 1 +- u (its cast to ``fmt``, u half a spacing relative to its number),
    exp(+-d_t), d_t = (D + 8) 2^-23 max_j alpha sum |q_i k_i| (a dot product of D terms, its scaling, S - m and
    exp's argument; Higham, Accuracy and Stability, eq. 3.5), and 1 +- (T + 8) 2^-23 (exp itself, rescaling, and
    sums over T keys); l likewise, whether it sums P_bar before or after the cast. With f the product of them less 1,
    |N'/l' - N/l| <= f / (1 - f) (P|V| + |O|). A P_bar below fmt's normal numbers is off by half its smallest
    spacing more. The last rounding of O adds half a spacing at the largest value it may be given.
    """
    q, k, v = head.q[block.rows], head.k[block.keys], head.v[block.keys].abs()
    magnitude = (q.abs() * head.scale) @ k.abs().T
    largest = magnitude.masked_fill_(block.scores == -torch.inf, 0.0).amax(1)
    casts = 1 + 2.0 ** -(fmt.precision + 1)
    sums = 1 + (len(k) + 8) * _FP32
    f = (casts * sums * (largest * (q.shape[1] + 8) * _FP32).exp() - 1)[:, None]
    tiny = ulp(torch.zeros(1, dtype=torch.float64, device=q.device), fmt) / 2
    reach = block.probs @ v + block.out.abs()
    # Where f reaches 1 (scores of many thousands) nothing is promised.
    inner = torch.where(f < 1, f / (1 - f).clamp(min=1e-300) * reach, torch.inf)
    inner = inner + tiny * (v.sum(0) + block.out.abs() * len(k)) * block.inverse_row_sum[:, None]
    return inner + ulp((block.out.abs() + inner).clamp(max=out.largest), out) / 2
