"""Exact integer arithmetic on finite floating-point numbers, and correct rounding of what it encloses.

Every finite float is an integer times a power of two, so dot products of floats are integers too, once a common power
of two is taken out; nothing here rounds before ``Enclosure.rounded`` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attn_diag.reference.rounding import FloatFormat

# An int64 holds sums below 2**63; one bit is left for the sign.
_WORD_BITS = 62
# Below this many bits a limb, Python's own integers are faster.
_MIN_LIMB_BITS = 8


@dataclass(frozen=True)
class IntegerMatrix:
    """``array`` [n, d] of integers (int64, or Python's in an object array) times 2**``exponent``."""

    array: npt.NDArray[np.generic]
    exponent: int
    bits: int

    @classmethod
    def of(cls, values: Tensor) -> IntegerMatrix:
        """The exact integers of a float64 tensor [n, d]. Raises ValueError for NaN or Inf."""
        numbers = values.detach().cpu().numpy()
        if not np.isfinite(numbers).all():
            raise ValueError("the oracle needs finite inputs, got NaN or Inf; leave their rows and keys out first")
        fraction, exponent = np.frexp(numbers)
        mantissa = (fraction * 2.0**53).astype(np.int64)
        lowest_bit = np.frexp((mantissa & -mantissa).astype(np.float64))[1] - 1
        used = mantissa != 0
        if not used.any():
            return cls(np.zeros(numbers.shape, dtype=np.int64), 0, 1)
        common = int((exponent - 53 + lowest_bit)[used].min())
        shift = np.where(used, exponent - 53 - common, 0)
        bits = int((exponent - common)[used].max())
        if bits <= _WORD_BITS:
            array = np.where(shift >= 0, mantissa << np.maximum(shift, 0), mantissa >> np.maximum(-shift, 0))
            return cls(array, common, bits)
        pairs = zip(mantissa.ravel().tolist(), shift.ravel().tolist(), strict=True)
        wide = _as_objects([m << s if s >= 0 else m >> -s for m, s in pairs])
        return cls(wide.reshape(numbers.shape), common, bits)

    def rows(self, index: npt.NDArray[np.int64] | slice) -> IntegerMatrix:
        """Some rows of it."""
        return IntegerMatrix(self.array[index], self.exponent, self.bits)

    def with_zeros(self) -> IntegerMatrix:
        """The same with one more row, of zeros."""
        return IntegerMatrix(np.concatenate([self.array, np.zeros_like(self.array, shape=(1, self.array.shape[1]))]),
                             self.exponent, self.bits)  # fmt: skip

    def times_rows(self, weights: Sequence[int], exponent: int) -> IntegerMatrix:
        """The same with row j times ``weights``_j 2**``exponent``."""
        widest = max((w.bit_length() for w in weights), default=0)
        array = self.array.astype(object) * _as_objects(weights)[:, None]
        if self.bits + widest <= _WORD_BITS:
            return IntegerMatrix(array.astype(np.int64), self.exponent + exponent, self.bits + widest)
        return IntegerMatrix(array, self.exponent + exponent, self.bits + widest)

    @property
    def largest(self) -> list[int]:
        """max_j |M_jd| for every column d."""
        return [int(m) for m in np.abs(self.array).max(0)] if len(self.array) else [0] * self.array.shape[1]

    def combine(self, weights: Sequence[int]) -> list[int]:
        """sum_j weights_j M_jd for every column d, exactly. The common exponent is left out."""
        n, d = self.array.shape
        if not n:
            return [0] * d
        limb = _WORD_BITS - self.bits - n.bit_length()
        if self.array.dtype == object or limb < _MIN_LIMB_BITS:
            return [int(x) for x in _as_objects(weights) @ self.array.astype(object)]
        # Weights of any length by limbs that no int64 sum overflows; >> floors, so only the last limb has a sign.
        count = max(1, -(-(max(w.bit_length() for w in weights) + 1) // limb))
        mask = (1 << limb) - 1
        limbs = np.empty((count, n), dtype=np.int64)
        for i in range(count - 1):
            limbs[i] = [(w >> (limb * i)) & mask for w in weights]
        limbs[-1] = [w >> (limb * (count - 1)) for w in weights]
        sums = (limbs @ self.array).tolist()
        return [sum(part[column] << (limb * i) for i, part in enumerate(sums)) for column in range(d)]

    def times(self, vector: IntegerMatrix) -> tuple[list[int], int]:
        """M x for one row vector x [1, d]: integers [n], and their exponent."""
        exponent = self.exponent + vector.exponent
        if self.array.dtype != object and self.bits + vector.bits + self.array.shape[1].bit_length() <= _WORD_BITS:
            return (self.array @ vector.array[0]).tolist(), exponent
        return [int(x) for x in self.array.astype(object) @ vector.array[0].astype(object)], exponent


def _as_objects(values: Sequence[int]) -> npt.NDArray[np.object_]:
    result = np.empty(len(values), dtype=object)
    result[:] = values
    return result


def dyadic(value: float | Fraction) -> tuple[int, int]:
    """(m, e) with value = m 2**e exactly. Raises ValueError for NaN or Inf."""
    if not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {value}")
    numerator, denominator = value.as_integer_ratio()
    return numerator, 1 - denominator.bit_length()


def scaled(mantissa: int, exponent: int) -> Fraction:
    """mantissa 2**exponent as a fraction."""
    return Fraction(mantissa << exponent) if exponent >= 0 else Fraction(mantissa, 1 << -exponent)


def round_dyadic(mantissa: int, exponent: int, fmt: FloatFormat) -> float:
    """mantissa 2**exponent rounded once to ``fmt``, to nearest, ties to even; overflow as the format has it."""
    return round_fraction(mantissa << max(exponent, 0), 1 << max(-exponent, 0), fmt)


def round_fraction(numerator: int, denominator: int, fmt: FloatFormat) -> float:
    """numerator / denominator (> 0) rounded once to ``fmt``, to nearest, ties to even."""
    if not numerator:
        return 0.0
    sign, n, d = (-1.0, -numerator, denominator) if numerator < 0 else (1.0, numerator, denominator)
    top = n.bit_length() - d.bit_length()  # floor(log2(n / d)), or one more
    if (n << max(-top, 0)) < (d << max(top, 0)):
        top -= 1
    quantum = max(top, fmt.min_exponent) - fmt.precision
    n, d = n << max(-quantum, 0), d << max(quantum, 0)
    kept, rest = divmod(n, d)
    kept += 2 * rest > d or (2 * rest == d and kept & 1)
    limit = fmt.largest if fmt.saturates else math.inf
    if kept.bit_length() + quantum > math.frexp(fmt.largest)[1]:
        return sign * limit
    value = math.ldexp(kept, quantum)
    return sign * (value if value <= fmt.largest else limit)


@dataclass(frozen=True)
class Enclosure:
    """A real number known to lie in [low, high] 2**exponent; integers, so the enclosure itself is exact."""

    low: int
    high: int
    exponent: int

    def rounded(self, fmt: FloatFormat) -> float | None:
        """The number correctly rounded to ``fmt``; None where the two ends round apart (ask with more bits)."""
        low = round_dyadic(self.low, self.exponent, fmt)
        return low if low == round_dyadic(self.high, self.exponent, fmt) else None

    def times(self, factor: int, exponent: int = 0) -> Enclosure:
        """The number times factor 2**exponent."""
        ends = self.low * factor, self.high * factor
        return Enclosure(min(ends), max(ends), self.exponent + exponent)

    def distance(self, value: float) -> tuple[float, float]:
        """Bounds of |value - number|: at least, at most. Each is rounded by at most one unit of float64."""
        m, e = dyadic(value)
        exponent = min(e, self.exponent)
        x = m << (e - exponent)
        low, high = (end << (self.exponent - exponent) for end in (self.low, self.high))
        nearest = max(low - x, x - high, 0)
        return _to_float(nearest, exponent), _to_float(max(x - low, high - x), exponent)


def _to_float(mantissa: int, exponent: int) -> float:
    excess = max(mantissa.bit_length() - 64, 0)
    try:
        return math.ldexp(float(mantissa >> excess), exponent + excess)
    except OverflowError:
        return math.inf


def quotient(numerator: tuple[int, int], denominator: tuple[int, int], bits: int) -> tuple[int, int]:
    """[low, high] / [low, high] in units of 2**-bits, rounded outwards; the denominator is positive."""
    (low, high), (small, large) = numerator, denominator
    below = (low << bits) // (large if low >= 0 else small)
    above = -((-high << bits) // (small if high >= 0 else large))
    return below, above
