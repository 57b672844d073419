"""dK and dV: the kernel of the backward with a block of keys each. See ``triton_backward``."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_diag.kernels.triton_gradients import end_range, end_sum, score_gradients, tile_statistics
from attn_diag.kernels.triton_math import as_operand, dot, dot_add, dot_more, round_to
from attn_diag.kernels.triton_sequences import first_block, head_slope, sequence_of
from attn_diag.kernels.triton_tiles import (
    backward_scores,
    load_rest,
    load_tile,
    load_values,
    mask_scores,
    query_tiles,
    source,
)  # fmt: skip


@triton.jit
def _walk_queries(sums, columns, rows, view, scale, softcap, first_tile, n_tiles, MASKED: tl.constexpr,
                  R: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """Adds dS^T Q to dk [N, block_d] and cast(P)^T dO to dv [N, block_dv] over tiles of query rows, all transposed.

    ``sums``: dk, dv, and the sums within a block of query rows, where the recipe rounds after each; else unused. Then
    dk of the features behind block_d, where there are any, and its sums.
    """
    dk, dv, dk_part, dv_part, dk_rest, rest_part = sums
    k, v, cols, k_rest = columns
    queries, gradients, statistics, b, h, q_length, shift, alibi = rows
    for tile in tl.range(first_tile, first_tile + n_tiles, num_stages=G.stages):
        start = tile * G.block_m
        offs = start + tl.arange(0, G.block_m)
        q = load_tile(queries, b, h, start, q_length, G.block_m, G)
        lse, delta = tile_statistics(statistics, start, G.block_m)
        s = dot(k, tl.trans(q), tl.constexpr(R.input))  # [N, M]
        if G.rest_d:
            q_rest = load_rest(queries, 0, b, h, start, q_length, G.block_m, False, G)
            s = dot_more(k_rest, tl.trans(q_rest), s, tl.constexpr(R.input))
        positions = offs + shift
        s, slope = backward_scores(
            s, positions[None, :], cols[:, None], start + shift, alibi, view[0], scale, softcap, R, G
        )
        if MASKED:
            s = tl.trans(mask_scores(tl.trans(s), positions, cols, view, G))
        p = tl.exp2(s - lse[None, :])
        do = load_values(gradients, 0, b, h, start, q_length, G.block_m, False, G)
        cast = as_operand(p, tl.constexpr(R.backward_probs))
        ds = p
        if G.wanted != "dv":
            dp = round_to(dot(v, tl.trans(do), tl.constexpr(R.input)), tl.constexpr(R.dprobs))
            ds = as_operand(score_gradients(p, dp, delta[None, :], slope, scale, R, G), tl.constexpr(R.dscores))
        ends = (start + G.block_m) % R.schedule.query_block == 0
        if G.wanted != "dk" and R.gradient_accumulator == "fp32":
            dv = dot_add(cast, do, dv, tl.constexpr(R.backward_probs))
        elif G.wanted != "dk":
            dv_part = dot_add(cast, do, dv_part, tl.constexpr(R.backward_probs))
            dv, dv_part = end_sum(dv, dv_part, ends, R)
        if G.wanted != "dv" and R.gradient_accumulator == "fp32":
            dk = dot_add(ds, q, dk, tl.constexpr(R.dscores))
            if G.rest_d:
                dk_rest = dot_add(ds, q_rest, dk_rest, tl.constexpr(R.dscores))
        elif G.wanted != "dv":
            dk_part = dot_add(ds, q, dk_part, tl.constexpr(R.dscores))
            dk, dk_part = end_range(dk, dk_part, ends, scale, R)
            if G.rest_d:
                rest_part = dot_add(ds, q_rest, rest_part, tl.constexpr(R.dscores))
                dk_rest, rest_part = end_range(dk_rest, rest_part, ends, scale, R)
    return dk, dv, dk_part, dv_part, dk_rest, rest_part


@triton.jit
def dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, q_ptr, k_ptr, v_ptr, do_ptr, statistics_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_ob, stride_oh, stride_ot, stride_wb, stride_wh, stride_wt,
    k_heads, group, q_length, k_length, shift, left, right, cu_q_ptr, cu_k_ptr, documents, slopes_ptr, stride_slopes,
    blocks, scale, softcap, R: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys; the query heads that share it are added one after the other."""
    BLOCK_N: tl.constexpr = G.block_n
    BLOCK_D: tl.constexpr = G.block_d
    REST_D: tl.constexpr = G.rest_d
    BLOCK_DV: tl.constexpr = G.block_dv
    block = tl.program_id(0)
    bh = tl.program_id(1)
    b = bh // k_heads
    hk = bh % k_heads
    item, block, k_first, k_length, q_first, q_length = sequence_of(
        block, b, k_length, q_length, cu_k_ptr, cu_q_ptr, documents, BLOCK_N, G
    )
    q_blocks = 0
    if G.documents:
        shift *= k_length - q_length
        if k_length == 0:
            return
        q_blocks = first_block(q_first, item, G.block_m)
    start = block * BLOCK_N
    cols = start + tl.arange(0, BLOCK_N)
    view = (k_length, left, right)
    keys = source(k_desc, k_ptr, b, hk, k_first, stride_kb, stride_kh, stride_kt, stride_kd, G)
    values = source(v_desc, v_ptr, b, hk, k_first, stride_vb, stride_vh, stride_vt, stride_vd, G)
    k = load_tile(keys, b, hk, start, k_length, BLOCK_N, G)
    v = k
    if not G.latent:
        v = load_values(values, 0, b, hk, start, k_length, BLOCK_N, False, G)
    k_rest = k
    dk_rest = 0.0
    rest_part = 0.0
    if G.rest_d:
        k_rest = load_rest(keys, 0, b, hk, start, k_length, BLOCK_N, False, G)
        dk_rest = tl.zeros([BLOCK_N, REST_D], tl.float32)
        if R.gradient_accumulator != "fp32":
            rest_part = tl.zeros([BLOCK_N, REST_D], tl.float32)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    last = tl.minimum(start + BLOCK_N, k_length) - 1
    begin, whole, partial, end = query_tiles(start, last, q_length, shift, left, right, G)
    dk_part = 0.0
    dv_part = 0.0
    if R.gradient_accumulator != "fp32":
        dk_part = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv_part = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    columns = (k, v, cols, k_rest)
    for g in range(0, group):
        h = hk * group + g
        queries = source(q_desc, q_ptr, b, h, q_first, stride_qb, stride_qh, stride_qt, stride_qd, G)
        gradients = source(do_desc, do_ptr, b, h, q_first, stride_gb, stride_gh, stride_gt, stride_gd, G)
        statistics = statistics_ptr + ((b * k_heads * group + h).to(tl.int64) * blocks + q_blocks) * (2 * G.block_m)
        alibi = head_slope(slopes_ptr, item, documents, h, stride_slopes, G)
        rows = (queries, gradients, statistics, b, h, q_length, shift, alibi)
        sums = (dk, dv, dk_part, dv_part, dk_rest, rest_part)
        if G.right:
            sums = _walk_queries(sums, columns, rows, view, scale, softcap, begin, whole - begin, True, R, G)
        sums = _walk_queries(sums, columns, rows, view, scale, softcap, whole, partial - whole, False, R, G)
        if G.left:
            sums = _walk_queries(sums, columns, rows, view, scale, softcap, partial, end - partial, True, R, G)
        dk, dv, dk_part, dv_part, dk_rest, rest_part = sums
        if R.gradient_accumulator != "fp32":
            # The next head's sums start anew.
            dv, dv_part = end_sum(dv, dv_part, True, R)
            dk, dk_part = end_range(dk, dk_part, True, scale, R)
            if G.rest_d:
                dk_rest, rest_part = end_range(dk_rest, rest_part, True, scale, R)
    if R.gradient_accumulator == "fp32" and R.alpha_in_backward == "after-product":
        dk = dk * scale
        dk_rest = dk_rest * scale
    here = (cols < k_length)[:, None]
    cols = (k_first + cols).to(tl.int64)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    if G.wanted != "dv":
        at = b.to(tl.int64) * stride_ob + hk.to(tl.int64) * stride_oh + cols * stride_ot + dims
        tl.store(dk_ptr + at, as_operand(dk, tl.constexpr(R.dq)), mask=here & (dims < G.head_dim))
        if G.rest_d:
            dims = BLOCK_D + tl.arange(0, G.rest_d)[None, :]
            at = b.to(tl.int64) * stride_ob + hk.to(tl.int64) * stride_oh + cols * stride_ot + dims
            tl.store(dk_ptr + at, as_operand(dk_rest, tl.constexpr(R.dq)), mask=here & (dims < G.head_dim))
    if G.wanted != "dk":
        dims = tl.arange(0, BLOCK_DV)[None, :]
        at = b.to(tl.int64) * stride_wb + hk.to(tl.int64) * stride_wh + cols * stride_wt + dims
        tl.store(dv_ptr + at, as_operand(dv, tl.constexpr(R.dq)), mask=here & (dims < G.value_dim))
