"""Rounding inside Triton kernels, by integer operations on the bits of fp32 or float64, after ``kernels.formats``.

No fp32 operation and no cast to a small format touches the value, so that nothing is flushed to zero, and the
interpreter (whose BF16 and FP8 casts are wrong) and a GPU give the same bits. In kernels that only round to nearest,
the hardware's own casts are faster: ``triton_math.round_to``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_diag.kernels.backend import COMPILED, check_backend
from attn_diag.kernels.formats import Rounding
from attn_diag.kernels.triton_interpreter import INTERPRETED


@triton.jit
def round_bits(
    x, draw, EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr, TOP: tl.constexpr, MODE: tl.constexpr
):
    """``x`` (fp32 or float64) rounded to a format; the same dtype. ``draw``: uniform uint32, used by random modes only.

    The format is given as ``kernels.formats.NumberFormat`` has it, TOP and MODE as the values of a ``Top`` and a
    ``Mode``. Stochastic rounding leaves zero with a probability that is cut off to a multiple of 2**-32: fp32 values
    above the format's subnormals get theirs exactly, and no mean is off by 2**-32 of a spacing. random-sign flips where
    ``draw`` is odd.
    """
    # The input's own format.
    WIDE: tl.constexpr = x.dtype.primitive_bitwidth == 64
    WORD: tl.constexpr = tl.uint64 if WIDE else tl.uint32
    WIDTH: tl.constexpr = 52 if WIDE else 23
    BIAS: tl.constexpr = 1023 if WIDE else 127
    SIGN: tl.constexpr = 1 << 63 if WIDE else 1 << 31
    INFINITY: tl.constexpr = (2 * BIAS + 1) << WIDTH
    # Of the format: its smallest normal number's exponent field, its smallest and its largest number's bits.
    FIRST: tl.constexpr = BIAS + 2 - (1 << (EXPONENT_BITS - 1))
    TINY: tl.constexpr = (
        (FIRST - MANTISSA_BITS) << WIDTH if FIRST > MANTISSA_BITS else 1 << (WIDTH + FIRST - MANTISSA_BITS - 1)
    )
    FINITE: tl.constexpr = TOP != "infinity"
    LAST: tl.constexpr = BIAS - 1 + (1 << (EXPONENT_BITS - 1)) + FINITE
    LARGEST: tl.constexpr = (LAST << WIDTH) + (((1 << MANTISSA_BITS) - 1 - (TOP == "nan")) << (WIDTH - MANTISSA_BITS))

    bits = x.to(WORD, bitcast=True)
    one = tl.full(x.shape, 1, WORD)
    sign = bits & SIGN
    magnitude = bits ^ sign
    field = magnitude >> WIDTH
    significand = (magnitude & ((1 << WIDTH) - 1)) | (tl.minimum(field, one) << WIDTH)
    # Low bits of the significand that the format has no room for: more, where its numbers are subnormal.
    shift = FIRST - tl.minimum(tl.maximum(field, one), one * FIRST) + (WIDTH - MANTISSA_BITS)
    # From WIDTH + 2 on, less than half the smallest number is there, in any case: shift no further.
    dropped = tl.minimum(shift, one * (WIDTH + 2))
    whole = significand >> dropped
    rest = significand ^ (whole << dropped)

    if MODE == "toward-zero":
        steps = whole
    else:
        if MODE == "up":
            away = (rest != 0) & (sign == 0)
        elif MODE == "down":
            away = (rest != 0) & (sign != 0)
        elif MODE == "stochastic":
            away = draw < _in_32_bits(rest, shift, WIDTH)
        else:
            # More than half a step, or half of one and odd.
            away = (rest << 1) + (whole & 1) > (one << dropped)
        steps = whole + away.to(WORD)
    rounded = tl.where(dropped == WIDTH + 2, one * TINY, magnitude - significand + (steps << dropped))
    rounded = tl.where(steps == 0, one * 0, rounded)

    over = rounded > LARGEST
    if FINITE or MODE == "toward-zero":
        limit = one * LARGEST
    elif MODE == "up":
        limit = tl.where(sign == 0, one * INFINITY, one * LARGEST)
    elif MODE == "down":
        limit = tl.where(sign == 0, one * LARGEST, one * INFINITY)
    else:
        limit = one * INFINITY
    rounded = tl.where(over, limit, rounded)
    # Infinities and NaN stay.
    rounded = tl.where(magnitude >= INFINITY, magnitude, rounded)
    if MODE == "random-sign":
        # x - error instead of x + error: exact in float64, and a number of x's own dtype.
        flips = ((draw & 1) == 1) & (over == 0)
        wide = tl.where(flips, magnitude, one * 0).to(x.dtype, bitcast=True).to(tl.float64)
        other = 2.0 * wide - tl.where(flips, rounded, one * 0).to(x.dtype, bitcast=True).to(tl.float64)
        rounded = tl.where(flips, other.to(x.dtype).to(WORD, bitcast=True), rounded)
    return (rounded | sign).to(x.dtype, bitcast=True)


@triton.jit
def _in_32_bits(rest, shift, WIDTH: tl.constexpr):
    """rest / 2**shift, below 1, in units of 2**-32, cut off."""
    BITS: tl.constexpr = 64 if WIDTH == 52 else 32
    thirty_two = tl.full(shift.shape, 32, shift.dtype)
    left = thirty_two - tl.minimum(shift, thirty_two)
    right = tl.maximum(shift, thirty_two) - thirty_two
    # A shift by all of a word's bits or more is undefined.
    scaled = tl.where(right < BITS, (rest << left) >> (right & (BITS - 1)), 0)
    return scaled.to(tl.uint32)


@triton.jit
def _round_kernel(
    x_ptr, y_ptr, n, seed,
    EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr, TOP: tl.constexpr, MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    draw = tl.zeros([BLOCK], tl.uint32)
    if MODE == "stochastic" or MODE == "random-sign":
        low = (offs & 0xFFFFFFFF).to(tl.uint32)
        high = (offs >> 32).to(tl.uint32)
        draw, _, _, _ = tl.philox(seed, low, high, low * 0, low * 0)
    tl.store(y_ptr + offs, round_bits(x, draw, EXPONENT_BITS, MANTISSA_BITS, TOP, MODE), mask=offs < n)


def round_tensor(x: Tensor, rounding: Rounding | None, seed: int = 0) -> Tensor:
    """``x`` (fp32 or float64, any shape) rounded once, in its own dtype, by one kernel; None changes nothing.

    On CUDA, or interpreted on the CPU (TRITON_INTERPRET=1). Random modes draw 32 bits of Philox for each element,
    from ``seed`` (its low 64 bits) and the element's place; they are not the draws of ``kernels.formats.round_to``.
    Raises TypeError for another dtype, BackendError where the kernel cannot run on ``x``'s device.
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"round_tensor expects fp32 or float64, got {x.dtype}; convert it first")
    if rounding is None or x.numel() == 0:
        return x
    check_backend(x.device)
    x = x.detach().contiguous()
    y = torch.empty_like(x)
    fmt = rounding.format
    # The interpreter pays for programs, not for elements.
    block = 1 << 16 if INTERPRETED.value else 1024
    _round_kernel[(triton.cdiv(x.numel(), block),)](
        x, y, x.numel(), seed & (2**64 - 1), fmt.exponent_bits, fmt.mantissa_bits, fmt.top, str(rounding.mode),
        BLOCK=block, **COMPILED,
    )  # fmt: skip
    return y
