"""Rounding of numpy arrays by integer operations on their bits, after the rules of ``kernels.formats``.

Nothing in common with the torch rounding there, which lets float64 additions and divisions do the work. Write a
magnitude as significand * 2**e, an integer of 24 (fp32) or 53 (float64) bits. The format keeps its upper bits:

    whole, rest = significand >> dropped, the ``dropped`` bits below
    steps = whole + (0 or 1, by rest, mode and sign)

and steps << dropped, put back under the exponent, carries into it by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attn_diag.kernels.formats import Mode, NumberFormat, Rounding

Floats = npt.NDArray[np.floating[Any]]
Bits = npt.NDArray[np.unsignedinteger[Any]]
Flags = npt.NDArray[np.bool_]

_BLOCK = 1 << 15  # elements at a time: what is in work stays in the cache


@dataclass(frozen=True)
class _Source:
    """How the input's own format lays out its bits."""

    dtype: type[np.floating[Any]]
    word: type[np.unsignedinteger[Any]]
    sign: int
    mantissa_bits: int
    bias: int

    def bits(self, value: float) -> int:
        """The pattern of a number that the format holds exactly."""
        return int(self.dtype(value).view(self.word))


_SOURCES = {
    np.dtype(np.float32): _Source(np.float32, np.uint32, 1 << 31, 23, 127),
    np.dtype(np.float64): _Source(np.float64, np.uint64, 1 << 63, 52, 1023),
}


def round_array(x: Floats, rounding: Rounding | None, seed: int = 0) -> Floats:
    """``x`` (fp32 or float64, any shape) rounded once, in ``x``'s own dtype; None changes nothing.

    The rules are those of ``kernels.formats``. Random modes draw 53 bits an element from numpy's PCG64, started by
    ``seed``, in the order of the elements; they are not the draws of the torch and the Triton rounding. Raises
    TypeError for any other dtype.
    """
    source = _SOURCES.get(x.dtype)
    if source is None:
        raise TypeError(f"round_array expects fp32 or float64, got {x.dtype}; convert it first")
    if rounding is None:
        return x
    generator = np.random.default_rng(seed)
    flat = np.ascontiguousarray(x).reshape(-1)
    rounded = np.empty_like(flat)
    for start in range(0, flat.size, _BLOCK):
        here = slice(start, start + _BLOCK)
        rounded[here] = _round_block(flat[here], rounding, source, generator)
    return rounded.reshape(x.shape)


def _round_block(x: Floats, rounding: Rounding, source: _Source, generator: np.random.Generator) -> Floats:
    fmt, mode, word, width = rounding.format, rounding.mode, source.word, source.mantissa_bits
    bits = x.view(word)
    magnitude = bits & word(source.sign - 1)
    negative = bits >= word(source.sign)
    significand = magnitude & word((1 << width) - 1)
    significand |= np.minimum(magnitude >> word(width), word(1)) << word(width)
    shift = _dropped_bits(magnitude, fmt, source)
    # From width + 2 on, less than half the format's smallest number is there, in any case: shift no further.
    dropped = np.minimum(shift, word(width + 2))
    whole = significand >> dropped
    rest = significand ^ (whole << dropped)
    draws = generator.random(x.shape) if mode in (Mode.STOCHASTIC, Mode.RANDOM_SIGN) else None

    away: Flags
    if draws is not None and mode is Mode.STOCHASTIC:
        away = draws < np.ldexp(rest.astype(np.float64), -shift.astype(np.int32))
    else:
        away = _goes_away_from_zero(mode, negative, whole, rest, dropped)
    steps = whole + away
    rounded = magnitude - significand + (steps << dropped)
    rounded *= steps != 0
    if dropped.max() == width + 2:
        tiny = word(source.bits(2.0 ** (fmt.min_exponent - fmt.mantissa_bits)))
        rounded = np.where(dropped == word(width + 2), tiny * away, rounded)
    inside = rounded <= word(source.bits(fmt.largest))
    if not inside.all():  # as for infinities and NaN
        rounded = _limited(rounded, magnitude, _overflow_stays(fmt, mode, negative), fmt, source)
    result: Floats = (rounded | (bits & word(source.sign))).view(source.dtype)
    if draws is None or mode is not Mode.RANDOM_SIGN:
        return result
    flipped = (draws < 0.5) & inside
    with np.errstate(all="ignore"):
        # Exact: like x, both differences are multiples of x's last place, and lie in its binade.
        return np.where(flipped, np.copysign(x - (result - x), x), result)


def _dropped_bits(magnitude: Bits, fmt: NumberFormat, source: _Source) -> Bits:
    """How many low bits of the significand the format has no room for: more, where its numbers are subnormal.

    One number, where it is the same for all: shifts by one number are several times as fast.
    """
    word, width = source.word, source.word(source.mantissa_bits)
    first_normal = word(fmt.min_exponent + source.bias)

    def count(magnitude: Bits) -> Bits:
        field = np.clip(magnitude >> width, word(1), first_normal)
        return np.asarray(first_normal - field + (width - word(fmt.mantissa_bits)))

    least = count(magnitude.max(keepdims=True))
    return least if least == count(magnitude.min(keepdims=True)) else count(magnitude)


def _goes_away_from_zero(mode: Mode, negative: Flags, whole: Bits, rest: Bits, dropped: Bits) -> Flags:
    """Whether the magnitude takes one more step, in the modes that do not draw it."""
    one = whole.dtype.type(1)
    if mode in (Mode.NEAREST_EVEN, Mode.RANDOM_SIGN):
        # More than half a step, or half of one and odd. (A rest is less than a step, so that twice it and 1 fit.)
        beyond: Flags = (rest << one) + (whole & one) > (one << dropped)
        return beyond
    if mode is Mode.TOWARD_ZERO:
        return np.zeros(whole.shape, np.bool_)
    inexact: Flags = rest != 0
    return inexact & (negative if mode is Mode.DOWN else ~negative)


def _overflow_stays(fmt: NumberFormat, mode: Mode, negative: Flags) -> Flags:
    """Where too large a magnitude becomes the largest number, not infinity."""
    if fmt.finite or mode is Mode.TOWARD_ZERO:
        return np.ones(negative.shape, np.bool_)
    if mode in (Mode.UP, Mode.DOWN):
        return negative if mode is Mode.UP else ~negative
    return np.zeros(negative.shape, np.bool_)


def _limited(rounded: Bits, magnitude: Bits, stays: Flags, fmt: NumberFormat, source: _Source) -> Bits:
    """Too large magnitudes as ``stays`` wants them; infinities and NaN as they came."""
    largest, infinity = source.word(source.bits(fmt.largest)), source.word(source.bits(np.inf))
    limited = np.where(rounded > largest, np.where(stays, largest, infinity), rounded)
    return np.where(magnitude >= infinity, magnitude, limited)
