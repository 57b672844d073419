"""Float64 attention in Triton: the forward, and products of what only tiles of T x T hold. Launched by ``fused``.

Everything is float64. Products are those of the float64 tensor core, sums of fused multiply-adds.
Nothing is added by atomics: the same bits every time. A launch makes the blocks ``first_block``, ``first_block + step``
and so on of query rows, or of keys.

``forward_kernel``, one tile of query rows against tiles of keys in ascending order:

    m' = max(m, rowmax S)      P_bar = exp(S - m')       l = exp(m - m') l + rowsum P_bar
    O_bar = exp(m - m') O_bar + P_bar V

Where m does not rise the factor is 1 and rounds nothing; how often it rises is counted, row by row.

``rows_kernel`` and ``keys_kernel`` recompute S and, where they need it, dP = dO V^T from the row's final m and delta:

    rows   W X      one tile of query rows against tiles of keys
    keys   W^T Y    one tile of keys against tiles of query rows

(one launch makes up to three products, of one S and one dP); ``scores_kernel`` looks at some rows again.

with a WEIGHT W of, by name (a, b, c: numbers by query row; slope: 1 - (S/c)^2 of a softcap c, else 1)

    probs            P_bar                         probs_squared     a P_bar^2 + b [P_bar > 0]
    sloped           P_bar o slope                 probs_cast        cast(a P_bar)
    dscores          dS_bar = P_bar o (dP - delta) o slope
    dscores_squared  a dS_bar^2 + b [P_bar > 0] + c (P_bar o slope)^2
    dscores_cast     cast(a (dS_bar - b P_bar o slope)), times alpha before or after the cast

A cast rounds to fp32 and then to BF16 or FP16, nearest-even, as a fused kernel does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_diag.reference.triton_exp import exp_of
from attn_diag.reference.triton_tiles import (
    VANISHES,
    load_rows,
    row_numbers,
    row_products,
    seen_rows,
    tile_scores,
    tile_weight,
    visible_tiles,
)


@triton.jit(do_not_specialize=["first_block", "step"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, positions_ptr, owners_ptr, numbers, mask_ptr, mask_t, mask_k, out_ptr, rows_ptr, places_ptr,
    q_length, k_length, width, value_width, left, right, first_block, step, G: tl.constexpr,
):  # fmt: skip
    """``out`` [H, Tq, Dv]: O_bar. ``rows`` [5, H, Tq]: m, l, the second largest score, rowsum P_bar^2, largest bias.

    The largest bias is that of a key whose P_bar is not 0, or was not when its tile was added.

    ``places`` int32 [3, H, Tq]: the first key with the largest score, how many keys are visible, how often m rose.
    """
    BLOCK_M: tl.constexpr = G.block_m
    BLOCK_X: tl.constexpr = G.block_x
    block, h, part = first_block + step * tl.program_id(1), tl.program_id(0), tl.program_id(2)
    owner = tl.load(owners_ptr + h).to(tl.int64)
    q_ptr += h.to(tl.int64) * q_length * width
    k_ptr += owner * k_length * width
    v_ptr += owner * k_length * value_width
    at = block * G.block_m + tl.arange(0, G.block_m)
    here = at < q_length
    position = tl.load(positions_ptr + at, mask=here, other=0)
    begin, end = visible_tiles(position, here, (q_length, k_length, left, right), G)
    q = load_rows(q_ptr, at, q_length, width, 0, G.block_d)
    acc = tl.zeros([BLOCK_M, BLOCK_X], tl.float64)
    l = tl.zeros([BLOCK_M], tl.float64)
    squares = tl.zeros([BLOCK_M], tl.float64)
    m = tl.full([BLOCK_M], float("-inf"), tl.float64)
    second = m
    top_key = tl.zeros([BLOCK_M], tl.int32)
    seen = tl.zeros([BLOCK_M], tl.int32)
    bias = tl.zeros([BLOCK_M], tl.float64)
    rises = tl.zeros([BLOCK_M], tl.int32)
    for tile in tl.range(begin, end, num_stages=G.stages):
        keys = tile * G.block_n + tl.arange(0, G.block_n)
        dots, _ = row_products(q, q_ptr, at, q_length, k_ptr, keys, k_length, width, G.block_d, G.parts_d)
        s, _, added = tile_scores(dots, at[:, None], position[:, None], keys[None, :], numbers,
                       (mask_ptr, mask_t, mask_k), (q_length, k_length, left, right), h, G)  # fmt: skip
        top = tl.max(s, 1)
        risen = tl.maximum(m, top)
        base = tl.where(risen == float("-inf"), 0.0, risen)
        shrink = tl.where(risen == m, 1.0, exp_of(m - base))
        p = exp_of(s - base[:, None])
        l = l * shrink + tl.sum(p, 1)
        rises += ((risen > m) & (m > float("-inf"))).to(tl.int32)
        if G.details:
            first = tl.min(tl.where(s == top[:, None], keys[None, :], k_length), 1)
            below = tl.max(tl.where(keys[None, :] == first[:, None], float("-inf"), s), 1)
            second = tl.maximum(tl.maximum(second, below), tl.minimum(m, top))
            top_key = tl.where(top > m, first, top_key)
            seen += tl.sum((s > float("-inf")).to(tl.int32), 1)
            squares = squares * (shrink * shrink) + tl.sum(p * p, 1)
            if G.adds:
                counts = tl.max(tl.where(s >= risen[:, None] - VANISHES, added, 0.0), 1)
                bias = tl.maximum(tl.where(shrink == 0.0, 0.0, bias), counts)
        v = load_rows(v_ptr, keys, k_length, value_width, part, G.block_x)
        acc = tl.dot(p, v, acc * shrink[:, None], out_dtype=tl.float64)
        m = risen
    row = h.to(tl.int64) * q_length + at
    features = part * G.block_x + tl.arange(0, G.block_x)
    inside = here[:, None] & (features < value_width)[None, :]
    tl.store(out_ptr + row[:, None] * value_width + features[None, :], acc, mask=inside)
    first_part = here & (part == 0)
    plane = tl.num_programs(0).to(tl.int64) * q_length
    tl.store(rows_ptr + row, m, mask=first_part)
    tl.store(rows_ptr + plane + row, l, mask=first_part)
    tl.store(places_ptr + 2 * plane + row, rises, mask=first_part)
    if G.details:
        tl.store(rows_ptr + 2 * plane + row, second, mask=first_part)
        tl.store(rows_ptr + 3 * plane + row, squares, mask=first_part)
        tl.store(rows_ptr + 4 * plane + row, bias, mask=first_part)
        tl.store(places_ptr + row, top_key, mask=first_part)
        tl.store(places_ptr + plane + row, seen, mask=first_part)


@triton.jit(do_not_specialize=["first_block", "step"])
def rows_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, x_ptr, other_ptr, positions_ptr, owners_ptr, numbers, mask_ptr, mask_t, mask_k,
    m_ptr, delta_ptr, rows_ptr, out_ptr, sums_ptr,
    q_length, k_length, width, value_width, x_width, left, right, first_block, step, G: tl.constexpr,
):  # fmt: skip
    """``out`` [W, H, Tq, Dx]: W X of up to three weights; ``sums`` [2, H, Tq]: of P_bar o (dP - delta), and squared.

    X is k for all of them (``G.of_keys``), or ``x`` [Hk, Tk, Dx] for the first and ``other`` for the second. ``m``
    [H, Tq] is finite in every row; ``delta`` is [H, Tq]; ``rows`` [W, 3, H, Tq]: a, b and c of each weight.
    """
    BLOCK_M: tl.constexpr = G.block_m
    BLOCK_X: tl.constexpr = G.block_x
    block, h, part = first_block + step * tl.program_id(1), tl.program_id(0), tl.program_id(2)
    owner = tl.load(owners_ptr + h).to(tl.int64)
    q_ptr += h.to(tl.int64) * q_length * width
    do_ptr += h.to(tl.int64) * q_length * value_width
    k_ptr += owner * k_length * width
    v_ptr += owner * k_length * value_width
    x_ptr += owner * k_length * x_width
    other_ptr += owner * k_length * x_width
    at = block * G.block_m + tl.arange(0, G.block_m)
    here = at < q_length
    row = h.to(tl.int64) * q_length + at
    plane = tl.num_programs(0).to(tl.int64) * q_length
    position = tl.load(positions_ptr + at, mask=here, other=0)
    m = tl.load(m_ptr + row, mask=here, other=float("inf"))
    delta = tl.load(delta_ptr + row, mask=here, other=0.0)
    alpha = tl.load(numbers)
    a, b, c = row_numbers(rows_ptr + row, plane, here)
    a1, b1, c1 = a, b, c
    a2, b2, c2 = a, b, c
    if G.count > 1:
        a1, b1, c1 = row_numbers(rows_ptr + 3 * plane + row, plane, here)
    if G.count > 2:
        a2, b2, c2 = row_numbers(rows_ptr + 6 * plane + row, plane, here)
    begin, end = visible_tiles(position, here, (q_length, k_length, left, right), G)
    q = load_rows(q_ptr, at, q_length, width, 0, G.block_d)
    do = q
    if G.needs_dprobs:
        do = load_rows(do_ptr, at, q_length, value_width, 0, G.block_v)
    acc = tl.zeros([BLOCK_M, BLOCK_X], tl.float64)
    acc1, acc2 = acc, acc
    total = tl.zeros([BLOCK_M], tl.float64)
    squares = tl.zeros([BLOCK_M], tl.float64)
    for tile in tl.range(begin, end, num_stages=G.stages):
        keys = tile * G.block_n + tl.arange(0, G.block_n)
        dots, x = row_products(q, q_ptr, at, q_length, k_ptr, keys, k_length, width, G.block_d, G.parts_d)
        s, slope, _ = tile_scores(dots, at[:, None], position[:, None], keys[None, :], numbers,
                           (mask_ptr, mask_t, mask_k), (q_length, k_length, left, right), h, G)  # fmt: skip
        p = exp_of(s - m[:, None])
        centred = p
        if G.needs_dprobs:
            centred, _ = row_products(
                do, do_ptr, at, q_length, v_ptr, keys, k_length, value_width, G.block_v, G.parts_v
            )
            centred = centred - delta[:, None]
        if G.details:
            term = p * centred
            total += tl.sum(term, 1)
            squares += tl.sum(term * term, 1)
        w = tile_weight(p, slope, centred, alpha, a[:, None], b[:, None], c[:, None],
                        tl.constexpr(G.first.name), tl.constexpr(G.first.cast),
                        tl.constexpr(G.first.alpha_first), G)  # fmt: skip
        if not G.of_keys:
            x = load_rows(x_ptr, keys, k_length, x_width, part, G.block_x)
        acc = tl.dot(w, x, acc, out_dtype=tl.float64)
        if G.count > 1:
            w = tile_weight(p, slope, centred, alpha, a1[:, None], b1[:, None], c1[:, None],
                        tl.constexpr(G.second.name), tl.constexpr(G.second.cast),
                        tl.constexpr(G.second.alpha_first), G)  # fmt: skip
            if not G.of_keys:
                x = load_rows(other_ptr, keys, k_length, x_width, part, G.block_x)
            acc1 = tl.dot(w, x, acc1, out_dtype=tl.float64)
        if G.count > 2:
            w = tile_weight(p, slope, centred, alpha, a2[:, None], b2[:, None], c2[:, None],
                        tl.constexpr(G.third.name), tl.constexpr(G.third.cast),
                        tl.constexpr(G.third.alpha_first), G)  # fmt: skip
            acc2 = tl.dot(w, x, acc2, out_dtype=tl.float64)
    features = part * G.block_x + tl.arange(0, G.block_x)
    inside = here[:, None] & (features < x_width)[None, :]
    out_ptr += row[:, None] * x_width + features[None, :]
    tl.store(out_ptr, acc, mask=inside)
    if G.count > 1:
        tl.store(out_ptr + plane * x_width, acc1, mask=inside)
    if G.count > 2:
        tl.store(out_ptr + 2 * plane * x_width, acc2, mask=inside)
    if G.details:
        tl.store(sums_ptr + row, total, mask=here & (part == 0))
        tl.store(sums_ptr + plane + row, squares, mask=here & (part == 0))


@triton.jit(do_not_specialize=["first_block", "step"])
def keys_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, y_ptr, y1_ptr, y2_ptr, positions_ptr, owners_ptr, numbers, mask_ptr, mask_t, mask_k,
    m_ptr, delta_ptr, rows_ptr, out_ptr,
    q_length, k_length, width, value_width, y_width, left, right, shift, first_block, step, G: tl.constexpr,
):  # fmt: skip
    """``out`` [W, H, Tk, Dy]: W^T Y of up to three weights, each with a Y [H, Tq, Dy] of its own.

    The rest as in ``rows_kernel``.
    """
    BLOCK_N: tl.constexpr = G.block_n
    BLOCK_X: tl.constexpr = G.block_x
    block, h, part = first_block + step * tl.program_id(1), tl.program_id(0), tl.program_id(2)
    owner = tl.load(owners_ptr + h).to(tl.int64)
    q_ptr += h.to(tl.int64) * q_length * width
    do_ptr += h.to(tl.int64) * q_length * value_width
    y_ptr += h.to(tl.int64) * q_length * y_width
    y1_ptr += h.to(tl.int64) * q_length * y_width
    y2_ptr += h.to(tl.int64) * q_length * y_width
    k_ptr += owner * k_length * width
    v_ptr += owner * k_length * value_width
    keys = block * G.block_n + tl.arange(0, G.block_n)
    alpha = tl.load(numbers)
    plane = tl.num_programs(0).to(tl.int64) * q_length
    k = load_rows(k_ptr, keys, k_length, width, 0, G.block_d)
    v = k
    if G.needs_dprobs:
        v = load_rows(v_ptr, keys, k_length, value_width, 0, G.block_v)
    begin, end = seen_rows(
        block, (q_length, k_length, left, right, shift), tl.constexpr(G.block_n), tl.constexpr(G.block_m), G
    )
    acc = tl.zeros([BLOCK_N, BLOCK_X], tl.float64)
    acc1, acc2 = acc, acc
    for tile in tl.range(begin, end, num_stages=G.stages):
        at = tile * G.block_m + tl.arange(0, G.block_m)
        here = at < q_length
        row = h.to(tl.int64) * q_length + at
        position = tl.load(positions_ptr + at, mask=here, other=0)
        dots, _ = row_products(k, k_ptr, keys, k_length, q_ptr, at, q_length, width, G.block_d, G.parts_d)
        s, slope, _ = tile_scores(dots, at[None, :], position[None, :], keys[:, None], numbers,
                           (mask_ptr, mask_t, mask_k), (q_length, k_length, left, right), h, G)  # fmt: skip
        m = tl.load(m_ptr + row, mask=here, other=float("inf"))
        p = exp_of(s - m[None, :])
        centred = p
        if G.needs_dprobs:
            centred, _ = row_products(v, v_ptr, keys, k_length, do_ptr, at, q_length, value_width, G.block_v, G.parts_v)
            centred = centred - tl.load(delta_ptr + row, mask=here, other=0.0)[None, :]
        a, b, c = row_numbers(rows_ptr + row, plane, here)
        w = tile_weight(p, slope, centred, alpha, a[None, :], b[None, :], c[None, :],
                        tl.constexpr(G.first.name), tl.constexpr(G.first.cast),
                        tl.constexpr(G.first.alpha_first), G)  # fmt: skip
        acc = tl.dot(w, load_rows(y_ptr, at, q_length, y_width, part, G.block_x), acc, out_dtype=tl.float64)
        if G.count > 1:
            a, b, c = row_numbers(rows_ptr + 3 * plane + row, plane, here)
            w = tile_weight(p, slope, centred, alpha, a[None, :], b[None, :], c[None, :],
                            tl.constexpr(G.second.name), tl.constexpr(G.second.cast),
                            tl.constexpr(G.second.alpha_first), G)  # fmt: skip
            acc1 = tl.dot(w, load_rows(y1_ptr, at, q_length, y_width, part, G.block_x), acc1, out_dtype=tl.float64)
        if G.count > 2:
            a, b, c = row_numbers(rows_ptr + 6 * plane + row, plane, here)
            w = tile_weight(p, slope, centred, alpha, a[None, :], b[None, :], c[None, :],
                            tl.constexpr(G.third.name), tl.constexpr(G.third.cast),
                            tl.constexpr(G.third.alpha_first), G)  # fmt: skip
            acc2 = tl.dot(w, load_rows(y2_ptr, at, q_length, y_width, part, G.block_x), acc2, out_dtype=tl.float64)
    features = part * G.block_x + tl.arange(0, G.block_x)
    inside = (keys < k_length)[:, None] & (features < y_width)[None, :]
    row = h.to(tl.int64) * k_length + keys
    out_ptr += row[:, None] * y_width + features[None, :]
    plane = tl.num_programs(0).to(tl.int64) * k_length * y_width
    tl.store(out_ptr, acc, mask=inside)
    if G.count > 1:
        tl.store(out_ptr + plane, acc1, mask=inside)
    if G.count > 2:
        tl.store(out_ptr + 2 * plane, acc2, mask=inside)


@triton.jit(do_not_specialize=["count", "first_block", "step"])
def scores_kernel(
    q_ptr, k_ptr, at_ptr, thresholds_ptr, positions_ptr, owners_ptr, numbers, mask_ptr, mask_t, mask_k,
    keys_ptr, scores_ptr, counts_ptr,
    q_length, k_length, width, left, right, count, kept, first_block, step, G: tl.constexpr,
):  # fmt: skip
    """Scores of some query rows above ``thresholds`` [H, N]; ``at`` int32 [H, N], Tq in place of none.

    ``counts`` int32 [H, N]: how many; the first ``kept`` of them: ``keys`` int32 [H, N, kept] and ``scores``.
    """
    BLOCK_M: tl.constexpr = G.block_m
    block, h = first_block + step * tl.program_id(1), tl.program_id(0)
    number = block * G.block_m + tl.arange(0, G.block_m)
    row = h.to(tl.int64) * count + number
    at = tl.load(at_ptr + row, mask=number < count, other=q_length)
    here = at < q_length
    position = tl.load(positions_ptr + at, mask=here, other=0)
    threshold = tl.load(thresholds_ptr + row, mask=here, other=float("inf"))
    owner = tl.load(owners_ptr + h).to(tl.int64)
    q_ptr += h.to(tl.int64) * q_length * width
    k_ptr += owner * k_length * width
    begin, end = visible_tiles(position, here, (q_length, k_length, left, right), G)
    if tl.max(here.to(tl.int32), 0) == 0:
        end = begin
    q = load_rows(q_ptr, at, q_length, width, 0, G.block_d)
    found = tl.zeros([BLOCK_M], tl.int32)
    for tile in tl.range(begin, end, num_stages=G.stages):
        keys = tile * G.block_n + tl.arange(0, G.block_n)
        dots, _ = row_products(q, q_ptr, at, q_length, k_ptr, keys, k_length, width, G.block_d, G.parts_d)
        s, _, _ = tile_scores(dots, at[:, None], position[:, None], keys[None, :], numbers,
                       (mask_ptr, mask_t, mask_k), (q_length, k_length, left, right), h, G)  # fmt: skip
        near = s > threshold[:, None]
        if tl.max(tl.max(near.to(tl.int32), 1), 0) > 0:
            ones = near.to(tl.int32)
            slot = found[:, None] + tl.cumsum(ones, 1) - 1
            place = row[:, None] * kept + slot
            fits = near & (slot < kept)
            tl.store(keys_ptr + place, tl.broadcast_to(keys[None, :], place.shape), mask=fits)
            tl.store(scores_ptr + place, s, mask=fits)
            found += tl.sum(ones, 1)
    tl.store(counts_ptr + row, found, mask=here)
