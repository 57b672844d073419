"""What the kernels note in passing: row statistics and tiles. Compiled in only where asked for."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_diag.kernels.triton_math import as_operand, dot_add

# Columns of ones in the products that sum over a row. Fewer than eight make Triton (3.6 to 3.9) use mma.sync, whose
# ones stay in registers; a wgmma keeps them in shared memory, which costs a resident block (1.1x of the time -> 1.4x).
ONES = tl.constexpr(4)


@triton.jit
def near_bound(m, factor, G: tl.constexpr):
    """A P_bar below which a score cannot repeat the maximum by any definition, [M].

    Rounding S to q's format merges scores at most an ulp apart, 2**-mantissa |S|; "unit" reaches 0.00196 below the
    maximum, "window" 1e-3; exp(-x) >= 1 - x. One BF16 step lower, as P_bar may have been rounded down.
    """
    step = 2.0**-8
    return tl.minimum(1.0 - 2.1e-3 - step, tl.abs(m) * (-factor * 2.0**-G.mantissa) + (1.0 - step))


@triton.jit
def reaches(p, bound, R: tl.constexpr, G: tl.constexpr):
    """1 where the cast P_bar [M, N] reaches ``bound`` [M], else 0, as an operand."""
    if G.packed and R.probs == "bf16":
        # Two comparisons an instruction.
        hits = tl.inline_asm_elementwise("set.ge.bf16x2.bf16x2 $0, $1, $2;", "=r,r,r",
                                         [p, bound.to(tl.bfloat16)[:, None]], dtype=tl.bfloat16, is_pure=True,
                                         pack=2)  # fmt: skip
    elif G.packed:
        hits = tl.inline_asm_elementwise("set.ge.f16x2.f16x2 $0, $1, $2;", "=r,r,r",
                                         [p, bound.to(tl.float16)[:, None]], dtype=tl.float16, is_pure=True,
                                         pack=2)  # fmt: skip
    else:
        hits = as_operand(tl.where(p.to(tl.float32) >= bound[:, None], 1.0, 0.0), tl.constexpr(R.probs))
    return hits


@triton.jit
def watch_rows(watched, cast, m, rescale, factor, R: tl.constexpr, G: tl.constexpr):
    """Per row, how many scores lie within reach of the maximum (an upper bound), and the sum of the cast P_bar."""
    near, cast_sum = watched
    BLOCK_N: tl.constexpr = G.block_n
    # Sums over a row as products with ones: on a GPU they cost a fraction of the additions.
    ones = as_operand(tl.full([BLOCK_N, ONES], 1.0, tl.float32), tl.constexpr(R.probs))
    if G.track_near:
        bound = near_bound(m, factor, G)
        # Scores of earlier tiles lie at or below the old maximum: they count while that is within reach.
        kept = tl.where((rescale >= bound)[:, None], near, 0.0)
        near = dot_add(reaches(cast, bound, R, G), ones, kept, tl.constexpr(R.probs))
    # O_bar for V = 1 everywhere.
    return near, dot_add(cast, ones, cast_sum * rescale[:, None], tl.constexpr(R.probs))


@triton.jit
def dump_tile(dump, s, cast, m, tile, k_length, G: tl.constexpr):
    """Store S, the cast P_bar and the maximum it was taken from, for the ``chosen`` rows, each in its slot."""
    s_ptr, p_ptr, m_ptr, slots, chosen, any_chosen, stride, tiles = dump
    if any_chosen:
        cols = tile * G.block_n + tl.arange(0, G.block_n)
        row = slots.to(tl.int64)
        where = row[:, None] * stride + cols[None, :]
        here = chosen[:, None] & (cols < k_length)[None, :]
        # Nobody reads them soon: K and V stay in the cache.
        tl.store(s_ptr + where, s, mask=here, eviction_policy="evict_first")
        tl.store(p_ptr + where, cast, mask=here, eviction_policy="evict_first")
        tl.store(m_ptr + row * tiles + tile, m, mask=chosen)


@triton.jit
def dump_gradients(dump, dp, ds, start, k_length, G: tl.constexpr):
    """Store dP and the cast dS of the rows that have a slot (>= 0), for the tile of keys from ``start`` on."""
    dp_ptr, ds_ptr, slots, any_slot, stride = dump
    if any_slot:
        cols = start + tl.arange(0, G.block_n)
        where = slots.to(tl.int64)[:, None] * stride + cols[None, :]
        here = (slots >= 0)[:, None] & (cols < k_length)[None, :]
        tl.store(dp_ptr + where, dp, mask=here)
        tl.store(ds_ptr + where, ds, mask=here)
