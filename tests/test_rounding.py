"""Correct rounding against an exact rational oracle; test_rounding_table.py judges it in bulk."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_diag.reference.rounding import BF16, E4M3, E5M2, FP16, FP32, FloatFormat, round_nearest_even, ulp

FORMATS = [BF16, FP16, FP32, E4M3, E5M2]
by_name = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)


def nearest_even(x: float, fmt: FloatFormat) -> float:
    """The specification in exact arithmetic: the nearest multiple of x's spacing, ties to an even multiple."""
    if math.isnan(x) or x == 0 or math.isinf(x):
        return x
    exponent = max(math.frexp(x)[1] - 1, fmt.min_exponent)
    spacing = Fraction(2) ** (exponent - fmt.precision)
    value = round(Fraction(x) / spacing) * spacing  # Fraction rounds ties to even
    if abs(value) > Fraction(fmt.largest):
        return math.copysign(fmt.largest if fmt.saturates else math.inf, x)
    return math.copysign(float(value), x)


def rounded(x: float, fmt: FloatFormat) -> float:
    return float(round_nearest_even(torch.tensor([x], dtype=torch.float64), fmt)[0])


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


@by_name
@settings(max_examples=200, derandomize=True, deadline=None)
@given(bits=st.integers(0, 2**64 - 1))
def test_any_float64(fmt: FloatFormat, bits: int) -> None:
    x = float(np.uint64(bits).view(np.float64))
    assert same(rounded(x, fmt), nearest_even(x, fmt)), f"{x!r} ({float.hex(x)})"


@by_name
@settings(max_examples=200, derandomize=True, deadline=None)
@given(data=st.data())
def test_near_ties(fmt: FloatFormat, data: st.DataObject) -> None:
    """Midpoints of the format's neighbours, moved by at most one float64 spacing, where double rounding errs."""
    exponent = data.draw(st.integers(fmt.min_exponent - 2, math.frexp(fmt.largest)[1] - 1))
    spacing = 2.0 ** (max(exponent, fmt.min_exponent) - fmt.precision)
    step = data.draw(st.integers(0, 2 ** (fmt.precision + 1)))
    x = (step + 0.5) * spacing
    x = data.draw(st.sampled_from([x, math.nextafter(x, math.inf), math.nextafter(x, 0.0)]))
    x = math.copysign(x, data.draw(st.sampled_from([1.0, -1.0])))
    assert same(rounded(x, fmt), nearest_even(x, fmt)), f"{x!r} ({float.hex(x)})"


def test_double_rounding_is_avoided() -> None:
    x = 1 + 2.0**-8 + 2.0**-40
    assert rounded(x, BF16) == 1.0078125
    via_float32 = torch.tensor(x, dtype=torch.float64).float().bfloat16().double()
    assert float(via_float32) == 1.0, "torch no longer rounds twice; the docstring is out of date"


def test_only_float64_is_taken() -> None:
    with pytest.raises(TypeError, match="float32"):
        round_nearest_even(torch.ones(1), BF16)


@by_name
def test_ulp_is_the_distance_to_the_next_number(fmt: FloatFormat) -> None:
    x = torch.tensor([1.0, 1.5, -2.0, 0.0, fmt.smallest_normal / 8], dtype=torch.float64)
    unit = 2.0**-fmt.precision
    tiny = fmt.smallest_normal * unit
    assert ulp(x, fmt).tolist() == [unit, unit, 2 * unit, tiny, tiny]


def test_threshold_of_rounding_to_one() -> None:
    assert pytest.approx(-0.001955, abs=1e-6) == BF16.rounds_to_one
    at = math.exp(BF16.rounds_to_one)
    assert rounded(at + 1e-12, BF16) == 1.0
    assert rounded(at - 1e-12, BF16) < 1.0
