"""``quant`` where arithmetic alone decides ties: nobody is accused of them, and they hide no fault."""

from __future__ import annotations

import pytest
import torch
from fake_quantisers import weight
from planted_quantisers import INT4, INT8
from torch import Tensor

import attn_diag


def fp8_by_its_factor(w: Tensor) -> Tensor:
    """As torchao's training casts each row: multiplied by 448 / amax, which is made in float64 and rounded to fp32."""
    factor = (448 / w.abs().amax(1, keepdim=True).double()).float()
    return (w.float() * factor).to(torch.float8_e4m3fn).float() / factor


def away(w: Tensor) -> Tensor:
    """INT4 whose ties go away from zero."""
    scale, zero = INT4.scales(w.float())
    steps = INT4.grouped(w.float()) / scale
    return INT4.values(w, (steps.abs() + 0.5).floor().clamp(max=7) * steps.sign(), scale, zero)


@pytest.mark.parametrize("seed", [4, 7, 8, 36])
def test_ties_are_not_called_a_quantiser_before(seed: int) -> None:
    w = weight(seed, 64, 512).bfloat16()
    found = attn_diag.quant(w, "fp8-row", observed=fp8_by_its_factor(w))
    assert (found.outcome, found.headline.partition("'s")[0]) == ("pass", "the values are fp8-row")


def test_ties_away_from_zero_are_said_and_pass() -> None:
    w = weight(5).bfloat16()
    found = attn_diag.quant(w, "int4", observed=away(w))
    assert (found.outcome, found.headline) == (
        "pass",
        "the values are int4's, in fp32 arithmetic with ties rounded away from zero",
    )


def test_ties_can_be_declared_away_from_zero() -> None:
    w = weight(5).bfloat16()
    by = attn_diag.quantizer("int4", ties="away", arithmetic="fp32")
    found = attn_diag.quant(w, by, observed=away(w))
    assert (found.outcome, found.headline) == ("pass", "the values are int4 ties=away arithmetic=fp32's")


def test_a_row_of_ties_is_no_place() -> None:
    w = weight(1).bfloat16()
    values = INT8(w.float())
    values[3] = INT8(w.float()[3:4].clamp(*(0.7 * w[3].abs().max().item() * sign for sign in (-1, 1))))
    found = attn_diag.quant(w, "int8", observed=values)
    assert found.outcome == "fail"
    assert found.headline.endswith("what differs is all in row 3")


@pytest.mark.parametrize("seed", range(4))
def test_codes_clipped_one_short_are_not_called_two_other_faults(seed: int) -> None:
    """In BF16, as they are written to a checkpoint: an eighth of a percent of the values differ."""
    w = weight(seed).bfloat16()
    scale, zero = INT8.scales(w.float())
    values = INT8.values(w, INT8.codes(w.float(), scale, zero).clamp(max=126), scale, zero)
    found = attn_diag.quant(w, "int8", observed=values.bfloat16())
    assert "but with codes clipped one below the largest" in found.headline


def test_a_changed_field_is_told_once() -> None:
    w = weight(2).bfloat16()
    values = attn_diag.quantize(w, attn_diag.quantizer("int4-half-range", scale="bf16")).values
    found = attn_diag.quant(w, attn_diag.quantizer("int4-half-range", scale="fp16"), observed=values)
    assert str(found.next).endswith("declare what it is: --quantizer int4-half-range --set scale=bf16")
    assert attn_diag.quantizer(attn_diag.quantizer("int4", block="64"), block="128").name == "int4 block=128"


def test_scales_a_little_off_are_not_1_to_1_times() -> None:
    """NNCF widens an asymmetric range until 0 is one of its numbers."""
    w = weight(3)
    low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    zero = (-255 * low / (high - low)).round()
    scale = torch.maximum(-low / zero, high / (255 - zero))
    found = attn_diag.quant(w, "int8-asymmetric", observed=((w / scale).round() + zero).clamp(0, 255).sub(zero) * scale)
    assert "with scales 1 to 1.00" in found.headline


def test_the_other_number_of_a_tie_is_rounded_to_the_weights_format() -> None:
    """As torchao 0.18's Int4WeightFakeQuantizer: in fp32, with a minimum that is no integer, and cast to BF16.

    A tie between two numbers, of which the observed one is the larger, had been "more than one of its numbers away".
    """
    for seed in (7, 9, 10):
        w = (0.02 * torch.randn(64, 512, generator=torch.Generator().manual_seed(seed))).bfloat16()
        groups = w.float().reshape(64, -1, 128)
        least = groups.amin(-1, keepdim=True)
        scale = (groups.amax(-1, keepdim=True) - least) / 15
        values = ((groups - least) / scale).round() * scale + least
        by = attn_diag.quantizer("int4-asymmetric", block="128", zero_point="float")
        found = attn_diag.quant(w, by, observed=values.reshape(w.shape).bfloat16())
        assert found.outcome == "pass", found.headline
