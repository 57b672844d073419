"""Backwards that make P of L, as people write them: what they round is named, and nothing else is called so."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag.analyses.verdicts.quality import SITES
from attn_diag.results.quality import QuantityVerdict

GRADIENTS = ("dq", "dk", "dv")


def gradients(
    how: str, dtype: torch.dtype, *, length: int = 192, width: int = 64, seed: int = 0, uniform: bool = False
) -> list[Tensor]:
    """q, k, v, O, dO, dQ, dK and dV of one causal head, [1, 1, T, D]; of a full one that weighs keys nearly alike."""
    torch.manual_seed(seed)
    q, k, v, do = (torch.randn(1, 1, length, width) for _ in range(4))
    q, k = (0.1 * q, 0.1 * k) if uniform else (q, k)
    q, k, v, do = (x.to(dtype) for x in (q, k, v, do))
    scale, hidden = width**-0.5, torch.ones(length, length, dtype=torch.bool).triu(length if uniform else 1)

    def masked(scores: Tensor) -> Tensor:
        return scores.masked_fill(hidden, -math.inf)

    fine = masked(q.float() @ k.float().mT * scale)
    largest = fine.amax(-1, keepdim=True)
    powers = (fine - largest).exp()
    row_sum = powers.sum(-1, keepdim=True)
    o, lse = (powers.to(dtype).float() @ v.float() / row_sum).to(dtype), largest + row_sum.log()
    if "low" in how:
        lse = lse.to(dtype)
    if how == "plain torch, L low":
        probs = torch.exp(masked((q @ k.mT) * scale) - lse)
        dscores = probs * (do @ v.mT - (o * do).sum(-1, keepdim=True))
        return [q, k, v, o, do, (dscores @ k) * scale, (dscores.mT @ q) * scale, probs.mT @ do]
    delta = (o.float() * do.float()).sum(-1, keepdim=True)
    if how == "compiled, L low":
        probs = torch.exp(masked((q @ k.mT).float() * scale) - lse.float())
        dscores = (probs * ((do @ v.mT).float() - delta)).to(dtype)
        return [q, k, v, o, do, (dscores @ k) * scale, (dscores.mT @ q) * scale, probs.to(dtype).mT @ do]
    noise = 0.01 * torch.randn(1, 1, length, 1)
    scores = fine.to(dtype).float() if how == "stored scores" else fine
    probs = torch.exp(scores - lse.float() - (noise if how == "noise" else 0.0))
    wide = (probs * (do.float() @ v.float().mT - delta)).to(dtype).float()
    found = wide @ k.float() * scale, wide.mT @ q.float() * scale, probs.to(dtype).float().mT @ do.float()
    return [q, k, v, o, do, *(x.to(dtype) for x in found)]


def judged(
    how: str, dtype: torch.dtype, *, factor: float = 1.0, uniform: bool = False, **kwargs: int
) -> dict[str, QuantityVerdict]:
    q, k, v, o, do, *made = gradients(how, dtype, uniform=uniform, **kwargs)
    dq, dk, dv = (factor * x for x in made)
    found = attn_diag.inspect(q, k, v, o=o, do=do, dq=dq, dk=dk, dv=dv, causal=not uniform)
    head = found.captures[0].observations[0].heads[0]
    return {verdict.quantity: verdict for verdict in head.quantities}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("how", "site"),
    [
        ("fused, L low", "lse"),
        ("plain torch, L low", "lse_steps"),
        ("compiled, L low", "lse_steps"),
        ("stored scores", "backward_scores"),
    ],
)
def test_what_is_rounded_is_named(how: str, site: str, dtype: torch.dtype) -> None:
    found = judged(how, dtype, length=160, width=128, seed=7)
    assert found["o"].answer == "good"
    assert {found[name].answer for name in GRADIENTS} == {"lossy"}
    assert {found[name].site for name in GRADIENTS} == {site}
    assert SITES[site] in found["dq"].words


@pytest.mark.parametrize("how", ["noise", "fused"])
def test_nothing_else_is_called_so(how: str) -> None:
    found = judged(how, torch.bfloat16)
    assert {found[name].answer for name in GRADIENTS} == {"lossy" if how == "noise" else "good"}
    assert not {found[name].site for name in GRADIENTS} - {None}


def test_a_factor_is_none_though_a_rounded_l_is_one_where_rows_weigh_keys_alike() -> None:
    """L = 5.3 rounds up there, so that all of P is 0.985 times what it was."""
    asked = {"length": 200, "seed": 3}
    rounded = judged("fused, L low", torch.bfloat16, uniform=True, **asked)
    assert {rounded[name].site for name in GRADIENTS} == {"lse"}
    wrong = judged("fused", torch.bfloat16, factor=0.98, uniform=True, **asked)
    assert {wrong[name].answer for name in GRADIENTS} == {"wrong"}
    assert all("0.98 times the true ones" in wrong[name].words for name in GRADIENTS)


def test_a_softmax_written_by_hand_is_named() -> None:
    """P, and P o (dP - rowsum(P o dP)), each step in 16 bits."""
    torch.manual_seed(3)
    q, k, v, do = (torch.randn(1, 1, 160, 64).bfloat16() for _ in range(4))
    scores = (q @ k.mT) * 0.125
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    probs = powers / powers.sum(-1, keepdim=True)
    dprobs = do @ v.mT
    dscores = probs * (dprobs - (dprobs * probs).sum(-1, keepdim=True))
    found = attn_diag.inspect(
        q, k, v, o=probs @ v, do=do, dq=dscores @ k * 0.125, dk=dscores.mT @ q * 0.125, dv=probs.mT @ do
    )
    head = found.captures[0].observations[0].heads[0]
    assert {x.site for x in head.quantities} == {"steps"}
