"""The forward over a latent that k and v share (absorbed MLA: 576 features, of which v is the first 512), on Hopper.

``triton_forward_kernel`` takes it too. But two tiles of keys are all that shared memory holds beside q's, and Triton
asks for the next one when all products with this one are done, so that every step waits for it; and of eight warps with
64 rows it has both halves compute all scores, in products so narrow that reading q takes longer than multiplying. Here,
in Gluon, one warp asks for a tile as soon as there is a place for it, and two warpgroups have a half of O's features
each and compute the scores of every second tile:

    first warpgroup                         second warpgroup
        S of tile i                             S of tile i + 1
        m, P_bar and l, handed over      →      m, P_bar and l of tile i taken
        O_bar of tile i                         m, P_bar and l of tile i + 1, handed over
        those of tile i + 1 taken        ←      O_bar of tile i
        O_bar of tile i + 1                     O_bar of tile i + 1

What is rounded, and the order of each sum, are the other kernel's, whose functions are called: O and L have its bits.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

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
from attn_diag.kernels.triton_softmax import rescaling

# A tile's rows; its features in two pieces, since a tile's sides are powers of two; a warpgroup's features of O.
ROWS = gl.constexpr(64)
WIDE, REST = gl.constexpr(512), gl.constexpr(64)
PART = gl.constexpr(256)
# A warpgroup's S [ROWS, ROWS] and O_bar [ROWS, PART], their rows (of the same threads), and P_bar as an operand.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
OF_SCORES, OF_SUMS = (gl.constexpr(gl.SliceLayout(1, layout.value)) for layout in (SCORES, SUMS))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))


@gluon.jit
def _load(descs, b, h, start, tile, rest, arrived):
    """Ask for a tile of q or k, in its two pieces; ``arrived`` counts their bytes."""
    mbarrier.expect(arrived, ROWS * (WIDE + REST) * 2)
    tma.async_copy_global_to_shared(descs[0], [b, h, start, 0], arrived, tile.reshape([1, 1, ROWS, WIDE]))
    tma.async_copy_global_to_shared(descs[1], [b, h, start, 0], arrived, rest.reshape([1, 1, ROWS, REST]))


@gluon.jit
def _load_tiles(q_descs, k_descs, tiles, barriers, place, walk):
    """One warp's work: q's tile, and those of k as the two places for them become free."""
    q, q_rest, k, k_rest = tiles
    arrived, free, _ = barriers
    b, h, hk, start = place
    tile, step, n, _, _ = walk
    _load(q_descs, b, h, start, q.index(0), q_rest.index(0), arrived.index(2))
    for i in range(n):
        mbarrier.wait(free.index(i % 2), (i // 2 & 1) ^ 1)
        _load(k_descs, b, hk, tile * ROWS, k.index(i % 2), k_rest.index(i % 2), arrived.index(i % 2))
        tile += step


@gluon.jit
def _scores(task, rows, tile, pair, PLACE: gl.constexpr, R: gl.constexpr, G: gl.constexpr):
    """S of this warpgroup's tile of a ``pair`` of them, which lies in PLACE."""
    tiles, barriers, _, _, walk, view, numbers, _ = task
    q, q_rest, k, k_rest = tiles
    # 0, which the compiler cannot know: else it keeps the addresses of q's 36 products, and runs out of registers.
    only = pair >> 30
    mbarrier.wait(barriers[0].index(PLACE), pair & 1)
    s = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
    s = warpgroup_mma(q.index(only), k.index(PLACE).permute([1, 0]), s, use_acc=False, is_async=True)
    s = warpgroup_mma(q_rest.index(only), k_rest.index(PLACE).permute([1, 0]), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    return visible_scores(s, rows, tile, walk, view, numbers, SCORES, R, G)


@gluon.jit
def _hand_over(s, m, l, factor, handed, ready, R: gl.constexpr):
    """(P_bar of this warpgroup's tile, what multiplies the sums before, m, l), which the other one gets too."""
    cast, rescale, m_new, l = tile_softmax(s, m, l, factor, R)
    handed[0].store(cast)
    handed[1].store(m_new)
    handed[2].store(l)
    mbarrier.arrive(ready, count=1)
    return gl.convert_layout(cast, OPERAND), rescale, m_new, l


@gluon.jit
def _take(m, factor, handed, arrived, ready, pair, R: gl.constexpr):
    """The same of the other warpgroup's tile. All of it is in registers before this one hands over anything."""
    mbarrier.wait(arrived, pair & 1)
    mbarrier.wait(ready, pair & 1)
    m_new = handed[1].load(OF_SCORES)
    return handed[0].load(OPERAND), rescaling(m, m_new, factor, R), m_new, handed[2].load(OF_SCORES)


@gluon.jit
def _add(acc, p, rescale, values, free, HALF: gl.constexpr):
    """O_bar after one more tile."""
    acc *= gl.convert_layout(rescale, OF_SUMS)[:, None]
    acc = warpgroup_mma(p, values.slice(HALF * PART, PART, 1), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free, count=1)
    return acc


@gluon.jit
def _attend(task, HALF: gl.constexpr, R: gl.constexpr, G: gl.constexpr):
    """A warpgroup's work."""
    tiles, barriers, handed, place, walk, _, numbers, out = task
    _, _, k, _ = tiles
    arrived, free, ready = barriers
    _, _, _, start = place
    tile, step, n, _, _ = walk
    factor = 1.0
    if R.alpha == "in-exponent" and not G.softcap:
        factor = numbers[1]
    rows = start + gl.arange(0, ROWS, OF_SCORES)
    acc = gl.zeros([ROWS, PART], gl.float32, SUMS)
    l = gl.zeros([ROWS], gl.float32, OF_SCORES)
    m = gl.full([ROWS], float("-inf"), gl.float32, OF_SCORES)
    mbarrier.wait(arrived.index(2), 0)
    tile += HALF * step
    for pair in range(n // 2):
        s = _scores(task, rows, tile, pair, HALF, R, G)
        if HALF == 0:
            p, rescale, m, l = _hand_over(s, m, l, factor, handed, ready.index(0), R)
            acc = _add(acc, p, rescale, k.index(0), free.index(0), HALF)
            p, rescale, m, l = _take(m, factor, handed, arrived.index(1), ready.index(1), pair, R)
        else:
            first, rescale, m, l = _take(m, factor, handed, arrived.index(0), ready.index(0), pair, R)
            p, next_rescale, m, l = _hand_over(s, m, l, factor, handed, ready.index(1), R)
            acc = _add(acc, first, rescale, k.index(0), free.index(0), HALF)
            rescale = next_rescale
        acc = _add(acc, p, rescale, k.index(1), free.index(1), HALF)
        tile += 2 * step
    if n % 2 == 1:
        if HALF == 0:
            s = _scores(task, rows, tile, n // 2, 0, R, G)
            p, rescale, m, l = _hand_over(s, m, l, factor, handed, ready.index(0), R)
        else:
            p, rescale, m, l = _take(m, factor, handed, arrived.index(0), ready.index(0), n // 2, R)
        acc = _add(acc, p, rescale, k.index(0), free.index(0), HALF)
    store_block(acc, m, l, rows, factor, place, out, HALF * PART, SUMS, R, G)


@gluon.jit
def barriers_of_places():
    """Of two places for tiles, and of the block's own rows: what has come; of the places: what both warpgroups are done
    with, and what one has handed over."""
    arrived = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived.index(2), count=1)
    for i in gl.static_range(2):
        mbarrier.init(arrived.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
        mbarrier.init(ready.index(i), count=1)
    return arrived, free, ready


@gluon.jit
def latent_kernel(
    q_desc, q_rest_desc, k_desc, k_rest_desc, o_ptr, lse_ptr, sinks_ptr, stride_ob, stride_oh, stride_ot, heads, group,
    q_length, k_length, shift, left, right, slopes_ptr, stride_slopes, scale, softcap, R: gl.constexpr,
    G: gl.constexpr,
):  # fmt: skip
    """One block of query rows of one head."""
    FORMAT: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(FORMAT, [1, ROWS, WIDE], SHARED)
    q_rest = gl.allocate_shared_memory(FORMAT, [1, ROWS, REST], SHARED)
    k = gl.allocate_shared_memory(FORMAT, [2, ROWS, WIDE], SHARED)
    k_rest = gl.allocate_shared_memory(FORMAT, [2, ROWS, REST], SHARED)
    probs = gl.allocate_shared_memory(FORMAT, [ROWS, ROWS], SHARED)
    maxima = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    sums = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    arrived, free, ready = barriers_of_places()
    place, walk, view, numbers = block_of_rows(
        heads, group, q_length, k_length, shift, left, right, slopes_ptr, stride_slopes, scale, softcap, ROWS, R, G
    )
    tiles = (q, q_rest, k, k_rest)
    barriers = (arrived, free, ready)
    out = (o_ptr, lse_ptr, sinks_ptr, stride_ob, stride_oh, stride_ot, heads, q_length)
    task = (tiles, barriers, (probs, maxima, sums), place, walk, view, numbers, out)
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
        *pieces_of(q, ROWS.value), *pieces_of(k, ROWS.value), o, lse, lse if sinks is None else sinks.contiguous(),
        *o.stride()[:3], heads, heads // k.shape[1], *seen, slopes, stride, scale, softcap or 0.0,
        R=anonymous(recipe), G=geometry, num_warps=4, **COMPILED,
    )  # fmt: skip


def pieces_of(tensor: Tensor, rows: int) -> list[TensorDescriptor]:
    """Descriptors of tiles of ``rows`` rows: of both pieces of q or k, of the one that v and dO have."""
    made = []
    for first, width in ((0, WIDE.value), (WIDE.value, REST.value)):
        if first < tensor.shape[3]:
            made.append(tiles_described(tensor[..., first : first + width], rows, width))
    return made
