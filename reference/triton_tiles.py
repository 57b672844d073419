"""Tiles of float64 attention in Triton: what they are loaded as, their scores, and their weights in a product.

Inputs are widened in memory, and masks have 32 bits at least: Triton (3.6, 3.7) cannot compile a float64 product whose
operand is made of narrower numbers. Numbers come as tensors, since a Python float reaches a kernel as fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import triton
import triton.language as tl
from triton.language.extra import libdevice

from attn_diag.reference.fused_products import MOST_FEATURES, TileWeight

# exp(-746) is 0 in float64.
VANISHES = tl.constexpr(746.0)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@dataclass(frozen=True)
class Tiling:
    """What a launch is compiled for."""

    block_m: int
    """Query rows of a tile."""
    block_n: int
    """Keys of a tile."""
    block_d: int
    """Features of q and k at a time."""
    parts_d: int
    """How many times that."""
    block_v: int
    """Features of v and dO at a time."""
    parts_v: int
    """How many times that."""
    block_x: int
    """Features of a product that one program sums."""
    warps: int
    """Warps of a program."""
    stages: int
    """Tiles that are loaded ahead."""
    warps_n: int = 1
    """Of how many warps each has other columns of a product, rather than rows; in Gluon."""
    left: bool = False
    """Whether keys too far before a row are hidden."""
    right: bool = False
    """Whether keys too far behind a row are hidden."""
    scattered: bool = False
    """Whether positions are other than t + shift."""
    softcap: bool = False
    """Whether there is one."""
    mask: bool = False
    """Whether a mask is added to the scores."""
    alibi: Literal["none", "row", "first-key", "last-key"] = "none"
    """From where a bias counts distances."""
    details: bool = False
    """Whether the forward also tells what the bounds and repeated maxima need."""
    weights: tuple[TileWeight, ...] = ()
    """W of each product that a launch makes."""
    of_keys: bool = False
    """Whether all of them are of k, whose tile the scores have loaded."""
    of_dout: tuple[bool, ...] = ()
    """Which of the products of keys are of dO rather than of q; in Gluon."""

    @property
    def count(self) -> int:
        """How many products a launch makes."""
        return len(self.weights)

    @property
    def first(self) -> TileWeight:
        """W of the first."""
        return self.weights[0]

    @property
    def second(self) -> TileWeight:
        """W of the second."""
        return self.weights[1]

    @property
    def third(self) -> TileWeight:
        """W of the third."""
        return self.weights[2]

    @property
    def casts(self) -> bool:
        """Whether the second product is one of BF16; in Gluon."""
        return self.count > 1 and (self.second.name, self.second.cast) == ("dscores_cast", "bf16")

    @property
    def adds(self) -> bool:
        """Whether numbers are added to the scores."""
        return self.mask or self.alibi != "none"

    @property
    def needs_dprobs(self) -> bool:
        """Whether a W is made of dP."""
        return any(weight.needs_dprobs for weight in self.weights)


@triton.jit
def load_rows(ptr, at, count, width, part, BLOCK: tl.constexpr):
    """Rows ``at`` of a contiguous [count, width]: part ``part`` of their features, [R, BLOCK], 0 where none is."""
    features = part * BLOCK + tl.arange(0, BLOCK)
    here = (at < count)[:, None] & (features < width)[None, :]
    return tl.load(ptr + at.to(tl.int64)[:, None] * width + features[None, :], mask=here, other=0.0)


@triton.jit
def row_numbers(ptr, plane, here):
    """a, b and c of some query rows, [R] each, from three planes of [H, Tq]."""
    a = tl.load(ptr, mask=here, other=0.0)
    b = tl.load(ptr + plane, mask=here, other=0.0)
    c = tl.load(ptr + 2 * plane, mask=here, other=0.0)
    return a, b, c


@triton.jit
def row_products(whole, left, left_at, left_count, right, right_at, right_count, width, BLOCK: tl.constexpr,
              PARTS: tl.constexpr):  # fmt: skip
    """Products of rows of ``left`` with rows of ``right``, [L, R], and the tile of ``right``, if of one part.

    ``whole`` is the tile of ``left`` if of one part; of several, what comes back in a tile's place is without meaning.
    """
    tile = whole
    if PARTS == 1:
        tile = load_rows(right, right_at, right_count, width, 0, BLOCK)
        found = tl.dot(whole, tl.trans(tile), out_dtype=tl.float64)
    else:
        found = tl.zeros([left_at.shape[0], right_at.shape[0]], tl.float64)
        for part in range(PARTS):
            one = load_rows(left, left_at, left_count, width, part, BLOCK)
            other = load_rows(right, right_at, right_count, width, part, BLOCK)
            found = tl.dot(one, tl.trans(other), found, out_dtype=tl.float64)
    return found, tile


@triton.jit
def _tanh(x):
    if INTERPRETED:
        # (e^z - 1) z / z loses nothing near 0 (Higham, Accuracy and Stability, section 1.14.1).
        z = tl.maximum(-2.0 * tl.abs(x), -80.0)  # where it is 1 in either format, and e^z is not 0
        grown = tl.exp(z)
        less = tl.where(grown == 1.0, z, (grown - 1.0) * z / tl.where(grown == 1.0, 1.0, tl.log(grown)))
        size = -less / (2.0 + less)
        found = tl.where(x < 0, -size, size)
    else:
        found = libdevice.tanh(x)
    return found


@triton.jit
def tile_visible(t, position, key, view, G: tl.constexpr):
    """Which keys of a tile its rows may see, by length and reach; arguments as of ``tile_scores``."""
    q_length, k_length, left, right = view
    visible = (key < k_length) & (t < q_length)
    distance = key - position
    if G.right:
        visible = visible & (distance <= right)
    if G.left:
        visible = visible & (distance >= -left)
    return visible


@triton.jit
def tile_scores(products, t, position, key, numbers, mask, view, h, G: tl.constexpr):
    """S from q.k, its slope, and the size of what was added to it; of the dtype of ``numbers``, that of q.k.

    ``t``, ``position`` and ``key`` broadcast to the tile, whichever way it lies.
    """
    mask_ptr, mask_t, mask_k = mask
    _, k_length, _, _ = view
    s = products * tl.load(numbers)
    real = s.dtype
    slope, added = s, s
    if G.adds:
        added = s * 0.0
    if G.softcap:
        cap = tl.load(numbers + 1)
        ratio = s / cap
        s = _tanh(ratio)
        if real == tl.float64:
            slope = 1.0 - s * s
        else:  # fp32 holds little of a small 1 - s^2
            less = tl.exp(-2.0 * tl.abs(ratio))
            slope = 4.0 * less / ((1.0 + less) * (1.0 + less))
        s = s * cap
    visible = tile_visible(t, position, key, view, G)
    if G.mask:
        at = mask_ptr + t.to(tl.int64) * mask_t + key.to(tl.int64) * mask_k
        bias = tl.load(at, mask=visible, other=0.0).to(real)
        s += bias
        added += tl.abs(bias)
    if G.alibi != "none":
        if G.alibi == "row":
            distance = -tl.abs(key - position)
        elif G.alibi == "first-key":
            distance = key
        else:
            distance = key - (k_length - 1)
        bias = distance.to(real) * tl.load(numbers + 2 + h)
        s += bias
        added += tl.abs(bias)
    return tl.where(visible, s, float("-inf")), slope, added


@triton.jit
def _cast(x, FORMAT: tl.constexpr):
    """Rounded to fp32 and then to FORMAT, nearest-even; a float64."""
    narrow = x.to(tl.float32)
    if FORMAT == "bf16":
        # By integers: the interpreter's own cast truncates.
        bits = narrow.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        narrow = tl.where(narrow != narrow, narrow, rounded.to(tl.float32, bitcast=True))
    elif FORMAT == "fp16":
        narrow = narrow.to(tl.float16).to(tl.float32)
    return narrow.to(tl.float64)


@triton.jit
def tile_weight(p, slope, centred, alpha, a, b, c, NAME: tl.constexpr, CAST: tl.constexpr, ALPHA_FIRST: tl.constexpr,
                G: tl.constexpr):  # fmt: skip
    """The W of a tile that ``TileWeight`` names; ``centred`` is dP - delta, and a, b, c broadcast to the tile."""
    sloped = p
    if G.softcap:
        sloped = p * slope
    if NAME == "probs":
        w = p
    elif NAME == "sloped":
        w = sloped
    elif NAME == "probs_squared":
        w = a * (p * p) + tl.where(p > 0, b, 0.0)
    elif NAME == "probs_cast":
        w = _cast(a * p, CAST)
    else:
        w = p * centred
        if G.softcap:
            w = w * slope
        if NAME == "dscores_squared":
            w = a * (w * w) + tl.where(p > 0, b, 0.0) + c * (sloped * sloped)
        if NAME == "dscores_cast":
            w = a * (w - b * sloped)
            w = _cast(w * alpha, CAST) if ALPHA_FIRST else _cast(w, CAST) * alpha
    return w


@triton.jit
def visible_tiles(position, here, view, G: tl.constexpr):
    """The tiles [begin, end) of keys that some of these rows may see."""
    _, k_length, left, right = view
    begin, stop = 0, k_length
    if G.right:
        last = tl.max(tl.where(here, position, -2147483647), 0)
        stop = tl.minimum(k_length, tl.maximum(last + right + 1, 0))
    if G.left:
        first = tl.min(tl.where(here, position, 2147483647), 0)
        begin = tl.minimum(tl.maximum(first - left, 0), stop) // G.block_n
    return begin, tl.cdiv(stop, G.block_n)


@triton.jit
def common_keys(position, here, view, G: tl.constexpr):
    """The keys [begin, end) that all of these rows may see."""
    _, k_length, left, right = view
    begin, end = 0, k_length
    if G.right:
        end = tl.minimum(k_length, tl.min(tl.where(here, position, 2147483647), 0) + right + 1)
    if G.left:
        begin = tl.max(tl.where(here, position, -2147483647), 0) - left
    return begin, end


@triton.jit
def seen_rows(block, view, KEYS: tl.constexpr, ROWS: tl.constexpr, G: tl.constexpr):
    """The tiles [begin, end) of so many query rows that may see some key of this block of so many."""
    q_length, k_length, left, right, shift = view
    begin, stop = 0, q_length
    if G.right and not G.scattered:
        begin = tl.minimum(tl.maximum(block * KEYS - right - shift, 0), q_length) // ROWS
    if G.left and not G.scattered:
        last = tl.minimum((block + 1) * KEYS, k_length) - 1
        stop = tl.minimum(tl.maximum(last + left - shift + 1, 0), q_length)
    return begin, tl.cdiv(stop, ROWS)


def tiling_of(
    kernel: str, width: int, value_width: int, x_width: int, *, of_keys: bool = False, count: int = 1
) -> Tiling:
    """The tiles of a launch of ``kernel``: of those in Triton its name without "_kernel"; of those in Gluon
    "gluon_forward", or "gluon".

    Args:
        kernel: Which.
        width: Features of q and k.
        value_width: Of v and dO.
        x_width: Of the product.
        of_keys: See ``Tiling``; of "rows" alone, and where no features are taken in parts.
        count: How many products are made.
    """
    block_d, block_v, block_x = (part_of_features(n) for n in (width, value_width, x_width))
    parts_d, parts_v = triton.cdiv(width, block_d), triton.cdiv(value_width, block_v)
    # Measured on an H100: larger tiles spill registers, or leave no room in shared memory for the next one.
    m, n, warps, stages, sharing = 32, 32, 4, 2, 1
    if max(parts_d, parts_v) > 1:
        warps = 8
    elif kernel == "variances":
        m, n, warps, stages = 128, 32, 8, 3
    elif kernel == "through":
        m, n, warps, stages = 128, 64, 8, 3
    elif kernel.startswith("gluon"):
        block_d, block_v, warps = max(block_d, 32), max(block_v, 32), 8
        m, sharing = (64, 2) if max(block_d, block_v) > 64 and kernel != "gluon_forward" else (128, 1)
    elif kernel == "key_variances":
        m, n, warps, stages = 32, 128, 8, 3
    elif kernel == "forward":
        m, warps = (64, 4) if max(block_d, block_x) <= 64 else (128, 8)
    elif kernel == "rows" and max(block_d, block_v, block_x) > 64:
        n, warps, stages = (64, 8, 1) if of_keys else (32, 4, 1)
    elif kernel == "keys" and max(block_d, block_v, block_x) > 64 and count > 1:
        stages = 1
    return Tiling(m, n, block_d, parts_d, block_v, parts_v, block_x, warps, stages, sharing, of_keys=of_keys)


def part_of_features(width: int) -> int:
    """How many of so many features are taken at a time: a power of 2 from 16 to ``MOST_FEATURES``."""
    return int(max(16, min(MOST_FEATURES, triton.next_power_of_2(width))))
