"""Attention that is not fused whose matrix products round each product of two numbers to the inputs' format.

    sums      sum = cast(sum + cast(x y)), one product after the other, as Eigen has it in FP16 on a CPU, and so
              TensorFlow and Keras outside of XLA; all else as plain torch with a softmax in fp32:
              S = alpha q kT in fp32, P = cast(softmax(S)), dS = cast(alpha P o (dP - rowsum(P o dP))) of the uncast P
    products  sum = sum + cast(x y) in fp32, as tinygrad has it in BF16, and each step of softmax is cast:
              e = cast(exp(cast(S - m))), l = cast(rowsum(e)), P = cast(e / l);
              dS = cast(exp(S - m) cast(cast(dP / l) - cast(cast(cast(rowsum(cast(dP o e))) / l) / l))) alpha

TensorFlow 2.21 and tinygrad 0.14 on a CPU: 99.7 to 100 % of the bits of O, dQ, dK and dV (64 to 1,024 keys). What is
multiplied one by one takes long, so this is tried where nothing else explains an error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_diag.reference import AttentionHead, FloatFormat
from attn_diag.reference.masking import adds

LOW_SUMS = ("low-sums", "low-products")
# Products of one matrix product: a tenth of a second in each of six.
_MOST_PRODUCTS = 2**26
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def low_sum_ways(head: AttentionHead, fmt: FloatFormat) -> tuple[str, ...]:
    """``LOW_SUMS``; none of a large head, or of one with a softcap, a sink, dropout, slopes or an additive mask."""
    mask, wide = head.masking.mask, max(head.q.shape[1], head.v.shape[1])
    plain = head.softcap is None and head.sink is None and head.dropout is None and head.masking.alibi is None
    plain = plain and (mask is None or not adds(mask)) and fmt.name in _DTYPES
    return LOW_SUMS if plain and len(head.q) * len(head.k) * wide <= _MOST_PRODUCTS else ()


def low_summed(head: AttentionHead, fmt: FloatFormat, way: str) -> dict[str, Tensor]:
    """What such a kernel returns for one head.

    Args:
        head: The head; all of its scores are held at once.
        fmt: The inputs' format.
        way: One of ``LOW_SUMS``.

    Returns:
        o and, with dO, dq, dk and dv; float64.
    """
    dtype, in_steps = _DTYPES[fmt.name], way == "low-products"

    def cast(values: Tensor) -> Tensor:
        return values.to(dtype).float()

    def product(a: Tensor, b: Tensor) -> Tensor:
        found = a.new_zeros(len(a), b.shape[1])
        for x, y in zip(a.T.contiguous(), b, strict=True):
            # Exact in fp32, but for what it cannot hold.
            found += cast(x[:, None] * y)
            found = found if in_steps else cast(found)
        return found

    q, k, v = (x.float() for x in (head.q, head.k, head.v))
    scores = product(q, k.T) * head.scale
    head.apply_mask(scores, slice(0, len(q)), slice(0, len(k)))
    scores = cast(scores) if in_steps else scores
    largest = scores.amax(1, keepdim=True)
    shifted = scores - largest.masked_fill(largest.isneginf(), 0.0)
    wide = (cast(shifted) if in_steps else shifted).exp()
    powers = cast(wide) if in_steps else wide
    row_sum = powers.sum(1, keepdim=True)
    row_sum = (cast(row_sum) if in_steps else row_sum).masked_fill(row_sum == 0, 1.0)
    normal = powers / row_sum
    probs = cast(normal)
    found = {"o": cast(product(probs, v)).double()}
    if head.do is None:
        return found
    do = head.do.float()
    dprobs = cast(product(do, v.T))
    if in_steps:
        inner = cast(cast(dprobs * powers).sum(1, keepdim=True))
        dscores = cast(cast(cast(dprobs / row_sum) - cast(cast(inner / row_sum) / row_sum)) * wide)
    else:
        dscores = (dprobs - (dprobs * normal).sum(1, keepdim=True)) * normal
    dscores = cast(dscores * head.scale)
    made = {"dq": product(dscores, k), "dk": product(dscores.T, q), "dv": product(probs.T, do)}
    return found | {name: cast(x).double() for name, x in made.items()}
