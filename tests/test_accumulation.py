"""Sums of products as an H200's tensor cores make them: its probes, an oracle in integers, and its real outputs."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import equal_bits, stored
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from attn_diag.kernels import accumulation, preset
from attn_diag.kernels.accumulation import HOPPER, TensorCore, matmul, tensor_core_matmul
from attn_diag.kernels.formats import Mode


def exponent(x: Fraction) -> int:
    """floor(log2 |x|)."""
    e = abs(x).numerator.bit_length() - x.denominator.bit_length()
    return e if abs(x) >= Fraction(2) ** e else e - 1


def toward_zero(x: Fraction, quantum: Fraction) -> Fraction:
    return math.trunc(x / quantum) * quantum


def oracle(a: list[float], b: list[float], start: float = 0.0, smallest: int = -126) -> float:
    """One sum of products in rationals, an instruction of 16 products after the other.

    ``smallest``: exponent of the operands' smallest normal number.
    """
    total = start
    for k in range(0, len(a), 16):
        pairs = list(zip(a[k : k + 16], b[k : k + 16], strict=True))
        ieee = sum([x * y for x, y in pairs], total)  # products of 16-bit numbers are far from float64's limits
        if not math.isfinite(ieee):
            total = ieee
            continue
        terms = [Fraction(x) * Fraction(y) for x, y in pairs] + [Fraction(total)]
        # A product's exponent is the sum of its operands': its significand lies in [1, 4), or below for subnormals.
        exponents = [
            max(exponent(Fraction(x)), smallest) + max(exponent(Fraction(y)), smallest) for x, y in pairs if x and y
        ]
        exponents.append(max(exponent(Fraction(total)), -126) if total else -133)
        quantum = Fraction(2) ** (max(-133, *exponents) - 25)
        exact = sum((toward_zero(term, quantum) for term in terms), Fraction(0))
        rounded = toward_zero(exact, Fraction(2) ** (max(exponent(exact), -126) - 23)) if exact else exact
        total = float(rounded) if abs(rounded) < 2**128 else math.copysign(math.inf, rounded)
    return total


def dot(a: list[float], b: list[float], start: float | None = None, operands: str = "bf16") -> float:
    rows, columns = torch.tensor([a], dtype=torch.float64), torch.tensor([b], dtype=torch.float64).T
    accumulator = None if start is None else torch.tensor([[start]], dtype=torch.float64)
    return float(tensor_core_matmul(rows, columns, accumulator, operands=operands))


def equal(x: float, y: float) -> bool:
    """Any NaN is a NaN; the sign of zero is another test's."""
    return x == y or (math.isnan(x) and math.isnan(y))


def bf16(*shape: int, seed: int, spread: int = 0) -> Tensor:
    """Normal BF16 numbers times 2**[-spread, spread], float64."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)
    return torch.from_numpy(values).float().bfloat16().double()


class TestProbes:
    """What an H200 returned (BF16 operands; torch 2.11)."""

    @pytest.mark.parametrize(
        ("terms", "expected"),
        [
            ([1.0, 2.0**-24], 1.0),
            ([1.0, -(2.0**-25)], 1 - 2.0**-24),
            ([1.0, -(2.0**-26)], 1.0),
            ([1.0] + [2.0**-25] * 4, 1 + 2.0**-23),
        ],
        ids=["half an ulp is cut off", "25 bits are kept", "26 are not", "kept bits add up"],
    )
    @pytest.mark.parametrize("negated", [False, True], ids=["positive", "negative"])
    @pytest.mark.parametrize("order", [1, -1], ids=["ascending", "descending"])
    def test_a_block_of_products(self, terms: list[float], expected: float, negated: bool, order: int) -> None:
        """Toward zero: signs mirror, and within a block the order does not count."""
        sign = -1.0 if negated else 1.0
        assert dot([sign * t for t in terms[::order]], [1.0] * len(terms)) == sign * expected
        assert oracle([sign * t for t in terms], [1.0] * len(terms)) == sign * expected

    def test_fp32_on_ordinary_cores_rounds_to_nearest(self) -> None:
        """Guard: the probes tell the two apart."""
        a, b = torch.tensor([[1.0, -(2.0**-25)]]), torch.ones(2, 1)
        assert float(matmul(a, b, "fp32-nearest")) == 1.0
        assert float(matmul(a, b, "nvidia-tensor-core")) == 1 - 2.0**-24

    @pytest.mark.parametrize(("k", "median"), [(256, -5), (1024, -28), (4096, -190)])
    def test_positive_data_is_summed_too_low(self, k: int, median: int) -> None:
        """Uniform on [0, 1): all errors negative, in 2**-24. 15 %: the measured medians are of another sample."""
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.rand(64, k, generator=generator).bfloat16().double() for _ in range(2))
        exact = a @ b.T
        error = (tensor_core_matmul(a, b.T) / exact - 1) * 2.0**24
        assert (error < 0).all()
        assert float(error.median()) == pytest.approx(median, rel=0.15, abs=1)


any_bf16 = st.integers(0, 2**16 - 1).map(lambda b: float(np.uint32(b << 16).view(np.float32)))
any_fp16 = st.integers(0, 2**16 - 1).map(lambda b: float(np.uint16(b).view(np.float16)))
subnormal_fp16 = st.integers(-1023, 1023).map(lambda m: m * 2.0**-24)


def bf16_between(low: int, high: int) -> st.SearchStrategy[float]:
    """BF16 numbers of either sign whose last bits have exponents from ``low`` to ``high``."""
    return st.builds(lambda m, e: m * 2.0**e, st.integers(128, 255) | st.integers(-255, -128), st.integers(low, high))


class TestOracle:
    operand = any_bf16.filter(lambda x: x == 0 or 2.0**-40 <= abs(x) <= 2.0**40)
    # Products from 2**-152 to 2**-121, where fp32 is subnormal.
    tiny = bf16_between(-83, -68)
    huge = bf16_between(54, 56)
    close = bf16_between(-20, -8)

    @settings(max_examples=200, derandomize=True, deadline=None)
    @given(data=st.data())
    def test_any_operands(self, data: st.DataObject) -> None:
        strategies = [self.operand, self.close, self.close | st.just(0.0), self.tiny, self.huge, any_bf16]
        value = data.draw(st.sampled_from(strategies))
        pairs = data.draw(st.lists(st.tuples(value, value), min_size=1, max_size=40))
        start = data.draw(st.sampled_from([None, 0.0, 1.0, -3.5, 1 + 2.0**-23, 3 * 2.0**-149, -(2.0**127), math.inf]))
        a, b = ([pair[i] for pair in pairs] for i in range(2))
        assert equal(dot(a, b, start), oracle(a, b, start or 0.0)), (a, b, start)

    @settings(max_examples=100, derandomize=True, deadline=None)
    @given(data=st.data())
    def test_fp16_operands(self, data: st.DataObject) -> None:
        value = data.draw(st.sampled_from([any_fp16, any_fp16 | subnormal_fp16, subnormal_fp16]))
        pairs = data.draw(st.lists(st.tuples(value, value), min_size=1, max_size=40))
        a, b = ([pair[i] for pair in pairs] for i in range(2))
        assert equal(dot(a, b, operands="fp16"), oracle(a, b, smallest=-14)), (a, b)

    @pytest.mark.parametrize("k", [1, 15, 16, 17, 33, 80])
    @pytest.mark.parametrize("spread", [0, 6, 30])
    def test_matrices(self, k: int, spread: int) -> None:
        a, b = bf16(5, k, seed=k, spread=spread), bf16(k, 7, seed=k + 1, spread=spread)
        expected = [[oracle(row, column) for column in b.T.tolist()] for row in a.tolist()]
        assert tensor_core_matmul(a, b).tolist() == expected

    def test_cancellation(self) -> None:
        """What was cut off beside large terms is not there when these cancel."""
        a = [2.0**10, 2.0**-16, -(2.0**10)]
        assert dot(a, [1.0] * 3) == oracle(a, [1.0] * 3) == 0.0
        assert dot([*a[:2], *[0.0] * 14, a[2]], [1.0] * 17) == 0.0
        assert dot([a[0], a[2], *[0.0] * 14, a[1]], [1.0] * 17) == 2.0**-16


class TestShapes:
    def test_the_accumulator_chains(self) -> None:
        """Summing the first keys, then adding the others to that, is one sum, where the cut is at a block."""
        a, b = bf16(6, 80, seed=1, spread=3), bf16(80, 4, seed=2, spread=3)
        first = tensor_core_matmul(a[:, :48], b[:48])
        assert torch.equal(tensor_core_matmul(a[:, 48:], b[48:], first), tensor_core_matmul(a, b))
        assert not torch.equal(tensor_core_matmul(a[:, 48:], b[48:]) + first, tensor_core_matmul(a, b))

    def test_chunks_change_no_bit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        a, b, start = bf16(50, 40, seed=3), bf16(40, 9, seed=4), bf16(50, 9, seed=5)
        whole = tensor_core_matmul(a, b, start)
        monkeypatch.setattr(accumulation, "_CHUNK", {"cpu": 16 * 9 * 7})
        assert torch.equal(tensor_core_matmul(a, b, start), whole)
        assert torch.equal(tensor_core_matmul(a[::7], b[:, ::2], start[::7, ::2]), whole[::7, ::2])

    @pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 0)], ids=str)
    @pytest.mark.parametrize("model", ["fp32-nearest", "exact", "nvidia-tensor-core"])
    def test_empty(self, shape: tuple[int, int, int], model: str) -> None:
        m, k, n = shape
        assert torch.equal(matmul(torch.ones(m, k), torch.ones(k, n), model), torch.zeros(m, n))
        start = torch.full((m, n), 2.5)
        assert torch.equal(matmul(torch.ones(4, 0)[:m], torch.ones(0, n), model, start), start)

    def test_zeros(self) -> None:
        zeros = torch.zeros(3, 20)
        assert torch.equal(tensor_core_matmul(zeros, zeros.T), torch.zeros(3, 3).double())
        assert torch.equal(tensor_core_matmul(zeros, zeros.T, torch.ones(3, 3)), torch.ones(3, 3).double())

    @pytest.mark.parametrize(
        ("size", "expected"),
        [(2.0**-133, 0.0), (2.0**-75, 2.0**-146), (2.0**60, 2.0**124), (2.0**62, math.inf)],
        ids=["below fp32", "subnormal", "large", "overflow"],
    )
    def test_extreme_exponents(self, size: float, expected: float) -> None:
        """Products down to 2**-266 are aligned without overflow of what they are aligned by."""
        got = tensor_core_matmul(torch.full((1, 16), size).double(), torch.full((16, 1), size).double())
        assert float(got) == expected

    def test_what_fp32_could_not_hold_is_not_nan(self) -> None:
        """Unrounded float64 probabilities may be as small as exp(-700)."""
        got = tensor_core_matmul(torch.full((1, 16), math.exp(-700), dtype=torch.float64), torch.ones(16, 1))
        assert float(got) == 0.0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("model", ["fp32-nearest", "exact", "nvidia-tensor-core"])
    def test_the_dtype_of_the_operands_returns(self, dtype: torch.dtype, model: str) -> None:
        a, b = bf16(3, 20, seed=6).to(dtype), bf16(20, 2, seed=7).to(dtype)
        got = matmul(a, b, model, torch.ones(3, 2, dtype=dtype))
        assert got.dtype == dtype
        # Each sum's error is below 20 truncations of 2**-23 of the sum of absolute values.
        bound = 20 * 2.0**-23 * (a.abs().double() @ b.abs().double() + 1)
        assert ((got.double() - (a.double() @ b.double() + 1)).abs() <= bound).all()


class TestExact:
    @pytest.mark.parametrize("spread", [0, 4])
    def test_one_rounding_at_the_end(self, spread: int) -> None:
        """With products of 16 bits, spread over less than float64's 53, the float64 sum is exact."""
        a, b = bf16(6, 50, seed=8, spread=spread), bf16(50, 5, seed=9, spread=spread)
        got = matmul(a.float(), b.float(), "exact")
        for (i, row), (j, column) in product(enumerate(a), enumerate(b.T)):
            terms = zip(row.tolist(), column.tolist(), strict=True)
            truth = sum((Fraction(x) * Fraction(y) for x, y in terms), Fraction(0))
            value = float(got[i, j])
            assert abs(Fraction(value) - truth) <= Fraction(2) ** (exponent(truth) - 24), (value, float(truth))

    def test_guard_fp32_sums_are_not(self) -> None:
        a, b = bf16(6, 500, seed=8), bf16(500, 5, seed=9)
        assert not torch.equal(
            matmul(a.float(), b.float(), "exact"), matmul(a.float(), b.float(), "nvidia-tensor-core")
        )

    def test_float64_stays_unrounded(self) -> None:
        a, b = bf16(6, 50, seed=8), bf16(50, 5, seed=9)
        assert torch.equal(matmul(a, b, "exact"), a @ b)


class TestSpecialValues:
    """Rule 4, and rules 1 and 3 at the ends of the range."""

    @pytest.mark.parametrize(
        ("a", "start", "expected"),
        [
            ([math.inf, 1.0], 0.0, math.inf),
            ([math.inf, -math.inf], 0.0, math.nan),
            ([1.0], -math.inf, -math.inf),
            ([-math.inf], math.inf, math.nan),
            ([math.nan], 0.0, math.nan),
            ([1.0], math.nan, math.nan),
            ([2.0**127, 2.0**127], 0.0, math.inf),
            ([2.0**127, 2.0**127, -(2.0**127)], 0.0, 2.0**127),
            ([-(2.0**127)], -(2.0**127), -math.inf),
        ],
        ids=str,
    )
    def test_infinities(self, a: list[float], start: float, expected: float) -> None:
        assert equal(dot(a, [1.0] * len(a), start), expected)
        assert equal(oracle(a, [1.0] * len(a), start), expected)

    def test_zero_times_infinity(self) -> None:
        assert math.isnan(dot([0.0], [math.inf]))

    def test_an_infinite_sum_stays_over_blocks(self) -> None:
        assert dot([2.0**100] * 16 + [-(2.0**100)] * 32, [2.0**25] * 48) == math.inf
        assert dot([2.0**100] * 16 + [-(2.0**100)] * 32, [2.0**20] * 48) == -(2.0**124)

    def test_the_sign_of_zero(self) -> None:
        """A result of 0 is +0, whether terms cancel, are cut off, or are -0 themselves."""
        for got in (dot([1.0, -1.0], [-1.0, -1.0], -0.0), dot([-(2.0**-75)], [2.0**-76]), dot([-0.0], [1.0], -0.0)):
            assert got == 0
            assert math.copysign(1, got) == 1

    def test_the_least_alignment(self) -> None:
        """However small the terms: 2**-158 counts (2**-149 less that much is cut off to 0), 2**-159 does not."""
        for size, expected in ((2.0**-79, 0.0), (2.0**-80, 2.0**-149)):
            a, b = [2.0**-75, size], [2.0**-74, -(2.0**-79)]
            assert dot(a, b) == oracle(a, b) == expected

    def test_subnormal_operands_are_not_normalised(self) -> None:
        """2**-24 in FP16 has the exponent -14: beside it 2**-40 is the last bit that is kept, not 2**-50."""
        a, b = [2.0**-24, 2.0**-16, 2.0**-16], [1.0, 2.0**-23, 2.0**-24]
        assert dot(a, b, operands="fp16") == 2.0**-24 + 2.0**-39
        assert dot(a, b, operands="bf16") == 2.0**-24 + 2.0**-39 + 2.0**-40
        assert dot([0.0, *a], [1.0, *b], operands="bf16") == 2.0**-24 + 2.0**-39 + 2.0**-40, "zeros have no exponent"

    def test_fp16_tensors_say_so_themselves(self) -> None:
        a, b = torch.tensor([[2.0**-24, 2.0**-16, 2.0**-16]]).half(), torch.tensor([1.0, 2.0**-23, 2.0**-24]).half()
        assert float(tensor_core_matmul(a, b[:, None])) == 2.0**-24 + 2.0**-39
        assert float(tensor_core_matmul(a.float(), b[:, None].float())) != 2.0**-24 + 2.0**-39

    def test_unknown_alignment(self) -> None:
        core = TensorCore(alignment=Mode.STOCHASTIC)
        with pytest.raises(ValueError, match="alignment must be toward-zero, nearest-even, down or up, got stochastic"):
            tensor_core_matmul(torch.ones(1, 1), torch.ones(1, 1), core=core)


DATA = Path(__file__).parent / "data" / "tensor_core_h200.safetensors"


def missed(core: TensorCore = HOPPER, operands: str | None = None, device: str = "cpu") -> dict[str, int]:
    """Sums whose bits the model misses, by operands and case; what an H200 returned is in DATA (15,360 sums)."""
    stored = load_file(DATA, device)
    counts: dict[str, int] = {}
    for name in (key.removesuffix(".out") for key in stored if key.endswith(".out")):
        a, b, observed = (stored[f"{name}.{part}"] for part in ("a", "b", "out"))
        got = tensor_core_matmul(a, b, stored.get(f"{name}.c"), core, operands=operands).float()
        different = (got.view(torch.int32) != observed.view(torch.int32)) & ~(got.isnan() & observed.isnan())
        case = name.rpartition(".")[0]
        counts[case] = counts.get(case, 0) + int(different.sum())
    return counts


class TestMeasuredSums:
    def test_every_bit_is_reproduced(self) -> None:
        counts = missed()
        assert len(counts) == 27, "twelve cases in two formats, and three of the least numbers"
        assert not any(counts.values()), counts

    @pytest.mark.parametrize(
        ("field", "value"),
        [("fraction_bits", 24), ("fraction_bits", 26), ("block", 8), ("block", 32), ("alignment", Mode.NEAREST_EVEN),
         ("alignment", Mode.DOWN), ("result", Mode.NEAREST_EVEN), ("result", Mode.DOWN)],
    )  # fmt: skip
    def test_guard_other_cores_are_seen(self, field: str, value: int | Mode) -> None:
        """Not in every case: where everything cancels, or is far apart, little is rounded."""
        counts = missed(replace(HOPPER, **{field: value}))  # type: ignore[arg-type]
        assert sum(count > 0 for count in counts.values()) >= 8, counts
        assert min(counts["bf16.cancel"], counts["fp16.cancel"]) > 0, counts

    def test_guard_flushed_and_normalised_subnormals_are_seen(self) -> None:
        """FP16 subnormals are normal numbers of BF16's range."""
        counts = missed(replace(HOPPER, subnormals=False))
        for case in ("bf16.subnormal_in", "bf16.subnormal_out", "fp16.subnormal_in", "fp16.subnormal_out"):
            assert counts[case] > 0, counts
        assert missed(operands="bf16")["fp16.subnormal_in"] > 0

    @pytest.mark.parametrize("exponent", [-132, -134, -300])
    def test_guard_another_least_alignment_is_seen(self, monkeypatch: pytest.MonkeyPatch, exponent: int) -> None:
        monkeypatch.setattr(accumulation, "_LEAST", exponent)
        counts = missed()
        assert min(counts["bf16.least"], counts["bf16.least_acc"]) > 0, counts

    @pytest.mark.parametrize("case", ["bf16.least.16", "bf16.signed_zeros.16"])
    def test_guard_negative_zeros_would_be_seen(self, case: str) -> None:
        """Negative sums that are cut off to 0 are among the data."""
        a, b, c, out = (load_file(DATA)[f"{case}.{part}"] for part in ("a", "b", "c", "out"))
        assert ((out == 0) & (a.double() @ b.double() + c.double() < 0)).any()

    def test_guard_saturation_is_seen(self) -> None:
        stored = load_file(DATA)
        infinite = [name for name, value in stored.items() if name.endswith(".out") and value.isinf().any()]
        assert {name.rsplit(".", 2)[0] for name in infinite} == {"bf16.overflow", "bf16.bits"}


CORES = {
    "hopper": HOPPER,
    "fp8": accumulation.HOPPER_FP8,
    "widened fp8": accumulation.HOPPER_WIDENED_FP8,
    "another": TensorCore(block=8, fraction_bits=24),
}


class TestInOneLaunch:
    """By a kernel of Triton's, as on a GPU."""

    def test_every_bit_is_reproduced(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(accumulation, "compiles_for", lambda _: True)
        found = missed(device=device)
        assert not any(found.values()), found

    @pytest.mark.parametrize("name", CORES)
    @pytest.mark.parametrize("operands", ["bf16", "fp16"])
    def test_the_bits_are_those_of_torch(
        self, device: str, monkeypatch: pytest.MonkeyPatch, name: str, operands: str
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = (11, 70), (37, 70), (11, 37)
        dtype = torch.bfloat16 if operands == "bf16" else torch.float16
        a, b = (torch.randn(*s, generator=generator).to(dtype).double().to(device) for s in shapes[:2])
        start = torch.randn(*shapes[2], generator=generator).double().to(device)
        a[:, 3::5] *= 2.0**-14  # beside others lost in part
        a[4:7] *= 2.0**-12 if operands == "fp16" else 2.0**-120
        a[6:9, ::2], start[2:8, :9] = 0.0, 0.0
        found = []
        for one_launch in (False, True):
            monkeypatch.setattr(accumulation, "compiles_for", lambda _, yes=one_launch: yes)
            found.append(tensor_core_matmul(a, b.mT, start, CORES[name], operands=operands))
        assert torch.equal(*found)
        assert torch.equal(*(x.signbit() for x in found))
        assert float(found[0].abs().max()) > 0

    @pytest.mark.parametrize(
        "core", [accumulation.HOPPER_FP16_SUMS, accumulation.HOPPER_FP8_PROMOTED, replace(HOPPER, alignment=Mode.DOWN)]
    )
    def test_other_sums_are_left_to_torch(self, monkeypatch: pytest.MonkeyPatch, core: TensorCore) -> None:
        a, b = torch.randn(3, 64).half().double(), torch.randn(64, 5).half().double()
        expected = tensor_core_matmul(a, b, None, core)
        monkeypatch.setattr(accumulation, "compiles_for", lambda _: True)
        assert torch.equal(tensor_core_matmul(a, b, None, core), expected)


class TestRealOutputs:
    """An H200's own bits, all of them: 512 x 64 or 256 x 64 elements of O or dQ a head."""

    @pytest.mark.parametrize(
        ("name", "observation", "recipe", "output"),
        [
            ("kernels_gauss_T512", "paper", "qiu2025", "o"),
            ("kernels_pair_T512", "paper", "qiu2025", "o"),
            ("kernels_gauss_T512", "stable", "qiu2025-stabilised", "o"),
            ("kernels_pair_T512", "stable", "qiu2025-stabilised", "o"),
            ("kernels_pair_T512", "paper", "qiu2025", "dq"),
            ("kernels_pair_T512", "stable", "qiu2025-stabilised", "dq"),
            ("pair_T256", "flash", "fa2", "o"),
            ("pair_T256", "cudnn", "cudnn", "o"),
            ("failing_step500_L2H7", "observed", "bf16-forward", "o"),
        ],
    )
    def test_are_reproduced(self, name: str, observation: str, recipe: str, output: str) -> None:
        model = replace(preset(recipe), accumulation="nvidia-tensor-core")
        assert equal_bits(stored(name), observation, model, output).all()

    def test_of_flex_attention_two_elements_go_another_way(self) -> None:
        """Both lie 2 units of fp32 from a tie, by which another order of the row's sum moves them."""
        model = replace(preset("flex"), accumulation="nvidia-tensor-core")
        assert int((~equal_bits(stored("kernels_pair_T512"), "flex", model, "o")).sum()) == 2

    @pytest.mark.parametrize("model", ["fp32-nearest", "exact"])
    @pytest.mark.parametrize(
        ("name", "observation", "recipe"), [("kernels_pair_T512", "paper", "qiu2025"), ("pair_T256", "flash", "fa2")]
    )
    def test_guard_other_models_do_not_reproduce_them(
        self, name: str, observation: str, recipe: str, model: str
    ) -> None:
        other = replace(preset(recipe), accumulation=model)  # type: ignore[arg-type]
        assert not equal_bits(stored(name), observation, other, "o").all()
