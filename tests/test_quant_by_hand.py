"""``quant`` on quantisers that are written by hand: faults are named, learned scales and pruned groups not accused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_quantisers import inputs, weight
from planted_quantisers import BY_HAND, INT4, INT8, UINT4, UINT8, ByHand, biased_dither, learned, zero_off
from torch import Tensor

import attn_diag
from attn_diag import InputError, QuantMonitor


@pytest.mark.parametrize("name", BY_HAND)
def test_faults_by_hand_are_named(name: str) -> None:
    declared, quantised, said = BY_HAND[name]
    w = weight(20, 32)
    found = attn_diag.quant(w, declared, observed=quantised(w))
    assert found.outcome == "fail"
    assert f"but with {said}" in found.headline
    assert found.matches[0].equal >= 0.999


@pytest.fixture
def pruned() -> Tensor:
    """A seventh of the groups, and some rows, are zeros."""
    w = weight(21)
    w.view(64, 8, 32)[:, ::5] = 0
    w[5:14] = 0
    return w


class TestPrunedGroups:
    """Programs keep a least scale for groups of zeros, and other ones another."""

    @pytest.mark.parametrize(("by", "name"), [(UINT4, "int4-asymmetric"), (INT4, "int4")])
    def test_sound_ones_pass(self, pruned: Tensor, by: ByHand, name: str) -> None:
        found = attn_diag.quant(pruned, name, observed=replace(by, least=1e-5)(pruned))
        assert (found.outcome, found.matches[0].equal) == ("pass", 1)

    @pytest.mark.parametrize("after", [False, True])
    def test_a_zero_point_off_by_one_is_named(self, pruned: Tensor, after: bool) -> None:
        wrong = zero_off(replace(UINT4, least=1e-5), 1, after=after)
        found = attn_diag.quant(pruned, "int4-asymmetric", observed=wrong(pruned))
        assert "but with the zero point off by +1 before clipping" in found.headline
        assert found.matches[0].equal >= 0.999

    def test_what_is_no_zero_there_is_told(self, pruned: Tensor) -> None:
        values = INT4(pruned)
        values[6, 3] = 0.01
        found = attn_diag.quant(pruned, "int4", observed=values)
        assert found.outcome == "fail"
        assert "all but 1 of 16384 values are int4's; these (in row 6)" in found.headline

    def test_zeros_make_no_quantizer_near(self) -> None:
        w = weight(22) * (torch.rand(64, 256, generator=torch.Generator().manual_seed(1)) < 0.3)
        found = attn_diag.quant(w, "int4", observed=w * 1.5 + w**2)
        assert "which gives 0.0 % of the values" in found.headline or "which gives 0.1 % of" in found.headline
        assert "the nearest" not in found.headline


class TestLearnedScales:
    @pytest.mark.parametrize(("by", "name"), [(INT4, "int4"), (INT8, "int8")])
    def test_they_pass_where_declared(self, by: ByHand, name: str) -> None:
        w, (fake, amax), (x, dy) = weight(23), learned(by), inputs()
        found = attn_diag.quant(w, name, observed=fake(w), amax=amax(w), x=x, dy=dy)
        assert (found.outcome, found.headline) == ("pass", f"the values are {name}'s")
        assert found.gradient is not None
        assert found.gradient.right
        assert {a.words for a in found.alternatives} > {"scales of the weight's own amax"}

    def test_they_are_told_from_the_datas_where_not(self) -> None:
        w, (fake, _) = weight(23), learned(INT4)
        found = attn_diag.quant(w, "int4", observed=fake(w))
        assert found.outcome == "fail"
        assert "times those of the weight's own amax: 100.00 %" in found.headline
        assert "amax=" in (found.next or "")
        assert attn_diag.quant(w, observed=fake(w)).outcome == "undecided"

    def test_a_fault_beside_them_is_named(self) -> None:
        w, (_, amax) = weight(23), learned(INT4)
        groups, scale = INT4.grouped(w), amax(w)[..., None] / 7
        floor = ((groups / scale).floor().clamp(-7, 7) * scale).reshape(w.shape)
        found = attn_diag.quant(w, "int4", observed=floor, amax=amax(w))
        assert "but with elements rounded down: 100.00 %" in found.headline
        own = attn_diag.quant(w, "int4", observed=INT4(w), amax=amax(w))
        assert "but with scales of the weight's own amax: 100.00 %" in own.headline

    @pytest.mark.parametrize(
        ("by", "amax", "said"),
        [
            ("int4", torch.ones(3, 3), r"a number or one for each block, \[64, 8\]"),
            ("int4-asymmetric", 1.0, "without a zero point"),
            ("int4", -1.0, "finite and 0 or more"),
            (None, 1.0, "name the quantizer too"),
        ],
    )
    def test_what_cannot_be_says_so(self, by: str | None, amax: Tensor | float, said: str) -> None:
        w = weight(23)
        with pytest.raises(InputError, match=said):
            attn_diag.quant(w, by, observed=w, amax=amax)


def test_rows_with_a_stale_amax_are_told_with_their_place() -> None:
    w = weight(24)
    amax = w.abs().amax(1, keepdim=True)
    amax[5] *= 0.5
    amax[9] *= 1.3
    found = attn_diag.quant(w, "int8", observed=attn_diag.quantize(w, "int8", amax=amax).values)
    assert "scales that are 0.5 to 1.3 times those of the weight's own amax" in found.headline
    assert "what differs is all in rows 5, 9" in found.headline


def test_an_undeclared_one_with_a_fault_does_not_pass() -> None:
    w = weight(25)
    found = attn_diag.quant(w, observed=zero_off(UINT4, 1)(w))
    assert found.outcome == "fail"
    assert "the values are int4-asymmetric's with the zero point off by +1 before clipping" in found.headline
    assert attn_diag.quant(w, observed=UINT8(w)).outcome == "pass"


def test_draws_that_leave_the_grid_have_no_place() -> None:
    w = weight(26)
    by = attn_diag.quantizer("int4", elements="int4:stochastic")
    found = attn_diag.quant(w, by, observed=biased_dither(w))
    assert found.outcome == "fail"
    assert "are one of the two numbers next to w, but the rest are other ones" in found.headline
    assert "what differs" not in found.headline


class TestTorchao:
    """QAT's own fake quantisers, in fp32 and BF16."""

    @pytest.fixture
    def qat(self) -> Any:
        return pytest.importorskip("torchao.quantization.qat")

    def fake(self, qat: Any, *given: Any, **options: Any) -> Any:
        config = qat.IntxFakeQuantizeConfig(*given, **options)
        return qat.FakeQuantizedLinear.from_linear(torch.nn.Linear(256, 64), weight_config=config).weight_fake_quantizer

    def test_its_gradient_is_judged_though_it_takes_no_float64(self, qat: Any) -> None:
        x, dy = inputs()
        fake = self.fake(qat, torch.int4, group_size=32)  # type: ignore[attr-defined]
        found = attn_diag.quant(weight(27), "int4-half-range", observed=fake, x=x, dy=dy)
        assert found.gradient is not None
        edge = torch.ones(1, requires_grad=True)
        # Its mask is torch.clamp's gradient, which is 0 at the limits from torch 2.14 on.
        if torch.autograd.grad(edge.clamp(-1, 1), edge)[0]:
            assert found.outcome == "pass"
            assert found.gradient.right
        else:
            assert found.outcome == "fail"
            assert "but in elements that become the grid's first or last number its gradient is 0" in found.headline
        assert found.parts[0].elements > 0
        assert "clipped elements are given none of it" in " ".join(found.report(100).split())

    @pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
    def test_int8_with_a_zero_point_for_each_token_in_bf16(self, qat: Any, precision: torch.dtype) -> None:
        x = weight(28).bfloat16()
        fake = self.fake(qat, torch.int8, "per_token", is_symmetric=False, scale_precision=precision)
        found = attn_diag.quant(x, "int8-asymmetric", observed=fake)
        assert "but with scales and" in found.headline
        assert "bf16" in found.headline
        declared = attn_diag.quantizer("int8-asymmetric", scale="bf16")
        assert attn_diag.quant(x, declared, observed=fake).outcome == "pass"


def test_activations_have_no_flips() -> None:
    with QuantMonitor(quantizer="int8") as monitor:
        fake = monitor.wrap(INT8, "x")
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
        for seed in range(3):
            fake(weight(seed).requires_grad_() * 2)
            optimizer.step()
    assert [check.flips for check in monitor.checks] == [None] * 3


@pytest.mark.parametrize("times", [2, 4])
def test_powers_of_two_that_are_too_large_are_not_called_one_scale_for_all(times: int) -> None:
    """Of floats a larger power of two loses little but the smallest ones: several ways make the same values."""
    w = weight(29)
    blocks = w.reshape(64, -1, 32)
    scale = times * torch.exp2(blocks.abs().amax(-1, keepdim=True).log2().floor() - 8)
    values = ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).reshape(w.shape)
    found = attn_diag.quant(w, "mxfp8", observed=values)
    assert found.outcome == "fail"
    assert re.search(
        r"but with (scales rounded to|one scale for).* or (scales|blocks).*, or other powers of two:", found.headline
    )
    assert found.next == "look at how the scales are made: the values do not tell which"
