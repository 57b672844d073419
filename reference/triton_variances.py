"""Variances of what a kernel rounds, on the tensor cores of BF16: products of squares, made from fp32 scores.

And (P_bar o slope) K, through which delta's error reaches dQ.

    of O    diag(a) (P_bar^2 + b [P_bar > 0]) V^2          of dQ   diag(a) (dS_bar^2 + b [P_bar > 0]) K^2
    of dV   (a P_bar^2 + b [P_bar > 0])^T dO^2
    of dK   (a dS_bar^2 + b [P_bar > 0] + c (P_bar o slope)^2)^T Q^2

q, k, v and dO are BF16 numbers, whose products are exact; S and dP are summed in fp32. A factor X and W are sums of two
BF16 numbers, and W_2 X_2 is left out; each tile is added in fp32, nearest-even.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_diag.reference.triton_tiles import INTERPRETED, load_rows, seen_rows, tile_scores, visible_tiles

_LOG2_E = tl.constexpr(1.4426950408889634)
# Below it exp is 0 in float64.
_NOTHING = tl.constexpr(-745.13)


@triton.jit
def _bf16(x):
    """fp32 numbers rounded to BF16, nearest-even; held in fp32 by the interpreter, whose own cast truncates."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        found = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        found = x.to(tl.bfloat16)
    return found


@triton.jit
def _tile(ptr, at, count, width, BLOCK: tl.constexpr):
    """Rows of BF16 numbers; held in fp32 by the interpreter, which cannot multiply them."""
    found = load_rows(ptr, at, count, width, 0, BLOCK)
    if INTERPRETED:
        found = found.to(tl.float32)
    return found


@triton.jit
def _times(w, x_ptr, part_plane, keys, k_length, width, BLOCK: tl.constexpr):
    """The product of fp32 numbers that are not negative with X, of two parts."""
    first = _bf16(w)
    second = _bf16(w - first.to(tl.float32))
    x = _tile(x_ptr, keys, k_length, width, BLOCK)
    found = tl.dot(first, x, input_precision="ieee")
    found = tl.dot(second, x, found, input_precision="ieee")
    return tl.dot(first, _tile(x_ptr + part_plane, keys, k_length, width, BLOCK), found, input_precision="ieee")


@triton.jit
def _store(ptr, values, row, here, width, BLOCK: tl.constexpr):
    """[R, BLOCK] features of some rows."""
    features = tl.arange(0, BLOCK)
    inside = here[:, None] & (features < width)[None, :]
    tl.store(ptr + row[:, None] * width + features[None, :], values, mask=inside)


@triton.jit(do_not_specialize=["first_block", "step"])
def variances_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, v2_ptr, k2_ptr, positions_ptr, owners_ptr, numbers, mask_ptr, mask_t, mask_k,
    m_ptr, delta_ptr, rows_ptr, of_out_ptr, of_dq_ptr,
    q_length, k_length, width, value_width, left, right, v_plane, k_plane, first_block, step, G: tl.constexpr,
):  # fmt: skip
    """``of_out`` fp32 [H, Tq, Dv] and, with dO (``G.needs_dprobs``), ``of_dq`` fp32 [H, Tq, D], before a and s of
    their rows.

    ``v2`` and ``k2``: parts of V^2 and K^2, BF16 [2, Hk, Tk, D], ``v_plane`` and ``k_plane`` numbers each. ``rows``
    fp32 [3, H, Tq]: b of O, sqrt(a/s), which dS_bar is times before it is squared, and a b/s of dQ; s holds a dS_bar^2
    and a b. ``numbers``, ``m`` and ``delta`` are fp32; the rest as in ``triton_attention.rows_kernel``.
    """
    BLOCK_M: tl.constexpr = G.block_m
    BLOCK_D: tl.constexpr = G.block_d
    BLOCK_V: tl.constexpr = G.block_v
    block, h = first_block + step * tl.program_id(1), tl.program_id(0)
    owner = tl.load(owners_ptr + h).to(tl.int64)
    q_ptr += h.to(tl.int64) * q_length * width
    do_ptr += h.to(tl.int64) * q_length * value_width
    k_ptr += owner * k_length * width
    k2_ptr += owner * k_length * width
    v_ptr += owner * k_length * value_width
    v2_ptr += owner * k_length * value_width
    at = block * G.block_m + tl.arange(0, G.block_m)
    here = at < q_length
    row = h.to(tl.int64) * q_length + at
    plane = tl.num_programs(0).to(tl.int64) * q_length
    position = tl.load(positions_ptr + at, mask=here, other=0)
    m = tl.load(m_ptr + row, mask=here, other=float("inf"))
    least_out = tl.load(rows_ptr + row, mask=here, other=0.0)
    begin, end = visible_tiles(position, here, (q_length, k_length, left, right), G)
    q = _tile(q_ptr, at, q_length, width, G.block_d)
    of_out = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    do, delta, shrink, least_dq, of_dq = q, m, m, m, of_out
    if G.needs_dprobs:
        do = _tile(do_ptr, at, q_length, value_width, G.block_v)
        delta = tl.load(delta_ptr + row, mask=here, other=0.0)
        shrink = tl.load(rows_ptr + plane + row, mask=here, other=0.0)
        least_dq = tl.load(rows_ptr + 2 * plane + row, mask=here, other=0.0)
        of_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for tile in tl.range(begin, end, num_stages=G.stages):
        keys = tile * G.block_n + tl.arange(0, G.block_n)
        dots = tl.dot(q, tl.trans(_tile(k_ptr, keys, k_length, width, G.block_d)), input_precision="ieee")
        s, slope, _ = tile_scores(dots, at[:, None], position[:, None], keys[None, :], numbers,
                           (mask_ptr, mask_t, mask_k), (q_length, k_length, left, right), h, G)  # fmt: skip
        p = tl.exp(s - m[:, None])
        w = p * p + tl.where(p > 0, least_out[:, None], 0.0)
        of_out += _times(w, v2_ptr, v_plane, keys, k_length, value_width, G.block_v)
        if G.needs_dprobs:
            dots = tl.dot(do, tl.trans(_tile(v_ptr, keys, k_length, value_width, G.block_v)), input_precision="ieee")
            w = p * ((dots - delta[:, None]) * shrink[:, None])
            if G.softcap:
                w = w * slope
            w = w * w + tl.where(p > 0, least_dq[:, None], 0.0)
            of_dq += _times(w, k2_ptr, k_plane, keys, k_length, width, G.block_d)
    _store(of_out_ptr, of_out, row, here, value_width, tl.constexpr(G.block_v))
    if G.needs_dprobs:
        _store(of_dq_ptr, of_dq, row, here, width, tl.constexpr(G.block_d))


@triton.jit(do_not_specialize=["first_block", "step"])
def key_variances_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, q2_ptr, do2_ptr, positions_ptr, owners_ptr, numbers, mask_ptr, mask_t, mask_k,
    m_ptr, delta_ptr, rows_ptr, floor_ptr, of_dk_ptr, of_dv_ptr, powers_ptr,
    q_length, k_length, width, value_width, left, right, shift, q_plane, do_plane, first_block, step, G: tl.constexpr,
):  # fmt: skip
    """``of_dk`` fp32 [H, Tk, D] and ``of_dv`` [H, Tk, Dv], before 4^f of their keys: ``powers`` fp32 [H, Tk].

    With e of a query row and f of a key, integers, P~ = 2^(e - f) P_bar and

        W of dK   (P~ o slope)^2 (((dP - delta) r)^2 + c) + b 4^(floor - f) [P_bar > 0]
        W of dV   P~^2 + b' 4^(floor - f) [P_bar > 0]

    ``rows``: fp32 [5, H, Tq], e, r, c, b and b'; ``floor`` fp32 [H]. f is the least that holds e + log2(P_bar) of all
    tiles so far, and the floor at least, so that no P~ is above 1: it rises as a row's maximum does in the forward.
    Terms from 2^-100 of a key's largest on are held, however small P_bar and a are, and dO as long as dP is a normal
    number of fp32. ``q2`` and ``do2``: parts of Y, BF16 [2, H, Tq, D], ``q_plane`` and ``do_plane`` numbers each. The
    rest as in ``variances_kernel``.
    """
    BLOCK_N: tl.constexpr = G.block_n
    BLOCK_D: tl.constexpr = G.block_d
    BLOCK_V: tl.constexpr = G.block_v
    block, h = first_block + step * tl.program_id(1), tl.program_id(0)
    owner = tl.load(owners_ptr + h).to(tl.int64)
    q_ptr += h.to(tl.int64) * q_length * width
    q2_ptr += h.to(tl.int64) * q_length * width
    do_ptr += h.to(tl.int64) * q_length * value_width
    do2_ptr += h.to(tl.int64) * q_length * value_width
    keys = block * G.block_n + tl.arange(0, G.block_n)
    plane = tl.num_programs(0).to(tl.int64) * q_length
    k = _tile(k_ptr + owner * k_length * width, keys, k_length, width, G.block_d)
    v = _tile(v_ptr + owner * k_length * value_width, keys, k_length, value_width, G.block_v)
    floor = tl.load(floor_ptr + h)
    power = tl.zeros([BLOCK_N], tl.float32) + floor
    of_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    of_dv = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    begin, end = seen_rows(
        block, (q_length, k_length, left, right, shift), tl.constexpr(G.block_n), tl.constexpr(G.block_m), G
    )
    for tile in tl.range(begin, end, num_stages=G.stages):
        at = tile * G.block_m + tl.arange(0, G.block_m)
        here = at < q_length
        row = h.to(tl.int64) * q_length + at
        position = tl.load(positions_ptr + at, mask=here, other=0)
        dots = tl.dot(k, tl.trans(_tile(q_ptr, at, q_length, width, G.block_d)), input_precision="ieee")
        s, slope, _ = tile_scores(dots, at[None, :], position[None, :], keys[:, None], numbers,
                           (mask_ptr, mask_t, mask_k), (q_length, k_length, left, right), h, G)  # fmt: skip
        s = s - tl.load(m_ptr + row, mask=here, other=float("inf"))[None, :]
        size = s * _LOG2_E + tl.load(rows_ptr + row, mask=here, other=0.0)[None, :]
        risen = tl.maximum(power, tl.ceil(tl.max(size, 1)))
        shrink, power = tl.exp2(2.0 * (power - risen)), risen
        p = tl.exp2(size - power[:, None])
        least = tl.where(s > _NOTHING, tl.exp2(2.0 * (floor - power))[:, None], 0.0)
        probs = p * p + least * tl.load(rows_ptr + 4 * plane + row, mask=here, other=0.0)[None, :]
        dots = tl.dot(v, tl.trans(_tile(do_ptr, at, q_length, value_width, G.block_v)), input_precision="ieee")
        dscores = dots - tl.load(delta_ptr + row, mask=here, other=0.0)[None, :]
        dscores = dscores * tl.load(rows_ptr + plane + row, mask=here, other=0.0)[None, :]
        dscores = dscores * dscores + tl.load(rows_ptr + 2 * plane + row, mask=here, other=0.0)[None, :]
        if G.softcap:
            p = p * slope
        dscores = p * p * dscores + least * tl.load(rows_ptr + 3 * plane + row, mask=here, other=0.0)[None, :]
        of_dv = of_dv * shrink[:, None] + _times(probs, do2_ptr, do_plane, at, q_length, value_width, G.block_v)
        of_dk = of_dk * shrink[:, None] + _times(dscores, q2_ptr, q_plane, at, q_length, width, G.block_d)
    row = h.to(tl.int64) * k_length + keys
    tl.store(powers_ptr + row, power, mask=keys < k_length)
    _store(of_dk_ptr, of_dk, row, keys < k_length, width, tl.constexpr(G.block_d))
    _store(of_dv_ptr, of_dv, row, keys < k_length, value_width, tl.constexpr(G.block_v))


@triton.jit(do_not_specialize=["first_block", "step"])
def through_kernel(
    q_ptr, k_ptr, positions_ptr, owners_ptr, numbers, mask_ptr, mask_t, mask_k, m_ptr, out_ptr,
    q_length, k_length, width, left, right, first_block, step, G: tl.constexpr,
):  # fmt: skip
    """``out`` fp32 [H, Tq, D]: (P_bar o slope) K; the rest as in ``variances_kernel``."""
    BLOCK_M: tl.constexpr = G.block_m
    BLOCK_D: tl.constexpr = G.block_d
    block, h = first_block + step * tl.program_id(1), tl.program_id(0)
    q_ptr += h.to(tl.int64) * q_length * width
    k_ptr += tl.load(owners_ptr + h).to(tl.int64) * k_length * width
    at = block * G.block_m + tl.arange(0, G.block_m)
    here = at < q_length
    row = h.to(tl.int64) * q_length + at
    position = tl.load(positions_ptr + at, mask=here, other=0)
    m = tl.load(m_ptr + row, mask=here, other=float("inf"))
    begin, end = visible_tiles(position, here, (q_length, k_length, left, right), G)
    q = _tile(q_ptr, at, q_length, width, G.block_d)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for tile in tl.range(begin, end, num_stages=G.stages):
        keys = tile * G.block_n + tl.arange(0, G.block_n)
        k = _tile(k_ptr, keys, k_length, width, G.block_d)
        s, slope, _ = tile_scores(tl.dot(q, tl.trans(k), input_precision="ieee"), at[:, None], position[:, None],
                           keys[None, :], numbers, (mask_ptr, mask_t, mask_k), (q_length, k_length, left, right), h,
                           G)  # fmt: skip
        w = tl.exp(s - m[:, None])
        if G.softcap:
            w = w * slope
        found = tl.zeros_like(out)
        for _part in tl.static_range(3):  # which hold all bits of fp32
            some = _bf16(w)
            found = tl.dot(some, k, found, input_precision="ieee")
            w = w - some.to(tl.float32)
        out += found
    _store(out_ptr, out, row, here, width, tl.constexpr(G.block_d))
