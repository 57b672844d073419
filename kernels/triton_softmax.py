"""The steps of the forward's online softmax for one tile of keys; ``R`` is the Recipe."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_diag.kernels.triton_math import LOG2_E, fused, product, round_to


@triton.jit
def _in_twos(difference, factor, R: tl.constexpr):
    """factor (s - m) log2 e; with alpha in q the scores have that in them."""
    if R.alpha != "in-q":
        difference = difference * factor * LOG2_E
    return difference


@triton.jit
def exponential(s, m, factor, R: tl.constexpr):
    """P_bar = exp(factor (s - m)) for s [M, N], m [M]. A row that has seen no key yet (m = -inf) gives 0."""
    m = tl.where(m == float("-inf"), 0.0, m)
    if R.exp == "exp2-fma":
        c = factor * LOG2_E
        p = tl.exp2(fused(s, c, -(m * c)[:, None]))
    elif R.exp == "exp2-scaled":
        c = factor * LOG2_E
        p = tl.exp2(product(s, c) - product(m, c)[:, None])
    elif R.exp == "exp2":
        p = tl.exp2(_in_twos(round_to(s - m[:, None], tl.constexpr(R.difference)), factor, R))
    else:
        p = tl.exp(round_to((s - m[:, None]) * factor, tl.constexpr(R.difference)))
    return p


@triton.jit
def rescaling(m, m_new, factor, R: tl.constexpr):
    """exp(factor (m - m_new)), [M]; 0 at the first keys of a row."""
    m_new = tl.where(m_new == float("-inf"), 0.0, m_new)
    if R.exp == "exp2-fma" and R.rescaling == "fused":
        c = factor * LOG2_E
        rescale = tl.exp2(fused(m, c, -(m_new * c)))
    elif R.exp == "exp2-fma":
        rescale = tl.exp2((m - m_new) * (factor * LOG2_E))
    elif R.exp == "exp2-scaled":
        c = factor * LOG2_E
        rescale = tl.exp2(product(m, c) - product(m_new, c))
    elif R.exp == "exp2":
        rescale = tl.exp2(_in_twos(round_to(m - m_new, tl.constexpr(R.difference)), factor, R))
    else:
        rescale = tl.exp(round_to((m - m_new) * factor, tl.constexpr(R.difference)))
    return rescale


@triton.jit
def next_maximum(m, top, repeated, R: tl.constexpr):
    """What is subtracted next, [M]: from the old ``m``, and the new keys' maximum ``top``, ``repeated`` or not."""
    if R.softmax.kind == "stabilised":
        repeated = repeated & (top > float("-inf"))  # keys that are all masked have no maximum
        top = tl.where(repeated, tl.where(top > 0, R.softmax.beta * top, tl.where(top < 0, 0.0, top)), top)
    m_new = tl.maximum(m, top)
    if R.softmax.kind == "stale":
        m_new = tl.where(m_new - m <= R.softmax.threshold, m, m_new)
    return round_to(m_new, tl.constexpr(R.row_max))


@triton.jit
def range_sum(p, cast, R: tl.constexpr):
    """What a tile adds to l, [M]."""
    if R.row_sum_of == "cast-probs":
        p = cast.to(tl.float32)
    return tl.sum(p, 1)


@triton.jit
def sink_step(sink, m, factor):
    """(m with a sink, what multiplies the old sums, exp(s - m) beside them, and beside the old m), [M].

    Where s lies so far above m that exp(s - m) might overflow, m moves to it, and so it does in a row without keys. The
    last of the four is no larger than exp(88).
    """
    no_keys = m == float("-inf")
    top = tl.where(no_keys, 0.0, m) * factor
    without_keys = tl.where(sink == float("-inf"), float("-inf"), float("inf"))
    difference = tl.where(no_keys, without_keys, sink - top)
    far = difference > 64.0
    shrink = tl.where(far, tl.exp(-difference), 1.0)
    own = tl.where(far, 1.0, tl.exp(tl.minimum(difference, 64.0)))
    return tl.where(far, sink / factor, m), shrink, own, tl.exp(tl.minimum(difference, 88.0))


@triton.jit
def add_range(acc, product, rescale, R: tl.constexpr):
    """O_bar after one more range, with every rounding of its own."""
    return round_to(
        round_to(acc * rescale[:, None], tl.constexpr(R.accumulator)) + round_to(product, tl.constexpr(R.range_pv)),
        tl.constexpr(R.accumulator),
    )
