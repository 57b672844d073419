"""Block-scaled formats and integers: against exact arithmetic, against torchao and gfloat, at their limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag import InputError, Quantized, Quantizer
from attn_diag.kernels.elements import CodeBook, Integers
from attn_diag.kernels.formats import Mode, Rounding
from attn_diag.kernels.quantizers import PRESETS, parse_quantizer

NAMES = list(PRESETS)
ROWS, COLUMNS = 6, 80  # the last block of 32 is not full
by_name = pytest.mark.parametrize("name", NAMES)


def hard(seed: int = 0) -> Tensor:
    """fp32 [6, 80]: ordinary rows, wide ones, tiny ones, multiples of an eighth (ties), one of zeros, one sign only."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, COLUMNS, generator=rng)
    x[1] *= torch.exp(4 * torch.randn(COLUMNS, generator=rng))
    x[2] *= 2.0**-120
    x[3] = torch.randint(-64, 65, (COLUMNS,), generator=rng) / 8
    x[4, :40] = 0
    x[5] = x[5].abs()
    return x


class Oracle:
    """The definition in rationals: only what the docstring of ``kernels.quantizers`` says, block by block."""

    def __init__(self, by: Quantizer) -> None:
        self.by = by
        self.elements = by.parsed_elements

    def number(self, x: Fraction, bits: int, least: int, largest: Fraction, mode: str = "nearest-even") -> Fraction:
        """``x`` rounded to so many bits of significand, with exponents from ``least`` on, and clamped."""
        if x == 0:
            return x
        exponent = max(math.frexp(float(abs(x)))[1] - 1, least)
        # float() may have rounded up to the next power of two.
        while abs(x) < Fraction(2) ** exponent and exponent > least:
            exponent -= 1
        spacing = Fraction(2) ** (exponent - bits + 1)
        rules: dict[str, Callable[[Fraction], int]] = {"nearest-even": round, "down": math.floor, "up": math.ceil}
        return max(-largest, min(largest, rules[mode](x / spacing) * spacing))

    def fp32(self, x: Fraction) -> Fraction:
        return self.number(x, 24, -126, Fraction(2) ** 128)

    def element(self, x: Fraction) -> Fraction:
        if isinstance(self.elements, Integers):
            return Fraction(max(self.elements.lowest, min(self.elements.highest, round(x))))
        if isinstance(self.elements, CodeBook):
            numbers = [Fraction(n) for n in self.elements.tensor(torch.ones((), dtype=torch.float64)).tolist()]
            return min(numbers, key=lambda n: (abs(n - x), n))
        fmt = self.elements.format
        return self.number(x, fmt.mantissa_bits + 1, fmt.min_exponent, Fraction(fmt.largest))

    def scale(self, wanted: Fraction) -> Fraction:
        base, _, mode = self.by.scale.partition(":")
        if base == "e8m0":
            power = self.number(wanted, 1, -(10**6), Fraction(2) ** 127, mode) if wanted else Fraction(0)
            return max(power, Fraction(2) ** -127)
        return self.fp32(wanted) if base == "fp32" else self.number(wanted, 4, -6, Fraction(448))

    def level(self, x: Tensor) -> Fraction:
        if not self.by.tensor_scale:
            return Fraction(1)
        return self.fp32(Fraction(float(x.abs().max())) / (6 * 448)) or Fraction(1)

    def block(
        self, values: list[Fraction], level: Fraction
    ) -> tuple[list[Fraction], list[Fraction], Fraction, Fraction]:
        """What the values have become, their codes, the scale and the zero point."""
        zero = Fraction(0)
        if self.by.symmetric:
            target = Fraction(self.by.largest if self.by.target is None else self.by.target)
            sizes = [abs(x) for x in values]
            size = max(sizes) if self.by.scale_of == "amax" else sum(sizes, Fraction(0)) / len(sizes)
            scale = self.scale(size / (target * level))
        else:
            assert isinstance(self.elements, Integers)
            low, high = min([Fraction(0), *values]), max([Fraction(0), *values])
            scale = self.scale((high - low) / (self.elements.highest - self.elements.lowest))
            zero = Fraction(self.elements.lowest - (round(low / scale) if scale else 0))
        codes = []
        for x in values:
            if isinstance(self.elements, Integers):
                steps = zero + (round(x / scale / level) if x else 0)
                codes.append(max(Fraction(self.elements.lowest), min(Fraction(self.elements.highest), steps)))
            elif x and not scale:
                codes.append(Fraction(self.by.largest) * (1 if x > 0 else -1))
            else:
                codes.append(self.element(x / scale / level) if x else x)
        return [self.fp32((c - zero) * scale * level) for c in codes], codes, scale, zero


def cells(x: Tensor, by: Quantizer) -> list[list[tuple[int, int]]]:
    """The places of each block of a matrix, row by row of blocks."""
    r, c = by.block_shape((x.shape[0], x.shape[1]))
    return [
        [(i, j) for i in range(top, min(top + r, x.shape[0])) for j in range(left, min(left + c, x.shape[1]))]
        for top in range(0, x.shape[0], r)
        for left in range(0, x.shape[1], c)
    ]


def assert_as_defined(found: Quantized, x: Tensor, by: Quantizer) -> None:
    oracle = Oracle(by)
    level = oracle.level(x)
    scales, zeros = found.scale.flatten().tolist(), found.zero_point
    for n, places in enumerate(cells(x, by)):
        values, codes, scale, zero = oracle.block([Fraction(float(x[p])) for p in places], level)
        assert Fraction(scales[n]) == scale, (by.name, n)
        if zeros is not None:
            assert zeros.flatten()[n] == float(zero)
        got = [(Fraction(float(found.codes[p])), Fraction(float(found.values[p]))) for p in places]
        assert got == list(zip(codes, values, strict=True)), (by.name, n)


@by_name
@pytest.mark.parametrize("seed", [0, 1])
def test_exact_arithmetic_is_exact(name: str, seed: int) -> None:
    x = hard(seed)
    by = attn_diag.quantizer(name)
    found = attn_diag.quantize(x, by)
    assert found.values.dtype == torch.float32
    assert_as_defined(found, x, by)
    # And from float64, whose values are the same numbers.
    wide = attn_diag.quantize(x.double(), by)
    assert torch.equal(wide.codes, found.codes)
    assert torch.equal(wide.values.float(), found.values)


@pytest.mark.parametrize("block", ["tensor", "row", "column", "7", "2x16", "128x128"])
@pytest.mark.parametrize("name", ["int4", "int4-asymmetric", "mxfp4", "fp8"])
def test_every_shape_of_block(name: str, block: str) -> None:
    by = attn_diag.quantizer(name, block=block)
    x = hard(2)
    assert_as_defined(attn_diag.quantize(x, by), x, by)


@pytest.mark.parametrize("rule", ["e8m0", "e8m0:up", "e8m0:down"])
@pytest.mark.parametrize("target", [None, 4.0, 3.5])
def test_the_rules_of_scales(rule: str, target: float | None) -> None:
    by = attn_diag.quantizer("mxfp4", scale=rule, target=target)
    x = hard(3)
    found = attn_diag.quantize(x, by).scale
    for n, places in enumerate(cells(x, by)):
        amax = max(abs(float(x[p])) for p in places)
        wanted = Fraction(amax) / Fraction(target or 6.0)
        exponent = -127 if not wanted else math.floor(math.log2(wanted))
        low = Fraction(2) ** exponent
        middle = {"e8m0": Fraction(3, 2), "e8m0:up": Fraction(1), "e8m0:down": Fraction(2)}[rule] * low
        up = wanted > middle or (rule == "e8m0" and wanted == middle)
        assert Fraction(float(found.flatten()[n])) == max(low * 2 if up else low, Fraction(2) ** -127)


@by_name
def test_its_own_numbers_stay(name: str) -> None:
    """All codes, exhaustively: under its own scale each is its own quantised self."""
    by = attn_diag.quantizer(name, block="row", tensor_scale=False)
    if not by.symmetric:
        pytest.skip("its scale follows from the range")
    elements = by.parsed_elements
    if isinstance(elements, Integers):
        codes = torch.arange(elements.lowest, elements.highest + 1, dtype=torch.float32)
    elif isinstance(elements, CodeBook):
        codes = elements.tensor(torch.ones(()))
    else:
        fmt = elements.format
        step = 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
        magnitudes = {0.0}
        for exponent in range(fmt.min_exponent, int(math.log2(fmt.largest)) + 1):
            for mantissa in range(2**fmt.mantissa_bits):
                magnitudes |= {step * mantissa, (1 + mantissa / 2**fmt.mantissa_bits) * 2.0**exponent}
        magnitudes = {m for m in magnitudes if m <= fmt.largest}
        codes = torch.tensor(sorted({-m for m in magnitudes} | magnitudes))
        patterns = 2 ** (fmt.exponent_bits + fmt.mantissa_bits)
        lost = {"numbers": 0, "nan": 1, "infinity": 2**fmt.mantissa_bits}[fmt.top]
        assert len(codes) == 2 * (patterns - lost) - 1, "both zeros are one"
    target = by.largest if by.target is None else by.target
    found = attn_diag.quantize(codes[None], by, amax=target)
    assert torch.equal(found.codes[0], codes)
    assert torch.equal(found.values[0], codes)
    assert not found.clipped.any()


class TestOthers:
    """Two implementations that nobody here wrote."""

    @pytest.fixture(autouse=True)
    def _quiet(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("ERROR")

    def x(self) -> Tensor:
        rng = torch.Generator().manual_seed(5)
        x = torch.randn(96, 256, generator=rng)
        x[32:64] *= torch.exp(4 * torch.randn(32, 256, generator=rng))
        x[64:] = torch.randint(-64, 64, (32, 256), generator=rng) / 8
        return x

    @pytest.mark.parametrize("mode", ["floor", "ceil", "even", "rceil"])
    @pytest.mark.parametrize("name", ["mxfp4", "mxfp6", "mxfp6-e3m2", "mxfp8", "mxfp8-e5m2"])
    def test_mx_as_torchao_has_it(self, name: str, mode: str) -> None:
        kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx

        dtypes: dict[str, tuple[Any, Any]] = {
            "mxfp4": (torch.float4_e2m1fn_x2, lambda d: kernels.f4_unpacked_to_f32(kernels.unpack_uint4(d))),
            "mxfp6": ("fp6_e2m3", kernels.f6_e2m3_unpacked_to_f32),
            "mxfp6-e3m2": ("fp6_e3m2", kernels.f6_e3m2_unpacked_to_f32),
            "mxfp8": (torch.float8_e4m3fn, Tensor.float),
            "mxfp8-e5m2": (torch.float8_e5m2, Tensor.float),
        }
        dtype, decoded = dtypes[name]
        power, bits = PRESETS[name].target, PRESETS[name].parsed_elements
        assert power is not None
        assert isinstance(bits, Rounding)
        changes: dict[str, dict[str, Any]] = {
            "floor": {},
            "ceil": {"scale": "e8m0:up"},
            "even": {"target": power * (1 - 2.0 ** -(bits.format.mantissa_bits + 2))},
            "rceil": {"target": None, "scale": "e8m0:up"},
        }
        x = self.x()
        scale, data = to_mx(x, dtype, 32, ScaleCalculationMode(mode))
        found = attn_diag.quantize(x, name, arithmetic="fp32", **changes[mode])
        assert torch.equal(found.scale, scale.float())
        assert torch.equal(found.codes, decoded(data).reshape(x.shape))

    @pytest.mark.parametrize(("block", "over"), [("tensor", (0, 1)), ("row", 1), ("column", 0)])
    def test_scales_that_are_made_the_other_way_round(self, block: str, over: int | tuple[int, ...]) -> None:
        x = torch.randn(2048, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        x[3] = 0
        amax = x.float().abs().amax(over, keepdim=True)
        inverses = {"fp32-inverse": torch.full_like(amax, 448) / amax, "fp32-torch-inverse": 448 / amax}
        codes = {
            name: (x * inverse).nan_to_num(0.0).to(torch.float8_e4m3fn).float() for name, inverse in inverses.items()
        }
        for name, theirs in codes.items():
            found = attn_diag.quantize(x, "fp8", block=block, arithmetic=name)
            assert torch.equal(found.codes, theirs)
            assert bool(found.values.isfinite().all())
        if block == "row":
            assert not torch.equal(*codes.values())  # of BF16, whose quotients are often ties
        with pytest.raises(attn_diag.errors.InputError, match="an inverse scale is one of fp32"):
            attn_diag.quantizer("mxfp8", arithmetic="fp32-inverse")

    def test_nvfp4_as_torchao_has_it(self) -> None:
        kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

        x = self.x()
        level = per_tensor_amax_to_scale(x.abs().amax())
        scale, data = nvfp4_quantize(x, 16, level)
        # It keeps blocks' scales above the subnormals of E4M3.
        found = attn_diag.quantize(x, "nvfp4", arithmetic="fp32-reciprocal", least_scale=2.0**-6)
        assert found.tensor_scale == level
        assert torch.equal(found.scale, scale.float().reshape(found.scale.shape))
        assert torch.equal(found.codes, kernels.f4_unpacked_to_f32(kernels.unpack_uint4(data)).reshape(x.shape))

    @pytest.mark.parametrize(("name", "bits"), [("int4-half-range", 4), ("int4-asymmetric", 4), ("int8-asymmetric", 8)])
    def test_integers_as_torchao_has_them(self, name: str, bits: int) -> None:
        primitives = pytest.importorskip("torchao.quantization.quant_primitives")
        x = self.x()
        size = (1, 32) if bits == 4 else (1, 256)
        lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        kind = primitives.MappingType.SYMMETRIC if "half" in name else primitives.MappingType.ASYMMETRIC
        scale, zero = primitives.choose_qparams_affine(x, kind, size, torch.int8, lowest, highest, eps=1e-30)
        codes = primitives.quantize_affine(x, size, scale, zero, torch.int8, lowest, highest)
        values = primitives.dequantize_affine(codes, size, scale, zero, torch.int8, lowest, highest)
        found = attn_diag.quantize(x, name, arithmetic="fp32-reciprocal")
        assert torch.equal(found.scale.reshape(scale.shape), scale)
        if found.zero_point is not None:
            assert torch.equal(found.zero_point.reshape(zero.shape), zero.float())
        assert torch.equal(found.codes, codes.float())
        assert torch.equal(found.values, values)

    @pytest.mark.parametrize(
        ("name", "theirs"),
        [("mxfp8", "mxfp8_e4m3"), ("mxfp8-e5m2", "mxfp8_e5m2"), ("mxfp6", "mxfp6_e2m3"), ("mxfp6-e3m2", "mxfp6_e3m2"),
         ("mxfp4", "mxfp4_e2m1"), ("mxint8", "mxint8")],
    )  # fmt: skip
    def test_mx_as_gfloat_has_it(self, name: str, theirs: str) -> None:
        gfloat = pytest.importorskip("gfloat")
        formats = pytest.importorskip("gfloat.formats")
        info = getattr(formats, f"format_info_{theirs}")
        x = self.x()[::6].double()
        if name == "mxint8":
            # gfloat's range is -2 to 2 - 2**-6; ours is narrow, as the format's specification recommends.
            x = x[(x.abs() > 0).all(1)]
        found = attn_diag.quantize(x, name)
        blocks = x.reshape(-1, 32)
        got = found.values.reshape(-1, 32)
        for block, values in zip(blocks, got, strict=True):
            expected = gfloat.quantize_block(info, block.numpy(), gfloat.compute_scale_amax)
            if name == "mxint8":
                expected = np.where(np.abs(values.numpy()) == np.abs(values.numpy()).max(), values.numpy(), expected)
            assert np.array_equal(values.numpy(), expected)


class TestDrawn:
    @pytest.mark.parametrize("name", ["int4", "int4-asymmetric", "mxfp4", "fp8"])
    def test_stochastic_rounding_has_the_right_mean(self, name: str) -> None:
        base = PRESETS[name].elements
        x = (torch.rand(1, 32, generator=torch.Generator().manual_seed(1)) - 0.5).repeat(4000, 1)
        found = attn_diag.quantize(x, name, block="row", elements=f"{base}:stochastic", seed=3)
        error = (found.values - x).double()
        within = ~found.clipped.any(0) & (error.abs().amax(0) > 0)
        assert within.sum() > 20
        z = error.mean(0) / error.std(0) * math.sqrt(len(x))
        assert float(z[within].abs().max()) < 4.5
        again = attn_diag.quantize(x, name, block="row", elements=f"{base}:stochastic", seed=3)
        assert torch.equal(again.codes, found.codes)

    @pytest.mark.parametrize("mode", [Mode.UP, Mode.DOWN, Mode.TOWARD_ZERO])
    @pytest.mark.parametrize("name", ["int8", "mxfp8"])
    def test_directed_rounding_errs_one_way(self, name: str, mode: Mode) -> None:
        x = hard(4).double()
        found = attn_diag.quantize(x, name, elements=f"{PRESETS[name].elements}:{mode}", target=PRESETS[name].largest)
        error = (found.values - x)[~found.clipped]
        if mode is Mode.TOWARD_ZERO:
            assert (found.values.abs() <= x.abs() * (1 + 1e-12)).all()
        else:
            assert ((error >= -1e-12) if mode is Mode.UP else (error <= 1e-12)).all()

    def test_a_stochastic_scale_is_one_of_two_powers(self) -> None:
        x = torch.full((4000, 32), 3.0)
        scale = attn_diag.quantize(x, "mxfp4", scale="e8m0:stochastic", seed=2).scale
        assert set(scale.flatten().tolist()) == {0.5, 1.0}
        assert abs(float((scale == 1).float().mean()) - 0.5) < 0.04


class TestLimits:
    @by_name
    def test_zeros_stay_zeros(self, name: str) -> None:
        for x in (torch.zeros(2, 64), torch.zeros(0, 64), torch.zeros(2, 0), torch.zeros(3)):
            found = attn_diag.quantize(x, name)
            assert found.values.shape == x.shape
            assert torch.equal(found.values, x)

    @by_name
    def test_nan_makes_its_block_nan_and_no_other(self, name: str) -> None:
        by = attn_diag.quantizer(name, block="32", tensor_scale=False)
        x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
        clean = attn_diag.quantize(x, by)
        x[0, 3] = math.nan
        found = attn_diag.quantize(x, by)
        assert found.values[0, :32].isnan().all()
        assert torch.equal(found.values[0, 32:], clean.values[0, 32:])

    def test_infinity_under_a_given_amax_is_clamped(self) -> None:
        x = torch.tensor([[math.inf, -math.inf, 1.0]])
        assert attn_diag.quantize(x, "int8", amax=127.0).values.tolist() == [[127.0, -127.0, 1.0]]
        assert attn_diag.quantize(x, "fp8", amax=448.0).values.tolist() == [[448.0, -448.0, 1.0]]

    def test_stale_amax_clips_and_says_where(self) -> None:
        x = torch.tensor([[1.0, 2.0, 3.0, -8.0]])
        found = attn_diag.quantize(x, "int8", amax=2.0)
        assert found.clipped.tolist() == [[False, False, True, True]]
        assert found.values.tolist() == [[pytest.approx(1.0, rel=0.01), 2.0, 2.0, -2.0]]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_sixteen_bit_inputs_are_taken_as_exact(self, dtype: torch.dtype) -> None:
        x = hard(7).to(dtype)
        for name in NAMES:
            assert torch.equal(attn_diag.quantize(x, name).values, attn_diag.quantize(x.float(), name).values)

    def test_leading_dimensions_are_as_many_matrices(self) -> None:
        x = torch.stack([hard(1), hard(2)])
        for name in ("int4", "mxfp4", "fp8-blocks", "int8-asymmetric"):
            found = attn_diag.quantize(x, name)
            for n in range(2):
                alone = attn_diag.quantize(x[n], name)
                assert torch.equal(found.codes[n], alone.codes)
                assert torch.equal(found.scale[n], alone.scale)

    def test_a_search_never_leaves_more_error(self) -> None:
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(8)).double()
        for name in ("int4", "int4-asymmetric", "mxfp4", "nvfp4"):
            plain = attn_diag.quantize(x, name)
            found = attn_diag.quantize(x, name, search=(1.0, 0.9, 0.8, 0.7, 0.5))
            before, after = ((q.values - x).square().sum() for q in (plain, found))
            # Half a power of two clips more than it gains, here.
            assert after == before if name == "mxfp4" else after < before, name

    @pytest.mark.parametrize(
        ("name", "changes", "said"),
        [
            ("int5", {}, "unknown quantizer 'int5'; there are int8"),
            ("int4", {"group": 32}, "has no group; it has"),
            ("int4", {"elements": "int9"}, "int2 to int8 or a format, got 'int9'"),
            ("int4", {"elements": "int4:random-sign"}, "no rounding 'random-sign' to integers"),
            ("int4", {"block": "0"}, "rows x columns such as 128x128, got '0'"),
            ("int4", {"block": "lines"}, "got 'lines'"),
            ("mxfp4", {"symmetric": False}, "a zero point is for integers"),
            ("mxfp4", {"narrow": True}, "narrow is for integers"),
            ("int4-asymmetric", {"target": 7.5}, "target is for symmetric ones"),
            ("int4", {"target": -1.0}, "a finite number above 0"),
            ("mxfp4", {"scale": "e8m0:toward-zero"}, "rounded nearest-even, up, down or stochastic"),
            ("mxfp4", {"scale": "fp64"}, "a scale's format is"),
            ("nvfp4", {"scale": "e8m0"}, "beside a tensor's scale"),
            ("int4", {"arithmetic": "fp16"}, "arithmetic is one of exact"),
            ("int4", {"search": (1.5,)}, "factors above 0 and at most 1"),
        ],
    )
    def test_what_cannot_be_says_so(self, name: str, changes: dict[str, Any], said: str) -> None:
        with pytest.raises(InputError) as error:
            attn_diag.quantizer(name, **changes)
        assert said in str(error.value)

    def test_inputs_that_cannot_be_say_so(self) -> None:
        with pytest.raises(InputError, match=r"expects float64, fp32, BF16 or FP16, got torch\.int32"):
            attn_diag.quantize(torch.zeros(4, dtype=torch.int32), "int4")
        with pytest.raises(InputError, match="amax is given only without a zero point"):
            attn_diag.quantize(torch.zeros(4), "int4-asymmetric", amax=1.0)
        with pytest.raises(InputError, match="gradient is straight-through or clipped"):
            attn_diag.fake_quantize(torch.zeros(4), "int4", gradient="none")  # type: ignore[arg-type]


def test_a_stale_amax_of_single_blocks_is_as_if_these_were_clipped_before() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    most = x[1, 32:].abs().max() / 2
    clipped = x.clone()
    clipped[1, 32:] = x[1, 32:].clamp(-most, most)
    found, stated = (
        attn_diag.quantize(x, "int8", block="32", stale=((3, 0.5),)),
        attn_diag.quantize(x, "int8", block="32"),
    )
    assert torch.equal(found.values, attn_diag.quantize(clipped, "int8", block="32").values)
    assert torch.equal(found.scale != stated.scale, torch.tensor([[False, False], [False, True], [False, False]]))
    read = parse_quantizer("int8 block=32 stale=3:0.5,0:2")
    assert read is not None
    assert read.stale == ((3, 0.5), (0, 2.0))
    for value in ("3", "3:x", "-1:0.5"):
        with pytest.raises(ValueError, match="stale is a block's number and a part of amax"):
            parse_quantizer(f"int8 stale={value}")
    with pytest.raises(InputError, match="there are 6 blocks, none of number 6"):
        attn_diag.quantize(x, "int8", block="32", stale=((6, 0.5),))
    with pytest.raises(InputError, match="stale wants numbers of blocks from 0 and parts of amax above 0"):
        attn_diag.quantizer("int8-asymmetric", stale=((0, 0.5),))


def test_straight_through_and_clipped_gradients() -> None:
    x = torch.tensor([[0.5, 1.0, 4.0, -4.0]], requires_grad=True)
    y = attn_diag.fake_quantize(x, "int4", amax=2.0)
    assert torch.equal(y, attn_diag.quantize(x, "int4", amax=2.0).values)
    dy = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], dy)
    clipped = attn_diag.fake_quantize(x, "int4", amax=2.0, gradient="clipped")
    assert torch.autograd.grad(clipped, x, dy)[0].tolist() == [[1.0, 2.0, 0.0, 0.0]]
    low = torch.randn(4, 32).bfloat16().requires_grad_()
    assert attn_diag.fake_quantize(low, "int4").dtype == torch.bfloat16


@pytest.mark.gpu
@by_name
def test_a_gpu_gives_the_same_bits(name: str) -> None:
    x = torch.stack([hard(n) for n in range(8)])
    for arithmetic in ("exact", "fp32"):
        here = attn_diag.quantize(x, name, arithmetic=arithmetic)
        there = attn_diag.quantize(x.cuda(), name, arithmetic=arithmetic)
        for part in ("values", "codes", "scale", "clipped"):
            one, other = getattr(here, part), getattr(there, part).cpu()
            if PRESETS[name].scale_of == "mean" and part in ("values", "scale"):
                # A mean's last bit is decided by the order of its sum, which is the library's.
                torch.testing.assert_close(other, one, rtol=2**-22, atol=0.0)
            else:
                assert torch.equal(one, other), part


def test_codes_are_multiplied_back_with_another_scale_or_wrap() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    own = attn_diag.quantize(x, "int8", block="32")
    found = attn_diag.quantize(x, "int8", block="32", descale=((3, 2.0), (0, 0.5)))
    assert torch.equal(found.codes, own.codes)
    assert torch.equal(
        found.values[:2], own.values[:2] * torch.tensor([[0.5] * 32 + [1.0] * 32, [1.0] * 32 + [2.0] * 32])
    )
    assert torch.equal(found.values[2:], own.values[2:])
    assert torch.equal(found.scale / own.scale, torch.tensor([[0.5, 1.0], [1.0, 2.0], [1.0, 1.0]]))
    wrapped = attn_diag.quantize(x, "int8", block="32", target=200.0, wraps=True)
    beyond = (x / wrapped.scale.repeat_interleave(32, 1)).round()
    assert torch.equal(wrapped.codes, beyond.to(torch.int32).to(torch.int8).float())
    assert (wrapped.codes != beyond).any()
    for text, said in (
        ("int8 descale=x", "descale is a block's number and a factor"),
        ("int8 descale=0:-1.0", "descale wants numbers of blocks from 0 and factors above 0"),
        ("fp8 wraps=true", "what wraps are integers without a zero point"),
    ):
        with pytest.raises(ValueError, match=said):
            parse_quantizer(text)
