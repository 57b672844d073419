"""Sentences that were untrue: of a feature that stands out, a softmax in INT8, factors beside a lossy gradient."""

from __future__ import annotations

import pytest
import torch
from builders import first_head, some
from torch import Tensor

import attn_diag
from attn_diag.reports.finding_words import matters, sure
from attn_diag.results.quality import QuantityVerdict
from attn_diag.testing.regression import judge
from attn_diag.testing.regression.cases import draw
from attn_diag.testing.stated import Stated


def _with_sink(q: Tensor, k: Tensor, v: Tensor, sink: float) -> Tensor:
    """Causal, with a sink that nobody states."""
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    largest = scores.amax(-1, keepdim=True).clamp(min=sink)
    probs = (scores - largest).exp()
    row_sum = probs.sum(-1, keepdim=True) + (sink - largest).exp()
    o: Tensor = (probs.bfloat16().float() @ v.float() / row_sum).to(q.dtype)
    return o


def test_a_feature_that_stands_out_is_not_all_rows() -> None:
    """It was "dV is 0.25 % off, which no 8-bit rounding makes: … all keys are 0.3 % off", which BF16 makes of any."""
    case = draw("normal", 0, dtype=torch.bfloat16, head_dim=64, stated=Stated("top-left", 0.125))
    assert case.do is not None
    q, k, v, do = (x[[6, 7]] for x in (case.q, case.k, case.v, case.do))
    v.requires_grad_()
    o = _with_sink(q, k, v, -8.0)
    (dv,) = torch.autograd.grad(o, v, do)
    tensors = {"q": q, "k": k, "v": v.detach(), "o": o.detach(), "do": do, "dv": dv}
    found = attn_diag.inspect_captures([attn_diag.Capture.from_tensors(tensors, causal="top-left")])
    (verdict,) = (x for x in first_head(found).quantities if x.quantity == "dv")
    assert verdict.answer == "wrong"
    assert verdict.words.endswith(", which no rounding makes: batch item 1 alone: feature 51 stands out over all keys.")


@pytest.mark.parametrize(("steps", "largest"), [(256, 255), (255, 255)])
def test_a_softmax_in_int8_is_named(steps: int, largest: int) -> None:
    """TFLite's and OpenVINO's: it was 12 % off, "which no 8-bit rounding makes", "certain: kernel or capture"."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 160, 64, generator=rng) for _ in range(3))
    probs = (q.double() @ k.double().mT * 0.125).softmax(-1)
    o = ((probs * steps).round().clamp(max=largest) / steps @ v.double()).float()
    found = attn_diag.inspect_captures([attn_diag.Capture.from_tensors({"q": q, "k": k, "v": v, "o": o})])
    (finding,) = found.findings
    assert f"P cast to INT8 (in steps of 1/{steps})" in finding.words
    assert matters(finding) == "much, unless these bits are meant to be lost."


def test_what_few_rows_show_is_not_held_against_8_bits() -> None:
    """Of some rows of an FP32 kernel (of 16-bit integers: 0.5 % off) it was "8 bits in all rows make less"."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 96, 64, generator=rng) for _ in range(3))
    o = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    o[:, :, [5, 40]] += 1e-2 * torch.randn(64, generator=rng).double()
    found = attn_diag.inspect_captures([attn_diag.Capture.from_tensors({"q": q, "k": k, "v": v, "o": o.float()})])
    (finding,) = found.findings
    assert finding.label == "wrong"
    assert sure(finding) == "certain: no rounding that was tried makes that; kernel or capture is at fault."


def test_an_fp32_kernel_is_not_held_against_fp8() -> None:
    """As OpenVINO's in BF16 with a cache in INT8: O 0.8 % off was "which no 8-bit rounding makes", which make 3 %."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 128, 64, generator=rng) for _ in range(3))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    o = o * (1 + 8e-3 * torch.randn(o.shape, generator=rng))
    found = attn_diag.inspect_captures([attn_diag.Capture.from_tensors({"q": q, "k": k, "v": v, "o": o})])
    (finding,) = found.findings
    assert "which no rounding that was tried makes: all rows (121 of 128) are 0.79 % off" in finding.words
    assert sure(finding).startswith("certain: no rounding that was tried makes that; ")
    advice = some(first_head(found).verdict).suggestions[0]
    assert advice.startswith("No rounding that was tried makes this error: ")
    assert "FP8" not in advice + finding.words
    assert sure(finding).endswith("is at fault, or 8 bits or fewer are meant there.")


def test_a_check_tells_the_factor_that_shows_it_lossy() -> None:
    """It was "dV is coarser than a well-rounded kernel's", "dV 0.91 times"."""
    whole, alike = (0.89, 0.93), (1.41, 1.46)
    lossy = QuantityVerdict(
        "dv", "lossy", "", factor=0.91, factor_ci95=whole, typical_factor=1.43, typical_factor_ci95=alike
    )
    assert judge._shown(lossy) == 1.43
    assert judge._shown(QuantityVerdict("dv", "wrong", "", factor=0.91, factor_ci95=whole)) == 0.91
