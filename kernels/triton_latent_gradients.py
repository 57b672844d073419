"""dQ, dK and dV over a latent that k and v share, on Hopper: of ``triton_backward`` what ``triton_latent`` is of the
forward, with the same bits.

A block has 64 query rows (of dQ) or keys (dK, dV) and goes through tiles of 32 of the others. A warpgroup makes
cast(dS), or for dV cast(P), of every second tile, hands it to the other one, and sums half of the features over all:

    S = X U^T     dP = Y W^T     dQ or dK = sum of dS U     dV = sum of P W

            X    Y           U    W
    dQ      q    dO          k    k's first 512 features
    dK, dV  k    k's first   q    dO                        S, P, dP and dS are transposed
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from attn_diag.kernels.backend import COMPILED
from attn_diag.kernels.geometry import Geometry
from attn_diag.kernels.recipe import Recipe
from attn_diag.kernels.triton_gluon import SHARED
from attn_diag.kernels.triton_gradients import row_statistics, score_gradients
from attn_diag.kernels.triton_latent import PART, REST, ROWS, WIDE, barriers_of_places, pieces_of
from attn_diag.kernels.triton_math import as_operand, round_to
from attn_diag.kernels.triton_sequences import head_slope
from attn_diag.kernels.triton_tiles import backward_lse, backward_scores, key_tiles, query_tiles

# Rows of a tile, and a warpgroup's share of the last features; its S, sums of both pieces, and dS as an operand.
TILE, REST_PART = gl.constexpr(32), gl.constexpr(32)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))
REST_OPERAND = gl.constexpr(gl.DotOperandLayout(0, SCORES.value, 2))


@gluon.jit
def _load(desc, b, h, start, tile, arrived):
    """Ask for a tile, or a piece of one."""
    rows: gl.constexpr = tile.shape[0]
    width: gl.constexpr = tile.shape[1]
    tma.async_copy_global_to_shared(desc, [b, h, start, 0], arrived, tile.reshape([1, 1, rows, width]))


@gluon.jit
def _load_tiles(descs, tiles, barriers, place, walk, WANT: gl.constexpr):
    """One warp's work: the block's own rows, and tiles as the two places for them become free."""
    x_desc, x_rest_desc, y_desc, u_desc, u_rest_desc, w_desc = descs
    x, x_rest, y, u, u_rest, w = tiles
    arrived, free, _ = barriers
    b, h, start = place
    first_head, begin, n, total, _, _ = walk
    mbarrier.expect(arrived.index(2), ROWS * ((2 * WIDE if WANT == "dq" else WIDE) + REST) * 2)
    _load(x_desc, b, h, start, x.index(0), arrived.index(2))
    _load(x_rest_desc, b, h, start, x_rest.index(0), arrived.index(2))
    if WANT == "dq":
        _load(y_desc, b, h, start, y.index(0), arrived.index(2))
    for i in range(total):
        has_come = arrived.index(i % 2)
        head = first_head + i // n
        first = (begin + i % n) * TILE
        mbarrier.wait(free.index(i % 2), (i // 2 & 1) ^ 1)
        mbarrier.expect(has_come, TILE * ((WIDE if WANT == "dq" else 2 * WIDE) + REST) * 2)
        _load(u_desc, b, head, first, u.index(i % 2), has_come)
        _load(u_rest_desc, b, head, first, u_rest.index(i % 2), has_come)
        if WANT != "dq":
            _load(w_desc, b, head, first, w.index(i % 2), has_come)


@gluon.jit
def _probabilities(products, lse, sight, alibi, scale, softcap, MASKED: gl.constexpr, R: gl.constexpr, G: gl.constexpr):
    """(P, softcap's slope). The other kernels' bits need a fused S - L where there is no mask, and none where there is.

    So the two must have no product in common: the compiler would make it before it asks which of them is wanted.
    """
    positions, cols, origin, k_length, left, right = sight
    visible = cols < k_length
    if MASKED:
        if G.right:
            visible = visible & (cols <= positions + right)
        if G.left:
            visible = visible & (cols >= positions - left)
        products = gl.where(visible, products, 0.0)
    s, slope = backward_scores(products, positions, cols, origin, alibi, k_length, scale, softcap, R, G)
    if MASKED:
        s = gl.where(visible, s, float("-inf"))
    return gl.exp2(s - lse), slope


@gluon.jit
def _own(task, statistics, i, PLACE: gl.constexpr, WANT: gl.constexpr, R: gl.constexpr, G: gl.constexpr):
    """cast(dS) or cast(P) of this warpgroup's tile, the ``i``-th, which lies in PLACE."""
    tiles, barriers, _, place, walk, view, numbers, pointers = task
    x, x_rest, y, u, u_rest, w = tiles
    b, h, _ = place
    first_head, begin, n, _, whole, partial = walk
    k_length, shift, left, right = view
    scale, softcap, heads, blocks, slopes_stride = numbers
    statistics_ptr, slopes_ptr = pointers
    rows, lse, delta = statistics
    tile = begin + i % n
    others = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    if WANT == "dq":
        alibi = head_slope(slopes_ptr, b, 0, h, slopes_stride, G)
        positions = (rows + shift)[:, None]
        cols = others[None, :]
        origin = tile * TILE
        lse = backward_lse(lse, rows + shift, origin, alibi, scale, R, G)[:, None]
        delta = delta[:, None]
    else:
        head = first_head + i // n
        alibi = head_slope(slopes_ptr, b, 0, head, slopes_stride, G)
        positions = (others + shift)[None, :]
        cols = rows[:, None]
        origin = tile * TILE + shift
        at = statistics_ptr + 2 * ((b * heads + head).to(gl.int64) * blocks * TILE + others)
        lse = gl.load(at)[None, :]
        delta = gl.load(at + 1)[None, :]
    # 0, which the compiler cannot know: else it keeps the addresses of all products, and runs out of registers.
    zero = i >> 30
    here = PLACE + zero
    mbarrier.wait(barriers[0].index(PLACE), i // 2 & 1)
    s = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    s = warpgroup_mma(x.index(zero), u.index(here).permute([1, 0]), s, use_acc=False, is_async=True)
    s = warpgroup_mma(x_rest.index(zero), u_rest.index(here).permute([1, 0]), s, is_async=True)
    if WANT != "dv":
        dp = gl.zeros([ROWS, TILE], gl.float32, SCORES)
        dp = warpgroup_mma(y.index(zero), w.index(here).permute([1, 0]), dp, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
    else:
        s = warpgroup_mma_wait(0, deps=[s])
    sight = (positions, cols, origin, k_length, left, right)
    if (tile < whole) | (tile >= partial):
        p, slope = _probabilities(s, lse, sight, alibi, scale, softcap, True, R, G)
    else:
        p, slope = _probabilities(s, lse, sight, alibi, scale, softcap, False, R, G)
    if WANT == "dv":
        cast = as_operand(p, gl.constexpr(R.backward_probs))
    else:
        dp = round_to(warpgroup_mma_wait(0, deps=[dp]), gl.constexpr(R.dprobs))
        cast = as_operand(score_gradients(p, dp, delta, slope, scale, R, G), gl.constexpr(R.dscores))
    return cast


@gluon.jit
def _hand_over(cast, handed, ready):
    """This warpgroup's tile, as an operand, which the other one gets too."""
    handed.store(cast)
    mbarrier.arrive(ready, count=1)
    return gl.convert_layout(cast, OPERAND)


@gluon.jit
def _take(handed, arrived, ready, phase):
    """The other warpgroup's tile. It is in registers before this one hands over anything."""
    mbarrier.wait(arrived, phase)
    mbarrier.wait(ready, phase)
    return handed.load(OPERAND)


@gluon.jit
def _add(acc, rest, cast, tiles, free, PLACE: gl.constexpr, HALF: gl.constexpr, WANT: gl.constexpr):
    """The sums of both pieces after one more tile."""
    _, _, _, u, u_rest, w = tiles
    if WANT == "dv":
        acc = warpgroup_mma(cast, w.index(PLACE).slice(HALF * PART, PART, 1), acc, is_async=True)
    else:
        acc = warpgroup_mma(cast, u.index(PLACE).slice(HALF * PART, PART, 1), acc, is_async=True)
        cast = gl.convert_layout(cast, REST_OPERAND)
        rest = warpgroup_mma(cast, u_rest.index(PLACE).slice(HALF * REST_PART, REST_PART, 1), rest, is_async=True)
        rest = warpgroup_mma_wait(0, deps=[rest])
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index(PLACE), count=1)
    return acc, rest


@gluon.jit
def _store(sums, ptr, stride, start, first, length, R: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows of a gradient, of its features from ``first`` on."""
    rows = start + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dims = first + gl.arange(0, sums.shape[1], gl.SliceLayout(0, LAYOUT))
    at = ptr + (rows.to(gl.int64)[:, None] * stride + dims[None, :])
    gl.store(at, as_operand(sums, gl.constexpr(R.dq)), mask=(rows < length)[:, None])


@gluon.jit
def _sum(task, out, HALF: gl.constexpr, WANT: gl.constexpr, R: gl.constexpr, G: gl.constexpr):
    """A warpgroup's work."""
    tiles, barriers, handed, place, walk, _, numbers, _ = task
    arrived, free, ready = barriers
    b, h, start = place
    _, _, _, total, _, _ = walk
    out_ptr, stride_b, stride_h, stride_t, length, lse_ptr, delta_ptr = out
    rows = start + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    lse = 0.0
    delta = 0.0
    if WANT == "dq":
        row = (b * numbers[2] + h).to(gl.int64) * length + rows
        lse, delta = row_statistics(lse_ptr, delta_ptr, row, rows < length)
    statistics = (rows, lse, delta)
    acc = gl.zeros([ROWS, PART], gl.float32, SUMS)
    rest = gl.zeros([ROWS, REST_PART], gl.float32, SCORES)
    mbarrier.wait(arrived.index(2), 0)
    for pair in range(total // 2):
        mine = _own(task, statistics, 2 * pair + HALF, HALF, WANT, R, G)
        if HALF == 0:
            mine = _hand_over(mine, handed, ready.index(0))
            acc, rest = _add(acc, rest, mine, tiles, free, 0, HALF, WANT)
            second = _take(handed, arrived.index(1), ready.index(1), pair & 1)
        else:
            first = _take(handed, arrived.index(0), ready.index(0), pair & 1)
            second = _hand_over(mine, handed, ready.index(1))
            acc, rest = _add(acc, rest, first, tiles, free, 0, HALF, WANT)
        acc, rest = _add(acc, rest, second, tiles, free, 1, HALF, WANT)
    if total % 2 == 1:
        if HALF == 0:
            mine = _own(task, statistics, total - 1, 0, WANT, R, G)
            mine = _hand_over(mine, handed, ready.index(0))
        else:
            mine = _take(handed, arrived.index(0), ready.index(0), total // 2 & 1)
        acc, rest = _add(acc, rest, mine, tiles, free, 0, HALF, WANT)
    if WANT != "dv" and R.alpha_in_backward == "after-product":
        acc *= numbers[0]
        rest *= numbers[0]
    ptr = out_ptr + b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h
    _store(acc, ptr, stride_t, start, HALF * PART, length, R, SUMS)
    if WANT != "dv":
        _store(rest, ptr, stride_t, start, WIDE + HALF * REST_PART, length, R, SCORES)


@gluon.jit
def gradient_kernel(
    x_desc, x_rest_desc, y_desc, u_desc, u_rest_desc, w_desc, lse_ptr, delta_ptr, statistics_ptr, out_ptr, stride_b,
    stride_h, stride_t, heads, group, q_length, k_length, shift, left, right, slopes_ptr, stride_slopes, blocks, scale,
    softcap, WANT: gl.constexpr, R: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """``WANT`` ("dq", "dk", "dv") of one block."""
    FORMAT: gl.constexpr = x_desc.dtype
    x = gl.allocate_shared_memory(FORMAT, [1, ROWS, WIDE], SHARED)
    x_rest = gl.allocate_shared_memory(FORMAT, [1, ROWS, REST], SHARED)
    u = gl.allocate_shared_memory(FORMAT, [2, TILE, WIDE], SHARED)
    u_rest = gl.allocate_shared_memory(FORMAT, [2, TILE, REST], SHARED)
    handed = gl.allocate_shared_memory(FORMAT, [ROWS, TILE], gl.NVMMASharedLayout(64, 16))
    arrived, free, ready = barriers_of_places()
    y = x
    w = u
    if WANT == "dq":
        y = gl.allocate_shared_memory(FORMAT, [1, ROWS, WIDE], SHARED)
        # The last query blocks see the most keys under causality: they go first.
        start = (gl.num_programs(0) - 1 - gl.program_id(0)) * ROWS
        b = gl.program_id(1) // heads
        h = gl.program_id(1) % heads
        length = q_length
        last = gl.minimum(start + ROWS, length) - 1
        begin, whole, partial, end = key_tiles(start + shift, last + shift, (k_length, left, right), G)
        first_head = h // group
        total = end - begin
    else:
        w = gl.allocate_shared_memory(FORMAT, [2, TILE, WIDE], SHARED)
        start = gl.program_id(0) * ROWS
        b = gl.program_id(1) // (heads // group)
        h = gl.program_id(1) % (heads // group)
        length = k_length
        last = gl.minimum(start + ROWS, length) - 1
        begin, whole, partial, end = query_tiles(start, last, q_length, shift, left, right, G)
        first_head = h * group
        total = (end - begin) * group
    tiles = (x, x_rest, y, u, u_rest, w)
    barriers = (arrived, free, ready)
    place = (b, h, start)
    walk = (first_head, gl.to_tensor(begin), end - begin, total, gl.to_tensor(whole), gl.to_tensor(partial))
    view = (k_length, shift, left, right)
    numbers = (scale, softcap, heads, blocks, stride_slopes)
    task = (tiles, barriers, handed, place, walk, view, numbers, (statistics_ptr, slopes_ptr))
    out = (out_ptr, stride_b, stride_h, stride_t, length, lse_ptr, delta_ptr)
    descs = (x_desc, x_rest_desc, y_desc, u_desc, u_rest_desc, w_desc)
    gl.warp_specialize([
        (_sum, (task, out, gl.constexpr(0), WANT, R, G)),
        (_sum, (task, out, gl.constexpr(1), WANT, R, G)),
        (_load_tiles, (descs, tiles, barriers, place, walk, WANT)),
    ], [4, 1], [240, 24])  # fmt: skip


def latent_gradients(
    q: Tensor, k: Tensor, do: Tensor, gradients: tuple[Tensor, Tensor, Tensor],
    statistics: tuple[Tensor, Tensor, Tensor], recipe: Recipe, rows: Geometry, columns: Geometry, seen: tuple[Any, ...],
    *, scale: float, softcap: float | None,
) -> None:  # fmt: skip
    """Write dQ, dK and dV (``gradients``) of q [B, Hq, Tq, 576] and a latent k [B, Hk, Tk, 576].

    ``statistics``: L, delta, and what ``triton_gradients.statistics_kernel`` makes of them; ``seen``: of
    ``Sequences.arguments``.
    """
    lse, delta, blocked = statistics
    *view, _, _, _, slopes, stride = seen
    of_rows, of_columns = (q, do, k, k), (k, k, q, do)
    for want, out in zip(("dq", "dk", "dv"), gradients, strict=True):
        x, y, u, w = of_rows if want == "dq" else of_columns
        gradient_kernel[(-(-out.shape[2] // ROWS.value), out.shape[0] * out.shape[1])](
            *pieces_of(x, ROWS.value), pieces_of(y, ROWS.value)[0], *pieces_of(u, TILE.value),
            pieces_of(w, TILE.value)[0], lse, delta, blocked, out, *out.stride()[:3], q.shape[1],
            q.shape[1] // k.shape[1], *view, slopes, stride, blocked.shape[2], scale, softcap or 0.0,
            WANT=want, R=recipe, G=rows if want == "dq" else columns, num_warps=4, **COMPILED,
        )  # fmt: skip
