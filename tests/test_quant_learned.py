"""``quant`` on quantisers with scales of their own, in fp32 and 16 bits: signed, learned or searched; and on faults."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_quantisers import inputs, weight
from torch import Tensor

import attn_diag
from attn_diag import InputError

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def signed(bits: int, group: int) -> Callable[[Tensor], Tensor]:
    """AutoRound's int_sym and Neural Compressor's full_range, in w's format."""

    def quantised(w: Tensor) -> Tensor:
        groups, most = w.reshape(len(w), -1, group), 2 ** (bits - 1)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = torch.where(high > -low, high, low) / -most
        values: Tensor = ((groups / scale).round().clamp(-most, most - 1) * scale).reshape(w.shape)
        return values

    return quantised


class TestSignedScales:
    @BOTH
    @pytest.mark.parametrize(("bits", "group", "name"), [(4, 32, "int4"), (8, 256, "int8")])
    def test_they_pass_where_declared_and_are_named_where_not(
        self, bits: int, group: int, name: str, dtype: torch.dtype
    ) -> None:
        w, scale = weight(30, 32).to(dtype), "fp32" if dtype == torch.float32 else "bf16"
        values = signed(bits, group)(w)
        declared = attn_diag.quantizer(name, narrow=False, scale_of="extreme", scale=scale)
        assert attn_diag.quant(w, declared, observed=values).outcome == "pass"
        plain = attn_diag.quantizer(name, narrow=False, target=2.0 ** (bits - 1), scale=scale)
        found = attn_diag.quant(w, plain, observed=values)
        assert "but with the number of largest magnitude mapped to the lowest integer" in found.headline
        assert "--set scale_of=extreme" in (found.next or "")

    @pytest.mark.parametrize("bits", [4, 8])
    def test_codes_that_are_not_clipped_are_not_called_so_alone(self, bits: int) -> None:
        w, half = weight(31).reshape(512, 32), 2.0 ** (bits - 1)
        scale = w.abs().amax(1, keepdim=True) / half
        by = attn_diag.quantizer(f"int{bits}", block="row", narrow=False, target=half)
        found = attn_diag.quant(w, by, observed=(w / scale).round() * scale)
        assert "codes that are not clipped: 100.00 %" in found.headline

    def test_the_lowest_integer_is_the_number_of_largest_magnitude(self) -> None:
        x = torch.tensor([[1.0, -3.0, 4.0, 0.6], [1.0, -4.0, 3.0, 0.6]], dtype=torch.float64)
        found = attn_diag.quantize(x, "int4", block="4", narrow=False, scale_of="extreme")
        assert found.scale.tolist() == [[-0.5], [0.5]]
        assert found.codes.tolist() == [[-2, 6, -8, -1], [2, -8, 6, 1]]

    @pytest.mark.parametrize("changes", [{"narrow": True}, {"scale": "e8m0"}, {"elements": "e2m1"}, {"least_scale": 1}])
    def test_what_cannot_be_says_so(self, changes: dict[str, Any]) -> None:
        with pytest.raises(InputError, match=r"scale_of=extreme is for integers|narrow is for integers"):
            attn_diag.quantizer("int4", **{"narrow": False, "scale_of": "extreme", **changes})


def learned(w: Tensor, group: int, largest: int, kept: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values of scales that are 0.8 to 0.95 times w's own and kept in a format, and these times the largest."""
    groups, g = w.reshape(len(w), -1, group), torch.Generator().manual_seed(1)
    own = groups.float().abs().amax(-1, keepdim=True) / largest
    scale = (own * (0.8 + 0.15 * torch.rand(own.shape, generator=g))).to(kept)
    values = ((groups / scale).round().clamp(-largest, largest) * scale).reshape(w.shape).to(w.dtype)
    return values, scale[..., 0].double() * largest


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=["fp32 scales", "bf16 scales"])
@pytest.mark.parametrize(("name", "group", "largest"), [("int4", 32, 7), ("int8", 256, 127)])
def test_learned_scales_are_read_off_values_in_bf16(name: str, group: int, largest: int, kept: torch.dtype) -> None:
    w = weight(32, 32).bfloat16()
    values, amax = learned(w, group, largest, kept)
    assert attn_diag.quant(w, name, observed=values, amax=amax).outcome == "pass"
    found = attn_diag.quant(w, name, observed=values)
    assert (found.outcome, found.matches[0].equal >= 0.999) == ("fail", True)
    assert re.search(
        "with scales that are 0.8[0-9]* to 0.9[45][0-9]* times those of the weight's own amax", found.headline
    )
    assert "amax=" in (found.next or "")


@BOTH
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 256)])
def test_a_range_of_its_own_beside_a_zero_point_is_read(bits: int, group: int, dtype: torch.dtype) -> None:
    w = weight(33, 16).to(dtype)
    groups, many, g = w.float().reshape(len(w), -1, group), 2**bits - 1, torch.Generator().manual_seed(1)
    part = 0.8 + 0.1 * torch.rand((*groups.shape[:2], 1), generator=g)
    low, high = groups.amin(-1, keepdim=True) * part, groups.amax(-1, keepdim=True) * part
    scale = (high - low) / many
    zero = (-low / scale).round()
    values = (((groups / scale).round() + zero).clamp(0, many) - zero) * scale
    found = attn_diag.quant(w, f"int{bits}-asymmetric", observed=values.reshape(w.shape).to(dtype))
    assert f"not int{bits}-asymmetric in " in found.headline
    assert "but with scales 0.8" in found.headline
    assert "if the scales are meant so (learned, searched, of earlier steps)" in (found.next or "")


def in_bf16(fault: str) -> Tensor:
    """INT4 in groups of 32, symmetric or with a zero point, all of it computed in BF16, with one fault."""
    groups = weight(34, 32).bfloat16().reshape(32, 8, 32)
    if fault.startswith("codes"):
        scale = groups.abs().amax(-1, keepdim=True) / (8 if "not" in fault else 7)
        codes = (groups / scale).round()
        return ((codes if "not" in fault else codes.clamp(-8, 6)) * scale).reshape(32, 256)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low) / 15
    zero = (-low / scale).floor() if "down" in fault else (-low / scale).round()
    codes = ((groups / scale).round() + zero + ("before" in fault)).clamp(0, 15)
    return ((codes - zero + ("-1" in fault)) * scale).reshape(32, 256)


@pytest.mark.parametrize(
    ("fault", "declared"),
    [
        ("codes clipped one below the largest", {}),
        ("codes that are not clipped", {"target": 8.0}),
        ("a zero point that is rounded down", None),
        ("the zero point off by +1 before clipping", None),
        ("the zero point off by -1", None),
    ],
)
def test_faults_in_bf16_arithmetic_are_named(fault: str, declared: dict[str, Any] | None) -> None:
    by = attn_diag.quantizer("int4-asymmetric", scale="bf16")
    if declared is not None:
        by = attn_diag.quantizer("int4", narrow=False, scale="bf16", **declared)
    found = attn_diag.quant(weight(34, 32).bfloat16(), by, observed=in_bf16(fault))
    assert re.search(f"but with {re.escape(fault)}[:,]", found.headline)
    assert found.outcome == "fail"


@pytest.mark.parametrize("fault", [False, True])
def test_an_order_of_bf16_arithmetic_that_is_not_known_is_undecided(fault: bool) -> None:
    """Neural Compressor's: scales and zero points in fp32, quotients in BF16."""
    w = weight(36).bfloat16()
    groups = w.reshape(64, 8, 32).float()
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low) / 15
    zero, quotient = (-low / scale).round(), (groups / scale).bfloat16().float()
    codes = (quotient.floor() if fault else quotient.round()) + zero
    values = ((codes.clamp(0, 15) - zero) * scale).bfloat16().reshape(64, 256)
    found = attn_diag.quant(w, "int4-asymmetric", observed=values)
    assert found.outcome == ("fail" if fault else "undecided")
    assert fault or "the rest are next to ties in bfloat16" in found.headline


class _Int4(torch.autograd.Function):
    """Scales of 0.8 times the weight's own, and a gradient where the codes are at most ``most``."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, most: float) -> Tensor:
        groups = w.reshape(len(w), -1, 32)
        scale = groups.abs().amax(-1, keepdim=True) * 0.8 / 7
        ctx.kept = ((groups / scale).abs() <= most).reshape(w.shape)
        return ((groups / scale).round().clamp(-7, 7) * scale).reshape(w.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.kept, None


class TestGradients:
    @pytest.mark.parametrize(("most", "outcome"), [(7.5, "pass"), (7.0, "pass"), (6.5, "fail")])
    def test_the_ends_of_learned_scales_have_one_too(self, most: float, outcome: str) -> None:
        w, (x, dy) = weight(35), inputs()
        amax = w.reshape(64, 8, 32).abs().amax(-1) * 0.8
        found = attn_diag.quant(w, "int4", observed=lambda t: _Int4.apply(t, most), x=x, dy=dy, amax=amax)  # type: ignore[no-untyped-call]
        assert found.outcome == outcome
        assert ("become the grid's first or last number its gradient is 0" in found.headline) == (outcome == "fail")

    def test_what_other_scales_clip_is_not_called_off(self) -> None:
        w, (x, dy) = weight(35), inputs()
        found = attn_diag.quant(w, "int4", observed=lambda t: _Int4.apply(t, 7.5), x=x, dy=dy)  # type: ignore[no-untyped-call]
        assert "an amax 0.8 times the data's" in found.headline
        assert found.gradient is not None
        assert (found.gradient.inner_right, found.gradient.off < 1e-6) == (True, True)
        assert not any("its gradient is" in note for note in found.notes)

    def test_nothing_is_said_of_a_gradient_whose_values_are_unknown(self) -> None:
        w, (x, dy) = weight(35), inputs()
        found = attn_diag.quant(w, "int4", observed=lambda t: t.sign() * t.square(), x=x, dy=dy)
        assert (found.outcome, found.gradient) == ("fail", None)

    @pytest.mark.parametrize(("times", "outcome"), [(1.0, "pass"), (0.5, "fail")])
    def test_an_estimator_of_fp4_that_weighs_elements(self, times: float, outcome: str) -> None:
        """AutoRound's mx_fp4, whose gradient is Q(x) / x: 0.95 times that of the smoothed forward, dyᵀ x to 2.4 %."""
        w, (x, dy) = weight(0).bfloat16(), inputs()

        def fake(t: Tensor) -> Tensor:
            found = attn_diag.quantize(t, "mxfp4")
            values, scale = found.values.to(t.dtype), found.scale.repeat_interleave(32, 1)
            ratio = torch.where(t.detach().abs() < scale, 1.0, values / t.detach())  # 1 where numbers are evenly spaced
            return values + times * ratio * (t - t.detach())

        found = attn_diag.quant(w, "mxfp4", observed=fake, x=x, dy=dy)
        assert found.outcome == outcome


@pytest.mark.parametrize("bits", [4, 8])
@BOTH
def test_an_amax_of_half_an_integer_that_is_rounded_past_the_last_one(bits: int, dtype: torch.dtype) -> None:
    """Scales of amax / 7.5 make it a tie: not clipped, it is 8 where fp32 says so. They are no scales with a sign."""
    w = weight(37).to(dtype)
    groups = w.float().reshape(64, -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / (2.0 ** (bits - 1) - 0.5)
    codes = (groups / scale).round()
    half = 2 ** (bits - 1)
    assert bool((codes == half).any())

    def told(codes: torch.Tensor) -> Any:
        values = (codes * scale).reshape(w.shape).to(dtype)
        return attn_diag.quant(w, attn_diag.quantizer(f"int{bits}-half-range", block="32"), observed=values)

    found = told(codes)
    assert found.outcome == "fail"
    assert "but with codes that are not clipped:" in found.headline
    assert told(codes.clamp(-half, half - 1)).outcome == "pass"
    other = (groups / scale + 0.5).floor()  # ties go up
    assert told(other.clamp(-half, half - 1)).outcome == "pass"
