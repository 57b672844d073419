"""Fused kernels that add gradients up in the inputs' format, block by block: dK and dV, as torch's SDPA on a CPU; dQ.

    P = cast(exp(S - L)), dS = cast(P o (dP - delta))     as FlashAttention-2
    dV = cast(dV + P^T dO), dK = cast(dK + alpha dS^T Q)  after every block of query rows
    dQ = cast(dQ + alpha dS K)                            after every block of keys

Torch's blocks have 32 rows where there are less than 192, 64 below 768, else 256 (torch 2.13). So 98 to 99.6 % of the
bits of its dK and dV are reproduced (T 128 to 1,024), and 48 to 75 % where they are added up in fp32. Under
``enable_gqa`` one sum goes through the query heads of a key head, one after the other (98 to 99 % in BF16, 87 to 94 %
in FP16; T 96 to 800, groups of 2 and 4), and through repeated keys each head has its own (35 to 61 %).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from attn_diag.head.compared import MOST_SCORES
from attn_diag.head.fp32_in_bf16 import EXPLAINED
from attn_diag.head.propagation import BackwardCollector
from attn_diag.reference import FloatFormat, reference_head, round_nearest_even

SITE = "gradient_accumulator"
WORDS = "gradients are added up in the inputs' format, block by block (dK and dV: torch's SDPA on a CPU)"
_BLOCKS = (32, 64, 128, 256)


def made_in_blocks(
    name: str,
    observed: Tensor,
    fed: Tensor,
    collectors: Sequence[BackwardCollector],
    total: Callable[[Sequence[dict[str, Tensor]]], Tensor],
    fmt: FloatFormat,
) -> float:
    """What of a gradient's squared error sums in the inputs' format make; 0 where it has not their bits.

    Args:
        name: dq, dk or dv.
        observed: It, [T, D] float64.
        fed: What it would be with the same casts and fp32 sums, from the captured O and LSE, [T, D] float64.
        collectors: Of the query heads that make it.
        total: It from these heads' gradients by name.
        fmt: The inputs' format.
    """
    if max(len(one.head.q) * len(one.head.k) for one in collectors) > MOST_SCORES:
        return 0.0
    factors = [_factors(name, one, fmt) for one in collectors]
    length = max(len(x) for _, x in factors)

    def left(block: int, *, shared: bool = False) -> float:
        sums = [factors] if shared else [[own] for own in factors]
        made = total([{name: _summed(of_heads, block, fmt)} for of_heads in sums])
        return float((observed - made).square().sum())

    # One block for all rows is a sum in fp32 that each query head rounds once.
    plain = min(float((observed - fed).square().sum()), left(length))
    ways = (False, True)[: len(factors)]
    rests = (left(block, shared=shared) for shared in ways for block in _BLOCKS if block < length)
    return next((plain - rest for rest in rests if rest < EXPLAINED * plain), 0.0)


def _factors(name: str, collector: BackwardCollector, fmt: FloatFormat) -> tuple[Tensor, Tensor]:
    """What is multiplied, the first transposed, float64; all scores are held at once.

    Cast dS^T [Tk, Tq] and alpha K for dQ, cast dS and alpha Q for dK, cast P and dO for dV.
    """
    head, errors, cast = collector.head, collector.errors, partial(round_nearest_even, fmt=fmt)
    assert head.do is not None
    truth = reference_head(head, key_gradients=False)
    lse = truth.lse if errors.lse_error is None else truth.lse + errors.lse_error
    scores, slope = (head.q @ head.k.T) * head.scale, torch.ones((), dtype=torch.float64, device=head.q.device)
    if head.softcap is not None:
        capped = (scores / head.softcap).tanh()
        scores, slope = head.softcap * capped, 1 - capped.square()
    head.apply_mask(scores, slice(0, len(head.q)), slice(0, len(head.k)))
    probs = (scores - lse.masked_fill(lse.isneginf(), 0.0)[:, None]).exp()
    every = slice(None)
    if name == "dv":
        return head.drop(cast(probs), every, every), head.do
    dprobs = head.drop(head.do @ head.v.T, every, every)
    dscores = cast(probs * (dprobs - errors.delta[:, None]) * slope)
    return (dscores.T, head.k * head.scale) if name == "dq" else (dscores, head.q * head.scale)


def _summed(factors: Sequence[tuple[Tensor, Tensor]], block: int, fmt: FloatFormat) -> Tensor:
    """weights^T x of heads that share a sum, rounded after every ``block`` of rows."""
    weights, x = factors[0]
    found = x.new_zeros(weights.shape[1], x.shape[1])
    for weights, x in factors:
        for start in range(0, len(x), block):
            rows = slice(start, start + block)
            found = round_nearest_even(found + weights[rows].T @ x[rows], fmt)
    return found
