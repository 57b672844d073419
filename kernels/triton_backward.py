"""Attention backward in Triton, driven by a recipe: delta, then dQ, then dK and dV, each deterministic.

    delta = rowsum(dO o O), from the rounded O or the unrounded one, or rowsum(P o dP)
                                                                  rounded to ``delta``, dO o O to ``delta_products``
    P = exp(S - L), S in fp32 or rounded as in the forward
    dP = dO V^T                                                   rounded to ``dprobs``
    dS = P o (dP - delta), of P or of cast(P)                     rounded to ``dscores``   (softcap: times 1 - (S/c)^2)
    dQ = alpha dS K,  dK = alpha dS^T Q                           rounded to ``dq`` at the end
    dV = cast(P)^T dO                                             P rounded to ``backward_probs``

Where the recipe rounds between ranges (``gradient_accumulator``), dQ is rounded after every key range, dK and dV after
every block of query rows.

S and dP are computed twice, for dQ and for dK and dV: two more products than a kernel that adds dQ atomically, and
the same bits in every run. What differs between a GPU and the interpreter is as in ``triton_forward``; ``R``, ``G``,
``view``, ``task`` and the sources of tiles are as in ``triton_tiles``.

Source: Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_diag.kernels.backend import DTYPES, fits_descriptor, has_tensor_memory
from attn_diag.kernels.geometry import Geometry, Level, Visibility, anonymous, dkdv_geometry, dq_geometry
from attn_diag.kernels.recipe import Recipe
from attn_diag.kernels.triton_gradients import (
    end_range,
    end_sum,
    finished,
    row_statistics,
    score_gradients,
    statistics_kernel,
    tile_statistics,
)
from attn_diag.kernels.triton_instruments import dump_gradients
from attn_diag.kernels.triton_math import as_operand, dot, dot_add, round_to
from attn_diag.kernels.triton_sequences import DENSE, Sequences, first_block, head_slope, sequence_of
from attn_diag.kernels.triton_tiles import (
    backward_lse,
    backward_scores,
    described,
    key_tiles,
    load_tile,
    load_values,
    mask_scores,
    query_tiles,
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

    ``sums``: that sum, and the one within a key range, where the recipe rounds after each; else unused.
    """
    acc, part = sums
    q, positions, keys, b, hk, view, scale, softcap, alibi = task
    for tile in tl.range(first_tile, first_tile + n_tiles, num_stages=G.stages):
        start = tile * G.block_n
        cols = start + tl.arange(0, G.block_n)
        k = load_tile(keys, b, hk, start, view[0], G.block_n, G)
        v = load_values(values, b, hk, start, view[0], G.block_n, G)
        s = dot(q, tl.trans(k), tl.constexpr(R.input))
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
            else:
                part = dot_add(cast, k, part, tl.constexpr(R.dscores))
                acc, part = end_range(acc, part, (start + G.block_n) % R.schedule.key_tile == 0, scale, R)
    return acc, part


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
    do = load_values(gradients, b, h, block * BLOCK_M, q_length, BLOCK_M, G)
    slots = offs
    any_slot = False
    if G.dump:
        slots = tl.load(slots_ptr + row, mask=here, other=-1)
        any_slot = tl.max(slots, 0) >= 0
    dump = (dp_ptr + k_first, ds_ptr + k_first, slots, any_slot, stride_dump)
    alibi = head_slope(slopes_ptr, item, h, stride_slopes, G)
    task = (q, positions, keys, b, hk, view, scale, softcap, alibi)

    part = 0.0
    if WANT == "delta":
        lse, _ = row_statistics(lse_ptr, lse_ptr, row, here)
        delta = lse
        acc = tl.zeros([BLOCK_M], tl.float32)
    else:
        lse, delta = row_statistics(lse_ptr, delta_ptr, row, here)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if R.gradient_accumulator != "fp32":
            part = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first = block * BLOCK_M + shift
    last = tl.minimum((block + 1) * BLOCK_M, q_length) - 1 + shift
    begin, whole, partial, end = key_tiles(first, last, view, G)
    sums = (acc, part)
    if G.left:
        sums = _walk_keys(sums, task, do, lse, delta, values, dump, begin, whole - begin, True, WANT, R, G)
    sums = _walk_keys(sums, task, do, lse, delta, values, dump, whole, partial - whole, False, WANT, R, G)
    sums = _walk_keys(sums, task, do, lse, delta, values, dump, partial, end - partial, True, WANT, R, G)
    acc, part = sums
    if WANT == "delta":
        tl.store(out_ptr + row, round_to(acc, tl.constexpr(R.delta)), mask=here)
    else:
        dims = tl.arange(0, BLOCK_D)
        at = out_ptr + b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh
        at += (q_first + offs).to(tl.int64)[:, None] * stride_ot + dims[None, :]
        acc = finished(acc, part, scale, R)
        tl.store(at, as_operand(acc, tl.constexpr(R.dq)), mask=here[:, None] & (dims < G.head_dim)[None, :])


@triton.jit
def _walk_queries(sums, columns, rows, view, scale, softcap, first_tile, n_tiles, MASKED: tl.constexpr,
                  R: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """Adds dS^T Q to dk [N, block_d] and cast(P)^T dO to dv [N, block_dv] over tiles of query rows, all transposed.

    ``sums``: dk, dv, and the sums within a block of query rows, where the recipe rounds after each; else unused.
    """
    dk, dv, dk_part, dv_part = sums
    k, v, cols = columns
    queries, gradients, statistics, b, h, q_length, shift, alibi = rows
    for tile in tl.range(first_tile, first_tile + n_tiles, num_stages=G.stages):
        start = tile * G.block_m
        offs = start + tl.arange(0, G.block_m)
        q = load_tile(queries, b, h, start, q_length, G.block_m, G)
        lse, delta = tile_statistics(statistics, start, G.block_m)
        s = dot(k, tl.trans(q), tl.constexpr(R.input))  # [N, M]
        positions = offs + shift
        s, slope = backward_scores(
            s, positions[None, :], cols[:, None], start + shift, alibi, view[0], scale, softcap, R, G
        )
        if MASKED:
            s = tl.trans(mask_scores(tl.trans(s), positions, cols, view, G))
        p = tl.exp2(s - lse[None, :])
        do = load_values(gradients, b, h, start, q_length, G.block_m, G)
        cast = as_operand(p, tl.constexpr(R.backward_probs))
        dp = round_to(dot(v, tl.trans(do), tl.constexpr(R.input)), tl.constexpr(R.dprobs))
        ds = as_operand(score_gradients(p, dp, delta[None, :], slope, scale, R, G), tl.constexpr(R.dscores))
        if R.gradient_accumulator == "fp32":
            dv = dot_add(cast, do, dv, tl.constexpr(R.backward_probs))
            dk = dot_add(ds, q, dk, tl.constexpr(R.dscores))
        else:
            dv_part = dot_add(cast, do, dv_part, tl.constexpr(R.backward_probs))
            dk_part = dot_add(ds, q, dk_part, tl.constexpr(R.dscores))
            ends = (start + G.block_m) % R.schedule.query_block == 0
            dv, dv_part = end_sum(dv, dv_part, ends, R)
            dk, dk_part = end_range(dk, dk_part, ends, scale, R)
    return dk, dv, dk_part, dv_part


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
    v = load_values(values, b, hk, start, k_length, BLOCK_N, G)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    last = tl.minimum(start + BLOCK_N, k_length) - 1
    begin, whole, partial, end = query_tiles(start, last, q_length, shift, left, right, G)
    dk_part = 0.0
    dv_part = 0.0
    if R.gradient_accumulator != "fp32":
        dk_part = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv_part = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    columns = (k, v, cols)
    for g in range(0, group):
        h = hk * group + g
        queries = source(q_desc, q_ptr, b, h, q_first, stride_qb, stride_qh, stride_qt, stride_qd, G)
        gradients = source(do_desc, do_ptr, b, h, q_first, stride_gb, stride_gh, stride_gt, stride_gd, G)
        statistics = statistics_ptr + ((b * k_heads * group + h).to(tl.int64) * blocks + q_blocks) * (2 * G.block_m)
        alibi = head_slope(slopes_ptr, item, h, stride_slopes, G)
        rows = (queries, gradients, statistics, b, h, q_length, shift, alibi)
        sums = (dk, dv, dk_part, dv_part)
        if G.right:
            sums = _walk_queries(sums, columns, rows, view, scale, softcap, begin, whole - begin, True, R, G)
        sums = _walk_queries(sums, columns, rows, view, scale, softcap, whole, partial - whole, False, R, G)
        if G.left:
            sums = _walk_queries(sums, columns, rows, view, scale, softcap, partial, end - partial, True, R, G)
        dk, dv, dk_part, dv_part = sums
        if R.gradient_accumulator != "fp32":
            # The next head's sums start anew.
            dv, dv_part = end_sum(dv, dv_part, True, R)
            dk, dk_part = end_range(dk, dk_part, True, scale, R)
    if R.gradient_accumulator == "fp32" and R.alpha_in_backward == "after-product":
        dk = dk * scale
    here = (cols < k_length)[:, None]
    cols = (k_first + cols).to(tl.int64)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    at = b.to(tl.int64) * stride_ob + hk.to(tl.int64) * stride_oh + cols * stride_ot + dims
    tl.store(dk_ptr + at, as_operand(dk, tl.constexpr(R.dq)), mask=here & (dims < G.head_dim))
    dims = tl.arange(0, BLOCK_DV)[None, :]
    at = b.to(tl.int64) * stride_wb + hk.to(tl.int64) * stride_wh + cols * stride_wt + dims
    tl.store(dv_ptr + at, as_operand(dv, tl.constexpr(R.dq)), mask=here & (dims < G.value_dim))


class BackwardOutputs(NamedTuple):
    """What ``backward`` returns; what was not asked for is empty."""

    dq: Tensor
    """[B, Hq, Tq, D], in the recipe's format."""
    dk: Tensor
    """[B, Hk, Tk, D], likewise."""
    dv: Tensor
    """[B, Hk, Tk, Dv], likewise."""
    delta: Tensor
    """[B, Hq, Tq] fp32."""
    dprobs: Tensor
    """dP, [slots, Tk] fp32."""
    dscores: Tensor
    """dS in the recipe's format, [slots, Tk]."""


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, recipe: Recipe, visibility: Visibility, *,
    scale: float, softcap: float | None, level: Level = "none", slots: Tensor | None = None, n_slots: int = 0,
    sequences: Sequences = DENSE,
) -> BackwardOutputs:  # fmt: skip
    """Launch delta, dQ and dK/dV. ``o`` is what delta is taken from, rounded or fp32; lse [B, Hq, Tq] fp32, contiguous.

    Tensors, ``slots``, ``n_slots`` and ``sequences`` as for ``attn_diag.kernels.triton_forward.forward``.
    """
    (batch, heads, q_length, head_dim), (_, k_heads, k_length, _) = q.shape, k.shape
    device, on_cpu = q.device, q.device.type == "cpu"
    if on_cpu:
        q, k, v, do, o = (t.float() for t in (q, k, v, do, o))
    tma = has_tensor_memory(device) and all(fits_descriptor(t) for t in (q, k, v, do))
    shape: dict[str, Any] = {"softcap": softcap is not None, "tma": tma, "value_dim": v.shape[3]}
    rows = sequences.extended(dq_geometry(recipe, head_dim, visibility, level=level, **shape), recipe, visibility)
    columns = sequences.extended(dkdv_geometry(recipe, head_dim, visibility, **shape), recipe, visibility)
    seen = sequences.arguments(recipe, visibility, q, k, scale=scale, softcap=softcap)

    def new(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=torch.float32 if on_cpu else dtype, device=device)

    grad_dtype = DTYPES[recipe.dq]
    delta = new(batch, heads, q_length)
    dq = new(batch, heads, q_length, head_dim, dtype=grad_dtype)
    dk, dv = (new(batch, k_heads, k_length, t.shape[3], dtype=grad_dtype) for t in (k, v))
    n_slots = n_slots if rows.dump else 0
    dprobs, dscores = new(n_slots, k_length), new(n_slots, k_length, dtype=DTYPES[recipe.dscores])
    strides = (*q.stride(), *k.stride(), *v.stride(), *do.stride())
    bare = anonymous(recipe)

    def launch_rows(want: str, out: Tensor, out_strides: tuple[int, ...], geometry: Geometry) -> None:
        dq_kernel[(sequences.blocks(q_length, geometry.block_m), batch * heads)](
            *described(geometry, q, k, v, do), q, k, v, do, lse, delta, out, dprobs, dscores,
            slots if slots is not None else lse, *strides, *out_strides, heads, heads // k_heads, *seen, k_length,
            scale, softcap or 0.0,
            WANT=want, R=bare, G=geometry, num_warps=geometry.warps, num_stages=geometry.stages,
        )  # fmt: skip

    if recipe.delta_from == "dp":
        launch_rows("delta", delta, (0, 0, 0), replace(rows, dump=False))
    else:
        delta_kernel[(-(-q_length // rows.block_m), batch * heads)](
            o, do, delta, *o.stride(), *do.stride(), heads, q_length, R=bare, G=rows
        )
    launch_rows("dq", dq, dq.stride()[:3], rows)
    blocks = sequences.blocks(q_length, columns.block_m)
    statistics = new(batch, heads, blocks, columns.block_m, 2)
    statistics_kernel[(blocks, batch * heads)](
        lse, delta, statistics, heads, q_length, k_length, *seen[5:], scale, R=bare, G=columns
    )
    dkdv_kernel[(sequences.blocks(k_length, columns.block_n), batch * k_heads)](
        *described(columns, q, k, v, do), q, k, v, do, statistics, dk, dv, *strides,
        *dk.stride()[:3], *dv.stride()[:3], k_heads, heads // k_heads, *seen, blocks, scale, softcap or 0.0,
        R=bare, G=columns, num_warps=columns.warps, num_stages=columns.stages,
    )  # fmt: skip
    dq, dk, dv = (t.to(grad_dtype) for t in (dq, dk, dv))
    return BackwardOutputs(dq, dk, dv, delta, dprobs, dscores.to(DTYPES[recipe.dscores]))


def backward_like(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, recipe: Recipe, *, level: Level, n_slots: int
) -> BackwardOutputs:
    """Empty tensors with the shapes and formats of ``backward``'s outputs."""
    n_slots = n_slots if level in ("tiles", "full") else 0
    dq, dk, dv = (q.new_empty(t.shape, dtype=DTYPES[recipe.dq]) for t in (q, k, v))
    dprobs = lse.new_empty(n_slots, k.shape[2])
    dscores = dprobs.new_empty(dprobs.shape, dtype=DTYPES[recipe.dscores])
    return BackwardOutputs(dq, dk, dv, torch.empty_like(lse), dprobs, dscores)
