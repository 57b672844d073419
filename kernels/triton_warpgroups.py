"""The forward of long plain calls of up to 128 or 256 features on Hopper, with ``triton_forward_kernel``'s bits.

There a block makes a tile's scores, its exponentials and its products one after the other. Here one warp asks for tiles
of k and v as soon as there is a place for them, each warpgroup has 64 rows of q, and its tensor cores multiply a tile's
P_bar with V while its other units make the exponentials of the next one (in Gluon):

    S of tile i and P_bar V of tile i - 1 asked for; S has come: m, P_bar and l; P_bar V has come: O_bar rescaled
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from attn_diag.kernels.backend import COMPILED
from attn_diag.kernels.geometry import Geometry, Visibility, anonymous
from attn_diag.kernels.recipe import Recipe
from attn_diag.kernels.triton_gluon import (
    SHARED,
    block_of_rows,
    store_block,
    tile_softmax,
    tiles_described,
    visible_scores,
)
from attn_diag.kernels.triton_sequences import Sequences

# A warpgroup's rows, and places for tiles of k and of v.
ROWS = gl.constexpr(64)
PLACES = gl.constexpr(2)
# Blocks of three warpgroups from which on they are faster than those of two: eight for each of an H200's cores.
_MANY = 8 * 132


@gluon.jit
def _load(desc, b, h, start, tile, arrived):
    """Ask for a tile [1, rows, features] from row ``start`` on; ``arrived`` counts its bytes."""
    tile = tile.reshape([1, 1, tile.shape[0], tile.shape[1]])
    mbarrier.expect(arrived, tile.shape[2] * tile.shape[3] * 2)
    tma.async_copy_global_to_shared(desc, [b, h, start, 0], arrived, tile)


@gluon.jit
def _load_tiles(descs, tiles, barriers, place, walk, G: gl.constexpr):
    """One warp's work: q's tiles, and those of k and v, in the order in which they are asked for."""
    q, k, v = tiles
    arrived, k_arrived, v_arrived, k_free, v_free = barriers
    b, h, hk, start = place
    tile, step, n, _, _ = walk
    for i in gl.static_range(G.block_m // ROWS):
        _load(descs[0], b, h, start + i * ROWS, q.index(i), arrived.index(i))
    for i in range(n + 1):
        if i < n:
            at = i % PLACES
            mbarrier.wait(k_free.index(at), (i // PLACES & 1) ^ 1)
            _load(descs[1], b, hk, tile * G.block_n, k.index(at), k_arrived.index(at))
        if i > 0:
            at = (i - 1) % PLACES
            mbarrier.wait(v_free.index(at), ((i - 1) // PLACES & 1) ^ 1)
            _load(descs[2], b, hk, (tile - step) * G.block_n, v.index(at), v_arrived.index(at))
        tile += step


@gluon.jit
def _ask_scores(q, k, arrived, i, LAYOUT: gl.constexpr, G: gl.constexpr):
    """q.k of the tile that is asked for as the i-th."""
    KEYS: gl.constexpr = G.block_n
    mbarrier.wait(arrived.index(i % PLACES), i // PLACES & 1)
    s = gl.zeros([ROWS, KEYS], gl.float32, LAYOUT)
    return warpgroup_mma(q, k.index(i % PLACES).permute([1, 0]), s, use_acc=False, is_async=True)


@gluon.jit
def _ask_sums(acc, p, v, arrived, i):
    """O_bar with that tile's P_bar V."""
    mbarrier.wait(arrived.index(i % PLACES), i // PLACES & 1)
    return warpgroup_mma(p, v.index(i % PLACES), acc, is_async=True)


@gluon.jit
def _attend(task, GROUP: gl.constexpr, R: gl.constexpr, G: gl.constexpr):
    """A warpgroup's work."""
    tiles, barriers, place, walk, view, numbers, out = task
    KEYS: gl.constexpr = G.block_n
    FEATURES: gl.constexpr = G.block_dv
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FEATURES, 16])
    OF_SCORES: gl.constexpr = gl.SliceLayout(1, SCORES)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    q, k, v = tiles
    arrived, k_arrived, v_arrived, k_free, v_free = barriers
    _, _, _, start = place
    tile, step, n, _, _ = walk
    factor = 1.0
    if R.alpha == "in-exponent" and not G.softcap:
        factor = numbers[1]
    rows = start + GROUP * ROWS + gl.arange(0, ROWS, OF_SCORES)
    acc = gl.zeros([ROWS, FEATURES], gl.float32, SUMS)
    l = gl.zeros([ROWS], gl.float32, OF_SCORES)
    m = gl.full([ROWS], float("-inf"), gl.float32, OF_SCORES)
    q = q.index(GROUP)
    mbarrier.wait(arrived.index(GROUP), 0)
    if n > 0:
        s = _ask_scores(q, k, k_arrived, 0, SCORES, G)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_free.index(0), count=1)
        s = visible_scores(s, rows, tile, walk, view, numbers, SCORES, R, G)
        cast, rescale, m, l = tile_softmax(s, m, l, factor, R)
        p = gl.convert_layout(cast, OPERAND)
        for i in range(1, n):
            tile += step
            s = _ask_scores(q, k, k_arrived, i, SCORES, G)
            acc = _ask_sums(acc, p, v, v_arrived, i - 1)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_free.index(i % PLACES), count=1)
            s = visible_scores(s, rows, tile, walk, view, numbers, SCORES, R, G)
            cast, rescale, m, l = tile_softmax(s, m, l, factor, R)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_free.index((i - 1) % PLACES), count=1)
            acc *= gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
            p = gl.convert_layout(cast, OPERAND)
        acc = _ask_sums(acc, p, v, v_arrived, n - 1)
        acc = warpgroup_mma_wait(0, deps=[acc])
    store_block(acc, m, l, rows, factor, place, out, 0, SUMS, R, G)


@gluon.jit
def _barriers(N: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def warpgroups_kernel(
    q_desc, k_desc, v_desc, o_ptr, lse_ptr, sinks_ptr, stride_ob, stride_oh, stride_ot, heads, group, q_length,
    k_length, shift, left, right, slopes_ptr, stride_slopes, scale, softcap, R: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """One block of query rows of one head."""
    FORMAT: gl.constexpr = q_desc.dtype
    GROUPS: gl.constexpr = G.block_m // ROWS
    KEYS: gl.constexpr = G.block_n
    FEATURES: gl.constexpr = G.block_d
    VALUES: gl.constexpr = G.block_dv
    q = gl.allocate_shared_memory(FORMAT, [GROUPS, ROWS, FEATURES], SHARED)
    k = gl.allocate_shared_memory(FORMAT, [PLACES, KEYS, FEATURES], SHARED)
    v = gl.allocate_shared_memory(FORMAT, [PLACES, KEYS, VALUES], SHARED)
    barriers = (_barriers(GROUPS, 1), _barriers(PLACES, 1), _barriers(PLACES, 1), _barriers(PLACES, GROUPS),
                _barriers(PLACES, GROUPS))  # fmt: skip
    place, walk, view, numbers = block_of_rows(
        heads, group, q_length, k_length, shift, left, right, slopes_ptr, stride_slopes, scale, softcap, G.block_m, R, G
    )
    tiles = (q, k, v)
    out = (o_ptr, lse_ptr, sinks_ptr, stride_ob, stride_oh, stride_ot, heads, q_length)
    task = (tiles, barriers, place, walk, view, numbers, out)
    descs = (q_desc, k_desc, v_desc)
    if GROUPS == 2:
        gl.warp_specialize([
            (_attend, (task, gl.constexpr(0), R, G)),
            (_attend, (task, gl.constexpr(1), R, G)),
            (_load_tiles, (descs, tiles, barriers, place, walk, G)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_attend, (task, gl.constexpr(0), R, G)),
            (_attend, (task, gl.constexpr(1), R, G)),
            (_attend, (task, gl.constexpr(2), R, G)),
            (_load_tiles, (descs, tiles, barriers, place, walk, G)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip


def warpgroups_forward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, recipe: Recipe, visibility: Visibility,
    geometry: Geometry, *, scale: float, softcap: float | None, sinks: Tensor | None, sequences: Sequences,
) -> None:  # fmt: skip
    """Write O [B, Hq, Tq, Dv] and L [B, Hq, Tq] of q [B, Hq, Tq, D], k [B, Hk, Tk, D] and v [B, Hk, Tk, Dv]."""
    batch, heads, q_length, _ = q.shape
    *seen, _, _, _, slopes, stride = sequences.arguments(recipe, visibility, q, k, scale=scale, softcap=softcap)
    many = -(-q_length // (3 * ROWS.value)) * batch * heads >= _MANY
    # Three do not have the registers for more keys or features.
    groups = 3 if many and geometry.block_n == 64 and geometry.block_dv == 128 else 2
    geometry = replace(geometry, block_m=groups * ROWS.value)
    warpgroups_kernel[(-(-q_length // geometry.block_m), batch * heads)](
        tiles_described(q, ROWS.value, geometry.block_d), tiles_described(k, geometry.block_n, geometry.block_d),
        tiles_described(v, geometry.block_n, geometry.block_dv), o, lse, lse if sinks is None else sinks.contiguous(),
        *o.stride()[:3], heads, heads // k.shape[1], *seen, slopes, stride, scale, softcap or 0.0,
        R=anonymous(recipe), G=geometry, num_warps=4, **COMPILED,
    )  # fmt: skip
