"""Measuring hardware by probes: what is planted is recovered, and what fits no model is said to fit none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_diag.kernels.accumulation import HOPPER, TensorCore, tensor_core_matmul
from attn_diag.kernels.exponential import exp2_polynomial
from attn_diag.kernels.formats import Mode, parse, round_to
from attn_diag.reference import format_of
from attn_diag.results.hardware import CastProfile, Exp2Profile, SumProfile
from attn_diag.testing.gpu import CASTS, CastFormat, profile_cast, profile_exp2, profile_multiply
from attn_diag.testing.gpu_sums import Operands, profile_sums, rounding_of

CPU = torch.device("cpu")


def planted(core: TensorCore) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda a, b, c: tensor_core_matmul(a, b, c, core).float()


def measure(dot: Callable[[Tensor, Tensor, Tensor], Tensor], operands: Operands = "bf16") -> SumProfile:
    return profile_sums(dot, operands, instruction="planted", device=CPU, sums=4000)


def as_core(found: SumProfile) -> TensorCore:
    assert None not in (found.block, found.fraction_bits, found.alignment, found.result), found
    modes = {mode.value: mode for mode in Mode}
    return TensorCore(
        found.block or 0, found.fraction_bits or 0, modes[str(found.alignment)], modes[str(found.result)],
        found.subnormals == "kept",
    )  # fmt: skip


CORES = {
    "hopper": HOPPER,
    "ampere-like": TensorCore(block=8, fraction_bits=24),
    "volta-like": TensorCore(block=4, fraction_bits=23),
    "wide": TensorCore(block=32, fraction_bits=30),
    "odd length": TensorCore(block=12),
    "nearest sum": replace(HOPPER, result=Mode.NEAREST_EVEN),
    "nearest terms": replace(HOPPER, alignment=Mode.NEAREST_EVEN),
    "terms down": replace(HOPPER, alignment=Mode.DOWN),
    "terms up, sum down": replace(HOPPER, alignment=Mode.UP, result=Mode.DOWN),
    "flushing": replace(HOPPER, subnormals=False),
}


class TestSums:
    @pytest.mark.parametrize("operands", ["bf16", "fp16"])
    @pytest.mark.parametrize("core", CORES.values(), ids=CORES)
    def test_planted_parameters_are_recovered(self, core: TensorCore, operands: Operands) -> None:
        assert list(CORES.values()).count(core) == 1, "an answer would be right for two of them"
        found = measure(planted(core), operands)
        assert as_core(found) == core
        assert (found.fits, found.mismatches, found.products_exact, found.notes) == (True, 0, True, ())
        assert found.sums >= 3500

    def test_fp32_chain_fits_no_model(self) -> None:
        """Fused multiply-adds: one product at a time, and no cut."""

        def chain(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            for k in range(a.shape[1]):
                c = (c.double() + a[:, k, None].double() * b[None, k].double()).float()
            return c

        found = measure(chain)
        assert (found.block, found.fraction_bits, found.fits, found.mismatches) == (1, None, False, None)
        assert "blocks of at least 4" in found.notes[0]

    def test_exact_sums_fit_no_model(self) -> None:
        found = measure(lambda a, b, c: (a.double() @ b.double() + c.double()).float())
        assert not found.fits
        assert found.notes

    def test_an_accumulator_added_afterwards_fits_no_model(self) -> None:
        found = measure(lambda a, b, c: tensor_core_matmul(a, b).float() + c)
        assert (found.block, found.fraction_bits, found.fits) == (16, None, False)
        assert "the running sum keep different numbers of bits" in found.notes[0]

    def test_rounded_products_are_seen(self) -> None:
        def rounded(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            return tensor_core_matmul(round_to(a.double(), parse("e8m4")), b, c).float()

        found = measure(rounded)
        assert (found.products_exact, found.fits) == (False, False)

    def test_a_small_lie_is_found_by_the_random_sums(self) -> None:
        """A unit that passes every probe but normalises subnormal operands."""
        found = measure(lambda a, b, c: tensor_core_matmul(a.double(), b.double(), c, operands="bf16").float(), "fp16")
        assert as_core(found) == HOPPER
        assert not found.fits
        assert found.mismatches is not None
        assert 0 < found.mismatches < found.sums / 4
        assert f"misses {found.mismatches} of {found.sums}" in found.notes[0]

    @pytest.mark.parametrize("normalised", [False, True])
    def test_products_aligned_by_their_own_exponent(self, normalised: bool) -> None:
        def exponents(x: Tensor) -> Tensor:
            return torch.where(x == 0, -2000, torch.frexp(x).exponent)

        def dot(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            a, b, total = a.double(), b.double(), c.double()
            products, sums = a[:, :, None] * b[None], exponents(a)[:, :, None] + exponents(b)[None] - 1
            places = exponents(products) if normalised else sums
            for k in range(0, a.shape[1], 16):
                largest = torch.maximum(places[:, k : k + 16].amax(1), exponents(total)).clamp(min=-300)
                quantum = torch.ldexp(torch.ones_like(total), largest - 26)
                whole = (products[:, k : k + 16] / quantum[:, None]).trunc().sum(1) + (total / quantum).trunc()
                total = round_to(whole * quantum, parse("e8m23:toward-zero"))
            return total.float()

        found = measure(dot)
        seen = any("terms are aligned by the products' own exponents" in note for note in found.notes)
        assert seen == normalised
        assert (found.block, found.fraction_bits) == (16, 25)

    def test_halves_rounded_away_are_named(self) -> None:
        steps = torch.tensor([0.5, -0.5, 1.5, 2.25], dtype=torch.float64)
        assert rounding_of(steps, torch.tensor([1.0, -1.0, 2.0, 2.0]).double()) == "nearest-away"
        assert rounding_of(steps, torch.tensor([0.0, 0.0, 2.0, 2.0]).double()) == "nearest-even"
        assert rounding_of(steps, torch.tensor([1.0, 0.0, 2.0, 2.0]).double()) is None


def exp2_profile(function: Callable[[Tensor], Tensor]) -> Exp2Profile:
    return profile_exp2(function, CPU, per_binade=2**12)


def true_exp2(x: Tensor) -> Tensor:
    return torch.exp2(x.double()).float()


class TestExp2:
    def test_a_rounded_truth_has_half_an_ulp_and_no_bias(self) -> None:
        found = exp2_profile(true_exp2)
        assert 0.49 < found.max_error_ulp <= 0.5
        assert abs(found.mean_error_ulp) < 1e-3, "0.29 / sqrt(2**20) is its standard error"
        assert (found.exact_at_zero, found.exact_at_integers, found.subnormal_results) == (True, True, "kept")
        assert found.not_nearest == 0
        assert found.arguments == 36 * 2**12 + round(2**12 * 62 / 64) + 1

    @pytest.mark.parametrize("offset", [2.0**-22, -(2.0**-23)])
    def test_a_planted_bias_is_measured(self, offset: float) -> None:
        """In ulp, 2**23 y of the result's y in [1, 2); y's mean over uniform arguments is 1 / ln 2."""
        found = exp2_profile(lambda x: (torch.exp2(x.double()) * (1 + offset)).float())
        assert found.mean_relative_error == pytest.approx(offset, rel=1e-3)
        assert found.mean_error_ulp == pytest.approx(offset * 2**23 / math.log(2), rel=1e-2)
        # Rounded by half an ulp more, or by one: just below a power of two the result has left the binade.
        assert abs(offset) * 2**24 - 0.5 <= found.max_error_ulp <= abs(offset) * 2**24 + 1
        assert (found.mean_error_ulp > 0) == (offset > 0)

    def test_the_published_polynomial(self) -> None:
        """FlashAttention-4's degree 3: mean relative error +8.2e-6 (arXiv 2603.05451)."""
        found = exp2_profile(lambda x: exp2_polynomial(x, 3))
        assert found.mean_relative_error == pytest.approx(8.2e-6, rel=0.02)
        assert found.max_error_ulp > 700
        assert found.exact_at_integers

    @pytest.mark.parametrize(
        ("function", "field", "value"),
        [
            (lambda x: torch.where(x == 0, 1 - 2.0**-24, true_exp2(x)), "exact_at_zero", False),
            (lambda x: true_exp2(x) * torch.where(x == -7, 1 + 2.0**-22, 1.0), "exact_at_integers", False),
            (lambda x: torch.where(x < -126, 0.0, true_exp2(x)), "subnormal_results", "flushed"),
            (lambda x: torch.where(x < -135, 0.0, true_exp2(x)), "subnormal_results", None),
            (lambda x: torch.where(x < -126, torch.nan, true_exp2(x)), "subnormal_results", None),
            (lambda x: torch.where(x < -126, 2.0**-130, true_exp2(x)), "subnormal_results", None),
        ],
        ids=["at 0", "at an integer", "flushed", "partly flushed", "NaN", "neither zero nor right"],
    )
    def test_planted_defects(self, function: Callable[[Tensor], Tensor], field: str, value: Any) -> None:
        assert getattr(exp2_profile(function), field) == value
        assert getattr(exp2_profile(true_exp2), field) != value

    def test_a_nan_is_the_worst_error(self) -> None:
        found = exp2_profile(lambda x: torch.where(x == -0.5, torch.nan, true_exp2(x)))
        assert not found.max_error_ulp <= 0.5
        assert found.worst_argument == -0.5


class TestMultiply:
    @pytest.mark.parametrize(
        ("multiply", "expected"),
        [
            (torch.mul, "kept"),
            (lambda x, y: flush(flush(x) * flush(y)), "flushed"),
            (lambda x, y: flush(x) * flush(y), None),
        ],
        ids=["IEEE", "flushing", "operands alone"],
    )
    def test_subnormals(self, multiply: Callable[[Tensor, Tensor], Tensor], expected: str | None) -> None:
        assert profile_multiply(multiply, CPU) == expected


def flush(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 2.0**-126, 0.0, x)


def cast_by(mode: str) -> Callable[[Tensor, torch.dtype], Tensor]:
    names = {dtype: name for name, dtype in CASTS.items()}
    return lambda x, dtype: round_to(x.double(), parse(f"{names[dtype]}:{mode}"))


def half_away(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearest, ties away from zero: as nearest-even, after ties are pushed outwards."""
    wide = x.double()
    return cast_by("nearest-even")(wide * (1 + 2.0**-40), dtype)


def flushing(x: Tensor, dtype: torch.dtype) -> Tensor:
    found = cast_by("nearest-even")(x, dtype)
    return torch.where(found.abs() < format_of(dtype).smallest_normal, 0.0, found)


class TestCasts:
    @pytest.mark.parametrize("fmt", CASTS)
    @pytest.mark.parametrize("mode", ["nearest-even", "toward-zero", "down", "up"])
    def test_planted_roundings_are_recovered(self, fmt: CastFormat, mode: str) -> None:
        found = profile_cast(cast_by(mode), fmt, CPU)
        assert (found.rounding, found.subnormals) == (mode, "kept")
        assert found.values > 10_000 or fmt in ("e4m3", "e5m2", "bf16")

    @pytest.mark.parametrize("fmt", CASTS)
    @pytest.mark.parametrize(
        ("cast", "expected"),
        [
            (half_away, ("nearest-away", "kept")),
            (flushing, ("nearest-even", "flushed")),
            (lambda x, dtype: x.to(dtype), ("nearest-even", "kept")),
        ],
        ids=["ties away", "flushing", "torch"],
    )
    def test_other_casts(self, cast: Callable[..., Tensor], expected: tuple[str, str], fmt: CastFormat) -> None:
        found = profile_cast(cast, fmt, CPU)
        assert (found.rounding, found.subnormals) == expected

    @pytest.mark.parametrize(
        ("limit", "expected"), [(torch.inf, "infinite"), (57344.0, "largest"), (torch.nan, "nan"), (1.0, None)]
    )
    def test_overflow(self, limit: float, expected: str | None) -> None:
        def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
            return torch.where(x.abs() > 1e10, torch.sign(x) * limit, x.to(dtype).float())

        found: CastProfile = profile_cast(cast, "e5m2", CPU)
        assert found.overflow == expected

    def test_noise_is_no_rounding(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def noisy(x: Tensor, dtype: torch.dtype) -> Tensor:
            flips = 1 + 2.0**-8 * (torch.rand(x.shape, generator=generator) < 1e-3)
            return (x.double() * flips).to(dtype)

        assert profile_cast(noisy, "bf16", CPU).rounding is None
