"""Products of FP8 operands as an H200 adds them: its probes and errors, an oracle in integers, its own bits."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import bench_fp8_products as bench
import numpy as np
import pytest
import torch
from torch import Tensor

from attn_diag.kernels.accumulation import (
    HOPPER,
    HOPPER_FP8,
    HOPPER_FP8_PROMOTED,
    HOPPER_WIDENED_FP8,
    TensorCore,
    matmul,
    tensor_core_matmul,
)
from attn_diag.kernels.formats import Mode

E4M3 = torch.float8_e4m3fn


def patterns(rows: int, columns: int, seed: int) -> Tensor:
    """Random bits, without NaN: [rows, columns] E4M3."""
    bits = np.random.default_rng(seed).integers(0, 256, (rows, columns)).astype(np.uint8)
    return torch.from_numpy(bits).view(E4M3).float().nan_to_num(0.0).to(E4M3)


def exponent(x: Fraction) -> int:
    return math.frexp(float(x))[1] - 1


def oracle(a: list[float], b: list[float], promotion: int | None) -> float:
    """One sum in rationals: 32 products and the running sum at a time, cut off 13 bits below the largest exponent."""
    outside, running = np.float32(0), Fraction(0)
    for k in range(0, len(a), 32):
        if promotion and k and k % promotion == 0:
            outside, running = outside + np.float32(float(running)), Fraction(0)
        terms = [(Fraction(x) * Fraction(y), x, y) for x, y in zip(a[k : k + 32], b[k : k + 32], strict=True)]
        exponents = [max(exponent(Fraction(x)), -6) + max(exponent(Fraction(y)), -6) for t, x, y in terms if t]
        exponents += [exponent(running)] if running else []
        quantum = Fraction(2) ** (max([-133, *exponents]) - 13)
        total = sum((math.trunc(t / quantum) * quantum for t in [*(t for t, _, _ in terms), running]), Fraction(0))
        last = Fraction(2) ** (exponent(total) - 13) if total else Fraction(1)
        running = math.trunc(total / last) * last
    return float(outside + np.float32(float(running))) if promotion else float(running)


@pytest.mark.parametrize("core", [HOPPER_FP8, HOPPER_FP8_PROMOTED], ids=["fast", "promoted"])
@pytest.mark.parametrize("k", [1, 32, 200, 288])
def test_an_oracle_in_rationals(core: TensorCore, k: int) -> None:
    a, b = patterns(4, k, seed=k), patterns(k, 3, seed=k + 1)
    expected = [[oracle(row, column, core.promotion) for column in b.T.tolist()] for row in a.tolist()]
    assert tensor_core_matmul(a, b, core=core).tolist() == expected


@pytest.mark.parametrize(("bits", "kept"), [(13, True), (14, False)])
def test_probes_of_an_h200(bits: int, kept: bool) -> None:
    a, b = torch.zeros(1, 32), torch.ones(32, 1)
    a[0, :2], b[1] = torch.tensor([1.0, 2.0 ** (8 - bits)]), 2.0**-8
    assert float(tensor_core_matmul(a.to(E4M3), b.to(E4M3))) == 1 + kept * 2.0**-bits


@pytest.mark.parametrize(("k", "error"), [(256, -1.7e-3), (1024, -1.35e-2), (4096, -6.6e-2)])
def test_errors_of_an_h200_on_positive_data(k: int, error: float) -> None:
    """What it measured (uniform on [0, 1)); 5 %: two digits, another sample. The promoted: -4.9e-4 at every K."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(16, k, generator=generator).to(E4M3) for _ in range(2))
    exact = a.double() @ b.double().T
    assert float((tensor_core_matmul(a, b.T) / exact - 1).mean()) == pytest.approx(error, rel=0.05)
    promoted = tensor_core_matmul(a, b.T, core=HOPPER_FP8_PROMOTED)
    assert float((promoted / exact - 1).mean()) == pytest.approx(-4.9e-4, rel=0.05)


def test_the_operands_choose_the_core() -> None:
    a, b = patterns(4, 64, seed=1), patterns(64, 4, seed=2)
    fp8 = tensor_core_matmul(a, b, core=HOPPER_FP8)
    assert torch.equal(tensor_core_matmul(a, b), fp8)
    wide = a.float(), b.float()
    assert torch.equal(tensor_core_matmul(*wide, operands="e4m3"), fp8)
    assert torch.equal(matmul(*wide, "nvidia-tensor-core", operands="e4m3"), fp8.float())
    assert torch.equal(tensor_core_matmul(*wide), tensor_core_matmul(*wide, core=HOPPER))
    assert not torch.equal(tensor_core_matmul(*wide), fp8)


def test_promotion_starts_from_the_accumulator() -> None:
    a, b, start = patterns(4, 160, seed=3), patterns(160, 4, seed=4), torch.full((4, 4), 1.0 + 2.0**-20)
    parts = [tensor_core_matmul(a[:, s], b[s], core=HOPPER_FP8).float() for s in (slice(128), slice(128, 160))]
    assert torch.equal(tensor_core_matmul(a, b, start, HOPPER_FP8_PROMOTED).float(), start + parts[0] + parts[1])
    with pytest.raises(ValueError, match=r"promotion must be a multiple of block \(32\), got 48"):
        tensor_core_matmul(a, b, core=replace(HOPPER_FP8, promotion=48))


def test_the_search_finds_a_planted_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "KINDS", ("positive", "gaussian", "one large"))
    monkeypatch.setattr(bench, "M", 16)
    planted = TensorCore(block=32, fraction_bits=13, result=Mode.NEAREST_EVEN, sums="e8m14", promotion=64)
    search = bench.Search(lambda a, b: tensor_core_matmul(a, b, core=planted).float(), 0, "cpu")
    found = search.run(256)
    assert found[0] == (0, planted)
    assert found[1][0] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["positive", "gaussian", "bit patterns", "wide", "cancelling", "one large"])
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "promoted"])
def test_scaled_mm_bit_for_bit(kind: str, fast: bool) -> None:
    for k in (32, 256, 1024, 2048):
        a, b = bench.inputs(kind, k, 7, "cuda")
        one = torch.ones((), device="cuda")
        got = torch._scaled_mm(a, b.T.contiguous().T, one, one, out_dtype=torch.float32, use_fast_accum=fast)
        assert bench.missed(got, HOPPER_FP8 if fast else HOPPER_FP8_PROMOTED, a, b) == 0, k


@pytest.mark.gpu
@pytest.mark.parametrize("promoted", [False, True], ids=["fast", "promoted"])
def test_triton_dot_bit_for_bit(promoted: bool) -> None:
    """wgmma; by Triton's own promotion sums leave the tensor core every 128 products."""
    from attn_diag.kernels.triton_probes import fp8_dot

    for kind in ("positive", "gaussian", "one large"):
        a, b = bench.inputs(kind, 512, 8, "cuda")
        got, instruction = fp8_dot(a, b, torch.zeros(64, 64, device="cuda"), promoted=promoted)
        if instruction != "wgmma":
            pytest.skip(f"this GPU multiplies FP8 by {instruction}")
        assert bench.missed(got, HOPPER_FP8_PROMOTED if promoted else HOPPER_FP8, a, b) == 0, kind


@pytest.mark.gpu
@pytest.mark.parametrize("kind", bench.KINDS)
def test_triton_dot_of_small_tiles_bit_for_bit(kind: str) -> None:
    """mma.sync, whose operands Triton widens to FP16: the sums of FP16 products."""
    from attn_diag.kernels.triton_probes import fp8_dot

    for k in (32, 512, 4096):
        a, b = bench.inputs(kind, k, 9, "cuda")
        got, instruction = fp8_dot(a, b, torch.zeros(64, 64, device="cuda"), 1)
        if instruction != bench.WIDENED:
            pytest.skip(f"this GPU multiplies FP8 by {instruction}")
        assert bench.missed(got, HOPPER_WIDENED_FP8, a, b, "fp16") == 0, k


@pytest.mark.parametrize(
    ("kind", "length", "misses"), [("bit patterns", 32, 1124), ("wide", 64, 1458), ("one large", 96, 326)]
)
def test_widened_operands_have_an_h200s_sums(kind: str, length: int, misses: int) -> None:
    """As many of these sums as an H200's own had other bits than this wrong model, on 2026-11-23."""
    a, b = bench.inputs(kind, length, 2027)
    got = tensor_core_matmul(a, b, core=HOPPER_WIDENED_FP8, operands="fp16")
    assert bench.missed(got.float(), replace(HOPPER, block=32), a, b) == misses


@pytest.mark.parametrize(("at", "kept"), [(4, False), (29, False), (2, True), (31, True), (33, True)])
def test_two_of_every_four_share_an_instruction(at: int, kept: bool) -> None:
    """Beside 2**26 a product of 1 is lost, beside nothing it is not."""
    a, b = torch.zeros(1, 34), torch.ones(34, 1)
    a[0, :2], b[:2] = torch.tensor([2.0**13, -(2.0**13)]), 2.0**13
    a[0, at] = 1.0
    assert float(tensor_core_matmul(a, b, core=HOPPER_WIDENED_FP8, operands="fp16")) == kept
