"""How kernels take exp: by a polynomial, or exp2 of an exponent that is rounded once or twice."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_emulation_rules import EXACT, make_head
from torch import Tensor

from attn_diag.kernels import Recipe, Schedule, emulate_head, emulation_softmax, preset
from attn_diag.kernels.emulation_operands import Rounder
from attn_diag.kernels.emulation_softmax import exponential
from attn_diag.kernels.exponential import MAX_DEGREE, exp2_polynomial
from attn_diag.reference import AttentionHead, Masking, reference_head


class TestPolynomials:
    X = torch.arange(2**16, dtype=torch.float64) / 2**16

    def relative_error(self, degree: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return exp2_polynomial(self.X.to(dtype), degree).double() / torch.exp2(self.X) - 1

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_degree_3_is_biased_as_published(self, dtype: torch.dtype) -> None:
        assert float(self.relative_error(3, dtype).mean()) == pytest.approx(8.2e-6, abs=0.05e-6)

    def test_degree_5(self) -> None:
        assert float(self.relative_error(5).abs().max()) <= 1e-7
        # Five fused multiply-adds in fp32, and the product with 2**floor(x), which is exact.
        assert float(self.relative_error(5, torch.float32).abs().max()) <= 1e-7 + 2.0**-23

    @pytest.mark.parametrize("degree", range(1, MAX_DEGREE + 1))
    def test_the_error_alternates(self, degree: int) -> None:
        """Chebyshev: with p(0) = 1 the largest relative error is least if it is taken degree + 1 times in turns."""
        error = self.relative_error(degree)
        if degree == 3:
            assert float(error.abs().max()) <= 8.8e-5  # published, and not quite that
            return
        largest = float(error.abs().max())
        peaks = error[(error.abs() > 0.98 * largest)].sign()
        assert int((peaks[1:] != peaks[:-1]).sum()) == degree

    @pytest.mark.parametrize("degree", range(2, MAX_DEGREE + 1))
    def test_each_degree_is_better(self, degree: int) -> None:
        assert self.relative_error(degree).abs().max() < self.relative_error(degree - 1).abs().max() / 10

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_integers_and_limits(self, dtype: torch.dtype) -> None:
        x = torch.tensor([-torch.inf, -2000.0, -126.0, -1.0, 0.0, 1.0, 8.0], dtype=dtype)
        assert torch.equal(exp2_polynomial(x, 3), torch.exp2(x))

    def test_unknown_degrees(self) -> None:
        with pytest.raises(ValueError, match="between 1 and 8, got 9"):
            exp2_polynomial(self.X, 9)

    @pytest.mark.parametrize(("degree", "limit"), [(3, 9e-5), (5, 1e-7)])
    def test_emulated(self, degree: int, limit: float) -> None:
        """P_bar is wrong by at most ``limit``, relatively; O, a mean under P, by twice that of the largest V."""
        head = make_head()
        recipe = replace(preset("fa2"), **EXACT, exp="polynomial", exp_degree=degree)
        error = (emulate_head(recipe, head).o - reference_head(head).out).abs().max()
        assert 0 < float(error) <= 2 * limit * float(head.v.abs().max())


class TestExponents:
    def test_scaled_scores_are_rounded_before_the_maximum_is_taken_off(self) -> None:
        """As cuDNN and CUTLASS write it, in fp32; a fused multiply-add rounds once, and other P_bar follow."""
        generator = torch.Generator().manual_seed(0)
        scores, top = 30 * torch.randn(64, 200, generator=generator), 90 * torch.ones(64, 1)
        c = torch.tensor(0.125 * math.log2(math.e), dtype=torch.float32)
        scaled, fused = (
            exponential(replace(preset("fa2"), exp=exp), scores, top, 0.125, Rounder(preset("fa2"), 0), 0)
            for exp in ("exp2-scaled", "exp2-fma")
        )
        assert torch.equal(scaled, torch.exp2((scores * c) - (top * c)))
        assert 0.1 < float((scaled != fused).float().mean()) < 0.9
        torch.testing.assert_close(scaled, fused, rtol=3e-6, atol=0)

    def test_old_sums_stay_where_the_maximum_stays(self) -> None:
        """Unlike those of a fused multiply-add, whose factor is then not quite 1."""
        recipe = replace(preset("cudnn"), schedule=Schedule(key_tile=16))
        top = torch.linspace(1, 50, 200)[:, None]
        factor = exponential(recipe, top, top, 0.3, Rounder(recipe, 0), 0, "rescale")
        assert torch.equal(factor, torch.ones_like(factor))
        assert recipe.keeps_sums


class TestTorchsMemoryEfficientKernel:
    """Rows of its O by an H100, BF16, 512 keys, 128 features; none lies within 8 units of fp32 of a tie."""

    DATA = load_file(Path(__file__).parent / "data" / "efficient_h100.safetensors")
    OWN = replace(preset("efficient", "bf16", 128), accumulation="nvidia-tensor-core")

    def missed(self, recipe: Recipe) -> int:
        q, k, v = (self.DATA[n].double() for n in "qkv")
        head = AttentionHead(q, k, v, None, 128**-0.5, Masking("none"))
        return int((emulate_head(recipe, head).o != self.DATA["o"]).sum())

    def test_is_reproduced_in_every_bit(self) -> None:
        assert self.missed(self.OWN) == 0

    @pytest.mark.parametrize(
        "change",
        [{"alpha": "in-exponent"}, {"exp": "exp2-fma"}, {"mma_k": 16}, {"accumulation": "fp32-nearest"}],
        ids=str,
    )
    def test_no_other_roundings_have_its_bits(self, change: dict[str, Any]) -> None:
        assert self.missed(replace(self.OWN, **change)) > 0

    def test_nor_has_the_nearest_exp2(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(emulation_softmax, "hardware_exp2", torch.exp2)
        assert self.missed(self.OWN) > 0
