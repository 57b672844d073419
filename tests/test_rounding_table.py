"""All roundings against the table of the format's numbers: stratified fp32 inputs, float64 near-ties, random modes.

``benchmarks/bench_rounding.py`` does the same with all 2**32 fp32 inputs. Every check is a function of the rounding it
judges, so that roundings with planted defects show that it can fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import ml_dtypes
import numpy as np
import pytest
import torch
from builders import some
from torch import Tensor

from attn_diag.kernels.formats import Mode, NumberFormat, Rounding, parse, round_to
from attn_diag.kernels.rounding_numpy import round_array
from attn_diag.kernels.triton_rounding import round_tensor
from attn_diag.reference.rounding import FloatFormat, round_nearest_even
from attn_diag.reference.rounding_table import RoundingTable, TableMode

FORMATS = ["bf16", "fp16", "e4m3", "e5m2", "e3m2", "e2m3", "e2m1"]
MODES: list[TableMode] = ["nearest-even", "toward-zero", "up", "down"]
BLOCK = 1 << 17  # values at a time, so that they stay in the cache

by_format = pytest.mark.parametrize("name", FORMATS)
# (values, rounding, seed) -> rounded values, in the same dtype.
Round = Callable[[Tensor, Rounding, int], Tensor]


def wanted(text: str) -> Rounding:
    return some(parse(text))


@cache
def table(name: str) -> RoundingTable:
    fmt = wanted(name).format
    return RoundingTable.of(fmt.exponent_bits, fmt.mantissa_bits, top=fmt.top)


def with_numpy(x: Tensor, rounding: Rounding, seed: int) -> Tensor:
    return torch.from_numpy(np.asarray(round_array(x.numpy(), rounding, seed)))


def with_triton(x: Tensor, rounding: Rounding, seed: int) -> Tensor:
    return round_tensor(x.cuda() if torch.cuda.is_available() else x, rounding, seed).cpu()


def with_reference(x: Tensor, rounding: Rounding, seed: int) -> Tensor:
    del seed
    fmt = rounding.format
    other = FloatFormat("", fmt.mantissa_bits, fmt.min_exponent, fmt.largest, fmt.finite)
    return round_nearest_even(x.double(), other).to(x.dtype)


ROUNDINGS: dict[str, Round] = {"torch": round_to, "numpy": with_numpy, "triton": with_triton}
by_rounding = pytest.mark.parametrize("rounds", ROUNDINGS.values(), ids=ROUNDINGS.keys())


def differ(got: Tensor, expected: Tensor) -> Tensor:
    """Where the bits differ; any NaN is as good as any other."""
    word = torch.int32 if got.dtype == torch.float32 else torch.int64
    return (got.view(word) != expected.view(word)) & ~(got.isnan() & expected.isnan())


def mismatches(x: Tensor, name: str, mode: TableMode, *roundings: Round) -> list[int]:
    """How many of ``x`` (fp32 or float64) each rounding does not round as the table says."""
    rounding, counts = wanted(f"{name}:{mode}"), [0] * len(roundings)
    for block in torch.split(x, BLOCK):
        expected = table(name).bracket(block.double()).round(mode).to(x.dtype)
        for n, rounds in enumerate(roundings):
            counts[n] += int(differ(rounds(block, rounding, 0), expected).sum())
    return counts


@cache
def stratified() -> Tensor:
    """2**22 fp32 values, ascending bit patterns: for each sign and exponent 8192 mantissas.

    Whatever the format and however subnormal the value is in it, some number d of low bits is cut off. So for every d
    from 1 to 23: 56 mantissas whose low d bits are each of zero, one, all but half, half, half and one, and ones;
    among their upper bits all zeros and all ones (next to powers of two and to the overflow). The rest is random.
    """
    rng = np.random.default_rng(0)
    head = np.arange(512, dtype=np.uint32)[:, None] << 23
    columns = []
    for d in range(1, 24):
        half = 1 << (d - 1)
        for low in (0, 1, half - 1, half, half + 1, 2 * half - 1):
            upper = rng.integers(0, 1 << (23 - d), (512, 56), dtype=np.uint32)
            upper[:, 0], upper[:, 1] = 0, (1 << (23 - d)) - 1
            columns.append((upper << d | (low & (2 * half - 1))).astype(np.uint32))
    columns.append(rng.integers(0, 1 << 23, (512, 8192 - sum(c.shape[1] for c in columns)), dtype=np.uint32))
    bits = np.sort((head | np.concatenate(columns, axis=1)).ravel())
    assert bits.size == 2**22
    return torch.from_numpy(bits.view(np.float32))


def near_ties(name: str, count: int) -> Tensor:
    """float64 within 3 places of a midpoint of two numbers, over all binades and up to the overflow, both signs.

    The first half is built for a rounding by way of fp32 to fail: fp32 makes a tie of each, and the tie goes to the
    even number although the value lies on the odd one's side. The second half are ties, or lie on the even one's side.
    """
    rng = np.random.default_rng(1)
    numbers = table(name).numbers.numpy()
    pattern = rng.integers(0, len(numbers) - 1, count)
    middle = (numbers[pattern] + numbers[pattern + 1]) / 2
    toward_odd = np.where(pattern % 2 == 0, 1, -1)
    places = np.where(np.arange(count) < count // 2, rng.integers(1, 4, count), -rng.integers(0, 4, count))
    x = (middle.view(np.int64) + places * toward_odd).view(np.float64)
    return torch.from_numpy(np.copysign(x, rng.choice([-1.0, 1.0], count)))


def through_fp32(x: Tensor, rounding: Rounding, seed: int) -> Tensor:
    return round_to(x.float(), rounding, seed).to(x.dtype)


class TestTable:
    """The judge itself, against what others say that a format's numbers are."""

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [
            ("bf16", ml_dtypes.bfloat16),
            ("fp16", np.float16),
            ("e4m3", ml_dtypes.float8_e4m3fn),
            ("e5m2", ml_dtypes.float8_e5m2),
            ("e3m4", ml_dtypes.float8_e3m4),
        ],
    )
    def test_numbers_are_the_bit_patterns(self, name: str, dtype: type) -> None:
        word = np.dtype(f"u{np.dtype(dtype).itemsize}")
        numbers = table(name).numbers[:-1].numpy()
        values = np.arange(len(numbers) + 1, dtype=word).view(dtype).astype(np.float64)
        np.testing.assert_array_equal(numbers, values[:-1])
        assert not math.isfinite(values[-1]), "the pattern after the largest number is one, too"

    @pytest.mark.parametrize(
        ("x", "mode", "expected"),
        [
            (464.0, "nearest-even", 448.0),
            (1e9, "up", 448.0),
            (2.0**-10, "nearest-even", 0.0),
            (2.0**-10 * (1 + 2.0**-52), "nearest-even", 2.0**-9),
            (-(2.0**-30), "nearest-even", -0.0),
            (-(2.0**-30), "down", -(2.0**-9)),
            (1.0625, "nearest-even", 1.0),
            (1.1875, "nearest-even", 1.25),
            (1.1875, "toward-zero", 1.125),
        ],
    )
    def test_e4m3_by_hand(self, x: float, mode: TableMode, expected: float) -> None:
        got = float(table("e4m3").bracket(torch.tensor([x], dtype=torch.float64)).round(mode)[0])
        assert math.copysign(1, got) == math.copysign(1, expected)
        assert got == expected

    def test_ties_at_the_overflow(self) -> None:
        """65520 lies halfway between fp16's largest number, whose pattern is odd, and the next."""
        x = torch.tensor([65520.0, math.nextafter(65520.0, 0), -65520.0], dtype=torch.float64)
        assert table("fp16").bracket(x).round("nearest-even").tolist() == [math.inf, 65504.0, -math.inf]
        assert table("fp16").bracket(x).round("up").tolist() == [math.inf, math.inf, -65504.0]

    def test_what_it_cannot_do(self) -> None:
        with pytest.raises(ValueError, match="up to 20 bits, sign included, got e8m12"):
            RoundingTable.of(8, 12)
        with pytest.raises(TypeError, match=r"float64, got torch\.float32"):
            table("bf16").bracket(torch.ones(1))


class TestFp32:
    @by_format
    @pytest.mark.parametrize("mode", MODES)
    def test_stratified_inputs(self, name: str, mode: TableMode) -> None:
        """torch, numpy and, for nearest-even, the reference."""
        judged = [round_to, with_numpy] + [with_reference] * (mode == "nearest-even")
        assert mismatches(stratified(), name, mode, *judged) == [0] * len(judged)

    @pytest.mark.parametrize("name", [*FORMATS, "tf32", "e8m11", "e3m4"])
    @pytest.mark.parametrize("mode", MODES)
    def test_a_sample_in_any_order(self, name: str, mode: TableMode) -> None:
        """Interpreted, Triton takes a microsecond a value; and numpy has a short cut for values of one binade."""
        sample = stratified()[:: 1 << 7]
        sample = sample[torch.randperm(len(sample), generator=torch.Generator().manual_seed(0))]
        assert mismatches(sample, name, mode, round_to, with_numpy, with_triton) == [0, 0, 0]


class TestFloat64:
    def test_all_ties_and_near_ties_of_bf16(self) -> None:
        numbers = table("bf16").numbers.numpy()
        middle = (numbers[:-1] + numbers[1:]) / 2
        places = np.arange(-3, 4)[:, None]
        x = torch.from_numpy((middle.view(np.int64) + places).view(np.float64).ravel())
        x = torch.cat([x, -x])
        assert mismatches(x, "bf16", "nearest-even", round_to, with_numpy, with_reference) == [0, 0, 0]

    @pytest.mark.parametrize("name", [*FORMATS, "tf32", "e8m11", "e3m4"])
    @pytest.mark.parametrize("mode", MODES)
    def test_near_ties(self, name: str, mode: TableMode) -> None:
        x = near_ties(name, 200_000)
        assert mismatches(x, name, mode, round_to, with_numpy) == [0, 0]
        assert mismatches(x[::20], name, mode, with_triton) == [0]

    @by_format
    def test_the_near_ties_tell_one_rounding_from_two(self, name: str) -> None:
        x = near_ties(name, 200_000)
        fails = torch.arange(len(x)) < len(x) // 2
        if table(name).finite:
            inside = x.abs() <= wanted(name).format.largest  # what lies beyond saturates: there, nothing fails
            x, fails = x[inside], fails[inside]
        assert mismatches(x, name, "nearest-even", through_fp32)[0] == int(fails.sum())

    def test_torchs_own_cast_fails_on_half_of_them(self) -> None:
        x = near_ties("bf16", 1_000_000)
        expected = table("bf16").bracket(x).round("nearest-even")
        assert int(differ(x.bfloat16().double(), expected).sum()) == len(x) // 2


@dataclass(frozen=True)
class Misunderstood(NumberFormat):
    """A format whose smallest exponent or largest number somebody got wrong."""

    exponent_off: int = 0
    largest_pattern_off: int = 0

    @property
    def min_exponent(self) -> int:
        return super().min_exponent + self.exponent_off

    @property
    def largest(self) -> float:
        top = NumberFormat(self.exponent_bits, self.mantissa_bits, self.top).largest
        spacing = 2.0 ** (math.frexp(top)[1] - 1 - self.mantissa_bits)
        return top + self.largest_pattern_off * spacing


def misunderstood(rounds: Round, exponent: int, largest: int) -> Round:
    def mutant(x: Tensor, rounding: Rounding, seed: int) -> Tensor:
        fmt = rounding.format
        wrong = Misunderstood(fmt.exponent_bits, fmt.mantissa_bits, fmt.top, exponent, largest)
        return rounds(x, Rounding(wrong, rounding.mode), seed)

    return mutant


def in_mode(mode: Mode, x: Tensor, rounding: Rounding, seed: int) -> Tensor:
    return round_to(x, Rounding(rounding.format, mode), seed)


def ties_away(x: Tensor, rounding: Rounding, seed: int) -> Tensor:
    """Half-up: the classical addition of half a unit, without a look at the last bit."""
    low, up, down = (in_mode(m, x, rounding, seed) for m in (Mode.TOWARD_ZERO, Mode.UP, Mode.DOWN))
    high = torch.where(x < 0, down, up)
    middle = (low.double() + high.double()) / 2
    return torch.where((x.double() == middle) & (low != high), high, round_to(x, rounding, seed))


def sticky_lost(x: Tensor, rounding: Rounding, seed: int) -> Tensor:
    """Only eight bits below the last one are looked at."""
    fmt = NumberFormat(rounding.format.exponent_bits, rounding.format.mantissa_bits + 8, rounding.format.top)
    return round_to(in_mode(Mode.TOWARD_ZERO, x, Rounding(fmt), seed), rounding, seed)


def flushed(x: Tensor, rounding: Rounding, seed: int) -> Tensor:
    rounded = round_to(x, rounding, seed)
    return torch.where(rounded.abs() < 2.0**rounding.format.min_exponent, 0.0 * rounded, rounded)


def swapped(x: Tensor, rounding: Rounding, seed: int) -> Tensor:
    other = {Mode.UP: Mode.DOWN, Mode.DOWN: Mode.UP}[rounding.mode]
    return in_mode(other, x, rounding, seed)


def magnitude_up(x: Tensor, rounding: Rounding, seed: int) -> Tensor:
    return round_to(x.abs(), rounding, seed).copysign(x)


def zero_unsigned(x: Tensor, rounding: Rounding, seed: int) -> Tensor:
    return round_to(x, rounding, seed) + 0.0


def nan_lost(x: Tensor, rounding: Rounding, seed: int) -> Tensor:
    """What a carry out of a NaN's payload makes of it."""
    return round_to(x, rounding, seed).nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)


def infinity_saturated(x: Tensor, rounding: Rounding, seed: int) -> Tensor:
    limit = rounding.format.largest
    return torch.where(x.isinf(), torch.full_like(x, limit).copysign(x), round_to(x, rounding, seed))


NEAREST_MUTANTS: dict[str, Round] = {
    "half up": ties_away,
    "truncation": partial(in_mode, Mode.TOWARD_ZERO),
    "sticky bit lost": sticky_lost,
    "subnormals flushed": flushed,
    "zero without its sign": zero_unsigned,
    "NaN lost": nan_lost,
    "infinity saturated": infinity_saturated,
    **{f"{n}: smallest exponent one off": misunderstood(r, 1, 0) for n, r in ROUNDINGS.items() if n != "triton"},
    "torch: largest number one too small": misunderstood(round_to, 0, -1),
    "torch: largest number one too large": misunderstood(round_to, 0, 1),
}


class TestMutants:
    """The checks above reject roundings that are wrong."""

    # At a part of the inputs: the checks are sharper.
    @pytest.mark.parametrize("name", ["fp16", "e4m3"])
    @pytest.mark.parametrize("mutant", NEAREST_MUTANTS.values(), ids=NEAREST_MUTANTS.keys())
    def test_nearest_even_on_fp32(self, name: str, mutant: Round) -> None:
        assert mismatches(stratified()[::9], name, "nearest-even", mutant)[0] > 0

    @by_format
    @pytest.mark.parametrize("mutant", [swapped, magnitude_up], ids=["up and down swapped", "sign forgotten"])
    @pytest.mark.parametrize("mode", ["up", "down"])
    def test_directed_on_fp32(self, name: str, mode: TableMode, mutant: Round) -> None:
        assert mismatches(stratified()[::9], name, mode, mutant)[0] > 0

    @by_format
    @pytest.mark.parametrize(
        "mutant", [through_fp32, ties_away, sticky_lost], ids=["through fp32", "half up", "sticky bit lost"]
    )
    def test_near_ties(self, name: str, mutant: Round) -> None:
        assert mismatches(near_ties(name, 20_000), name, "nearest-even", mutant)[0] > 0


COUNT = 50_000
# Of either sign, normal and subnormal in the small formats, near a number, far from one, and next to the overflow.
DRAWN_VALUES = [0.7, -0.7, 1.0 + 2.0**-20, -1.999, 3e-6, -3e-6, 1.3e-3, 440.3]


def check_stochastic(rounds: Round, name: str, dtype: torch.dtype) -> None:
    """Unbiased within five standard errors (binomial; one false alarm in two million), only to the neighbours."""
    for seed, value in enumerate(DRAWN_VALUES):
        x = torch.full((COUNT,), value, dtype=dtype)
        exact = float(x[0])
        got = rounds(x, wanted(f"{name}:stochastic"), seed).double()
        bracket = table(name).bracket(x[:1].double())
        low, high = float(bracket.round("down")[0]), float(bracket.round("up")[0])
        assert set(got.tolist()) <= {low, high}, f"{value} left its neighbours"
        fraction = (exact - low) / (high - low)
        error = (high - low) * math.sqrt(fraction * (1 - fraction) / COUNT)
        # 2**-25 of a spacing: the draws' resolution.
        bias = float((got - exact).mean())
        assert abs(bias) <= 5 * error + (high - low) * 2.0**-25, f"{value} is biased by {bias / error} standard errors"


def check_numbers_stay(rounds: Round, name: str, mode: str) -> None:
    numbers = table(name).numbers[:-1]
    # Repeated, so that a random mode draws both ways.
    special = torch.tensor([math.inf, math.nan, 0.0], dtype=torch.float64).repeat(20)
    x = torch.cat([numbers, -numbers, special, -special])
    for values in (x, x.float()):
        assert not differ(rounds(values, wanted(f"{name}:{mode}"), 1), values).any()


def a_coin(x: Tensor, rounding: Rounding, seed: int) -> Tensor:
    """Either neighbour with probability a half: never beyond them, and biased."""
    heads = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    return torch.where(heads, in_mode(Mode.UP, x, rounding, seed), in_mode(Mode.DOWN, x, rounding, seed))


def noise_added(x: Tensor, rounding: Rounding, seed: int) -> Tensor:
    """Unbiased, but beyond the neighbours: noise of a whole spacing and nearest-even."""
    spread = in_mode(Mode.UP, x, rounding, seed) - in_mode(Mode.DOWN, x, rounding, seed)
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype) - 0.5
    return in_mode(Mode.NEAREST_EVEN, x + 2 * spread * noise, rounding, seed)


class TestRandomModes:
    @by_rounding
    @pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3", "e8m11"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_stochastic_is_unbiased_between_two_neighbours(self, rounds: Round, name: str, dtype: torch.dtype) -> None:
        check_stochastic(rounds, name, dtype)

    @pytest.mark.parametrize("mutant", [partial(in_mode, Mode.NEAREST_EVEN), a_coin, noise_added])
    def test_the_check_sees(self, mutant: Round) -> None:
        with pytest.raises(AssertionError, match=r"is biased|left its neighbours"):
            check_stochastic(mutant, "bf16", torch.float64)

    @by_rounding
    @pytest.mark.parametrize("name", [*FORMATS, "e3m4"])
    @pytest.mark.parametrize("mode", list(Mode))
    def test_numbers_of_the_format_stay(self, rounds: Round, name: str, mode: Mode) -> None:
        check_numbers_stay(rounds, name, mode)

    def test_the_check_of_numbers_sees(self) -> None:
        with pytest.raises(AssertionError):
            check_numbers_stay(lambda x, r, s: round_to(x * (1 + 2.0**-20), r, s), "bf16", Mode.STOCHASTIC)

    @by_rounding
    @by_format
    def test_random_sign_keeps_the_size_of_the_error(self, rounds: Round, name: str) -> None:
        for x in (stratified()[::101], near_ties(name, 20_000)):
            nearest = table(name).bracket(x.double()).round("nearest-even")
            got = rounds(x, wanted(f"{name}:random-sign"), 3).double()
            other = (2 * x.double() - nearest).copysign(x)
            # Where nearest-even overflows nothing flips. (E4M3's tie there goes to 448, which is even.)
            last = table(name).numbers[-2:].mean()
            inside = (x.abs() <= last) if name == "e4m3" else (x.abs() < last)
            plain, flipped = ~differ(got, nearest), ~differ(got, other)
            assert (plain | (flipped & inside)).all()
            moved = inside & (nearest != x)
            heads = float(flipped[moved].double().mean())
            assert abs(heads - 0.5) <= 5 * 0.5 / math.sqrt(int(moved.sum()))

    @by_rounding
    def test_a_seed_decides(self, rounds: Round) -> None:
        x = torch.linspace(-3, 3, 1001)
        for mode in (Mode.STOCHASTIC, Mode.RANDOM_SIGN):
            first, again, other = (rounds(x, wanted(f"bf16:{mode}"), s) for s in (5, 5, 6))
            assert torch.equal(first, again)
            assert not torch.equal(first, other)

    @by_rounding
    def test_draws_do_not_repeat_from_block_to_block(self, rounds: Round) -> None:
        x = torch.full((1 << 18,), 1.0 + 2.0**-8)
        up = rounds(x, wanted("bf16:stochastic"), 0) > x
        for lag in (1, 1024, 1 << 15, 1 << 16, 1 << 17):
            agree = float((up[lag:] == up[:-lag]).double().mean())
            assert abs(agree - 0.5) <= 5 * 0.5 / math.sqrt(len(up) - lag), lag


def values_of(x: Tensor) -> Iterator[Tensor]:
    yield x
    yield x.double()


class TestShapes:
    @by_rounding
    def test_any_shape_and_layout(self, rounds: Round) -> None:
        x = torch.linspace(-3, 3, 24).reshape(2, 3, 4)
        for values in values_of(x):
            expected = round_to(values, wanted("bf16:up"), 0)
            assert torch.equal(rounds(values.transpose(0, 2), wanted("bf16:up"), 0), expected.transpose(0, 2))
            assert torch.equal(rounds(values[0, 0, 0], wanted("bf16:up"), 0), expected[0, 0, 0])
            assert rounds(values[:0], wanted("bf16:up"), 0).shape == (0, 3, 4)

    @by_rounding
    def test_the_input_is_not_changed(self, rounds: Round) -> None:
        for x in values_of(torch.linspace(-3e5, 3e5, 1001)):
            before = x.clone()
            for mode in Mode:
                rounds(x, wanted(f"fp16:{mode}"), 0)
                assert torch.equal(x, before)

    def test_other_dtypes_are_refused(self) -> None:
        with pytest.raises(TypeError, match="fp32 or float64, got float16; convert"):
            round_array(np.ones(3, np.float16), wanted("bf16"))
        with pytest.raises(TypeError, match=r"fp32 or float64, got torch\.int32; convert"):
            round_tensor(torch.ones(3, dtype=torch.int32), wanted("bf16"))


@pytest.mark.gpu
@by_format
def test_triton_compiled_on_the_stratified_inputs(name: str) -> None:
    for mode in MODES:
        assert mismatches(stratified(), name, mode, with_triton) == [0]
        assert mismatches(near_ties(name, 1_000_000), name, mode, with_triton) == [0]
