"""Tiles of float64 attention in Gluon: who holds what, what is copied, and products of rows with rows.

Of a program's own rows the BF16 numbers stay in shared memory, pair by pair, and are widened where they are used, by
the thread that multiplies them; tiles of other rows come in float64.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from attn_diag.reference import triton_exp, triton_tiles

exp_of = gluon.jit(triton_exp.exp_of.fn)
visible_tiles = gluon.jit(triton_tiles.visible_tiles.fn)
common_keys = gluon.jit(triton_tiles.common_keys.fn)
_all_scores = gluon.jit(triton_tiles.tile_scores.fn)
_visible = gluon.jit(triton_tiles.tile_visible.fn)

# Triton 3.7 and 3.9 gave them other names.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def _doubled(first, end):
    """first, twice that, and so on below ``end``."""
    found = []
    while first < end:
        found.append(first)
        first *= 2
    return found


@gluon.constexpr_function
def mma(G):
    """A product [M, N]."""
    return gl.NVMMADistributedLayout([2, 0], [G.warps // G.warps_n, G.warps_n], [16, 8])


@gluon.constexpr_function
def left_operand(G):
    """Its first factor."""
    return gl.DotOperandLayout(0, mma(G), 1)


@gluon.constexpr_function
def right_operand(G):
    """Its second."""
    return gl.DotOperandLayout(1, mma(G), 1)


@gluon.constexpr_function
def _pairs_of_left(G):
    """Who holds which of [M, 8] pairs: a row, and a pair of a block."""
    rows = G.warps // G.warps_n * 16
    registers = [[8, 0], [0, 4], *([x, 0] for x in _doubled(rows, G.block_m))]
    warps = [*([0, 0] for _ in _doubled(1, G.warps_n)), *([x, 0] for x in _doubled(16, rows))]
    return gl.DistributedLinearLayout(registers, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warps, [], [G.block_m, 8])


@gluon.constexpr_function
def _block_of_right(G):
    """Who holds which of [N, 16] numbers."""
    columns = 8 * G.warps_n
    registers = [[0, 4], [0, 8], *([x, 0] for x in _doubled(columns, G.block_n))]
    warps = [*([x, 0] for x in _doubled(8, columns)), *([0, 0] for _ in _doubled(1, G.warps // G.warps_n))]
    return gl.DistributedLinearLayout(registers, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warps, [], [G.block_n, 16])


@gluon.constexpr_function
def shared_pairs(G):
    """[M, 8] pairs, four of each row, then the other four: a warp reads all banks at once."""
    return gl.SharedLinearLayout([[0, 1], [0, 2], *([x, 0] for x in _doubled(1, G.block_m)), [0, 4]])


@gluon.constexpr_function
def shared_tile(G, width):
    """A tile row by row; of four rows four numbers each lie in different banks, which is what a warp reads at once."""
    rows = [[x, 0] for x in _doubled(1, G.block_n)]
    rows[0][1], rows[1][1] = 4, 8
    return gl.SharedLinearLayout([*([0, x] for x in _doubled(1, width)), *rows])


@gluon.constexpr_function
def narrow_tile():
    """A tile of BF16 numbers."""
    return gl.SwizzledSharedLayout(8, 1, 8, [1, 0])


@gluon.constexpr_function
def _copied(G, several):
    """Who copies how many numbers of a tile at once."""
    return gl.BlockedLayout([1, several], [1, 32] if several == 2 else [8, 4], [G.warps, 1], [1, 0])


@gluon.jit
def appended(several, one):
    """A tuple and one more."""
    return several + (one,)  # noqa: RUF005


@gluon.jit
def query_rows(positions_ptr, q_length, first_block, step, G: gl.constexpr):
    """A program's head; of its query rows, [M], their numbers, which of them there are, their places in [H, Tq], how
    many of these there are, and their positions."""
    M: gl.constexpr = G.block_m
    block, h = first_block + step * gl.program_id(1), gl.program_id(0)
    at = block * M + gl.arange(0, M, layout=gl.SliceLayout(1, mma(G)))
    here = at < q_length
    row = h.to(gl.int64) * q_length + at
    plane = gl.num_programs(0).to(gl.int64) * q_length
    return h, at, here, row, plane, gl.load(positions_ptr + at, mask=here, other=0)


@gluon.jit
def keep_pairs(kept, ptr, at, count, width, BLOCK: gl.constexpr, G: gl.constexpr):
    """The pairs of rows ``at`` into ``kept`` [BLOCK / 16, M, 8]."""
    LAYOUT: gl.constexpr = _pairs_of_left(G)
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, LAYOUT))
    row = gl.convert_layout(at, gl.SliceLayout(1, LAYOUT))
    for block in gl.static_range(BLOCK // 16):
        here = (row < count)[:, None] & (8 * block + column < width // 2)[None, :]
        place = row.to(gl.int64)[:, None] * (width // 2) + (8 * block + column)[None, :]
        kept.index(block).store(gl.load(ptr + place, mask=here, other=0))


@gluon.jit
def mixed(row):
    """Which of a mixed tile's rows, in their order, lies at this one's place: of each 8 at 2 l + j number 4 j + l."""
    return (row & -8) + ((row & 1) << 2) + ((row & 7) >> 1)


@gluon.jit
def fetch(tile, ptr, first, count, width, BLOCK: gl.constexpr, G: gl.constexpr, MIXED: gl.constexpr = False):
    """Begin to copy rows from ``first`` on into a tile [N, BLOCK], by 16 bytes each; ``MIXED``: see ``mixed``."""
    LAYOUT: gl.constexpr = _copied(G, 128 // tile.dtype.primitive_bitwidth)
    row = gl.arange(0, G.block_n, layout=gl.SliceLayout(1, LAYOUT))
    row = first + (mixed(row) if MIXED else row)
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    here = (row < count)[:, None] & (column < width)[None, :]
    _load(tile, ptr + row.to(gl.int64)[:, None] * width + column[None, :], mask=here)


@gluon.jit
def row_products(kept, tile, BLOCK: gl.constexpr, G: gl.constexpr):
    """Products of the program's own rows with those of a tile, [M, N]."""
    M: gl.constexpr = G.block_m
    N: gl.constexpr = G.block_n
    found = gl.zeros([M, N], gl.float64, layout=mma(G))
    for block in gl.static_range(BLOCK // 16):
        # Not pure, so that it stays in the loop: widened, the rows do not fit into registers.
        low, high = gl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $2, 16; cvt.f64.f32 $0, t; and.b32 t, $2, 0xffff0000; cvt.f64.f32 $1, t; }",
            "=d,=d,r", [kept.index(block).load(_pairs_of_left(G))], dtype=(gl.float64, gl.float64), is_pure=False,
            pack=1,
        )  # fmt: skip
        left = gl.join(low, high).reshape([M, 2, 4, 2]).permute(0, 1, 3, 2).reshape([M, 16])
        right = tile.slice(16 * block, 16, dim=1).load(_block_of_right(G)).permute(1, 0)
        left = gl.convert_layout(left, left_operand(G), assert_trivial=True)
        found = mma_v2(left, gl.convert_layout(right, right_operand(G), assert_trivial=True), found)
    return found


@gluon.jit
def tile_scores(products, t, position, key, numbers, mask, view, h, inner, G: gl.constexpr):
    """As of ``triton_tiles``; ``inner``: whether the rows of the tile see all of its keys."""
    if G.softcap or G.adds:
        s, slope, added = _all_scores(products, t, position, key, numbers, mask, view, h, G)
    else:
        s = products * gl.load(numbers)
        if not inner:
            s = gl.where(_visible(t, position, key, view, G), s, float("-inf"))
        slope, added = s, s
    return s, slope, added


@gluon.jit
def store_part(ptr, values, row, here, width, first: gl.constexpr, G: gl.constexpr):
    """[M, 32] features from ``first`` on of some rows."""
    features = first + gl.arange(0, 32, layout=gl.SliceLayout(0, mma(G)))
    gl.store(ptr + row[:, None] * width + features[None, :], values, mask=here[:, None] & (features < width)[None, :])
