"""Attention forward in Triton, driven by a recipe: what is rounded, when, and in which order the keys come.

    for each key range, in the schedule's order:
        S = alpha Q K^T                                    rounded to ``scores``
        m' = max(m, rowmax S)                              rounded to ``row_max``; softmax rule
        P_bar = exp(S - m')                                S - m' rounded to ``difference``
        l = exp(m - m') l + rowsum P_bar                   rounded to ``row_sum``
        O_bar = exp(m - m') O_bar + cast(P_bar) V          rounded to ``accumulator``, P_bar to ``probs``,
                                                           P_bar V to ``range_pv``
    with a sink s: l = l + exp(s - m)                      after the last range, rounded to ``row_sum``
    O = O_bar (1 / l), rounded once to ``out``;  L = m + ln l

A range of one tile of keys is walked once, as production kernels do (``_walk_tiles``); a wider one twice, for its
maximum first (``_walk_ranges``). Source of the algorithm: Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 1.

What differs between a GPU and Triton's interpreter, given the same inputs; the rounding sites are bit for bit the same:

| operation | GPU (sm_90) | interpreter |
|---|---|---|
| sums of products | tensor core: 16 at a time, aligned, truncated | fp32, numpy's order |
| exp2 | ex2.approx: 2 ulp, subnormals flushed | numpy: 1 ulp |
| log | 1 ulp | numpy |
| sums over a row | tree over registers and lanes | numpy's pairwise sum |

``R``, ``G``, ``view``, ``task`` and the sources of tiles are as in ``triton_tiles``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_diag.kernels.backend import DTYPES, fits_descriptor, has_tensor_memory
from attn_diag.kernels.geometry import Level, Visibility, anonymous, forward_geometry
from attn_diag.kernels.recipe import Recipe
from attn_diag.kernels.split_keys import merge_splits
from attn_diag.kernels.triton_instruments import ONES, dump_tile, watch_rows
from attn_diag.kernels.triton_low_bit import cast_probs, head_scales, in_codes, is_fp8, rescaled_sums
from attn_diag.kernels.triton_math import as_operand, dot, dot_add, fused, round_to
from attn_diag.kernels.triton_sequences import DENSE, Sequences, head_slope, sequence_of
from attn_diag.kernels.triton_softmax import add_range, exponential, next_maximum, range_sum, rescaling, sink_step
from attn_diag.kernels.triton_tiles import (
    described,
    key_source,
    key_tiles,
    load_rest,
    load_tile,
    load_values,
    source,
    tile_scores,
)  # fmt: skip


@triton.jit
def _walk_tiles(sums, task, values, factor, dump, first_tile, n_tiles, MASKED: tl.constexpr, R: tl.constexpr,
                G: tl.constexpr):  # fmt: skip
    """Online softmax over ``n_tiles`` tiles of keys from ``first_tile`` on."""
    acc, l, m, near, cast_sum = sums
    _, _, _, b, hk, view, _, _, _, _ = task
    for i in tl.range(0, n_tiles, num_stages=G.stages):
        tile = first_tile + i
        if R.schedule.order == "descending":
            tile = first_tile + n_tiles - 1 - i
        s = tile_scores(task, tile, MASKED, R, G)  # [M, N]
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
        v = load_values(values, b, hk, tile * G.block_n, view[0], G.block_n, G)
        if R.range_pv == "fp32" and R.accumulator == "fp32":
            acc = dot_add(cast, v, acc * rescale[:, None], tl.constexpr(R.probs))
        else:
            acc = add_range(acc, dot(cast, v, tl.constexpr(R.probs)), rescale, R)
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
            v = load_values(values, b, hk, tile * G.block_n, view[0], G.block_n, G)
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
    table_ptr, stride_table, page_size, split_keys, stride_dump, dump_tiles, scale, softcap,
    R: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """One block of query rows of one head (and, with split-KV, one split of the keys).

    ``rows_ptr`` [5, B, Hq, Tq]: m, l, near, sum of the cast P_bar, sum over features of O's rounding error.
    """
    BLOCK_M: tl.constexpr = G.block_m
    BLOCK_DV: tl.constexpr = G.block_dv
    # The last query blocks see the most keys under causality: they go first.
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
    offs = block * G.block_m + tl.arange(0, G.block_m)
    here = offs < q_length
    positions = offs + shift
    dims = tl.arange(0, G.block_dv)
    view = (k_length, left, right)

    queries = source(q_desc, q_ptr, b, h, q_first, stride_qb, stride_qh, stride_qt, stride_qd, G)
    pages = (table_ptr + item.to(tl.int64) * stride_table, page_size)
    keys = key_source(k_desc, k_ptr, b, hk, k_first, pages, stride_kb, stride_kh, stride_kt, stride_kd, G)
    values = key_source(v_desc, v_ptr, b, hk, k_first, pages, stride_vb, stride_vh, stride_vt, stride_vd, G)
    alibi = head_slope(slopes_ptr, item, h, stride_slopes, G)
    q = load_tile(queries, b, h, block * G.block_m, q_length, G.block_m, G)
    q_rest = q
    if G.rest_d:
        q_rest = load_rest(queries, b, h, block * G.block_m, q_length, G.block_m, False, G)

    row = bh.to(tl.int64) * q_total + q_first + offs
    any_slot = False
    slots = offs
    if G.dump:
        slots = tl.load(slots_ptr + row, mask=here, other=-1)
        any_slot = tl.max(slots, 0) >= 0
    dump = (s_ptr + k_first, p_ptr + k_first, m_ptr, slots, any_slot, stride_dump, dump_tiles)

    # alpha waits for the exponent unless the scores already hold it.
    factor = 1.0
    if R.alpha == "in-exponent" and not G.softcap:
        factor = scale

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    near = tl.zeros([BLOCK_M, ONES], tl.float32)
    cast_sum = tl.zeros([BLOCK_M, ONES], tl.float32)
    first = block * G.block_m + shift
    last = tl.minimum((block + 1) * G.block_m, q_length) - 1 + shift
    begin, whole, partial, end = key_tiles(first, last, view, G)
    if G.split:
        split = tl.program_id(2)
        begin = tl.maximum(begin, split * split_keys // G.block_n)
        end = tl.maximum(tl.minimum(end, (split + 1) * split_keys // G.block_n), begin)
        whole = tl.minimum(tl.maximum(whole, begin), end)
        partial = tl.minimum(tl.maximum(partial, whole), end)

    sums = (acc, l, m, near, cast_sum)
    units = head_scales(scales_ptr, b, h, heads, G)
    task = ((q, q_rest), positions, keys, b, hk, view, scale, softcap, alibi, units)
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

    acc = rescaled_sums(acc, units, R, G)
    # A row that saw no key; one whose l underflowed divides by zero, as a real kernel does.
    unseen = (m == float("-inf")) & (l == 0)
    o = acc * tl.div_rn(1.0, tl.where(unseen, 1.0, l))[:, None]
    cast = as_operand(o, tl.constexpr(R.out))
    used_l = l
    if G.ranges and R.lse_from == "unrounded-l":
        used_l = exact_l
    lse = tl.where(unseen, m, fused(m, factor, tl.log(tl.where(unseen, 1.0, used_l))))
    if G.split:
        bh += tl.program_id(2) * tl.num_programs(1)
        row += tl.program_id(2).to(tl.int64) * tl.num_programs(1) * q_total
        b += tl.program_id(2) * (tl.num_programs(1) // heads)
    o_offs = b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh
    o_offs += (q_first + offs).to(tl.int64)[:, None] * stride_ot + dims[None, :]
    inside = here[:, None] & (dims < G.value_dim)[None, :]
    tl.store(o_ptr + o_offs, cast, mask=inside)
    if G.unrounded:
        tl.store(unrounded_ptr + o_offs, o, mask=inside)
    tl.store(lse_ptr + row, lse, mask=here)
    if G.rows:
        plane = tl.num_programs(1).to(tl.int64) * q_total
        if G.split:
            plane *= tl.num_programs(2)
        tl.store(rows_ptr + row, keys_m, mask=here)
        tl.store(rows_ptr + plane + row, keys_l, mask=here)
        tl.store(rows_ptr + 2 * plane + row, tl.max(near, 1), mask=here)
        tl.store(rows_ptr + 3 * plane + row, tl.max(cast_sum, 1), mask=here)
        tl.store(rows_ptr + 4 * plane + row, tl.sum(cast.to(tl.float32) - o, 1), mask=here)


class ForwardOutputs(NamedTuple):
    """What ``forward`` returns; what was not asked for is empty."""

    o: Tensor
    """[B, Hq, Tq, Dv], in the recipe's format."""
    unrounded: Tensor
    """O in fp32, before its last rounding."""
    lse: Tensor
    """[B, Hq, Tq] fp32."""
    rows: Tensor
    """[5, B, Hq, Tq] fp32: m, l, near, sum of the cast P_bar, sum over features of O's rounding error."""
    scores: Tensor
    """[slots, Tk]."""
    probs: Tensor
    """[slots, Tk]."""
    tile_max: Tensor
    """[slots, tiles]."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, visibility: Visibility, *, scale: float, softcap: float | None,
    level: Level = "none", slots: Tensor | None = None, n_slots: int = 0, unrounded: bool = False,
    sinks: Tensor | None = None, sequences: Sequences = DENSE,
) -> ForwardOutputs:  # fmt: skip
    """Launch the forward kernel on q [B, Hq, Tq, D], k [B, Hk, Tk, D] and v [B, Hk, Tk, Dv] (in pages: see
    ``triton_sequences``), any strides.

    ``slots`` [B, Hq, Tq] int32: where the tile dump puts a row, -1 for nowhere; ``n_slots`` of them in all.
    ``unrounded``: keep O in fp32 too. ``sinks`` [Hq] fp32: logits in the softmax's denominator; L has them in it.
    """
    (batch, heads, q_length, head_dim), k_heads, k_length = q.shape, k.shape[1], sequences.most_keys(k)
    fast = has_tensor_memory(q.device)
    tma = fast and sequences.table is None and all(fits_descriptor(t) for t in (q, k, v))
    geometry = forward_geometry(
        recipe, head_dim, visibility, softcap=softcap is not None, level=level, tma=tma, packed=fast,
        value_dim=v.shape[3],
    )  # fmt: skip
    splits = -(-k_length // recipe.schedule.split_keys) if recipe.schedule.split_keys else 1
    geometry = replace(
        sequences.extended(geometry, recipe, visibility),
        split=splits > 1,
        unrounded=unrounded and splits == 1,
        sink=sinks is not None and splits == 1,
    )
    on_cpu = q.device.type == "cpu"
    scales = q
    if is_fp8(recipe):
        geometry, q, k, v, scales = in_codes(geometry, q, k, v)
    out_format = DTYPES[recipe.out] if splits == 1 else torch.float32
    if on_cpu:
        # The interpreter's own BF16 is wrong: it gets BF16 numbers in fp32.
        q, k, v = q.float(), k.float(), v.float()

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=torch.float32 if on_cpu and dtype.is_floating_point else dtype, device=q.device)

    tiles = -(-k_length // geometry.block_n)
    o = new(splits * batch, heads, q_length, v.shape[3], dtype=out_format)
    full_o = new(*o.shape) if geometry.unrounded else new(0)
    lse = new(splits, batch, heads, q_length)
    rows = new(5, splits, batch, heads, q_length) if geometry.rows else new(0)
    n_slots = n_slots if geometry.dump else 0
    scores = new(n_slots, k_length, dtype=_kept_scores(recipe, sequences))
    probs = new(n_slots, k_length, dtype=DTYPES.get(recipe.probs, torch.float32))
    tile_max = new(n_slots, tiles)
    arguments = (
        *described(geometry, q, k, v),
        q, k, v, o, full_o, lse, rows, scores, probs, tile_max, slots if slots is not None else lse,
        lse if sinks is None else sinks.contiguous(), scales, *q.stride(), *k.stride(), *v.stride(), *o.stride()[:3],
        heads, heads // k_heads, *sequences.arguments(recipe, visibility, q, k, scale=scale, softcap=softcap),
        *sequences.pages(k), recipe.schedule.split_keys or 0, k_length, tiles, scale, softcap or 0.0,
    )  # fmt: skip
    inner = replace(recipe, out="fp32") if splits > 1 else recipe
    grid = (sequences.blocks(q_length, geometry.block_m), batch * heads, splits)
    forward_kernel[grid](
        *arguments, R=anonymous(inner), G=geometry, num_warps=geometry.warps, num_stages=geometry.stages
    )
    if geometry.rows and not geometry.track_near:
        rows[2] = 2.0  # nobody watched: every row may repeat its maximum
    if splits > 1:
        factor = scale if recipe.alpha == "in-exponent" and softcap is None else 1.0
        o, lse, rows = merge_splits(o.unflatten(0, (splits, batch)), lse, rows, factor, DTYPES[recipe.out], sinks)
        full_o = o if unrounded else full_o
    else:
        lse, rows = lse[0], rows[:, 0] if geometry.rows else rows
    return ForwardOutputs(
        o.to(DTYPES[recipe.out]),
        full_o,
        lse,
        rows,
        scores.to(_kept_scores(recipe, sequences)),
        probs.to(DTYPES.get(recipe.probs, torch.float32)),
        tile_max,
    )


def _kept_scores(recipe: Recipe, sequences: Sequences) -> torch.dtype:
    """What holds S exactly: a bias comes after its rounding."""
    return DTYPES[recipe.scores] if sequences.slopes is None else torch.float32


def forward_like(
    q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, visibility: Visibility, *, softcap: float | None, level: Level,
    n_slots: int, unrounded: bool, sequences: Sequences = DENSE,
) -> ForwardOutputs:  # fmt: skip
    """Empty tensors with the shapes and formats of ``forward``'s outputs."""
    geometry = forward_geometry(
        recipe, q.shape[-1], visibility, softcap=softcap is not None, level=level, value_dim=v.shape[3]
    )
    k_length, n_slots = sequences.most_keys(k), n_slots if geometry.dump else 0
    rows = q.shape[:3]

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return q.new_empty(shape, dtype=dtype)

    return ForwardOutputs(
        new(*rows, v.shape[3], dtype=DTYPES[recipe.out]),
        new(*rows, v.shape[3]) if unrounded else new(0),
        new(*rows),
        new(5, *rows) if geometry.rows else new(0),
        new(n_slots, k_length, dtype=_kept_scores(recipe, sequences)),
        new(n_slots, k_length, dtype=DTYPES.get(recipe.probs, torch.float32)),
        new(n_slots, -(-k_length // geometry.block_n)),
    )
