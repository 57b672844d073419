"""A Triton kernel under development: causal attention, forward, FP16.

It has a mistake that no test with ``allclose`` on Gaussian inputs sees: the row sum l is kept in FP16. To see it found:

    cd examples/kernel; export TRITON_INTERPRET=1        # no GPU is needed
    python -m pytest                                     # one test fails, and says "row sum"
    attn-diag check attention:attention --causal top-left --dtype fp16 --no-backward
"""

import torch
import triton
import triton.language as tl


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, T, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """One block of BLOCK_M query rows of one head."""
    head = tl.program_id(1) * T * D
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, D)
    rows = offs_m < T
    q = tl.load(q_ptr + head + offs_m[:, None] * D + offs_d, mask=rows[:, None], other=0.0).to(tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, D], tl.float32)
    for start in range(0, T, BLOCK_N):
        keys = start + offs_n
        at = head + keys[:, None] * D + offs_d
        k = tl.load(k_ptr + at, mask=keys[:, None] < T, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=keys[:, None] < T, other=0.0).to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        scores = tl.where((keys <= offs_m[:, None]) & (keys < T), scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        factor = tl.exp(row_max - new_max)
        probs = tl.exp(scores - new_max[:, None])
        # The mistake: fp32 would be right.
        row_sum = (row_sum * factor + tl.sum(probs, 1)).to(tl.float16).to(tl.float32)
        out = out * factor[:, None] + tl.dot(probs.to(tl.float16).to(tl.float32), v, input_precision="ieee")
        row_max = new_max
    out = out / row_sum[:, None]
    tl.store(o_ptr + head + offs_m[:, None] * D + offs_d, out.to(tl.float16), mask=rows[:, None])


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q, k, v [B, H, T, D] in FP16 to O [B, H, T, D]."""
    q, k, v = (t.contiguous() for t in (q, k, v))
    o = torch.empty_like(q)
    batch, heads, length, dim = q.shape
    grid = (triton.cdiv(length, 32), batch * heads)
    attention_kernel[grid](q, k, v, o, length, dim**-0.5, D=dim, BLOCK_M=32, BLOCK_N=32)
    return o
