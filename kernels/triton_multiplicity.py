"""How often each row's maximum is repeated, by the four definitions: the second pass of the ``rows`` instrumentation.

The forward counts scores within reach of the maximum, as they pass, against the maximum so far: an upper bound. A row
where only the maximum itself came near has multiplicity one by every definition. The others are gathered, and their
scores computed again and compared one by one, in the forward's own arithmetic:

    exact     RN(S) = RN(m) in q's format          as_run    S = m in the recipe's own score format
    window    m - S <= 1e-3                        unit      S - m >= ln(1 - 2**-(p + 2)), p = 7 (BF16) or 10 (FP16)

For counting, S and m include alpha; ``as_run`` compares what the kernel stored.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_diag.kernels.backend import COMPILED
from attn_diag.kernels.geometry import Visibility, anonymous, forward_geometry
from attn_diag.kernels.recipe import Recipe
from attn_diag.kernels.triton_math import round_to
from attn_diag.kernels.triton_sequences import DENSE, Sequences, head_slope, sequence_of
from attn_diag.kernels.triton_tiles import key_source, key_tiles, tile_scores

WINDOW = tl.constexpr(1e-3)
# More scores than this near the maximum: more than itself. Counts are whole, held in fp32.
ALONE = tl.constexpr(1.5)
# Tiles of keys that one program counts.
_CHUNK = 8


@triton.jit
def gather_kernel(near_ptr, rows_ptr, counts_ptr, cu_ptr, q_length, BLOCK: tl.constexpr, DOCUMENTS: tl.constexpr):
    """The rows of one head (of a document) with more than one score near the maximum, in order, and their number."""
    first = tl.program_id(0).to(tl.int64) * q_length
    if DOCUMENTS:
        begin = tl.load(cu_ptr + tl.program_id(1))
        first += begin
        q_length = tl.maximum(tl.minimum(tl.load(cu_ptr + tl.program_id(1) + 1), q_length) - begin, 0)
    found = 0
    for start in range(0, q_length, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        near = tl.load(near_ptr + first + offs, mask=offs < q_length, other=0.0)
        flag = (near > ALONE).to(tl.int32)
        at = found + tl.cumsum(flag, 0) - 1
        tl.store(rows_ptr + first + at, offs, mask=flag > 0)
        found += tl.sum(flag, 0)
    tl.store(counts_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), found)


@triton.jit
def multiplicity_kernel(
    q_ptr, k_ptr, max_ptr, rows_ptr, counts_ptr, out_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    heads, group, q_length, k_length, shift, left, right, cu_q_ptr, cu_k_ptr, documents, slopes_ptr, stride_slopes,
    table_ptr, stride_table, scale, softcap, unit,
    CHUNK: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Adds what block_m gathered rows of one head find in CHUNK tiles of keys to ``out_ptr`` [4, B, Hq, Tq]."""
    BLOCK_M: tl.constexpr = G.block_m
    bh = tl.program_id(1)
    counted = bh
    q_total = q_length
    item, block, q_first, q_length, k_first, k_length = sequence_of(
        tl.program_id(0), bh // heads, q_length, k_length, cu_q_ptr, cu_k_ptr, documents, BLOCK_M, G
    )
    if G.documents:
        shift *= k_length - q_length
        if item >= documents:
            return
        counted = bh * documents + item
    gathered = tl.load(counts_ptr + counted)
    start = block * BLOCK_M
    if start < gathered:
        slot = start + tl.arange(0, BLOCK_M)
        here = slot < gathered
        rows = tl.load(rows_ptr + bh.to(tl.int64) * q_total + q_first + slot, mask=here, other=0)
        positions = rows + shift
        view = (k_length, left, right)
        first = tl.min(tl.where(here, positions, q_length + shift), 0)
        last = tl.max(tl.where(here, positions, shift), 0)
        begin, _, _, end = key_tiles(first, last, view, G)
        chunk = tl.maximum(begin, tl.program_id(2) * CHUNK)
        chunk_end = tl.minimum(end, (tl.program_id(2) + 1) * CHUNK)
        if chunk < chunk_end:
            b = bh // heads
            h = bh % heads
            hk = h // group
            dims = tl.arange(0, G.block_d)
            first_at = q_ptr + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
            first_at += (q_first + rows).to(tl.int64)[:, None] * stride_qt
            q = tl.load(
                first_at + dims[None, :] * stride_qd, mask=here[:, None] & (dims < G.head_dim)[None, :], other=0.0
            )
            q_rest = q
            if G.rest_d:
                dims = tl.arange(0, G.rest_d)
                at = first_at + (G.block_d + dims)[None, :] * stride_qd
                q_rest = tl.load(at, mask=here[:, None] & (G.block_d + dims < G.head_dim)[None, :], other=0.0)
            table = table_ptr + item.to(tl.int64) * stride_table
            keys = key_source(k_ptr, k_ptr, b, hk, k_first, table, stride_kb, stride_kh, stride_kt, stride_kd, G)
            alibi = head_slope(slopes_ptr, item, documents, h, stride_slopes, G)
            task = ((q, q_rest), positions, keys, b, hk, view, scale, softcap, alibi, (1.0, 1.0, 1.0))
            factor = 1.0
            if R.alpha == "in-exponent" and not G.softcap:
                factor = scale
            if R.subtracts_maximum and (G.alibi == "none" or R.row_max == "fp32"):
                top = tl.load(max_ptr + bh.to(tl.int64) * q_total + q_first + rows, mask=here, other=0.0)
            else:
                # What such a recipe subtracts is not the maximum.
                top = tl.full([BLOCK_M], float("-inf"), tl.float32)
                for tile in range(begin, end):
                    top = tl.maximum(top, tl.max(tile_scores(task, tile, True, R, G), 1))
            # A gathered row may see no key; it must not meet inf - inf.
            top = tl.where(top == float("-inf"), 0.0, top)
            natural_top = top * factor
            rounded_top = round_to(natural_top, tl.constexpr(R.input))
            exact = tl.zeros([BLOCK_M], tl.int32)
            as_run = tl.zeros([BLOCK_M], tl.int32)
            window = tl.zeros([BLOCK_M], tl.int32)
            ones = tl.zeros([BLOCK_M], tl.int32)
            for tile in tl.range(chunk, chunk_end, num_stages=G.stages):
                s = tile_scores(task, tile, True, R, G)
                seen = s > float("-inf")
                natural = s * factor
                same = round_to(natural, tl.constexpr(R.input)) == rounded_top[:, None]
                exact += tl.sum((seen & same).to(tl.int32), 1)
                as_run += tl.sum((seen & (s == top[:, None])).to(tl.int32), 1)
                below = natural_top[:, None] - natural
                window += tl.sum((seen & (below <= WINDOW)).to(tl.int32), 1)
                ones += tl.sum((seen & (below <= unit)).to(tl.int32), 1)
            plane = tl.num_programs(1).to(tl.int64) * q_total
            to = out_ptr + bh.to(tl.int64) * q_total + q_first + rows
            # Sums of integers: their order changes nothing.
            tl.atomic_add(to, exact, mask=here)
            tl.atomic_add(to + plane, as_run, mask=here)
            tl.atomic_add(to + 2 * plane, window, mask=here)
            tl.atomic_add(to + 3 * plane, ones, mask=here)


def multiplicities(
    q: Tensor, k: Tensor, near: Tensor, row_max: Tensor, recipe: Recipe, visibility: Visibility, *, scale: float,
    softcap: float | None, sequences: Sequences = DENSE,
) -> Tensor:  # fmt: skip
    """How many scores are the row's maximum, by each definition: int32 [4, B, Hq, Tq]; 0 for a row without keys.

    ``near``, ``row_max`` [B, Hq, Tq] fp32 from the forward. No host synchronisation.
    """
    (batch, heads, q_length, head_dim), k_heads, k_length = q.shape, k.shape[1], sequences.most_keys(k)
    # Sixty-four gathered rows at a time; the tile's width changes no score.
    geometry = forward_geometry(recipe, head_dim, visibility, softcap=softcap is not None, level="none")
    geometry = replace(geometry, block_m=64, block_n=min(geometry.block_n, 64), warps=4, stages=2)
    if geometry.block_d > 256:
        geometry = replace(geometry, warps=8, stages=1)
    geometry = sequences.extended(geometry, recipe, visibility, k)
    seen = sequences.arguments(recipe, visibility, q, k, scale=scale, softcap=softcap)
    documents = 1 if sequences.cu_q is None else len(sequences.cu_q) - 1
    if q.device.type == "cpu":
        q, k = q.float(), k.float()
    flagged: Tensor = near > ALONE.value
    out = ((row_max > -torch.inf) & ~flagged).to(torch.int32).repeat(4, 1, 1, 1)
    rows = torch.empty(batch * heads, q_length, dtype=torch.int32, device=q.device)
    counts = torch.empty(batch * heads, documents, dtype=torch.int32, device=q.device)
    gather_kernel[(batch * heads, documents)](
        near.contiguous(), rows, counts, seen[5], q_length, BLOCK=1024, DOCUMENTS=sequences.packed, **COMPILED
    )
    # A score no further below the maximum has a P_bar that rounds to 1, ties included.
    unit = -math.log1p(-(2.0 ** -(geometry.mantissa + 2)))
    chunks = -(-k_length // (geometry.block_n * _CHUNK))
    multiplicity_kernel[(sequences.blocks(q_length, geometry.block_m), batch * heads, chunks)](
        q, k, row_max.contiguous(), rows, counts, out, *q.stride(), *k.stride(), heads, heads // k_heads,
        *seen, *sequences.pages(k), scale, softcap or 0.0, unit, CHUNK=_CHUNK, R=anonymous(recipe), G=geometry,
        num_warps=geometry.warps, num_stages=geometry.stages, **COMPILED,
    )  # fmt: skip
    return out
