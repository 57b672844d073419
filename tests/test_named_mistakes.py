"""Mistakes of public kernels that were found unnamed, or named as something else, by mutation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_diag

SCALE, CAP = 0.125, 3.0


def call(rows: int = 128, heads: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, heads, rows, 64, generator=generator) for _ in range(4))
    return (2 * q).bfloat16(), k.bfloat16(), v.bfloat16(), do.bfloat16()


def words(diagnosis: attn_diag.Diagnosis) -> str:
    return "; ".join(p.words for h in diagnosis.heads for one in h.quantities for p in one.patterns)


@pytest.mark.parametrize("rows", [1, 128], ids=["decoding", "all rows"])
def test_scores_that_are_capped_before_they_are_scaled(rows: int) -> None:
    """Of decoding it fitted the scale 1/D within 4.4 %, and "correct the metadata" was said of that."""
    q, k, v, _ = (t.double() for t in call())
    q = q[:, :, :rows]
    s = SCALE * CAP * torch.tanh(q @ k.mT / CAP)
    o = (s.softmax(-1) @ v).bfloat16()
    found = attn_diag.inspect(*(t.bfloat16() for t in (q, k, v)), o=o, scale=SCALE, softcap=CAP)
    assert "softcap=0.375 (scores are capped before they are scaled) fits" in " ".join(found.report().split())


def test_ln_in_place_of_log2_in_the_lse() -> None:
    q, k, v, _ = call()
    s = q.double() @ k.double().mT * SCALE
    m = s.amax(-1)
    o = (s.softmax(-1) @ v.double()).bfloat16()
    lse = m + math.log(2) * (s - m[..., None]).exp().sum(-1).log()
    found = attn_diag.inspect(q, k, v, o=o, lse=lse.float(), scale=SCALE)
    assert "add ln 2 ln l to m, as where ln stands for log2 of l" in words(found)


def gradients(factor: float) -> dict[str, Any]:
    """Of a backward whose exponent has the scale times a factor, and whose products with K and Q have the scale."""
    q, k, v, do = (t.double() for t in call())
    s = q @ k.mT
    lse = (SCALE * s).logsumexp(-1, keepdim=True)
    o = ((SCALE * s - lse).exp() @ v).bfloat16()
    delta = (o.double() * do).sum(-1, keepdim=True)
    p = (factor * SCALE * s - lse).exp()
    ds = (p * (do @ v.mT - delta)).bfloat16().double()
    found = {"o": o, "dq": SCALE * ds @ k, "dk": SCALE * ds.mT @ q, "dv": p.bfloat16().double().mT @ do}
    return {name: t.bfloat16() for name, t in found.items()} | {"do": do.bfloat16()}


@pytest.mark.parametrize("factor", [1.01, math.log(2)])
def test_a_scale_in_the_backwards_exponent_alone(factor: float) -> None:
    """One per cent was lossy, as of coarse rounding: dQ 4.6 % off; ln 2 (exp2 for exp) had no name."""
    q, k, v, _ = call()
    found = attn_diag.inspect(q, k, v, scale=SCALE, **gradients(factor))
    assert "wrong" in found.labels
    for head in found.heads:
        for quantity in (one for one in head.quantities if one.quantity in ("dq", "dk")):
            assert any(
                f"are what the scale {factor * SCALE:.5g}"[:24] in p.words and "exponent alone gives" in p.words
                for p in quantity.patterns
            ), quantity


def test_a_right_backward_has_no_other_scale() -> None:
    q, k, v, _ = call()
    found = attn_diag.inspect(q, k, v, scale=SCALE, **gradients(1.0))
    assert "wrong" not in found.labels
    assert "exponent" not in words(found)
