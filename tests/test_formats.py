"""Rounding to a site's format against casts of torch and ml_dtypes, and against rationals; its limits and its names.

test_rounding_table.py judges the same rounding, with the two others, in bulk and in the random modes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from builders import hard_fp32, some
from command_line import python
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn_diag.kernels.formats import Mode, NumberFormat, base, parse, round_to, rounds_monotonically, site_seed
from attn_diag.reference.rounding import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, FP16, FP32, FloatFormat, round_nearest_even

NAMES = ["bf16", "fp16", "tf32", "e4m3", "e5m2", "e8m11", "e2m1", "e2m2", "e2m3", "e3m2", "e3m4", "e8m23"]
DIRECTED = [Mode.NEAREST_EVEN, Mode.TOWARD_ZERO, Mode.UP, Mode.DOWN]
DRAWN = [Mode.STOCHASTIC, Mode.RANDOM_SIGN]
by_name = pytest.mark.parametrize("name", NAMES)
by_mode = pytest.mark.parametrize("mode", DIRECTED)


def number_format(name: str) -> NumberFormat:
    rounding = some(parse(name))
    return rounding.format


def float_format(name: str) -> FloatFormat:
    """The same format, as the reference has it."""
    fmt = number_format(name)
    return FloatFormat(name, fmt.mantissa_bits, fmt.min_exponent, fmt.largest, fmt.finite)


def spacing(x: float, fmt: NumberFormat) -> Fraction:
    exponent = max(math.frexp(x)[1] - 1, fmt.min_exponent)
    return Fraction(2) ** (exponent - fmt.mantissa_bits)


def oracle(x: float, fmt: NumberFormat, mode: Mode) -> float:
    """The specification in exact arithmetic (IEEE 754-2019, 4.3): a multiple of the spacing, then the overflow."""
    if math.isnan(x) or math.isinf(x) or x == 0:
        return x
    quantum = spacing(x, fmt)
    steps = Fraction(x) / quantum
    rounders: dict[Mode, Callable[[Fraction], int]] = {
        Mode.NEAREST_EVEN: round,
        Mode.TOWARD_ZERO: math.trunc,
        Mode.UP: math.ceil,
        Mode.DOWN: math.floor,
    }
    value = rounders[mode](steps) * quantum
    if abs(value) > Fraction(fmt.largest):
        inward = {Mode.NEAREST_EVEN: False, Mode.TOWARD_ZERO: True, Mode.UP: x < 0, Mode.DOWN: x > 0}[mode]
        return math.copysign(fmt.largest if fmt.finite or inward else math.inf, x)
    return math.copysign(float(value), x)


def rounded(x: float, text: str, dtype: torch.dtype = torch.float64) -> float:
    return float(round_to(torch.tensor([x], dtype=dtype), parse(text))[0])


def bits_equal(got: Tensor, expected: Tensor) -> bool:
    """The same numbers with the same signs of zero; any NaN equals any other."""
    number = ~expected.isnan()
    same = torch.equal(got.isnan(), expected.isnan()) and torch.equal(got[number], expected[number])
    return same and torch.equal(got[number].signbit(), expected[number].signbit())


def assert_same(got: float, expected: float, x: float) -> None:
    signs = math.copysign(1.0, got) == math.copysign(1.0, expected)
    same = (math.isnan(got) and math.isnan(expected)) or (got == expected and signs)
    assert same, f"{x!r} ({float.hex(x)}) became {got!r}, not {expected!r}"


def near_ties(fmt: NumberFormat) -> st.SearchStrategy[float]:
    """Numbers of the format and midpoints of two, moved by at most one float64 spacing."""

    def value(exponent: int, half_steps: int, push: float, sign: float) -> float:
        x = half_steps * 2.0 ** (max(exponent, fmt.min_exponent) - fmt.mantissa_bits - 1)
        return sign * (math.nextafter(x, push) if push >= 0 else x)

    top = math.frexp(fmt.largest)[1] - 1
    return st.builds(
        value,
        st.integers(fmt.min_exponent - 1, top),
        st.integers(0, 2 ** (fmt.mantissa_bits + 2)),
        st.sampled_from([-1.0, 0.0, math.inf]),
        st.sampled_from([1.0, -1.0]),
    )


def hard_float64(fmt: NumberFormat) -> st.SearchStrategy[list[float]]:
    """Near ties and random bit patterns, NaN and infinities among them."""
    bits = st.integers(0, 2**64 - 1).map(lambda b: float(np.uint64(b).view(np.float64)))
    return st.lists(near_ties(fmt) | bits, min_size=10, max_size=20)


class TestNearestEven:
    @pytest.mark.parametrize(
        ("name", "cast"),
        [
            ("bf16", ml_dtypes.bfloat16),
            ("fp16", np.float16),
            ("e5m2", ml_dtypes.float8_e5m2),
            ("e8m7", ml_dtypes.bfloat16),
            ("e3m4", ml_dtypes.float8_e3m4),
            ("e8m23", np.float32),
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_fp32_values_agree_with_a_cast(self, name: str, cast: type, dtype: torch.dtype) -> None:
        values = hard_fp32()
        with np.errstate(all="ignore"):
            expected = torch.from_numpy(values.astype(cast).astype(np.float32)).to(dtype)
        got = round_to(torch.from_numpy(values).to(dtype), parse(name))
        assert got.dtype == dtype
        assert bits_equal(got, expected)


class TestDirected:
    @by_name
    @settings(max_examples=60, derandomize=True, deadline=None)
    @given(data=st.data())
    def test_float64_agrees_with_exact_arithmetic(self, name: str, data: st.DataObject) -> None:
        """And so does the reference's rounding, which shares no code with this one."""
        fmt = number_format(name)
        x = data.draw(hard_float64(fmt))
        values = torch.tensor(x, dtype=torch.float64)
        found = [(mode, round_to(values, parse(f"{name}:{mode}"))) for mode in DIRECTED]
        found.append((Mode.NEAREST_EVEN, round_nearest_even(values, float_format(name))))
        for mode, got in found:
            for value, result in zip(x, got.tolist(), strict=True):
                assert_same(result, oracle(value, fmt, mode), value)

    @by_mode
    @by_name
    def test_fp32_and_float64_inputs_agree(self, name: str, mode: Mode) -> None:
        values = torch.from_numpy(hard_fp32()[::23].copy())
        rounding = parse(f"{name}:{mode}")
        assert bits_equal(round_to(values, rounding).double(), round_to(values.double(), rounding))

    def test_guard_double_rounding_would_be_seen(self) -> None:
        """The oracle tells a float64 value next to a tie from its fp32 neighbour."""
        x = 1 + 2.0**-8 + 2.0**-40
        assert oracle(x, number_format("bf16"), Mode.NEAREST_EVEN) != oracle(
            float(np.float32(x)), number_format("bf16"), Mode.NEAREST_EVEN
        )


class TestLimits:
    @by_mode
    @by_name
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_overflow(self, name: str, mode: Mode, dtype: torch.dtype) -> None:
        fmt = number_format(name)
        # The first number past the largest: half a spacing is a tie, which nearest-even sends away from it.
        step = float(spacing(fmt.largest, fmt))
        big = [fmt.largest + step / 4, fmt.largest + step / 2, 3e38, torch.finfo(dtype).max]
        for x in [float(torch.tensor(v, dtype=dtype)) for v in big]:
            for value in (x, -x):
                assert_same(rounded(value, f"{name}:{mode}", dtype), oracle(value, fmt, mode), value)

    @by_mode
    @by_name
    @pytest.mark.parametrize("x", [0.0, -0.0, math.inf, -math.inf, math.nan], ids=str)
    def test_special_values_stay(self, name: str, mode: Mode, x: float) -> None:
        """-inf marks masked scores: it stays -inf in E4M3 too."""
        for dtype in (torch.float32, torch.float64):
            assert_same(rounded(x, f"{name}:{mode}", dtype), x, x)

    @by_name
    def test_what_underflows_keeps_its_sign(self, name: str) -> None:
        fmt = number_format(name)
        tiny, least = 1e-300, 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
        assert math.copysign(1.0, rounded(-tiny, name)) == -1.0
        assert rounded(-tiny, name) == 0.0
        assert rounded(tiny, f"{name}:up") == least
        assert rounded(-tiny, f"{name}:down") == -least
        assert_same(rounded(-tiny, f"{name}:up"), -0.0, -tiny)

    @pytest.mark.parametrize("mode", list(Mode))
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_empty_tensors(self, mode: Mode, dtype: torch.dtype) -> None:
        assert round_to(torch.empty(0, 3, dtype=dtype), parse(f"e4m3:{mode}")).shape == (0, 3)

    def test_the_references_formats_are_these(self) -> None:
        for name, fmt in {
            "bf16": BF16,
            "fp16": FP16,
            "e8m23": FP32,
            "e4m3": E4M3,
            "e5m2": E5M2,
            "e3m2": E3M2,
            "e2m3": E2M3,
            "e2m1": E2M1,
        }.items():
            assert replace(float_format(name), name=fmt.name) == fmt

    @pytest.mark.parametrize(
        ("name", "largest", "least"),
        [("bf16", 3.3895313892515355e38, 2.0**-133), ("fp16", 65504.0, 2.0**-24), ("e4m3", 448.0, 2.0**-9),
         ("e5m2", 57344.0, 2.0**-16), ("tf32", 3.4011621342146535e38, 2.0**-136), ("e2m1", 6.0, 0.5),
         ("e2m3", 7.5, 0.125), ("e3m2", 28.0, 2.0**-4), ("e2m2", 3.5, 0.25)],
    )  # fmt: skip
    def test_extremes(self, name: str, largest: float, least: float) -> None:
        fmt = number_format(name)
        assert fmt.largest == largest
        assert 2.0 ** (fmt.min_exponent - fmt.mantissa_bits) == least


class TestDrawn:
    """Random modes, at the ends of the range."""

    @pytest.mark.parametrize("mode", DRAWN)
    @pytest.mark.parametrize(("name", "limit"), [("bf16", math.inf), ("e4m3", 448.0)])
    def test_overflow(self, name: str, limit: float, mode: Mode) -> None:
        """No error's sign is turned there: 2 * 1e39 - 448 would be neither rounded nor near."""
        x = torch.tensor([1e39, -1e39], dtype=torch.float64).repeat_interleave(20)
        got = round_to(x, parse(f"{name}:{mode}"))
        assert bits_equal(got, torch.full_like(x, limit).copysign(x))

    @pytest.mark.parametrize("mode", DRAWN)
    def test_what_underflows_keeps_its_sign(self, mode: Mode) -> None:
        x = torch.tensor([1e-40, -1e-40], dtype=torch.float64).repeat_interleave(50)
        assert torch.equal(round_to(x, parse(f"fp16:{mode}")).signbit(), x.signbit())


class TestSites:
    @pytest.mark.parametrize(
        "text", ["", "bf17", "bf16:", "bf16:sideways", "fp32:up", "fp64:toward-zero", "e9m3", "e1m3", "e8m24", "e8m0",
                 "e4", "BF16", "bf16:up:down", "e4m3 ", "e008m7"],
    )  # fmt: skip
    def test_errors_name_what_is_allowed(self, text: str) -> None:
        with pytest.raises(
            ValueError,
            match=r"bf16, fp16, tf32, e4m3, e5m2, e3m2, e2m3, e2m1, fp32, fp64 or e<2\.\.8>m<1\.\.23>.*stochastic",
        ) as error:
            parse(text)
        assert repr(text) in str(error.value)

    @pytest.mark.parametrize("name", ["fp32", "fp64"])
    def test_the_arithmetics_own_precision_rounds_nothing(self, name: str) -> None:
        x = torch.randn(5, dtype=torch.float64)
        assert parse(name) is None
        assert round_to(x, parse(name)) is x

    def test_generic_names_are_the_named_formats(self) -> None:
        assert parse("e8m7") == parse("bf16")
        assert parse("e5m10:up") == parse("fp16:up")
        assert parse("e8m10") == parse("tf32")
        # OFP8's E4M3 has no infinity; "e4m3" means that one.
        assert number_format("e4m3").finite

    def test_monotonic_modes(self) -> None:
        assert [m for m in Mode if not rounds_monotonically(f"bf16:{m}")] == DRAWN
        assert rounds_monotonically("fp32")
        assert base("e8m11:up") == "e8m11"

    @by_mode
    def test_monotonic_modes_are(self, mode: Mode) -> None:
        x = torch.from_numpy(hard_fp32())
        x = x[~x.isnan()].sort().values
        got = round_to(x, parse(f"e5m2:{mode}"))
        assert (got[1:] >= got[:-1]).all()

    def test_seeds_do_not_depend_on_the_process(self) -> None:
        code = "from attn_diag.kernels.formats import site_seed; print(site_seed(7, 'probs', 128, 64), hash('probs'))"
        seed, hashed = map(int, python("-c", code, PYTHONHASHSEED="1").out.split())
        assert seed == site_seed(7, "probs", 128, 64)
        if os.environ.get("PYTHONHASHSEED") != "1":
            assert hashed != hash("probs"), "hashes no longer tell processes apart"

    def test_seeds_tell_places_apart(self) -> None:
        places = [(s, site, r, k) for s in range(3) for site in ("o", "probs") for r in range(9) for k in range(9)]
        assert len({site_seed(*place) for place in places}) == len(places)
