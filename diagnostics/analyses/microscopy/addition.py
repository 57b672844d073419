"""One rounding of a sum to a binary format, bit by bit, in exact rational arithmetic.

    x = sum of the terms = (-1)^s * n * spacing        spacing = 2^(e - p)    e = exponent of x, p mantissa bits
    n = kept + 0.g r s...                              guard, round, and sticky = OR of every later bit
    nearest-even: up in magnitude where g (r or s or kept odd)

A *tie* is g = 1, r = s = 0: x lies half-way between two neighbours and goes to the even one. The mechanism of Qiu &
Yao (arXiv 2510.04212, section 3.3): the main terms tie, and a residual far below the format's spacing decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from attn_diag.captures.sources import FLOATS
from attn_diag.errors import InputError
from attn_diag.reference import FloatFormat, format_of
from attn_diag.results.microscope import Addition, Counterfactual, Direction, Operand

_FORMATS = {fmt.name: fmt for fmt in map(format_of, FLOATS)}
# Bits shown below the last one kept, and above the sum's leading one: BF16 products have 16 bits.
_TAIL_BITS = 16
_HEAD_BITS = 24


@dataclass(frozen=True)
class _Rounding:
    """|x| = (kept + fraction) * spacing and its nearest-even value, signed."""

    exponent: int
    spacing: Fraction
    kept: int
    fraction: Fraction
    rounded: float
    toward_zero: float
    away: float

    @property
    def tie_point(self) -> Fraction:
        return (self.kept + Fraction(1, 2)) * self.spacing

    @property
    def tie(self) -> bool:
        return self.fraction == Fraction(1, 2)


def examine_addition(
    terms: Sequence[float | Fraction],
    fmt: FloatFormat | str = "bf16",
    *,
    residual: Sequence[bool] | None = None,
    labels: Sequence[str] | None = None,
) -> Addition:
    """Examine the rounding of the exact sum of ``terms`` to ``fmt``, to nearest, ties to even.

        >>> a = examine_addition([-2.40625, -2.296875, -0.0008654594421386719])
        >>> a.tie, a.rounded, a.error, a.without_residual.rounded
        ('broken', -4.71875, -0.014759540557861328, -4.6875)

    Args:
        terms: Finite numbers, each taken as exact.
        fmt: A FloatFormat or one of bf16, fp16, fp32, fp64, e4m3, e5m2.
        residual: For every term, whether it belongs to the residual; None: those smaller in magnitude than half the
            spacing at the sum, unless that were all of them.
        labels: A name for every term.

    Raises:
        InputError: No terms, terms that are not finite, a sum beyond float64, an unknown format, or lists of different
            lengths.
    """
    found = _format(fmt)
    if not terms or not all(map(math.isfinite, terms)):
        raise InputError(f"terms must be one or more finite numbers, got {list(terms)}")
    for name, given in (("residual", residual), ("labels", labels)):
        if given is not None and len(given) != len(terms):
            raise InputError(f"{name} must have one entry for each of the {len(terms)} terms, got {len(given)}")
    exact_terms = [Fraction(term) for term in terms]
    total = sum(exact_terms, Fraction(0))
    if abs(total) > Fraction(torch.finfo(torch.float64).max):
        raise InputError("the exact sum of the terms lies beyond the range of float64; scale them down")
    rounding = _round(total, found)
    small = [abs(x) < rounding.spacing / 2 for x in exact_terms] if residual is None else [bool(r) for r in residual]
    if all(small):
        small = [False] * len(terms)
    main = sum((x for x, is_small in zip(exact_terms, small, strict=True) if not is_small), Fraction(0))
    alone = _round(main, found) if any(small) else None
    names = list(labels) if labels is not None else [f"term {i}" for i in range(1, len(terms) + 1)]
    digits = _Digits(rounding, found, [*exact_terms, total])
    operands = tuple(
        _operand(name, x, digits, found, residual=is_small)
        for name, x, is_small in zip(names, exact_terms, small, strict=True)
    )
    # The main terms alone tie, and the whole sum lies between the same neighbours.
    between = rounding.toward_zero, rounding.away
    broken = alone is not None and alone.tie and (alone.toward_zero, alone.away) == between
    exponents = [operand.exponent for operand in operands if operand.exponent is not None]
    below = rounding.fraction * 4
    return Addition(
        format=found.name,
        operands=operands,
        exact=float(total),
        exact_aligned=digits.of(total),
        exponent=rounding.exponent,
        carry=_exponent(total, found) - max(exponents) if exponents and total else 0,
        kept=_kept_bits(rounding, found),
        guard=int(below) >> 1,
        round_bit=int(below) & 1,
        sticky=int(below % 1 != 0),
        tie="exact" if rounding.tie else "broken" if broken else "none",
        from_tie=float(total - rounding.tie_point * (-1 if total < 0 else 1)),
        residual=float(total - main),
        toward_zero=rounding.toward_zero,
        away=rounding.away,
        rounded=rounding.rounded,
        direction=_direction(total, rounding),
        error=_error(rounding.rounded, total),
        ulp=float(rounding.spacing),
        without_residual=None
        if alone is None
        else Counterfactual(float(main), alone.tie, alone.rounded, _error(alone.rounded, main)),
    )


def _format(fmt: FloatFormat | str) -> FloatFormat:
    if isinstance(fmt, FloatFormat):
        return fmt
    if fmt not in _FORMATS:
        raise InputError(f"no format {fmt!r}; known: {', '.join(_FORMATS)}, or give a FloatFormat")
    return _FORMATS[fmt]


def _exponent(x: Fraction, fmt: FloatFormat) -> int:
    """floor(log2 |x|); that of the smallest normal number for 0."""
    if not x:
        return fmt.min_exponent
    top, bottom = abs(x.numerator), x.denominator
    guess = top.bit_length() - bottom.bit_length()
    return guess if Fraction(top, bottom) >= Fraction(2) ** guess else guess - 1


def _round(x: Fraction, fmt: FloatFormat) -> _Rounding:
    exponent = max(_exponent(x, fmt), fmt.min_exponent)
    spacing = Fraction(2) ** (exponent - fmt.precision)
    kept, fraction = divmod(abs(x) / spacing, 1)
    up = fraction > Fraction(1, 2) or (fraction == Fraction(1, 2) and kept % 2 == 1)
    sign = -1 if x < 0 else 1

    def value(n: int) -> float:
        magnitude = n * spacing
        if magnitude > Fraction(fmt.largest):
            return sign * (fmt.largest if fmt.saturates else math.inf)
        return sign * float(magnitude)

    away = value(kept + 1) if fraction else value(kept)
    return _Rounding(exponent, spacing, kept, fraction, value(kept + up), value(kept), away)


def _direction(x: Fraction, rounding: _Rounding) -> Direction:
    if not rounding.fraction and math.isfinite(rounding.rounded) and Fraction(rounding.rounded) == x:
        return "exact"
    return "toward zero" if abs(rounding.rounded) <= abs(x) else "away from zero"


def _error(rounded: float, exact: Fraction) -> float:
    return float(Fraction(rounded) - exact) if math.isfinite(rounded) else rounded


def _kept_bits(rounding: _Rounding, fmt: FloatFormat) -> str:
    digits = f"{rounding.kept:0{fmt.precision + 1}b}"
    return f"{digits[0]}.{digits[1:]}"


def _operand(label: str, x: Fraction, digits: _Digits, fmt: FloatFormat, *, residual: bool) -> Operand:
    exponent = _exponent(x, fmt) if x else None
    bits = "0"
    if exponent is not None:
        # Products of powers of two end somewhere; a quotient's first 53 bits do.
        scaled = abs(x) / Fraction(2) ** exponent * 2**52
        text = f"{int(scaled):b}".rstrip("0")
        bits = f"{text[0]}.{text[1:] or '0'}"
    return Operand(label, float(x), x < 0, exponent, bits, digits.of(x), residual)


class _Digits:
    """Digits in units of 2^(the sum's exponent), as wide as the largest term, a bar behind the format's last bit."""

    def __init__(self, rounding: _Rounding, fmt: FloatFormat, terms: list[Fraction]) -> None:
        self._spacing, self._places = rounding.spacing, fmt.precision
        top = max((_exponent(x, fmt) for x in terms if x), default=rounding.exponent)
        if not terms[-1]:  # the terms cancel to 0: there is no exponent but theirs
            self._spacing = Fraction(2) ** (top - fmt.precision)
            self._head = 1
        else:
            self._head = min(max(top - rounding.exponent, 0), _HEAD_BITS) + 1

    def of(self, x: Fraction) -> str:
        scaled = abs(x) / self._spacing * 2**_TAIL_BITS
        text = f"{int(scaled):0{self._head + self._places + _TAIL_BITS}b}"
        kept, tail = text[:-_TAIL_BITS], text[-_TAIL_BITS:]
        whole, places = kept[: len(kept) - self._places], kept[len(kept) - self._places :]
        start = "…" if len(whole) > self._head else ""
        return f"{start}{whole[-self._head :]}.{places}|{tail}{'+' if scaled % 1 else ''}"
