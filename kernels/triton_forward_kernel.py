"""The kernel of the forward: one block of query rows of one head. See ``triton_forward``."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_diag.kernels.triton_instruments import ONES, dump_tile, watch_rows
from attn_diag.kernels.triton_low_bit import cast_probs, range_product, rescaled_sums, scales_of
from attn_diag.kernels.triton_math import LOG2_E, as_operand, dot_add, fused, round_to, rounding_error
from attn_diag.kernels.triton_sequences import head_slope, sequence_of
from attn_diag.kernels.triton_softmax import add_range, exponential, next_maximum, range_sum, rescaling, sink_step
from attn_diag.kernels.triton_tiles import (
    key_source,
    key_tiles,
    load_group,
    load_keys,
    load_rest,
    load_tile,
    load_values,
    scores_of,
    source,
    tile_pages,
    tile_scores,
)  # fmt: skip


@triton.jit
def _walk_tiles(sums, task, values, factor, dump, first_tile, n_tiles, MASKED: tl.constexpr, R: tl.constexpr,
                G: tl.constexpr):  # fmt: skip
    """Online softmax over ``n_tiles`` tiles of keys from ``first_tile`` on."""
    acc, l, m, near, cast_sum = sums
    _, _, keys, b, hk, view, _, _, _, _ = task
    tile = first_tile
    if R.schedule.order == "descending":
        tile = first_tile + n_tiles - 1
    following = tile_pages(keys, tl.maximum(tile, 0) * G.block_n, view[0], G.block_n, G)
    for i in tl.range(0, n_tiles, num_stages=G.stages):
        tile = first_tile + i
        after = tile + 1
        if R.schedule.order == "descending":
            tile = first_tile + n_tiles - 1 - i
            after = tl.maximum(tile - 1, 0)
        page = following
        following = tile_pages(keys, after * G.block_n, view[0], G.block_n, G)
        k = load_keys(keys, page, b, hk, tile * G.block_n, view[0], G.block_n, not MASKED, G)
        s = scores_of(task, k, tile, page, MASKED, R, G)  # [M, N]
        top = tl.max(s, 1)
        repeated = False
        if R.softmax.kind == "stabilised":
            repeated = tl.sum((s >= top[:, None] - R.softmax.epsilon).to(tl.int32), 1) > 1
        m_new = next_maximum(m, top, repeated, R)
        rescale = rescaling(m, m_new, factor, R)
        p = exponential(s, m_new, factor, R)
        cast = cast_probs(p, R, G)
        total = range_sum(p, cast, R)
        if R.row_sum_clamp is not None:
            total = tl.maximum(total, R.row_sum_clamp)
        l = round_to(l * rescale + total, tl.constexpr(R.row_sum))
        if G.rows:
            near, cast_sum = watch_rows((near, cast_sum), cast, m_new, rescale, factor, R, G)
        if G.dump:
            dump_tile(dump, s, cast, m_new, tile, view[0], G)
        v = k
        if not G.latent:
            v = load_values(values, page, b, hk, tile * G.block_n, view[0], G.block_n, not MASKED, G)
        if R.range_pv == "fp32" and R.accumulator == "fp32" and R.pv_levels == "one":
            acc = dot_add(cast, v, acc * rescale[:, None], tl.constexpr(R.probs))
        else:
            acc = add_range(acc, range_product(cast, v, R), rescale, R)
        m = m_new
    return acc, l, m, near, cast_sum


@triton.jit
def _walk_ranges(sums, exact_l, task, values, factor, dump, begin, end, R: tl.constexpr, G: tl.constexpr):
    """Online softmax over ranges of several tiles: one maximum, one sum and one P_bar V for each range."""
    _, _, _, near, cast_sum = sums
    acc, l, m, _, _ = sums
    _, _, _, b, hk, view, _, _, _, _ = task
    BLOCK_M: tl.constexpr = G.block_m
    BLOCK_DV: tl.constexpr = G.block_dv
    BLOCK_N: tl.constexpr = G.block_n
    ones = as_operand(tl.full([BLOCK_N, ONES], 1.0, tl.float32), tl.constexpr(R.probs))
    first_range = begin // G.range_tiles
    n_ranges = tl.cdiv(end, G.range_tiles) - first_range
    for i in range(0, n_ranges):
        r = first_range + i
        if R.schedule.order == "descending":
            r = first_range + n_ranges - 1 - i
        if R.schedule.order == "diagonal-first":
            r = first_range + tl.where(i == 0, n_ranges - 1, i - 1)
        first = tl.maximum(r * G.range_tiles, begin)
        last = tl.minimum((r + 1) * G.range_tiles, end)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        for tile in range(first, last):
            top = tl.maximum(top, tl.max(tile_scores(task, tile, True, R, G), 1))
        near_top = tl.zeros([BLOCK_M], tl.int32)
        if R.softmax.kind == "stabilised":
            for tile in range(first, last):
                s = tile_scores(task, tile, True, R, G)
                near_top += tl.sum((s >= top[:, None] - R.softmax.epsilon).to(tl.int32), 1)
        m_new = next_maximum(m, top, near_top > 1, R)
        rescale = rescaling(m, m_new, factor, R)
        total = tl.zeros([BLOCK_M], tl.float32)
        product = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        cast_sum = cast_sum * rescale[:, None]
        for tile in range(first, last):
            s = tile_scores(task, tile, True, R, G)
            p = exponential(s, m_new, factor, R)
            cast = cast_probs(p, R, G)
            total += range_sum(p, cast, R)
            if G.rows:
                cast_sum = dot_add(cast, ones, cast_sum, tl.constexpr(R.probs))
            page = tile_pages(values, tile * G.block_n, view[0], G.block_n, G)
            v = load_values(values, page, b, hk, tile * G.block_n, view[0], G.block_n, False, G)
            product = dot_add(cast, v, product, tl.constexpr(R.probs))
            if G.dump:
                dump_tile(dump, s, cast, m_new, tile, view[0], G)
        if R.row_sum_clamp is not None:
            total = tl.maximum(total, R.row_sum_clamp)
        exact_l = exact_l * rescale + total
        l = round_to(l * rescale + total, tl.constexpr(R.row_sum))
        acc = add_range(acc, product, rescale, R)
        m = m_new
    return (acc, l, m, near, cast_sum), exact_l


@triton.jit
def forward_kernel(
    q_desc, k_desc, v_desc, q_ptr, k_ptr, v_ptr, o_ptr, unrounded_ptr, lse_ptr, rows_ptr, s_ptr, p_ptr, m_ptr,
    slots_ptr, sinks_ptr, scales_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_ob, stride_oh, stride_ot,
    heads, group, q_length, k_length, shift, left, right, cu_q_ptr, cu_k_ptr, documents, slopes_ptr, stride_slopes,
    table_ptr, stride_table, split_keys, stride_dump, dump_tiles, scale, softcap,
    R: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """One block of query rows of one head (and, with split-KV, one split of the keys).

    ``rows_ptr`` [5, B, Hq, Tq]: m, l, near, sum of the cast P_bar, sum over features of O's rounding error.
    """
    BLOCK_M: tl.constexpr = G.block_m
    BLOCK_DV: tl.constexpr = G.block_dv
    # The last query blocks see the most keys under causality: they go first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    b = tl.program_id(1) * G.group // heads
    h = tl.program_id(1) * G.group % heads
    hk = h // group
    q_total = q_length
    item, block, q_first, q_length, k_first, k_length = sequence_of(
        block, b, q_length, k_length, cu_q_ptr, cu_k_ptr, documents, BLOCK_M, G
    )
    if G.documents:
        shift *= k_length - q_length // G.group
        if q_length == 0:
            return
    offs = block * G.block_m + tl.arange(0, G.block_m)
    here = offs < q_length
    positions = offs // G.group + shift
    q_rows = q_first // G.group + offs // G.group
    dims = tl.arange(0, G.block_dv)
    view = (k_length, left, right)

    table = table_ptr + item.to(tl.int64) * stride_table
    keys = key_source(k_desc, k_ptr, b, hk, k_first, table, stride_kb, stride_kh, stride_kt, stride_kd, G)
    values = key_source(v_desc, v_ptr, b, hk, k_first, table, stride_vb, stride_vh, stride_vt, stride_vd, G)
    scales = scales_of(scales_ptr, b, h, heads, offs, dims, q_length, k_length, G)
    if G.group > 1:
        h += offs % G.group
        starts = b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh + q_rows.to(tl.int64) * stride_qt
        q = load_group(q_ptr, starts, here, stride_qd, 0, G.block_d, G)
        q_rest = q
        if G.rest_d:
            q_rest = load_group(q_ptr, starts, here, stride_qd, G.block_d, G.rest_d, G)
        alibi = 0.0
        if G.alibi != "none":
            alibi = head_slope(slopes_ptr, item, documents, h, stride_slopes, G)[:, None]
    else:
        queries = source(q_desc, q_ptr, b, h, q_first, stride_qb, stride_qh, stride_qt, stride_qd, G)
        q = load_tile(queries, b, h, block * G.block_m, q_length, G.block_m, G)
        q_rest = q
        if G.rest_d:
            q_rest = load_rest(queries, 0, b, h, block * G.block_m, q_length, G.block_m, False, G)
        alibi = head_slope(slopes_ptr, item, documents, h, stride_slopes, G)

    row = (b * heads + h).to(tl.int64) * q_total + q_rows
    slots = row
    chosen = here
    any_chosen = True
    if G.dump and not G.dump_all:
        slots = tl.load(slots_ptr + row, mask=here, other=-1)
        chosen = slots >= 0
        any_chosen = tl.max(slots, 0) >= 0
    dump = (s_ptr + k_first, p_ptr + k_first, m_ptr, slots, chosen, any_chosen, stride_dump, dump_tiles)

    # alpha waits for the exponent unless the scores already hold it.
    factor = 1.0
    if R.alpha == "in-exponent" and not G.softcap:
        factor = scale
    if R.alpha == "in-q":
        factor = 1.0 / LOG2_E  # it is in q, with log2 e

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    near = tl.zeros([BLOCK_M, ONES], tl.float32)
    cast_sum = tl.zeros([BLOCK_M, ONES], tl.float32)
    first = block * G.block_m // G.group + shift
    last = (tl.minimum((block + 1) * G.block_m, q_length) - 1) // G.group + shift
    begin, whole, partial, end = key_tiles(first, last, view, G)
    if G.split:
        split = tl.program_id(2)
        begin = tl.maximum(begin, split * split_keys // G.block_n)
        end = tl.maximum(tl.minimum(end, (split + 1) * split_keys // G.block_n), begin)
        whole = tl.minimum(tl.maximum(whole, begin), end)
        partial = tl.minimum(tl.maximum(partial, whole), end)

    sums = (acc, l, m, near, cast_sum)
    task = ((q, q_rest), positions, keys, b, hk, view, scale, softcap, alibi, scales)
    exact_l = l
    if G.ranges:
        sums, exact_l = _walk_ranges(sums, exact_l, task, values, factor, dump, begin, end, R, G)
    elif R.schedule.order == "descending":
        sums = _walk_tiles(sums, task, values, factor, dump, partial, end - partial, True, R, G)
        sums = _walk_tiles(sums, task, values, factor, dump, whole, partial - whole, False, R, G)
        if G.left:
            sums = _walk_tiles(sums, task, values, factor, dump, begin, whole - begin, True, R, G)
    else:
        if R.schedule.order == "diagonal-first":
            head = tl.minimum(end - begin, 1)
            sums = _walk_tiles(sums, task, values, factor, dump, end - head, head, True, R, G)
            end -= head
            whole = tl.minimum(whole, end)
            partial = tl.minimum(partial, end)
        if G.left:
            sums = _walk_tiles(sums, task, values, factor, dump, begin, whole - begin, True, R, G)
        sums = _walk_tiles(sums, task, values, factor, dump, whole, partial - whole, False, R, G)
        sums = _walk_tiles(sums, task, values, factor, dump, partial, end - partial, True, R, G)
    acc, l, m, near, cast_sum = sums

    keys_m = m
    keys_l = l
    if G.sink:
        m, shrink, own, beside_keys = sink_step(tl.load(sinks_ptr + h), m, factor)
        acc *= shrink[:, None]
        exact_l = exact_l * shrink + own
        l = round_to(l * shrink + own, tl.constexpr(R.row_sum))
        keys_l += beside_keys

    acc = rescaled_sums(acc, scales, R, G)
    # A row that saw no key; one whose l underflowed divides by zero, as a real kernel does.
    unseen = (m == float("-inf")) & (l == 0)
    o = acc * tl.div_rn(1.0, tl.where(unseen, 1.0, l))[:, None]
    cast = as_operand(o, tl.constexpr(R.out))
    used_l = l
    if G.ranges and R.lse_from == "unrounded-l":
        used_l = exact_l
    lse = tl.where(unseen, m, fused(m, factor, tl.log(tl.where(unseen, 1.0, used_l))))
    if G.split:
        batch = tl.num_programs(1) * G.group // heads
        row += tl.program_id(2).to(tl.int64) * batch * heads * q_total
        b += tl.program_id(2) * batch
    starts = b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh + q_rows.to(tl.int64) * stride_ot
    o_offs = starts[:, None] + dims[None, :]
    inside = here[:, None] & (dims < G.value_dim)[None, :]
    tl.store(o_ptr + o_offs, cast, mask=inside)
    if G.unrounded:
        tl.store(unrounded_ptr + o_offs, o, mask=inside)
    tl.store(lse_ptr + row, lse, mask=here)
    if G.rows:
        plane = tl.num_programs(1).to(tl.int64) * G.group * q_total
        if G.split:
            plane *= tl.num_programs(2)
        # Every store of a vector goes through shared memory and two barriers: four at once, [M, 2, 2].
        four = tl.join(tl.join(keys_m, keys_l), tl.join(tl.max(near, 1), tl.max(cast_sum, 1)))
        planes = (tl.arange(0, 2)[:, None] + 2 * tl.arange(0, 2)[None, :]) * plane
        tl.store(rows_ptr + row[:, None, None] + planes[None, :, :], four, mask=here[:, None, None])
        error = tl.sum(rounding_error(o, cast, tl.constexpr(R.out), G.packed), 1)
        tl.store(rows_ptr + 4 * plane + row, error, mask=here)
