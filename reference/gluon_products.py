"""``rows_kernel`` and ``keys_kernel`` of ``triton_attention`` in Gluon, for q, k, v and dO that are BF16 numbers.

The same products on the same tensor cores: W X has the bits of theirs where tiles are as large. W^T Y has numbers by
query row in W instead of in Y, and a cast dS is multiplied in BF16. Of tiles the next one comes while one is used.

Only for Triton that has Gluon; the interpreter has none.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from attn_diag.reference import triton_tiles
from attn_diag.reference.gluon_tiles import (
    appended,
    barrier,
    common_keys,
    exp_of,
    fetch,
    keep_pairs,
    left_operand,
    mma,
    narrow_tile,
    query_rows,
    right_operand,
    row_products,
    shared_pairs,
    shared_tile,
    store_part,
    tile_scores,
    visible_tiles,
)

_row_numbers = gluon.jit(triton_tiles.row_numbers.fn)
_tile_weight = gluon.jit(triton_tiles.tile_weight.fn)
_seen_rows = gluon.jit(triton_tiles.seen_rows.fn)


@gluon.jit
def _fetch_keys(ks, vs, narrows, k_ptr, v_ptr, narrow_ptr, tile, k_length, width, value_width, G: gl.constexpr):
    """Begin to copy a tile of keys."""
    fetch(ks.index(tile % 2), k_ptr, tile * G.block_n, k_length, width, G.block_d, G)
    fetch(vs.index(tile % 2), v_ptr, tile * G.block_n, k_length, value_width, G.block_v, G)
    if G.casts:
        fetch(narrows.index(tile % 2), narrow_ptr, tile * G.block_n, k_length, width, G.block_d, G)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["first_block", "step"])
def rows_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, narrow_ptr, positions_ptr, owners_ptr, numbers, mask_ptr, mask_t, mask_k,
    m_ptr, delta_ptr, rows_ptr, out_ptr, sums_ptr,
    q_length, k_length, width, value_width, left, right, first_block, step, G: gl.constexpr,
):  # fmt: skip
    """As of ``triton_attention``, of one or two weights times k; ``q`` and ``do`` are ``bf16_pairs``.

    What dS cast to BF16 makes of k, whose BF16 numbers are ``narrow``, is a product of BF16, as the kernel's own is,
    whose tiles are added in fp32.
    """
    MMA: gl.constexpr = mma(G)
    M: gl.constexpr = G.block_m
    D: gl.constexpr = G.block_d
    OWN: gl.constexpr = gl.SliceLayout(1, MMA)
    h, at, here, row, plane, position = query_rows(positions_ptr, q_length, first_block, step, G)
    owner = gl.load(owners_ptr + h).to(gl.int64)
    k_ptr += owner * k_length * width
    v_ptr += owner * k_length * value_width
    m = gl.load(m_ptr + row, mask=here, other=float("inf"))
    delta = gl.load(delta_ptr + row, mask=here, other=0.0)
    alpha = gl.load(numbers)
    view = (q_length, k_length, left, right)
    begin, end = visible_tiles(position, here, view, G)
    first_common, end_common = common_keys(position, here, view, G)
    q = gl.allocate_shared_memory(gl.int32, [G.block_d // 16, G.block_m, 8], shared_pairs(G))
    do = gl.allocate_shared_memory(gl.int32, [G.block_v // 16, G.block_m, 8], shared_pairs(G))
    keep_pairs(q, q_ptr + h.to(gl.int64) * q_length * (width // 2), at, q_length, width, G.block_d, G)
    keep_pairs(do, do_ptr + h.to(gl.int64) * q_length * (value_width // 2), at, q_length, value_width, G.block_v, G)
    ks = gl.allocate_shared_memory(gl.float64, [2, G.block_n, G.block_d], shared_tile(G, G.block_d))
    vs = gl.allocate_shared_memory(gl.float64, [2, G.block_n, G.block_v], shared_tile(G, G.block_v))
    narrow_ptr += owner * k_length * width
    # Without a use the least that its layout takes.
    ns = gl.allocate_shared_memory(gl.bfloat16, [2, G.block_n, G.block_d] if G.casts else [2, 8, 64], narrow_tile())
    KIND1: gl.constexpr = gl.float32 if G.casts else gl.float64
    PARTS: gl.constexpr = D // 32
    acc, acc1 = (), ()
    for _part in gl.static_range(PARTS):
        acc = appended(acc, gl.zeros([M, 32], gl.float64, layout=MMA))
        if G.count > 1:
            acc1 = appended(acc1, gl.zeros([M, 32], KIND1, layout=MMA))
    a, b, c = _row_numbers(rows_ptr + row, plane, here)
    a1, b1, c1 = a, b, c
    if G.count > 1:
        a1, b1, c1 = _row_numbers(rows_ptr + 3 * plane + row, plane, here)
    total = gl.zeros([M], gl.float64, layout=OWN)
    squares = gl.zeros([M], gl.float64, layout=OWN)
    if begin < end:
        _fetch_keys(ks, vs, ns, k_ptr, v_ptr, narrow_ptr, begin, k_length, width, value_width, G)
    for tile in range(begin, end):
        async_copy.wait_group(0)
        barrier()
        if tile + 1 < end:
            _fetch_keys(ks, vs, ns, k_ptr, v_ptr, narrow_ptr, tile + 1, k_length, width, value_width, G)
        k = ks.index(tile % 2)
        keys = tile * G.block_n + gl.arange(0, G.block_n, layout=gl.SliceLayout(0, MMA))
        inner = (tile * G.block_n >= first_common) & (tile * G.block_n + G.block_n <= end_common)
        s, slope, _added = tile_scores(row_products(q, k, G.block_d, G), at[:, None], position[:, None], keys[None, :],
                                       numbers, (mask_ptr, mask_t, mask_k), view, h, inner, G)  # fmt: skip
        centred = row_products(do, vs.index(tile % 2), G.block_v, G) - delta[:, None]
        p = exp_of(s - m[:, None])
        if G.details:
            term = p * centred
            total += gl.sum(term, 1)
            squares += gl.sum(term * term, 1)
        w = _tile_weight(p, slope, centred, alpha, a[:, None], b[:, None], c[:, None], gl.constexpr(G.first.name),
                         gl.constexpr(G.first.cast), gl.constexpr(G.first.alpha_first), G)  # fmt: skip
        w = gl.convert_layout(w, left_operand(G))
        w1 = w
        if G.count > 1:
            # alpha after the cast comes last.
            w1 = _tile_weight(p, slope, centred, 1.0 if G.casts and not G.second.alpha_first else alpha, a1[:, None],
                              b1[:, None], c1[:, None], gl.constexpr(G.second.name), gl.constexpr(G.second.cast),
                              gl.constexpr(G.second.alpha_first), G)  # fmt: skip
            if G.casts:
                w1 = gl.convert_layout(w1.to(gl.bfloat16), gl.DotOperandLayout(0, MMA, 2))
            else:
                w1 = gl.convert_layout(w1, left_operand(G))
        old, old1 = acc, acc1
        acc, acc1 = (), ()
        for part in gl.static_range(PARTS):
            x = k.slice(32 * part, 32, dim=1).load(right_operand(G))
            acc = appended(acc, mma_v2(w, x, old[part]))
            if G.casts:
                x = ns.index(tile % 2).slice(32 * part, 32, dim=1).load(gl.DotOperandLayout(1, MMA, 2))
                acc1 = appended(acc1, old1[part] + mma_v2(w1, x, gl.zeros([M, 32], gl.float32, layout=MMA)))
            elif G.count > 1:
                acc1 = appended(acc1, mma_v2(w1, x, old1[part]))
    for part in gl.static_range(PARTS):
        store_part(out_ptr, acc[part], row, here, width, 32 * part, G)
        if G.casts and not G.second.alpha_first:
            store_part(out_ptr + plane * width, acc1[part].to(gl.float64) * alpha, row, here, width, 32 * part, G)
        elif G.count > 1:
            store_part(out_ptr + plane * width, acc1[part], row, here, width, 32 * part, G)
    if G.details:
        gl.store(sums_ptr + row, total, mask=here)
        gl.store(sums_ptr + plane + row, squares, mask=here)


@gluon.jit
def _keys_weight(p, slope, centred, alpha, ptr, plane, here, INDEX: gl.constexpr, NAME: gl.constexpr,
                 CAST: gl.constexpr, ALPHA_FIRST: gl.constexpr, G: gl.constexpr):  # fmt: skip
    """W of a tile of keys and query rows, times a number by query row."""
    ptr += 4 * INDEX * plane
    a, b, c = _row_numbers(ptr, plane, here)
    w = _tile_weight(p, slope, centred, alpha, a[None, :], b[None, :], c[None, :], NAME, CAST, ALPHA_FIRST, G)
    return gl.convert_layout(w * gl.load(ptr + 3 * plane, mask=here, other=0.0)[None, :], left_operand(G))


@gluon.jit
def _fetch_rows(qs, dos, q_ptr, do_ptr, tile, q_length, width, value_width, G: gl.constexpr):
    """Begin to copy a tile of query rows."""
    fetch(qs.index(tile % 2), q_ptr, tile * G.block_n, q_length, width, G.block_d, G)
    fetch(dos.index(tile % 2), do_ptr, tile * G.block_n, q_length, value_width, G.block_v, G)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["first_block", "step"])
def keys_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, positions_ptr, owners_ptr, numbers, mask_ptr, mask_t, mask_k,
    m_ptr, delta_ptr, rows_ptr, out_ptr, out1_ptr,
    q_length, k_length, width, value_width, left, right, shift, first_block, step, G: gl.constexpr,
):  # fmt: skip
    """As of ``triton_attention``, of one or two weights times q or dO (``G.of_dout``), whose rows are times a number.

    ``k`` and ``v`` are ``bf16_pairs``; ``rows`` [W, 4, H, Tq]: a, b, c, and that number. A program's own rows,
    ``G.block_m``, are keys.
    """
    MMA: gl.constexpr = mma(G)
    M: gl.constexpr = G.block_m
    N: gl.constexpr = G.block_n
    OTHER: gl.constexpr = gl.SliceLayout(0, MMA)
    block, h = first_block + step * gl.program_id(1), gl.program_id(0)
    owner = gl.load(owners_ptr + h).to(gl.int64)
    q_ptr += h.to(gl.int64) * q_length * width
    do_ptr += h.to(gl.int64) * q_length * value_width
    keys = block * M + gl.arange(0, M, layout=gl.SliceLayout(1, MMA))
    plane = gl.num_programs(0).to(gl.int64) * q_length
    alpha = gl.load(numbers)
    view = (q_length, k_length, left, right)
    begin, end = _seen_rows(block, (q_length, k_length, left, right, shift), gl.constexpr(M), gl.constexpr(N), G)
    k = gl.allocate_shared_memory(gl.int32, [G.block_d // 16, M, 8], shared_pairs(G))
    v = gl.allocate_shared_memory(gl.int32, [G.block_v // 16, M, 8], shared_pairs(G))
    keep_pairs(k, k_ptr + owner * k_length * (width // 2), keys, k_length, width, G.block_d, G)
    keep_pairs(v, v_ptr + owner * k_length * (value_width // 2), keys, k_length, value_width, G.block_v, G)
    qs = gl.allocate_shared_memory(gl.float64, [2, N, G.block_d], shared_tile(G, G.block_d))
    dos = gl.allocate_shared_memory(gl.float64, [2, N, G.block_v], shared_tile(G, G.block_v))
    PARTS: gl.constexpr = (G.block_v if G.of_dout[0] else G.block_d) // 32
    PARTS1: gl.constexpr = (G.block_v if G.of_dout[1] else G.block_d) // 32 if G.count > 1 else 0
    acc, acc1 = (), ()
    for _part in gl.static_range(PARTS):
        acc = appended(acc, gl.zeros([M, 32], gl.float64, layout=MMA))
    for _part in gl.static_range(PARTS1):
        acc1 = appended(acc1, gl.zeros([M, 32], gl.float64, layout=MMA))
    if begin < end:
        _fetch_rows(qs, dos, q_ptr, do_ptr, begin, q_length, width, value_width, G)
    for tile in range(begin, end):
        async_copy.wait_group(0)
        barrier()
        if tile + 1 < end:
            _fetch_rows(qs, dos, q_ptr, do_ptr, tile + 1, q_length, width, value_width, G)
        q, do = qs.index(tile % 2), dos.index(tile % 2)
        at = tile * N + gl.arange(0, N, layout=OTHER)
        here = at < q_length
        row = h.to(gl.int64) * q_length + at
        position = gl.load(positions_ptr + at, mask=here, other=0)
        # All rows see all keys where the last one sees the first, and the first one the last.
        inner = (block * M + M <= k_length) & (tile * N + N <= q_length) & (not G.scattered)
        if G.right:
            inner = inner & (block * M + M - 1 - (tile * N + shift) <= right)
        if G.left:
            inner = inner & (block * M - (tile * N + N - 1 + shift) >= -left)
        s, slope, _added = tile_scores(row_products(k, q, G.block_d, G), at[None, :], position[None, :], keys[:, None],
                                      numbers, (mask_ptr, mask_t, mask_k), view, h, inner, G)  # fmt: skip
        p = exp_of(s - gl.load(m_ptr + row, mask=here, other=float("inf"))[None, :])
        centred = p
        if G.needs_dprobs:
            delta = gl.load(delta_ptr + row, mask=here, other=0.0)
            centred = row_products(v, do, G.block_v, G) - delta[None, :]
        w = _keys_weight(p, slope, centred, alpha, rows_ptr + row, plane, here, 0, gl.constexpr(G.first.name),
                         gl.constexpr(G.first.cast), gl.constexpr(G.first.alpha_first), G)  # fmt: skip
        old, old1 = acc, acc1
        acc, acc1 = (), ()
        y = do if G.of_dout[0] else q
        for part in gl.static_range(PARTS):
            acc = appended(acc, mma_v2(w, y.slice(32 * part, 32, dim=1).load(right_operand(G)), old[part]))
        if G.count > 1:
            w = _keys_weight(p, slope, centred, alpha, rows_ptr + row, plane, here, 1, gl.constexpr(G.second.name),
                             gl.constexpr(G.second.cast), gl.constexpr(G.second.alpha_first), G)  # fmt: skip
            y = do if G.of_dout[1] else q
            for part in gl.static_range(PARTS1):
                acc1 = appended(acc1, mma_v2(w, y.slice(32 * part, 32, dim=1).load(right_operand(G)), old1[part]))
    row = h.to(gl.int64) * k_length + keys
    for part in gl.static_range(PARTS):
        store_part(out_ptr, acc[part], row, keys < k_length, value_width if G.of_dout[0] else width, 32 * part, G)
    for part in gl.static_range(PARTS1):
        store_part(out1_ptr, acc1[part], row, keys < k_length, value_width if G.of_dout[1] else width, 32 * part, G)
