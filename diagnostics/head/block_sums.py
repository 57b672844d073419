"""torch's SDPA on a CPU: a fused kernel that adds dK and dV up in the inputs' format, block by block.

    P = cast(exp(S - L)), dS = cast(P o (dP - delta))     as FlashAttention-2
    dV = cast(dV + P^T dO), dK = cast(dK + alpha dS^T Q)  after every block of query rows

Blocks have 32 rows where there are less than 192, 64 below 768, else 256 (torch 2.13). So 98 to 99.6 % of the bits of
its dK and dV are reproduced (T 128 to 1,024), and 48 to 75 % where they are added up in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from attn_diag.head.propagation import BackwardCollector
from attn_diag.reference import AttentionHead, FloatFormat, reference_head, round_nearest_even

SITE = "gradient_accumulator"
WORDS = "dK and dV are added up in the inputs' format, block by block (torch's SDPA on a CPU)"
_BLOCKS = (32, 64, 256)
# A kernel explains an error where what differs from its output is less than this part of what differs from fp32 sums.
_EXPLAINED = 0.25
# Heads with more scores are not run again for that.
_MOST_SCORES = 2**24


def adds_in_blocks(
    observed: Tensor,
    fed: Tensor,
    collectors: Sequence[BackwardCollector],
    total: Callable[[Sequence[dict[str, Tensor]]], Tensor],
    fmt: FloatFormat,
) -> bool:
    """Whether a gradient has the bits of sums in the inputs' format.

    Args:
        observed: dK or dV, [Tk, D] float64.
        fed: What it would be with the same casts and fp32 sums, from the captured O and LSE.
        collectors: Of the query heads that make it.
        total: It from these heads' gradients by name.
        fmt: The inputs' format.
    """
    heads = [collector.head for collector in collectors]
    if max(len(head.q) * len(head.k) for head in heads) > _MOST_SCORES:
        return False
    plain = float((observed - fed).square().sum())
    for rows in _BLOCKS:
        made = total([_of(one, fmt, rows) for one in collectors])
        if float((observed - made).square().sum()) < _EXPLAINED * plain:
            return True
    return False


def _of(collector: BackwardCollector, fmt: FloatFormat, rows: int) -> dict[str, Tensor]:
    errors = collector.errors
    return summed_in_blocks(collector.head, fmt, rows, errors.delta_error, errors.lse_error)


def summed_in_blocks(
    head: AttentionHead, fmt: FloatFormat, block: int, delta_error: Tensor, lse_error: Tensor | None
) -> dict[str, Tensor]:
    """dk and dv of such a kernel for one query head, float64; all of its scores are held at once.

    Args:
        head: The head, with dO.
        fmt: The inputs' format.
        block: Query rows of a block.
        delta_error: delta as captured, minus the reference's, [Tq].
        lse_error: Likewise; None where L is not known.
    """
    assert head.do is not None
    cast = partial(round_nearest_even, fmt=fmt)
    truth = reference_head(head, key_gradients=False)
    assert truth.delta is not None
    lse = truth.lse if lse_error is None else truth.lse + lse_error
    scores, slope = (head.q @ head.k.T) * head.scale, torch.ones((), dtype=torch.float64, device=head.q.device)
    if head.softcap is not None:
        capped = (scores / head.softcap).tanh()
        scores, slope = head.softcap * capped, 1 - capped.square()
    head.apply_mask(scores, slice(0, len(head.q)), slice(0, len(head.k)))
    probs = (scores - lse.masked_fill(lse.isneginf(), 0.0)[:, None]).exp()
    delta = truth.delta + delta_error
    dscores = cast(probs * (head.do @ head.v.T - delta[:, None]) * slope)
    probs = cast(probs)
    dk, dv = torch.zeros_like(head.k), torch.zeros_like(head.v)
    for start in range(0, len(head.q), block):
        rows = slice(start, start + block)
        dk = cast(dk + (dscores[rows].T @ head.q[rows]) * head.scale)
        dv = cast(dv + probs[rows].T @ head.do[rows])
    return {"dk": dk, "dv": dv}
