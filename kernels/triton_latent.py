"""The forward over a latent that k and v share (absorbed MLA: 576 features, of which v is the first 512), on Hopper.

``triton_forward_kernel`` takes it too. But two tiles of keys are all that shared memory holds beside q's, and Triton
asks for the next one when all products with this one are done, so that every step waits for it; and where eight warps
share 64 rows it has both halves of them compute all scores, in products so narrow that reading q takes longer than
multiplying. Here, in Gluon, one warp asks for tiles as soon as their places are free, and two warpgroups of four warps
each compute all scores, in products twice as wide, and half of O's features. What is rounded and in which order sums
are made is the other kernel's, whose functions are called, and so are O and L, bit for bit.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_diag.kernels.geometry import Geometry, Visibility, anonymous
from attn_diag.kernels.recipe import Recipe
from attn_diag.kernels.triton_math import as_operand, fused
from attn_diag.kernels.triton_sequences import Sequences, head_slope
from attn_diag.kernels.triton_softmax import exponential, next_maximum, range_sum, rescaling, sink_step
from attn_diag.kernels.triton_tiles import biased, descriptor_of, key_tiles, mask_scores, recipe_scores

# A tile's rows, and its features in two pieces, since a tile's sides are powers of two.
ROWS = gl.constexpr(64)
WIDE, REST = gl.constexpr(512), gl.constexpr(64)


@gluon.jit
def _load(descs, b, h, start, tiles, arrived):
    """Ask for a tile of q or k, in its two pieces; ``arrived`` counts their bytes."""
    mbarrier.expect(arrived, ROWS * (WIDE + REST) * 2)
    tma.async_copy_global_to_shared(descs[0], [b, h, start, 0], arrived, tiles[0].reshape([1, 1, ROWS, WIDE]))
    tma.async_copy_global_to_shared(descs[1], [b, h, start, 0], arrived, tiles[1].reshape([1, 1, ROWS, REST]))


@gluon.jit
def _load_tiles(q_descs, k_descs, tiles, barriers, place, walk):
    """One warp's work: q's tile, and those of k as the two places for them become free."""
    q, q_rest, k, k_rest = tiles
    arrived, free = barriers
    b, h, hk, start = place
    tile, step, n, _, _ = walk
    _load(q_descs, b, h, start, (q, q_rest), arrived.index(2))
    for i in range(n):
        mbarrier.wait(free.index(i % 2), (i // 2 & 1) ^ 1)
        _load(k_descs, b, hk, tile * ROWS, (k.index(i % 2), k_rest.index(i % 2)), arrived.index(i % 2))
        tile += step


@gluon.jit
def _attend(task, HALF: gl.constexpr, R: gl.constexpr, G: gl.constexpr):
    """A warpgroup's work: one half of O's features, from all scores."""
    tiles, barriers, place, walk, view, shift, scale, softcap, alibi, sinks_ptr, out, heads, q_length = task
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE // 2, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)  # the same threads
    q, q_rest, k, k_rest = tiles
    arrived, free = barriers
    b, h, _, start = place
    tile, step, n, whole, partial = walk
    rows = start + gl.arange(0, ROWS, OF_ROWS)
    positions = rows + shift
    factor = 1.0
    if R.alpha == "in-exponent" and not G.softcap:
        factor = scale
    acc = gl.zeros([ROWS, WIDE // 2], gl.float32, SUMS)
    l = gl.zeros([ROWS], gl.float32, OF_ROWS)
    m = gl.full([ROWS], float("-inf"), gl.float32, OF_ROWS)
    mbarrier.wait(arrived.index(2), 0)
    for i in range(n):
        mbarrier.wait(arrived.index(i % 2), i // 2 & 1)
        keys = k.index(i % 2)
        s = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
        s = warpgroup_mma(q, keys.permute([1, 0]), s, use_acc=False, is_async=True)
        s = warpgroup_mma(q_rest, k_rest.index(i % 2).permute([1, 0]), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        cols = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, SCORES))
        s = recipe_scores(s, scale, softcap, R, G)
        s = biased(s, positions[:, None], cols[None, :], tile * ROWS, alibi, view[0], G)
        if (tile < whole) | (tile >= partial):
            s = mask_scores(s, positions, cols, view, G)
        m_new = next_maximum(m, gl.max(s, 1), False, R)
        rescale = rescaling(m, m_new, factor, R)
        p = exponential(s, m_new, factor, R)
        cast = as_operand(p, gl.constexpr(R.probs))
        l = l * rescale + range_sum(p, cast, R)
        acc *= gl.convert_layout(rescale, OF_SUMS)[:, None]
        cast = gl.convert_layout(cast, gl.DotOperandLayout(0, SUMS, 2))
        acc = warpgroup_mma(cast, keys.slice(HALF * (WIDE // 2), WIDE // 2, 1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index(i % 2), count=1)
        m = m_new
        tile += step

    if G.sink:
        m, shrink, own, _ = sink_step(gl.load(sinks_ptr + h), m, factor)
        acc *= gl.convert_layout(shrink, OF_SUMS)[:, None]
        l = l * shrink + own
    # A row that saw no key; one whose l underflowed divides by zero, as a real kernel does.
    unseen = (m == float("-inf")) & (l == 0)
    l = gl.where(unseen, 1.0, l)
    o = acc * gl.convert_layout(gl.div_rn(1.0, l), OF_SUMS)[:, None]
    o_ptr, lse_ptr, stride_b, stride_h, stride_t = out
    at = o_ptr + b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h
    o_rows = gl.convert_layout(rows, OF_SUMS)
    dims = HALF * (WIDE // 2) + gl.arange(0, WIDE // 2, gl.SliceLayout(0, SUMS))
    at = at + (o_rows.to(gl.int64)[:, None] * stride_t + dims[None, :])
    gl.store(at, as_operand(o, gl.constexpr(R.out)), mask=(o_rows < q_length)[:, None])
    if HALF == 0:
        lse = gl.where(unseen, m, fused(m, factor, gl.log(l)))
        gl.store(lse_ptr + (b * heads + h).to(gl.int64) * q_length + rows, lse, mask=rows < q_length)


@gluon.jit
def latent_kernel(
    q_desc, q_rest_desc, k_desc, k_rest_desc, o_ptr, lse_ptr, sinks_ptr, stride_ob, stride_oh, stride_ot, heads, group,
    q_length, k_length, shift, left, right, slopes_ptr, stride_slopes, scale, softcap, R: gl.constexpr,
    G: gl.constexpr,
):  # fmt: skip
    """One block of query rows of one head."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    FORMAT: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(FORMAT, [ROWS, WIDE], SHARED)
    q_rest = gl.allocate_shared_memory(FORMAT, [ROWS, REST], SHARED)
    k = gl.allocate_shared_memory(FORMAT, [2, ROWS, WIDE], SHARED)
    k_rest = gl.allocate_shared_memory(FORMAT, [2, ROWS, REST], SHARED)
    arrived = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(arrived.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(free.index(i), count=2)
    # The last query blocks see the most keys under causality: they go first.
    start = (gl.num_programs(0) - 1 - gl.program_id(0)) * ROWS
    b = gl.program_id(1) // heads
    h = gl.program_id(1) % heads
    view = (k_length, left, right)
    last = gl.minimum(start + ROWS, q_length) - 1
    begin, whole, partial, end = key_tiles(start + shift, last + shift, view, G)
    tile = begin
    step = gl.to_tensor(1)
    if R.schedule.order == "descending":
        tile = end - 1
        step = gl.to_tensor(-1)
    tiles = (q, q_rest, k, k_rest)
    barriers = (arrived, free)
    place = (b, h, h // group, start)
    walk = (tile, step, end - begin, whole, partial)
    alibi = gl.to_tensor(head_slope(slopes_ptr, b, 0, h, stride_slopes, G))
    out = (o_ptr, lse_ptr, stride_ob, stride_oh, stride_ot)
    task = (tiles, barriers, place, walk, view, shift, scale, softcap, alibi, sinks_ptr, out, heads, q_length)
    gl.warp_specialize([
        (_attend, (task, gl.constexpr(0), R, G)),
        (_attend, (task, gl.constexpr(1), R, G)),
        (_load_tiles, ((q_desc, q_rest_desc), (k_desc, k_rest_desc), tiles, barriers, place, walk)),
    ], [4, 1], [240, 24])  # fmt: skip


def latent_forward(
    q: Tensor, k: Tensor, o: Tensor, lse: Tensor, recipe: Recipe, visibility: Visibility, geometry: Geometry, *,
    scale: float, softcap: float | None, sinks: Tensor | None, sequences: Sequences,
) -> None:  # fmt: skip
    """Write O [B, Hq, Tq, 512] and L [B, Hq, Tq] of q [B, Hq, Tq, 576] and k [B, Hk, Tk, 576], which v begins with."""
    batch, heads, q_length, _ = q.shape
    *seen, _, _, _, slopes, stride = sequences.arguments(recipe, visibility, q, k, scale=scale, softcap=softcap)
    latent_kernel[(-(-q_length // ROWS.value), batch * heads)](
        *_described(q), *_described(k), o, lse, lse if sinks is None else sinks.contiguous(), *o.stride()[:3], heads,
        heads // k.shape[1], *seen, slopes, stride, scale, softcap or 0.0, R=anonymous(recipe), G=geometry, num_warps=4,
    )  # fmt: skip


def _described(tensor: Tensor) -> list[TensorDescriptor]:
    """Of tiles of both pieces of q's or k's features."""
    made = []
    for first, width in ((0, WIDE.value), (WIDE.value, REST.value)):
        plain = descriptor_of(tensor[..., first : first + width], ROWS.value, width)
        layout = gl.NVMMASharedLayout(128, 16, rank=4)
        made.append(TensorDescriptor(plain.base, plain.shape, plain.strides, plain.block_shape, layout))
    return made
