"""The steps of the backward for one tile; ``R`` is the Recipe and ``G`` the Geometry."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_diag.kernels.triton_math import LOG2_E, round_to
from attn_diag.kernels.triton_sequences import head_slope, sequence_of
from attn_diag.kernels.triton_tiles import backward_lse


@triton.jit
def row_statistics(lse_ptr, delta_ptr, row, here):
    """(L log2 e, delta) of rows; rows past the end, and rows that see no key, get L = inf, so that P = 0."""
    lse = tl.load(lse_ptr + row, mask=here, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    return lse * LOG2_E, tl.load(delta_ptr + row, mask=here, other=0.0)


@triton.jit
def tile_statistics(statistics, start, BLOCK: tl.constexpr):
    """(L log2 e, delta) [BLOCK] of the rows from ``start`` on, as ``statistics_kernel`` has written them."""
    rows = start + tl.arange(0, BLOCK)
    return tl.split(tl.load(statistics + 2 * rows[:, None] + tl.arange(0, 2)[None, :]))


@triton.jit
def statistics_kernel(
    lse_ptr, delta_ptr, out_ptr, heads, q_length, k_length, cu_q_ptr, cu_k_ptr, documents, slopes_ptr, stride_slopes,
    scale, R: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """(L log2 e, delta) of the rows of one block, for dK and dV: [B, Hq, blocks, block_m, 2]; (inf, 0) past the end.

    L has in it the part of ALiBi's bias that tells rows from the first of their tile: in dK/dV a thread holds many rows
    and few keys, and would do again for every block of keys what is done once here. Side by side and in whole blocks
    they are one copy of as many numbers as there are threads: of fewer, or of rows of documents, which are aligned to
    nothing, Triton 3.6 has every thread copy by itself all that it needs, and at D = 128 the registers run out.
    """
    block = tl.program_id(0)
    bh = tl.program_id(1)
    first = bh.to(tl.int64) * q_length
    at = (bh.to(tl.int64) * tl.num_programs(0) + block) * G.block_m + tl.arange(0, G.block_m)
    item, block, begin, q_length, _, _ = sequence_of(
        block, bh // heads, q_length, k_length, cu_q_ptr, cu_k_ptr, documents, G.block_m, G
    )
    first += begin
    start = block * G.block_m
    offs = start + tl.arange(0, G.block_m)
    lse, delta = row_statistics(lse_ptr, delta_ptr, first + offs, offs < q_length)
    alibi = head_slope(slopes_ptr, item, documents, bh % heads, stride_slopes, G)
    tl.store(out_ptr + 2 * at, backward_lse(lse, offs, start, alibi, scale, R, G))
    tl.store(out_ptr + 2 * at + 1, delta)


@triton.jit
def score_gradients(p, dp, delta, slope, scale, R: tl.constexpr, G: tl.constexpr):
    """dS before its cast; ``p``, ``dp`` (already rounded to ``dprobs``) and ``delta`` of one shape."""
    if R.dscores_from == "cast-probs":
        p = round_to(p, tl.constexpr(R.backward_probs))
    if R.alpha_in_backward == "before-cast":
        p = p * scale
    ds = p * (dp - delta)
    if G.softcap:
        ds *= slope
    return ds


@triton.jit
def end_sum(total, part, ends, R: tl.constexpr):
    """(total, part) of a gradient: where ``ends``, what a range has summed is rounded and added, and rounded again."""
    rounded = round_to(part, tl.constexpr(R.gradient_accumulator))
    rounded = round_to(total + rounded, tl.constexpr(R.gradient_accumulator))
    return tl.where(ends, rounded, total), tl.where(ends, 0.0, part)


@triton.jit
def end_range(total, part, ends, scale, R: tl.constexpr):
    """As ``end_sum``, for dQ and dK: alpha enters with the part, unless dS held it."""
    kept = part
    if R.alpha_in_backward == "after-product":
        part = part * scale
    total, _ = end_sum(total, part, ends, R)
    return total, tl.where(ends, 0.0, kept)


@triton.jit
def finished(total, part, scale, R: tl.constexpr):
    """A gradient before its last rounding, alpha included."""
    if R.gradient_accumulator != "fp32":
        total, part = end_range(total, part, True, scale, R)
    elif R.alpha_in_backward == "after-product":
        total = total * scale
    return total
