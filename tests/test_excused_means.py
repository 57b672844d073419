"""A mean error that a well-rounded kernel has too is told, and is no fault of the kernel."""

from __future__ import annotations

import pytest
import torch
from builders import some
from torch import Tensor
from verdicts.inputs import draw

import attn_diag
from attn_diag.analyses.verdicts.means import excuse
from attn_diag.head.counterfactual import Counterfactuals
from attn_diag.results.diagnosis import BiasEstimate, HeadDiagnosis, RoundingBias

NOTHING = RoundingBias(None, None)


@pytest.mark.parametrize(("other", "excused"), [(None, False), (0.4, False), (0.5, True), (-1.0, False), (2.0, True)])
def test_half_of_the_mean_and_its_sign(other: float | None, excused: bool) -> None:
    estimate = BiasEstimate(n=8, mean=1.0, p_adjusted=1e-6, well_rounded_mean=other)
    assert (excuse("o_excess", estimate, NOTHING, 0.01) is not None) == excused


def cut_off(x: Tensor) -> Tensor:
    """BF16 numbers toward zero: the upper half of each fp32 number's bits."""
    return (x.float().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def judged() -> HeadDiagnosis:
    """What is said of a head whose O is cut off."""
    x = draw("gaussian", "independent", heads=1, t_q=96, d=32, seed=3)
    scores = (x.q.double() @ x.k.double().transpose(-1, -2)) * x.scale
    if x.causal != "none":
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -torch.inf)
    o = cut_off(scores.softmax(-1) @ x.v.double())
    found = attn_diag.inspect(
        x.q, x.k, x.v, do=x.do, o=o, causal=x.causal if x.causal != "none" else False, scale=x.scale, device="cpu"
    )
    return found.captures[0].observations[0].heads[0]


def test_a_mean_of_its_own_is_the_kernels() -> None:
    head = judged()
    assert "biased" in some(head.verdict).labels
    away = some(head.bias.o_away_excess)
    assert some(away.mean) < 0
    assert abs(some(away.well_rounded_mean)) < abs(some(away.mean)) / 2


def test_a_mean_that_a_well_rounded_kernel_shares_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = Counterfactuals.outputs

    def nearer_zero(self: Counterfactuals, *args: object, **kwargs: object) -> dict[str, Tensor]:
        found = outputs(self, *args, **kwargs)  # type: ignore[arg-type]
        return {**found, "o": found["o"] * (1 - 2.0**-9)}

    monkeypatch.setattr(Counterfactuals, "outputs", nearer_zero)
    verdict = some(judged().verdict)
    assert "biased" not in verdict.labels
    said = next(reason for reason in verdict.reasons if "O's magnitude" in reason)
    assert "a well-rounded kernel has -" in said
    assert said.endswith("on this input: no fault of the kernel.")
    assert not any(reason.startswith("No significant mean error") for reason in verdict.reasons)


def test_sums_in_fp32_lose_terms_that_are_too_small() -> None:
    """Any kernel's do that adds key by key: ggml's lose 2.5 ulp of FP32 on 1,024 keys of low rank."""
    generator = torch.Generator().manual_seed(3)
    basis = torch.randn(4, 64, generator=generator)
    q, k = (torch.randn(384, 4, generator=generator) @ basis / 2 for _ in range(2))
    v = 1 + torch.randn(384, 64, generator=generator)
    scores = (q @ k.mT / 8).masked_fill(torch.ones(384, 384).triu(1) > 0, -torch.inf)
    probs, o = (scores - scores.amax(1, keepdim=True)).exp(), torch.zeros(384, 64)
    for key in range(384):
        o += probs[:, key, None] * v[key]
    o /= probs.double().sum(1, keepdim=True).float()
    q, k, v, o = (x[None, None] for x in (q, k, v, o))
    for factor, label in ((1.0, "clean"), (1 + 2.0**-20, "biased")):
        head = attn_diag.inspect(q, k, v, o=factor * o, causal="top-left").captures[0].observations[0].heads[0]
        assert some(head.verdict).labels == (label,)
        means = [one for one in (head.bias.o_excess, head.bias.o_away_excess) if some(some(one).p_adjusted) < 0.01]
        assert means
    said = [reason for reason in some(head.verdict).reasons if reason.startswith("Mean error")]
    assert said
