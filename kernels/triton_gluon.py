"""What Hopper's forward kernels in Gluon share: the steps of a tile, the end of a block, and descriptors.

What is rounded is ``triton_forward_kernel``'s, whose functions are called. ``walk`` is a block's tiles of keys: the
first, the step to the next, how many, and the range [whole, partial) of those that need no mask; ``numbers`` are
position(t) - t, alpha, the softcap and the head's slope of ALiBi.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_diag.kernels.triton_math import as_operand, fused
from attn_diag.kernels.triton_sequences import head_slope
from attn_diag.kernels.triton_softmax import exponential, next_maximum, range_sum, rescaling, sink_step
from attn_diag.kernels.triton_tiles import biased, descriptor_of, key_tiles, mask_scores, recipe_scores

SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16))


@gluon.jit
def block_of_rows(
    heads, group, q_length, k_length, shift, left, right, slopes_ptr, stride_slopes, scale, softcap,
    BLOCK: gl.constexpr, R: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """(place, walk, view, numbers) of this program: (batch item, head, head of k, first row), and what its rows see."""
    # The last query blocks see the most keys under causality: they go first.
    start = (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK
    b = gl.program_id(1) // heads
    h = gl.program_id(1) % heads
    view = (k_length, left, right)
    last = gl.minimum(start + BLOCK, q_length) - 1
    begin, whole, partial, end = key_tiles(start + shift, last + shift, view, G)
    tile = begin
    step = gl.to_tensor(1)
    if R.schedule.order == "descending":
        tile = end - 1
        step = gl.to_tensor(-1)
    numbers = (shift, scale, softcap, gl.to_tensor(head_slope(slopes_ptr, b, 0, h, stride_slopes, G)))
    return (b, h, h // group, start), (tile, step, end - begin, whole, partial), view, numbers


@gluon.jit
def visible_scores(products, rows, tile, walk, view, numbers, LAYOUT: gl.constexpr, R: gl.constexpr, G: gl.constexpr):
    """S [rows, block_n] of a tile of keys from its q.k."""
    _, _, _, whole, partial = walk
    shift, scale, softcap, alibi = numbers
    positions = rows + shift
    cols = tile * G.block_n + gl.arange(0, G.block_n, gl.SliceLayout(0, LAYOUT))
    s = recipe_scores(products, scale, softcap, R, G)
    s = biased(s, positions[:, None], cols[None, :], tile * G.block_n, alibi, view[0], G)
    if (tile < whole) | (tile >= partial):
        s = mask_scores(s, positions, cols, view, G)
    return s


@gluon.jit
def tile_softmax(s, m, l, factor, R: gl.constexpr):
    """(P_bar of a tile, as it is multiplied, what multiplies the sums before, m, l)."""
    m_new = next_maximum(m, gl.max(s, 1), False, R)
    rescale = rescaling(m, m_new, factor, R)
    p = exponential(s, m_new, factor, R)
    cast = as_operand(p, gl.constexpr(R.probs))
    return cast, rescale, m_new, l * rescale + range_sum(p, cast, R)


@gluon.jit
def store_block(acc, m, l, rows, factor, place, out, FIRST: gl.constexpr, LAYOUT: gl.constexpr, R: gl.constexpr,
                G: gl.constexpr):  # fmt: skip
    """The sink's step, O of the features from FIRST on, ``acc``'s in LAYOUT, and with the first ones L."""
    b, h, _, _ = place
    o_ptr, lse_ptr, sinks_ptr, stride_b, stride_h, stride_t, heads, q_length = out
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if G.sink:
        m, shrink, own, _ = sink_step(gl.load(sinks_ptr + h), m, factor)
        acc *= gl.convert_layout(shrink, OF_ROWS)[:, None]
        l = l * shrink + own
    # A row that saw no key; one whose l underflowed divides by zero, as a real kernel does.
    unseen = (m == float("-inf")) & (l == 0)
    l = gl.where(unseen, 1.0, l)
    o = acc * gl.convert_layout(gl.div_rn(1.0, l), OF_ROWS)[:, None]
    at = o_ptr + b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h
    o_rows = gl.convert_layout(rows, OF_ROWS)
    dims = FIRST + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    at = at + (o_rows.to(gl.int64)[:, None] * stride_t + dims[None, :])
    inside = (o_rows < q_length)[:, None]
    if G.value_dim < G.block_dv:
        inside = inside & (dims < G.value_dim)[None, :]
    gl.store(at, as_operand(o, gl.constexpr(R.out)), mask=inside)
    if FIRST == 0:
        lse = gl.where(unseen, m, fused(m, factor, gl.log(l)))
        gl.store(lse_ptr + (b * heads + h).to(gl.int64) * q_length + rows, lse, mask=rows < q_length)


def tiles_described(tensor: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Of tiles [rows, width] of a tensor [B, H, T, D]."""
    plain = descriptor_of(tensor, rows, width)
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    return TensorDescriptor(plain.base, plain.shape, plain.strides, plain.block_shape, layout)
