"""``forward_kernel`` of ``triton_attention`` in Gluon, for q that is BF16 numbers.

Each of the four threads of a row sums its own keys and keeps its own two largest scores, which are put together at the
end: but for the row's maximum none asks another. Keys of a tile are mixed, so that what a thread holds of P_bar is what
it must hold of a left factor whose columns are in order: O_bar has the bits of Triton's.
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
    mixed,
    mma,
    query_rows,
    right_operand,
    row_products,
    shared_pairs,
    shared_tile,
    store_part,
    tile_scores,
    visible_tiles,
)

_VANISHES = triton_tiles.VANISHES


@gluon.jit
def _fetch(ks, vs, k_ptr, v_ptr, tile, k_length, width, value_width, G: gl.constexpr):
    """Begin to copy a tile of keys."""
    fetch(ks.index(tile % 2), k_ptr, tile * G.block_n, k_length, width, G.block_d, G, True)
    fetch(vs.index(tile % 2), v_ptr, tile * G.block_n, k_length, value_width, G.block_v, G)
    async_copy.commit_group()


@gluon.jit
def _by_thread(x, G: gl.constexpr):
    """[M, N] as [M, N / 8, 4, 2]: of a row each of four threads holds what has the same third place."""
    M: gl.constexpr = G.block_m
    N: gl.constexpr = G.block_n
    return x.reshape([M, N // 8, 4, 2])


@gluon.jit
def _sum_of(x):
    """The sum of what each thread holds of each row, [M, 4]."""
    return gl.sum(gl.sum(x, 3), 1)


@gluon.jit
def _max_of(x):
    """The largest, [M, 4]."""
    return gl.max(gl.max(x, 3), 1)


@gluon.jit
def _to_each(x):
    """[M, 4] as [M, 1, 4, 1]."""
    return x[:, None, :][:, :, :, None]


@gluon.jit(do_not_specialize=["first_block", "step"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, positions_ptr, owners_ptr, numbers, mask_ptr, mask_t, mask_k, out_ptr, rows_ptr, places_ptr,
    q_length, k_length, width, value_width, left, right, first_block, step, G: gl.constexpr,
):  # fmt: skip
    """As of ``triton_attention``; ``q`` is ``bf16_pairs``."""
    MMA: gl.constexpr = mma(G)
    M: gl.constexpr = G.block_m
    N: gl.constexpr = G.block_n
    OWN: gl.constexpr = gl.SliceLayout(1, MMA)
    h, at, here, row, plane, position = query_rows(positions_ptr, q_length, first_block, step, G)
    owner = gl.load(owners_ptr + h).to(gl.int64)
    k_ptr += owner * k_length * width
    v_ptr += owner * k_length * value_width
    view = (q_length, k_length, left, right)
    begin, end = visible_tiles(position, here, view, G)
    first_common, end_common = common_keys(position, here, view, G)
    q = gl.allocate_shared_memory(gl.int32, [G.block_d // 16, M, 8], shared_pairs(G))
    keep_pairs(q, q_ptr + h.to(gl.int64) * q_length * (width // 2), at, q_length, width, G.block_d, G)
    ks = gl.allocate_shared_memory(gl.float64, [2, N, G.block_d], shared_tile(G, G.block_d))
    vs = gl.allocate_shared_memory(gl.float64, [2, N, G.block_v], shared_tile(G, G.block_v))
    PARTS: gl.constexpr = G.block_v // 32
    acc = ()
    for _part in gl.static_range(PARTS):
        acc = appended(acc, gl.zeros([M, 32], gl.float64, layout=MMA))
    l = _sum_of(_by_thread(gl.zeros([M, N], gl.float64, layout=MMA), G))
    LANES: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    squares, bias = l, l
    top = l - float("inf")
    second = top
    top_key = l.to(gl.int32)
    seen = top_key
    m = gl.zeros([M], gl.float64, layout=OWN) - float("inf")
    rises = gl.zeros([M], gl.int32, layout=OWN)
    if begin < end:
        _fetch(ks, vs, k_ptr, v_ptr, begin, k_length, width, value_width, G)
    for tile in range(begin, end):
        async_copy.wait_group(0)
        barrier()
        if tile + 1 < end:
            _fetch(ks, vs, k_ptr, v_ptr, tile + 1, k_length, width, value_width, G)
        keys = tile * N + mixed(gl.arange(0, N, layout=gl.SliceLayout(0, MMA)))
        inner = (tile * N >= first_common) & (tile * N + N <= end_common)
        s, _slope, added = tile_scores(row_products(q, ks.index(tile % 2), G.block_d, G), at[:, None],
                                      position[:, None], keys[None, :], numbers, (mask_ptr, mask_t, mask_k), view, h,
                                      inner, G)  # fmt: skip
        scores = _by_thread(s, G)
        highest = _max_of(scores)
        risen = gl.maximum(m, gl.convert_layout(gl.max(highest, 1), OWN))
        base = gl.where(risen == float("-inf"), 0.0, risen)
        shrink = gl.where(risen == m, 1.0, exp_of(m - base))
        p = _by_thread(exp_of(s - base[:, None]), G)
        rises += ((risen > m) & (m > float("-inf"))).to(gl.int32)
        m = risen
        shrink_of_lanes = gl.convert_layout(shrink, LANES)[:, None]
        l = l * shrink_of_lanes + _sum_of(p)
        if G.details:
            key_of = _by_thread(keys[None, :] + gl.zeros([M, N], gl.int32, layout=MMA), G)
            first = gl.where(scores == _to_each(highest), key_of, k_length)
            first = gl.min(gl.min(first, 3), 1)
            below = _max_of(gl.where(key_of == _to_each(first), float("-inf"), scores))
            second = gl.maximum(gl.maximum(second, below), gl.minimum(top, highest))
            top_key = gl.where(highest > top, first, top_key)
            top = gl.maximum(top, highest)
            squares = squares * (shrink_of_lanes * shrink_of_lanes) + _sum_of(p * p)
            if G.mask:
                seen += _sum_of((scores > float("-inf")).to(gl.int32))
            if G.adds:
                counts = _max_of(_by_thread(gl.where(s >= risen[:, None] - _VANISHES, added, 0.0), G))
                bias = gl.maximum(gl.where(shrink_of_lanes == 0.0, 0.0, bias), counts)
        weights = gl.convert_layout(p.permute(0, 1, 3, 2).reshape([M, N]), left_operand(G), assert_trivial=True)
        v = vs.index(tile % 2)
        old = acc
        acc = ()
        for part in gl.static_range(PARTS):
            x = v.slice(32 * part, 32, dim=1).load(right_operand(G))
            acc = appended(acc, mma_v2(weights, x, old[part] * shrink[:, None]))
    for part in gl.static_range(PARTS):
        store_part(out_ptr, acc[part], row, here, value_width, 32 * part, G)
    gl.store(rows_ptr + row, m, mask=here)
    gl.store(rows_ptr + plane + row, gl.convert_layout(gl.sum(l, 1), OWN), mask=here)
    gl.store(places_ptr + 2 * plane + row, rises, mask=here)
    if G.details:
        has_top = top == gl.convert_layout(m, LANES)[:, None]
        key = gl.min(gl.where(has_top, top_key, k_length), 1)
        rest = gl.where(has_top & (top_key == key[:, None]), second, top)
        if G.mask:
            count = gl.convert_layout(gl.sum(seen, 1), OWN)
        else:
            first_seen, end_seen = gl.zeros([M], gl.int32, layout=OWN), gl.zeros([M], gl.int32, layout=OWN) + k_length
            if G.left:
                first_seen = gl.maximum(position - left, 0)
            if G.right:
                end_seen = gl.minimum(position + right + 1, k_length)
            count = gl.maximum(end_seen - first_seen, 0)
        gl.store(rows_ptr + 2 * plane + row, gl.convert_layout(gl.max(rest, 1), OWN), mask=here)
        gl.store(rows_ptr + 3 * plane + row, gl.convert_layout(gl.sum(squares, 1), OWN), mask=here)
        gl.store(rows_ptr + 4 * plane + row, gl.convert_layout(gl.max(bias, 1), OWN), mask=here)
        gl.store(places_ptr + row, gl.convert_layout(key, OWN), mask=here)
        gl.store(places_ptr + plane + row, count, mask=here)
