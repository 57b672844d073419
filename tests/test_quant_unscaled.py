"""Values that are the weight itself or a cast of it, and codes that lack both ends."""

from __future__ import annotations

import pytest
import torch
from fake_quantisers import plain_int4, weight
from torch import Tensor

from attn_diag import quant, quantizer


@pytest.mark.parametrize(
    ("observed", "said"),
    [
        (lambda w: w, "w itself, as nothing was quantised"),
        (lambda w: w.bfloat16(), "w cast to BF16"),
        (lambda w: w.to(torch.float8_e4m3fn).float(), "w cast to FP8 (E4M3), without a scale"),
        (lambda w: w.to(torch.float8_e5m2).float(), "w cast to FP8 (E5M2), without a scale"),
    ],
    ids=["itself", "BF16", "E4M3", "E5M2"],
)
def test_what_no_quantiser_made_is_told(observed: object, said: str) -> None:
    """It was "not int4 …, nor one that is near it", of a fake quantiser that was switched off too."""
    assert callable(observed)
    w = weight(1)
    found = quant(w, "int4", observed=observed(w))
    assert (found.outcome, found.headline) == ("fail", f"the values are not {quantizer('int4').name}'s: {said}")
    unknown = quant(w, observed=observed(w).to(torch.float32))
    assert unknown.outcome == "undecided" or "mxfp6" in unknown.headline


@pytest.mark.parametrize(("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("mxfp8", torch.float8_e4m3fn)])
def test_a_cast_alone_is_told_where_fp8_is_declared(name: str, dtype: torch.dtype) -> None:
    """It was "scales rounded to e8m0:up, an amax 64 times the data's", with the advice to declare them."""
    w = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    found = quant(w, name, observed=w.to(dtype).float())
    said = f"the values are not {quantizer(name).name}'s: w cast to FP8 (E4M3), without a scale"
    assert (found.outcome, found.headline) == ("fail", said)
    assert "declare" not in found.report().split("quantised weight")[0]


def test_a_cast_whose_scale_is_one_is_the_quantisers() -> None:
    w = weight(1) / weight(1).abs().amax() * 448
    assert quant(w, "fp8", observed=w.to(torch.float8_e4m3fn).float()).outcome == "pass"


def test_a_weight_that_was_quantised_before_is_its_own_values() -> None:
    w = plain_int4(weight(1))
    assert quant(w, quantizer("int4", block="32"), observed=w).outcome == "pass"


@pytest.mark.parametrize(("name", "top"), [("int4", 7), ("int8", 127)])
def test_codes_without_both_ends_are_named(name: str, top: int) -> None:
    """They were "nor one that is near it"; without one end they had a name."""
    w = weight(1)
    scale = w.abs().amax(1, keepdim=True) / top

    def short(low: int, high: int) -> Tensor:
        return (w / scale).round().clamp(low, high) * scale

    by = quantizer(name, block="row")
    assert (
        "with codes clipped one short at both ends: 100.00 %" in quant(w, by, observed=short(1 - top, top - 1)).headline
    )
    assert "one below the largest" in quant(w, by, observed=short(-top, top - 1)).headline
    assert quant(w, by, observed=short(-top, top)).outcome == "pass"
