"""What is said of a kernel does not depend on the scale of dO: a loss scaler's factor, or a mean's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import some
from verdicts.inputs import draw
from verdicts.kernels import Kernel, attend

import attn_diag
from attn_diag.results.diagnosis import HeadDiagnosis


def judged(scale: float) -> HeadDiagnosis:
    """A healthy head with LSE and delta, its dO times ``scale``."""
    x = draw("gaussian", "plain", heads=1, t_q=96, d=32, seed=3)
    x = replace(x, do=x.do * scale)
    made: dict[str, Any] = attend(x, Kernel()).tensors()
    causal = x.causal if x.causal != "none" else False
    found = attn_diag.inspect(x.q, x.k, x.v, do=x.do, causal=causal, scale=x.scale, device="cpu", **made)
    return found.captures[0].observations[0].heads[0]


@pytest.mark.parametrize("power", [-40, 30, 90])
def test_a_healthy_head_is_judged_as_if_do_had_size_one(power: int) -> None:
    plain, scaled = judged(1.0), judged(2.0**power)
    assert some(scaled.verdict).labels == some(plain.verdict).labels
    for one, other in zip(plain.quantities, scaled.quantities, strict=True):
        assert (one.quantity, one.answer) == (other.quantity, other.answer)
        assert other.factor == pytest.approx(one.factor, rel=1e-9)
