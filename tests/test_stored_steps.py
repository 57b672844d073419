"""Attention that is not fused and stores more than S and P in 16 bits: S + mask, steps of softmax, P o dP."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag.results.diagnosis import Diagnosis, HeadDiagnosis


def inputs(seed: int, heat: float, dtype: torch.dtype, rows: int = 128) -> list[Tensor]:
    """q, k, v and dO of one head of 64 features; scores have a deviation of ``heat``."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(1, 1, rows, 64, generator=generator) for _ in range(4))
    return [x.to(dtype) for x in (heat * q, k, v, do)]


def bias_of(seed: int, size: float, dtype: torch.dtype, rows: int = 128) -> Tensor:
    """An additive mask, [1, 1, Tq, Tk], as relative positions have it."""
    return (size * torch.randn(1, 1, rows, rows, generator=torch.Generator().manual_seed(seed))).to(dtype)


def stepwise(q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
    """As JAX has it for arrays of 16 bits, forward and backward: a cast behind every step."""
    dtype, alpha = q.dtype, q.shape[-1] ** -0.5
    low = (q.float() * alpha).to(dtype)
    scores = (low.float() @ k.float().mT).to(dtype)
    scores = scores if mask is None else scores + mask
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    probs = powers / powers.float().sum(-1, keepdim=True).to(dtype)
    dprobs = (do.float() @ v.float().mT).to(dtype)
    products = probs * dprobs
    dscores = products - probs * products.float().sum(-1, keepdim=True).to(dtype)
    made = {
        "o": probs.float() @ v.float(),
        "dv": probs.float().mT @ do.float(),
        "dq": (dscores.float() @ k.float()).to(dtype).float() * alpha,
        "dk": dscores.float().mT @ low.float(),
    }
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def only_head(found: Diagnosis) -> HeadDiagnosis:
    return next(h for h in found.captures[0].observations[0].heads if h.head == 0)


def sites(head: HeadDiagnosis) -> dict[str, str | None]:
    return {q.quantity: q.site for q in head.quantities}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_softmax_whose_steps_are_stored_is_named(dtype: torch.dtype) -> None:
    q, k, v, do = inputs(0, 1.0, dtype)
    found = attn_diag.inspect(q, k, v, do=do, **stepwise(q, k, v, do), device="cpu")
    named = sites(only_head(found))
    assert (named["o"], named["dv"]) == ("steps", "steps")
    # The opening says it too, and does not send to look for what is known.
    assert "every step of softmax" in " ".join(found.report().partition("What to do")[0].split())


def test_a_sum_with_the_mask_that_is_stored_is_named() -> None:
    q, k, v, _ = inputs(1, 1.0, torch.bfloat16)
    mask = bias_of(2, 4.0, torch.bfloat16)
    o = ((q @ k.mT) * 0.125 + mask).softmax(-1) @ v
    head = only_head(attn_diag.inspect(q, k, v, o=o, mask=mask, device="cpu"))
    assert (head.verdict and head.verdict.labels, sites(head)) == (("lossy",), {"o": "biased"})
    # Once: the sum alone is rounded, as torch.baddbmm does it.
    once = ((q.float() @ k.float().mT) * 0.125 + mask.float()).bfloat16().softmax(-1) @ v
    assert sites(only_head(attn_diag.inspect(q, k, v, o=once, mask=mask, device="cpu"))) == {"o": "biased"}


def test_a_row_that_is_wrong_is_not_explained_by_a_stored_sum() -> None:
    q, k, v, _ = inputs(1, 1.0, torch.bfloat16)
    mask = bias_of(2, 4.0, torch.bfloat16)
    o = ((q @ k.mT) * 0.125 + mask).softmax(-1) @ v
    o[:, :, 77] *= 1.5
    head = only_head(attn_diag.inspect(q, k, v, o=o, mask=mask, device="cpu"))
    assert sites(head) == {"o": None}
    assert head.quantities[0].answer in ("undecided", "wrong")


def test_what_is_known_is_not_to_be_looked_for() -> None:
    """P is normalised before its cast, scores are fp32: JAX's own attention, and FlexAttention without compile."""
    q, k, v, _ = inputs(3, 3.0, torch.bfloat16, rows=384)
    later = torch.ones(384, 384, dtype=torch.bool).triu(1)
    scores = (q.float() @ k.float().mT * 0.125).masked_fill(later, -math.inf)
    o = scores.softmax(-1).bfloat16() @ v
    found = attn_diag.inspect(q, k, v, o=o, causal=True, device="cpu")
    head, report = only_head(found), " ".join(found.report().split())
    assert head.verdict is not None
    assert head.verdict.labels == ("lossy",)
    assert "well-rounded kernel. O: as where P is normalised before its cast" in report
    assert "accumulators or LSE below fp32" not in report
    assert "Which rounding inside" not in attn_diag.explain(found, head=0).report()


def test_no_16_bit_figure_is_held_against_fp32() -> None:
    q, k, v, do = inputs(4, 1.0, torch.float32)
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    found = attn_diag.inspect(q, k, v, o=o, do=do, device="cpu").report()
    assert "production kernels in 16 bits" in " ".join(found.split())


def derived(q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, jitted: bool, divided: bool = False) -> dict[str, Any]:
    """As JAX 0.11 derives its softmax of 16 bits; in BF16 under jax.jit its row sum divides before it is cast.

    ``divided``: by the root of D, rounded, as in Flax.
    """
    dtype, root = q.dtype, torch.tensor(q.shape[-1] ** 0.5)
    root = root.to(dtype).float() if divided else root
    low = (q.float() / root).to(dtype)
    scores = (low.float() @ k.float().mT).to(dtype)
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    whole = powers.float().sum(-1, keepdim=True)
    row_sum = whole.to(dtype)
    divisor = whole if jitted else row_sum.float()
    probs = (powers.float() / divisor).to(dtype)
    dprobs = (do.float() @ v.float().mT).to(dtype)
    inverse = (1 / (row_sum * row_sum).float()).to(dtype)
    delta = (dprobs * inverse * powers).float().sum(-1, keepdim=True).to(dtype)
    dscores = ((dprobs.float() / divisor).to(dtype) - delta) * powers
    made = {
        "o": probs.float() @ v.float(),
        "dv": probs.float().mT @ do.float(),
        "dq": (dscores.float() @ k.float()).to(dtype).float() / root,
        "dk": dscores.float().mT @ low.float(),
    }
    return {name: tensor.to(dtype) for name, tensor in made.items()}


@pytest.mark.parametrize(("dtype", "jitted"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)])
def test_a_softmax_whose_gradient_is_derived_step_by_step_is_named(dtype: torch.dtype, jitted: bool) -> None:
    q, k, v, do = inputs(0, 1.0, dtype)
    found = attn_diag.inspect(q, k, v, do=do, **derived(q, k, v, do, jitted=jitted), device="cpu")
    named = sites(only_head(found))
    assert (named["dq"], named["dk"]) == ("derived", "derived")
    # Without jax.jit its O is that of a softmax with a gradient rule of its own, which claims less.
    assert (named["o"], named["dv"]) == (("derived",) * 2 if jitted else ("steps",) * 2)


@pytest.mark.parametrize("jitted", [True, False])
def test_a_rounded_alpha_is_named_with_it(jitted: bool) -> None:
    halves = (inputs(seed, 1.0, torch.bfloat16) for seed in (0, 1))
    q, k, v, do = (torch.cat(pair, -1) for pair in zip(*halves, strict=True))
    made = derived(q, k, v, do, jitted=jitted, divided=True)
    named = sites(only_head(attn_diag.inspect(q, k, v, do=do, **made, device="cpu")))
    assert (named["o"], named["dq"], named["dk"]) == ("low", "low", "low")


def scores_in_fp32(q: Tensor, k: Tensor, v: Tensor, do: Tensor, alpha: float) -> dict[str, Any]:
    """jax.nn.dot_product_attention by XLA: S and softmax in fp32, dP stored, alpha dS cast once."""
    dtype = q.dtype
    wide = (q.float() @ k.float().mT * alpha).softmax(-1)
    dprobs = (do.float() @ v.float().mT).to(dtype).float()
    dscores = (wide * (dprobs - (wide * dprobs).sum(-1, keepdim=True)) * alpha).to(dtype)
    made = {
        "o": wide.to(dtype).float() @ v.float(),
        "dv": wide.to(dtype).float().mT @ do.float(),
        "dq": dscores.float() @ k.float(),
        "dk": dscores.float().mT @ q.float(),
    }
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def test_scores_times_a_rounded_alpha_are_named() -> None:
    q, k, v, do = inputs(0, 1.0, torch.bfloat16)
    low = torch.tensor(0.1).bfloat16()
    scores = ((q.float() @ k.float().mT).bfloat16() * low).float().requires_grad_()
    probs = scores.softmax(-1)
    o = (probs.bfloat16().float() @ v.float()).bfloat16()
    dprobs = (do.float() @ v.float().mT).bfloat16().float()
    dscores = torch.autograd.grad(probs, scores, dprobs)[0].bfloat16() * low
    made = {"dq": dscores.float() @ k.float(), "dk": dscores.float().mT @ q.float()}
    gradients: dict[str, Any] = {name: x.bfloat16() for name, x in made.items()}
    head = only_head(attn_diag.inspect(q, k, v, o=o.detach(), do=do, **gradients, scale=0.1, device="cpu"))
    assert sites(head) == {"o": "alpha", "dq": "alpha", "dk": "alpha"}


def test_hot_rows_of_a_scaled_dscores_that_is_cast_once_are_not_accused() -> None:
    # Row 374 of dQ is 1.3 % off, of nearly one-hot rows: no kernel that casts dS before alpha makes that.
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 2, 1024, 64, generator=generator).mul(3).bfloat16()[:, :1] for _ in range(2))
    v, do = (torch.randn(1, 2, 1024, 64, generator=generator).bfloat16()[:, :1] for _ in range(2))
    head = only_head(attn_diag.inspect(q, k, v, do=do, **scores_in_fp32(q, k, v, do, 0.1), scale=0.1, device="cpu"))
    assert head.verdict is not None
    assert head.verdict.labels == ("lossy",)
    assert sites(head)["dq"] == "normalised"
