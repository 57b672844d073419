"""The reference's rounding: what its docstrings say. test_formats.py and test_rounding_table.py judge its values."""

from __future__ import annotations

import math

import pytest
import torch

from attn_diag.kernels.formats import parse, round_to
from attn_diag.reference.rounding import BF16, E4M3, E5M2, FP16, FP32, FloatFormat, round_nearest_even, ulp

FORMATS = [BF16, FP16, FP32, E4M3, E5M2]
by_name = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)


def rounded(x: float, fmt: FloatFormat) -> float:
    return float(round_nearest_even(torch.tensor([x], dtype=torch.float64), fmt)[0])


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


def test_numbers_with_a_gradient_are_rounded_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    x = torch.tensor([1.003, -2.5], dtype=torch.float64, requires_grad=True)
    assert round_nearest_even(x, BF16).tolist() == [1.0, -2.5]
    assert round_to(x, parse("e4m3")).tolist() == [1.0, -2.5]
    assert not recwarn.list
