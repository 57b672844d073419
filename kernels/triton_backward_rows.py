"""delta and dQ: the kernels of the backward with a block of query rows each. See ``triton_backward``."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_diag.kernels.triton_gradients import end_range, finished, row_statistics, score_gradients
from attn_diag.kernels.triton_instruments import dump_gradients
from attn_diag.kernels.triton_math import as_operand, dot, dot_add, dot_more, round_to
from attn_diag.kernels.triton_sequences import head_slope, sequence_of
from attn_diag.kernels.triton_tiles import (
    backward_lse,
    backward_scores,
    key_tiles,
    load_keys,
    load_rest,
    load_tile,
    load_values,
    mask_scores,
    source,
)  # fmt: skip


@triton.jit
def delta_kernel(
    o_ptr, do_ptr, delta_ptr, stride_ob, stride_oh, stride_ot, stride_od, stride_gb, stride_gh, stride_gt, stride_gd,
    heads, q_length, R: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO o O) of one block of rows."""
    bh = tl.program_id(1)
    b = (bh // heads).to(tl.int64)
    h = (bh % heads).to(tl.int64)
    start = tl.program_id(0) * G.block_m
    offs = start + tl.arange(0, G.block_m)
    dims = tl.arange(0, G.block_dv)
    here = (offs < q_length)[:, None] & (dims < G.value_dim)[None, :]
    offs = offs.to(tl.int64)[:, None]
    o_at = o_ptr + b * stride_ob + h * stride_oh + offs * stride_ot + dims[None, :] * stride_od
    do_at = do_ptr + b * stride_gb + h * stride_gh + offs * stride_gt + dims[None, :] * stride_gd
    o = tl.load(o_at, mask=here, other=0.0).to(tl.float32)
    do = tl.load(do_at, mask=here, other=0.0).to(tl.float32)
    delta = round_to(tl.sum(round_to(do * o, tl.constexpr(R.delta_products)), 1), tl.constexpr(R.delta))
    rows = start + tl.arange(0, G.block_m)
    tl.store(delta_ptr + bh.to(tl.int64) * q_length + rows, delta, mask=rows < q_length)


@triton.jit
def _walk_keys(sums, task, do, lse, delta, values, dump, first_tile, n_tiles, MASKED: tl.constexpr,
               WANT: tl.constexpr, R: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """Over tiles of keys, the sum of dS K ([M, block_d], WANT "dq") or of P o dP ([M], WANT "delta").

    ``sums``: that sum, and the one within a key range, where the recipe rounds after each; else unused. Then both for
    the features behind block_d, where there are any.
    """
    acc, part, acc_rest, part_rest = sums
    queries, positions, keys, b, hk, view, scale, softcap, alibi = task
    q, q_rest = queries
    for tile in tl.range(first_tile, first_tile + n_tiles, num_stages=G.stages):
        start = tile * G.block_n
        cols = start + tl.arange(0, G.block_n)
        k = load_keys(keys, 0, b, hk, start, view[0], G.block_n, not MASKED, G)
        v = k
        if not G.latent:
            v = load_values(values, 0, b, hk, start, view[0], G.block_n, not MASKED, G)
        s = dot(q, tl.trans(k), tl.constexpr(R.input))
        if G.rest_d:
            k_rest = load_rest(keys, 0, b, hk, start, view[0], G.block_n, False, G)
            s = dot_more(q_rest, tl.trans(k_rest), s, tl.constexpr(R.input))
        s, slope = backward_scores(s, positions[:, None], cols[None, :], start, alibi, view[0], scale, softcap, R, G)
        if MASKED:
            s = mask_scores(s, positions, cols, view, G)
        p = tl.exp2(s - backward_lse(lse, positions, start, alibi, scale, R, G)[:, None])
        dp = round_to(dot(do, tl.trans(v), tl.constexpr(R.input)), tl.constexpr(R.dprobs))
        if WANT == "delta":
            acc += tl.sum(p * dp, 1)
        else:
            cast = as_operand(score_gradients(p, dp, delta[:, None], slope, scale, R, G), tl.constexpr(R.dscores))
            if G.dump:
                dump_gradients(dump, dp, cast, start, view[0], G)
            if R.gradient_accumulator == "fp32":
                acc = dot_add(cast, k, acc, tl.constexpr(R.dscores))
                if G.rest_d:
                    acc_rest = dot_add(cast, k_rest, acc_rest, tl.constexpr(R.dscores))
            else:
                ends = (start + G.block_n) % R.schedule.key_tile == 0
                part = dot_add(cast, k, part, tl.constexpr(R.dscores))
                acc, part = end_range(acc, part, ends, scale, R)
                if G.rest_d:
                    part_rest = dot_add(cast, k_rest, part_rest, tl.constexpr(R.dscores))
                    acc_rest, part_rest = end_range(acc_rest, part_rest, ends, scale, R)
    return acc, part, acc_rest, part_rest


@triton.jit
def dq_kernel(
    q_desc, k_desc, v_desc, do_desc, q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, out_ptr, dp_ptr,
    ds_ptr, slots_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_ob, stride_oh, stride_ot,
    heads, group, q_length, k_length, shift, left, right, cu_q_ptr, cu_k_ptr, documents, slopes_ptr, stride_slopes,
    stride_dump, scale, softcap, WANT: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """dQ of one block of query rows (WANT "dq"), or their delta = rowsum(P o dP) (WANT "delta"), into ``out_ptr``."""
    BLOCK_M: tl.constexpr = G.block_m
    BLOCK_D: tl.constexpr = G.block_d
    REST_D: tl.constexpr = G.rest_d
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1)
    b = bh // heads
    h = bh % heads
    hk = h // group
    q_total = q_length
    item, block, q_first, q_length, k_first, k_length = sequence_of(
        block, b, q_length, k_length, cu_q_ptr, cu_k_ptr, documents, BLOCK_M, G
    )
    if G.documents:
        shift *= k_length - q_length
        if q_length == 0:
            return
    offs = block * BLOCK_M + tl.arange(0, BLOCK_M)
    here = offs < q_length
    positions = offs + shift
    view = (k_length, left, right)
    row = bh.to(tl.int64) * q_total + q_first + offs

    queries = source(q_desc, q_ptr, b, h, q_first, stride_qb, stride_qh, stride_qt, stride_qd, G)
    gradients = source(do_desc, do_ptr, b, h, q_first, stride_gb, stride_gh, stride_gt, stride_gd, G)
    keys = source(k_desc, k_ptr, b, hk, k_first, stride_kb, stride_kh, stride_kt, stride_kd, G)
    values = source(v_desc, v_ptr, b, hk, k_first, stride_vb, stride_vh, stride_vt, stride_vd, G)
    q = load_tile(queries, b, h, block * BLOCK_M, q_length, BLOCK_M, G)
    q_rest = q
    if G.rest_d:
        q_rest = load_rest(queries, 0, b, h, block * BLOCK_M, q_length, BLOCK_M, False, G)
    do = load_values(gradients, 0, b, h, block * BLOCK_M, q_length, BLOCK_M, False, G)
    slots = offs
    any_slot = False
    if G.dump:
        slots = tl.load(slots_ptr + row, mask=here, other=-1)
        any_slot = tl.max(slots, 0) >= 0
    dump = (dp_ptr + k_first, ds_ptr + k_first, slots, any_slot, stride_dump)
    alibi = head_slope(slopes_ptr, item, documents, h, stride_slopes, G)
    task = ((q, q_rest), positions, keys, b, hk, view, scale, softcap, alibi)

    part = 0.0
    acc_rest = 0.0
    part_rest = 0.0
    if WANT == "delta":
        lse, _ = row_statistics(lse_ptr, lse_ptr, row, here)
        delta = lse
        acc = tl.zeros([BLOCK_M], tl.float32)
    else:
        lse, delta = row_statistics(lse_ptr, delta_ptr, row, here)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if R.gradient_accumulator != "fp32":
            part = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if G.rest_d:
            acc_rest = tl.zeros([BLOCK_M, REST_D], tl.float32)
            if R.gradient_accumulator != "fp32":
                part_rest = tl.zeros([BLOCK_M, REST_D], tl.float32)
    first = block * BLOCK_M + shift
    last = tl.minimum((block + 1) * BLOCK_M, q_length) - 1 + shift
    begin, whole, partial, end = key_tiles(first, last, view, G)
    sums = (acc, part, acc_rest, part_rest)
    if G.left:
        sums = _walk_keys(sums, task, do, lse, delta, values, dump, begin, whole - begin, True, WANT, R, G)
    sums = _walk_keys(sums, task, do, lse, delta, values, dump, whole, partial - whole, False, WANT, R, G)
    sums = _walk_keys(sums, task, do, lse, delta, values, dump, partial, end - partial, True, WANT, R, G)
    acc, part, acc_rest, part_rest = sums
    if WANT == "delta":
        tl.store(out_ptr + row, round_to(acc, tl.constexpr(R.delta)), mask=here)
    else:
        dims = tl.arange(0, BLOCK_D)
        first = out_ptr + b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh
        first += (q_first + offs).to(tl.int64)[:, None] * stride_ot
        at = first + dims[None, :]
        acc = finished(acc, part, scale, R)
        tl.store(at, as_operand(acc, tl.constexpr(R.dq)), mask=here[:, None] & (dims < G.head_dim)[None, :])
        if G.rest_d:
            inside = here[:, None] & (tl.arange(0, G.rest_d) < G.head_dim - BLOCK_D)[None, :]
            acc_rest = finished(acc_rest, part_rest, scale, R)
            tl.store(first + BLOCK_D + tl.arange(0, G.rest_d)[None, :], as_operand(acc_rest, tl.constexpr(R.dq)),
                     mask=inside)  # fmt: skip
