"""Tiles of q, k and v, and the scores of a tile: what the forward, the backward and the second pass share.

In every function ``R`` is the Recipe and ``G`` the Geometry, both compile-time. A source of tiles is a tuple (TMA
descriptor, pointer, stride of a position, stride of a feature, row of the tensor where the sequence begins, pages),
where pages are (the sequence's row of the page table, stride of a page), ``view`` is (number of keys, left, right),
and ``task`` what a block of query rows needs to see its keys: (q and its features behind block_d, where there are any;
their positions, source of keys, batch item, head of the keys, ``view``, scale, softcap, ALiBi's slope, the head's
scales of codes).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_diag.kernels.geometry import Geometry
from attn_diag.kernels.triton_low_bit import rescaled_products
from attn_diag.kernels.triton_math import LOG2_E, dot, dot_more, fused, round_to, tanh

# No sequence is longer than this, see ``_ragged_descriptor``.
_RAGGED = tl.constexpr(2**30)


@triton.jit
def source(desc, ptr, b, h, first, stride_b, stride_h, stride_t, stride_d, G: tl.constexpr):
    """The tiles of head ``h`` from row ``first`` on, where its sequence begins."""
    ptr += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    if G.documents:
        ptr += first.to(tl.int64) * stride_t
    return desc, ptr, stride_t, stride_d, first, (0, 0)


@triton.jit
def key_source(desc, ptr, b, h, first, table, stride_b, stride_h, stride_t, stride_d, G: tl.constexpr):
    """As ``source``, of k or v, which may lie in pages: ``table`` is the sequence's row of their table."""
    if G.page_size:
        if G.tma:
            stride_b = (stride_b // stride_t).to(tl.int32)  # a page's rows, with those that lie between
        elif stride_b.dtype == tl.int32:
            stride_b = stride_b.to(tl.uint32)  # two of 32 bits without a sign: one instruction for their product
        found = (desc, ptr + h.to(tl.int64) * stride_h, stride_t, stride_d, first, (table, stride_b))
    else:
        found = source(desc, ptr, b, h, first, stride_b, stride_h, stride_t, stride_d, G)
    return found


@triton.jit
def tile_pages(source, start, length, BLOCK: tl.constexpr, G: tl.constexpr):
    """Which page each of the keys [start, start + BLOCK) lies in, [BLOCK], or all of them: a scalar; 0: in none.

    A walk over tiles loads its next tile's pages a step ahead: Triton begins loads several steps early, but not those
    of an address that the same step loads.
    """
    page = 0
    if G.page_size:
        table, _ = source[5]
        offs = start
        if G.page_size % BLOCK:
            offs += tl.arange(0, BLOCK)
        page = tl.load(table + offs // G.page_size, mask=offs < length, other=0)
    return page


@triton.jit
def load_tile(source, b, h, start, length, BLOCK: tl.constexpr, G: tl.constexpr):
    """Positions [start, start + BLOCK) of q or k: [BLOCK, block_d], zero beyond ``length`` and the head dimension."""
    return _load(source, 0, b, h, start, length, BLOCK, 0, G.head_dim, G.block_d, False, False, G)


@triton.jit
def load_keys(source, page, b, h, start, length, BLOCK: tl.constexpr, WHOLE: tl.constexpr, G: tl.constexpr):
    """As ``load_tile``, of k, which may lie in pages: those of ``tile_pages``. WHOLE: none lies beyond ``length``."""
    return _load(source, page, b, h, start, length, BLOCK, 0, G.head_dim, G.block_d, G.page_size > 0, WHOLE, G)


@triton.jit
def load_rest(source, page, b, h, start, length, BLOCK: tl.constexpr, PAGED: tl.constexpr, G: tl.constexpr):
    """As ``load_tile``, of the features behind block_d: [BLOCK, rest_d]."""
    return _load(source, page, b, h, start, length, BLOCK, G.block_d, G.head_dim, G.rest_d, PAGED, False, G)


@triton.jit
def load_values(source, page, b, h, start, length, BLOCK: tl.constexpr, WHOLE: tl.constexpr, G: tl.constexpr):
    """As ``load_keys``, of v, or of dO, for keys in no pages: [BLOCK, block_dv], zero beyond V's features."""
    return _load(source, page, b, h, start, length, BLOCK, 0, G.value_dim, G.block_dv, G.page_size > 0, WHOLE, G)


@triton.jit
def _load(source, page, b, h, start, length, BLOCK: tl.constexpr, FIRST: tl.constexpr, DIM: tl.constexpr,
          BLOCK_D: tl.constexpr, PAGED: tl.constexpr, WHOLE: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """Features FIRST to FIRST + BLOCK_D, of DIM in all."""
    desc, ptr, stride_t, stride_d, first, pages = source
    _, stride_page = pages
    if G.tma and PAGED:
        first = page * stride_page + start % G.page_size - start
    if G.tma and FIRST == 0 and G.documents:
        tile = tl.reshape(desc.load([_RAGGED, first + length, h, _RAGGED - length + start, 0]), [BLOCK, BLOCK_D])
    elif G.tma and FIRST == 0:
        tile = tl.reshape(desc.load([b, h, start, 0]), [BLOCK, BLOCK_D])
    else:
        offs = start + tl.arange(0, BLOCK)
        dims = FIRST + tl.arange(0, BLOCK_D)
        here = (dims < DIM)[None, :]
        if not WHOLE:
            here = (offs < length)[:, None] & here
        rows = offs
        if PAGED and BLOCK % G.page_size == 0:
            rows = tl.arange(0, BLOCK) % G.page_size  # a tile begins where a page does
        elif PAGED:
            rows = offs % G.page_size
        at = ptr + (rows.to(tl.int64) * stride_t)[:, None] + dims[None, :] * stride_d
        if PAGED:
            page = page.to(tl.uint32).to(tl.int64) * stride_page.to(tl.int64)
            if G.page_size % BLOCK:
                page = page[:, None]
            at += page
        tile = tl.load(at, mask=here, other=0.0)
    return tile


@triton.jit
def load_group(ptr, rows, here, stride_d, FIRST: tl.constexpr, BLOCK_D: tl.constexpr, G: tl.constexpr):
    """As ``load_tile`` or ``load_rest``, of q, whose rows begin at ``rows`` [M]: those ``here``."""
    dims = FIRST + tl.arange(0, BLOCK_D)
    mask = here[:, None] & (dims < G.head_dim)[None, :]
    return tl.load(ptr + rows[:, None] + dims[None, :] * stride_d, mask=mask, other=0.0)


@triton.jit
def key_tiles(first, last, view, G: tl.constexpr):
    """Tiles of keys that row positions [first, last] can see: [begin, end), of which [whole, partial) need no mask."""
    k_length, left, right = view
    stop = k_length
    partial = k_length // G.block_n
    if G.right:
        stop = tl.minimum(stop, tl.maximum(last + right + 1, 0))
        partial = tl.minimum(partial, tl.maximum(first + right + 1, 0) // G.block_n)
    begin = 0
    whole = 0
    if G.left:
        begin = tl.minimum(tl.maximum(first - left, 0), stop) // G.block_n
        whole = tl.cdiv(tl.maximum(last - left, 0), G.block_n)
    end = tl.maximum(tl.cdiv(stop, G.block_n), begin)
    whole = tl.minimum(tl.maximum(whole, begin), end)
    partial = tl.minimum(tl.maximum(partial, whole), end)
    return begin, whole, partial, end


@triton.jit
def query_tiles(first, last, q_length, shift, left, right, G: tl.constexpr):
    """Tiles of query rows that see some key of [first, last]: [begin, end); those in [whole, partial) see them all."""
    begin = 0
    whole = 0
    end = tl.cdiv(q_length, G.block_m)
    partial = end
    if G.right:
        # Row t sees key j if j <= t + shift + right.
        begin = tl.maximum(first - shift - right, 0) // G.block_m
        whole = tl.cdiv(tl.maximum(last - shift - right, 0), G.block_m)
    if G.left:
        # ... and if j >= t + shift - left.
        end = tl.minimum(end, tl.cdiv(tl.maximum(last - shift + left + 1, 0), G.block_m))
        partial = tl.minimum(partial, tl.maximum(first - shift + left + 1, 0) // G.block_m)
    end = tl.maximum(end, begin)
    whole = tl.minimum(tl.maximum(whole, begin), end)
    partial = tl.minimum(tl.maximum(partial, whole), end)
    return begin, whole, partial, end


@triton.jit
def mask_scores(s, positions, cols, view, G: tl.constexpr):
    """-inf where row position p [M] may not see column j [N]: outside p - left <= j <= p + right, or past the keys."""
    k_length, left, right = view
    visible = (cols < k_length)[None, :]
    if G.right:
        visible = visible & (cols[None, :] <= positions[:, None] + right)
    if G.left:
        visible = visible & (cols[None, :] >= positions[:, None] - left)
    return tl.where(visible, s, float("-inf"))


@triton.jit
def biased(s, positions, cols, origin, alibi, k_length, G: tl.constexpr):
    """S with ALiBi's bias, rounded once; ``positions`` and ``cols`` broadcast to S, numbers up to 2**24.

    The distance is summed from ``origin``, the columns' last three bits and the others: exactly, and with one addition
    of a constant for every score, as tensor cores spread a row's columns over threads.
    """
    if G.alibi != "none":
        start = origin.to(tl.float32)
        if G.alibi == "behind" or G.alibi == "distance":
            start -= positions.to(tl.float32)
        if G.alibi == "last-key":
            start -= k_length - 1
        ahead = cols - origin
        far = (start + (ahead & 7).to(tl.float32)) + (ahead & -8).to(tl.float32)
        if G.alibi == "distance":
            far = -tl.abs(far)
        s = fused(far, alibi, s)
    return s


@triton.jit
def recipe_scores(products, scale, softcap, R: tl.constexpr, G: tl.constexpr):
    """S as the recipe stores it, from q.k in fp32, without a bias; unscaled where alpha waits for the exponent."""
    if R.alpha == "after-rounding":
        s = round_to(round_to(products, tl.constexpr(R.scores)) * scale, tl.constexpr(R.scores))
    elif R.alpha == "before-rounding" or G.softcap:
        s = round_to(products * scale, tl.constexpr(R.scores))
    else:
        s = round_to(products, tl.constexpr(R.scores))
    if G.softcap:
        s = round_to(tanh(s / softcap) * softcap, tl.constexpr(R.scores))
    return s


@triton.jit
def _log2_slope(alibi, scale, R: tl.constexpr, G: tl.constexpr):
    """ALiBi's slope in units of S log2 e; ``alibi`` lacks alpha where the scores do."""
    if R.alpha == "in-exponent" and not G.softcap:
        slope = alibi * (scale * LOG2_E)
    else:
        slope = alibi * LOG2_E
    return slope


@triton.jit
def backward_lse(lse, positions, origin, alibi, scale, R: tl.constexpr, G: tl.constexpr):
    """L log2 e [M], with what the scores of ``backward_scores`` lack of ALiBi's bias, from ``origin`` on."""
    if G.alibi == "behind" and R.backward_scores != "as-forward":
        lse += _log2_slope(alibi, scale, R, G) * (positions - origin).to(tl.float32)
    return lse


@triton.jit
def backward_scores(products, positions, cols, origin, alibi, k_length, scale, softcap, R: tl.constexpr,
                    G: tl.constexpr):  # fmt: skip
    """(S log2 e, dS/dS before the softcap) from q.k in fp32; the slope is 1 without softcap.

    ``positions`` and ``cols`` of the rows and keys broadcast to the products. ALiBi's bias j - p is split at
    ``origin``, a tile's first key or row, and the part of p left to ``backward_lse``: that costs a vector less for
    every score. Near the diagonal both parts are small, and far from it P is.
    """
    slope = 1.0
    if R.backward_scores == "as-forward":
        s = recipe_scores(products, scale, softcap, R, G)
        if G.softcap:
            slope = 1.0 - (s / softcap) * (s / softcap)
        s = biased(s, positions, cols, origin, alibi, k_length, G)
        if R.alpha == "in-exponent" and not G.softcap:
            s *= scale
        s *= LOG2_E
    elif G.softcap:
        t = tanh(products * scale / softcap)
        slope = 1.0 - t * t
        s = t * (softcap * LOG2_E)
        if G.alibi == "behind":
            s += _log2_slope(alibi, scale, R, G) * (cols - origin).to(tl.float32)
        elif G.alibi != "none":
            s = biased(t * softcap, positions, cols, origin, alibi, k_length, G) * LOG2_E
    elif G.alibi == "behind":
        s = products * (scale * LOG2_E) + _log2_slope(alibi, scale, R, G) * (cols - origin).to(tl.float32)
    elif G.alibi != "none" and R.alpha != "in-exponent":
        s = biased(products * scale, positions, cols, origin, alibi, k_length, G) * LOG2_E
    else:
        s = biased(products, positions, cols, origin, alibi, k_length, G) * (scale * LOG2_E)
    return s, slope


@triton.jit
def tile_scores(task, tile, MASKED: tl.constexpr, R: tl.constexpr, G: tl.constexpr):
    """S of one tile of keys: [M, block_n]."""
    _, _, keys, b, hk, view, _, _, _, _ = task
    start = tile * G.block_n
    page = tile_pages(keys, start, view[0], G.block_n, G)
    k = load_keys(keys, page, b, hk, start, view[0], G.block_n, False, G)
    return scores_of(task, k, tile, page, MASKED, R, G)


@triton.jit
def scores_of(task, k, tile, page, MASKED: tl.constexpr, R: tl.constexpr, G: tl.constexpr):
    """As ``tile_scores``, of the tile ``k``, whose keys lie in ``page``, as ``tile_pages`` has it."""
    queries, positions, keys, b, hk, view, scale, softcap, alibi, scales = task
    q, q_rest = queries
    start = tile * G.block_n
    cols = start + tl.arange(0, G.block_n)
    products = dot(q, tl.trans(k), tl.constexpr(R.input))
    if G.rest_d:
        k_rest = load_rest(keys, page, b, hk, start, view[0], G.block_n, G.page_size > 0, G)
        products = dot_more(q_rest, tl.trans(k_rest), products, tl.constexpr(R.input))
    products = rescaled_products(products, scales, cols, view[0], G)
    s = recipe_scores(products, scale, softcap, R, G)
    s = biased(s, positions[:, None], cols[None, :], start, alibi, view[0], G)
    if MASKED:
        s = mask_scores(s, positions, cols, view, G)
    return s


def begin_alike(k: Tensor, v: Tensor) -> bool:
    """Whether v [..., Dv] is the first features of k: the shared latent of absorbed MLA."""
    return v.data_ptr() == k.data_ptr() and v.stride() == k.stride() and v.shape[:3] == k.shape[:3]


def described(geometry: Geometry, q: Tensor, k: Tensor, v: Tensor, *do: Tensor) -> list[Any]:
    """Descriptors of tiles [block, block_d], for v and dO [block, block_dv]; the tensors where none are wanted."""
    tensors = (q, k, v, *do)
    if not geometry.tma:
        return list(tensors)
    blocks = (geometry.block_m, geometry.block_n, geometry.block_n, geometry.block_m)
    widths = (geometry.block_d, geometry.block_d, geometry.block_dv, geometry.block_dv)
    made = _ragged_descriptor if geometry.documents else descriptor_of
    return [made(t, block, width) for t, block, width in zip(tensors, blocks, widths, strict=False)]


def _ragged_descriptor(tensor: Tensor, block: int, block_d: int) -> TensorDescriptor:
    """Of rows that end where a document does, wherever that is: TMA fills with zeros behind it.

    A row's coordinate is 2**30 - length + row, out of bounds from ``length`` on; two more dimensions take back what
    that adds to the address, modulo 2**64. Source: triton.tools.ragged_tma.
    """
    plain = descriptor_of(tensor, block, block_d)
    (_, heads, _, dim), (_, stride_h, stride_t, _) = plain.shape, plain.strides
    most = 0x7FFF0000
    shape, strides = [most, most, heads, _RAGGED.value, dim], [2**34 - stride_t, stride_t, stride_h, stride_t, 1]
    return TensorDescriptor(tensor, shape, strides, [1, 1, 1, block, block_d])


def descriptor_of(tensor: Tensor, block: int, block_d: int) -> TensorDescriptor:
    """Of tiles [block, block_d] of a tensor [B, H, T, D]."""
    # The stride of a dimension of size one is arbitrary in torch; TMA wants a multiple of 16 bytes.
    strides = [
        s if n > 1 else tensor.shape[-1] * 16 for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    ]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, block, block_d])
