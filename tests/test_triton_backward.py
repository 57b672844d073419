"""The backward kernels against their emulation and the float64 reference; on a GPU or interpreted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import some
from kernel_inputs import head_of, kernel_inputs, options
from torch import Tensor

from attn_diag.kernels import PRESETS, Recipe, Schedule, emulate_head, preset
from attn_diag.kernels.attention import attention
from attn_diag.kernels.backend import DTYPES
from attn_diag.kernels.geometry import Visibility
from attn_diag.kernels.recipe import BACKWARD
from attn_diag.kernels.triton_backward import backward
from attn_diag.kernels.triton_forward import forward
from attn_diag.reference import AttentionHead, format_of, reference_head, round_nearest_even

CUDNN = preset("cudnn")
CASES: dict[str, dict[str, Any]] = {
    "causal": {"T": 150, "causal": "top-left"},
    "none-63": {"T": 63, "D": 80},
    "cross-top-left": {"T": 77, "Tk": 333, "causal": "top-left", "D": 32},
    "cross-bottom-right": {"T": 63, "Tk": 333, "causal": "bottom-right", "D": 32},
    "more-queries": {"T": 333, "Tk": 63, "D": 96, "causal": "bottom-right"},
    "window": {"T": 200, "window": (50, 20), "D": 32},
    "softcap": {"T": 130, "causal": "top-left", "softcap": 2.0},
    "gqa": {"T": 130, "H": 4, "Hk": 2, "D": 16, "causal": "top-left"},
    "wide": {"T": 70, "D": 256, "causal": "top-left"},
    "32-more": {"T": 40, "D": 288, "Dv": 32, "causal": "top-left"},
    "absorbed": {"T": 40, "Tk": 70, "D": 576, "Dv": 512, "H": 4, "Hk": 1, "causal": "bottom-right"},
    "mla": {"T": 70, "D": 192, "Dv": 128, "causal": "top-left"},
    "wider-values": {"T": 90, "Tk": 63, "D": 24, "Dv": 80, "H": 4, "Hk": 2, "causal": "bottom-right"},
}


def gradients(case: dict[str, Any], parts: Sequence[Tensor], **more: Any) -> list[Tensor]:
    """dQ, dK, dV of the kernels, on the CPU."""
    q, k, v, do = parts
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = attention(*leaves, **options(case), **more)  # type: ignore[call-overload]
    return [g.cpu() for g in torch.autograd.grad(out, leaves, do)]


def heads_of(case: dict[str, Any], parts: Sequence[Tensor]) -> list[AttentionHead]:
    q, k, v, do = parts
    return [head_of(q, k, v, h, case, do) for h in range(q.shape[1])]


def summed(per_head: list[Tensor], groups: int) -> Tensor:
    """dK or dV: the sum over the query heads that share a key head, [Hk, Tk, D]."""
    stacked = torch.stack(per_head)
    return stacked.view(groups, -1, *stacked.shape[1:]).sum(1)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", CASES)
def test_gradients_agree_with_float64(name: str, device: str) -> None:
    """At most twice the error of the same roundings in plain torch, plus one rounding; the mean error likewise."""
    case = CASES[name]
    parts = kernel_inputs(device, **case)
    got = gradients(case, parts, recipe=CUDNN)
    heads = heads_of(case, parts)
    truths, plain = [reference_head(h) for h in heads], [emulate_head(CUDNN, h) for h in heads]
    groups = parts[1].shape[1]
    for index, name in enumerate(("dq", "dk", "dv")):
        true = [getattr(t, name) for t in truths]
        low = [getattr(e, name).double() for e in plain]
        if name == "dq":
            exact, emulated = torch.stack(true), torch.stack(low)
        else:
            exact, emulated = summed(true, groups), summed(low, groups)
        error, expected = got[index][0].double() - exact, emulated - exact
        rounding = round_nearest_even(exact, format_of(torch.bfloat16)) - exact
        assert error.norm() <= 2 * expected.norm() + rounding.norm(), name
        assert abs(error.mean()) <= abs(expected.mean()) + 4 * error.std() / math.sqrt(error.numel()), name


MIXED = {
    **{name: preset(name) for name in PRESETS},
    "fp16": preset("fa2", "fp16"),
    "dscores-fp32": replace(CUDNN, dscores="fp32"),
    # Gradients are rounded after every range of keys and block of queries.
    "qiu2025-tiles": replace(preset("qiu2025"), schedule=Schedule(query_block=128, key_tile=64)),
}


@pytest.mark.parametrize("name", MIXED)
def test_gradients_agree_with_the_emulation_on_every_recipe(name: str, device: str) -> None:
    recipe = MIXED[name]
    case: dict[str, Any] = {"T": 140, "causal": "top-left", "D": 32}
    parts = kernel_inputs(device, dtype=DTYPES[recipe.input], H=1, **case)
    got = gradients(case, parts, recipe=recipe)
    emulated = emulate_head(recipe, heads_of(case, parts)[0])
    for mine, theirs in zip(got, map(some, (emulated.dq, emulated.dk, emulated.dv)), strict=True):
        assert (mine[0, 0] == theirs).float().mean() > 0.98
        # Apart by less than one rounding of every element.
        assert (mine[0, 0].double() - theirs.double()).norm() <= 2e-3 * theirs.double().norm()


def test_forward_and_backward_recipes_can_differ(device: str) -> None:
    """The mixture of the training failures: a forward that rounds scores, a backward that recomputes them in fp32."""
    case: dict[str, Any] = {"T": 140, "causal": "top-left"}
    parts = kernel_inputs(device, H=1, **case)
    forward = preset("qiu2025")
    mixed = gradients(case, parts, recipe=forward, backward_recipe="fa2")
    same = gradients(case, parts, recipe=forward)
    assert not torch.equal(mixed[0], same[0])
    fa2 = preset("fa2")
    mixture = replace(forward, **{site: getattr(fa2, site) for site in BACKWARD})
    expected = some(emulate_head(mixture, heads_of(case, parts)[0]).dq)
    assert (mixed[0][0, 0] == expected).float().mean() > 0.98


def test_deterministic(device: str) -> None:
    # Interpreted, there is but one order; what could differ is a GPU's.
    rows, dim = (140, 64) if device == "cuda" else (70, 16)
    case: dict[str, Any] = {"T": rows, "D": dim, "causal": "top-left", "H": 4, "Hk": 1}
    parts = kernel_inputs(device, **case)
    first, second = (gradients(case, parts, recipe="fa2") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("recipe", [CUDNN, preset("delta-fp32"), preset("delta-from-dp")], ids=lambda r: r.name)
def test_backward_dump_holds_what_was_used(recipe: Recipe, device: str) -> None:
    case: dict[str, Any] = {"T": 90, "causal": "top-left", "D": 32}
    q, k, v, do = kernel_inputs(device, **case)
    q.requires_grad_()
    chosen = torch.zeros(2, 90, dtype=torch.bool)
    chosen[0, ::9] = True
    out, dump = attention(q, k, v, causal="top-left", recipe=recipe, instrument="tiles", dump_rows=chosen)
    before = dump.has_backward
    (dq,) = torch.autograd.grad(out, q, do)
    assert (before, dump.has_backward) == (False, True)
    rows = dump.chosen[:, 2].cpu()
    assert rows.tolist() == list(range(0, 90, 9))
    head = heads_of(case, [q.detach(), k, v, do])[0]
    emulated = emulate_head(recipe, head)
    if recipe.delta_from == "rounded-o":
        # From the kernel's own O: another rounding of a single element would move delta by far more than fp32 does.
        expected = (do[0, 0].cpu().double() * out[0, 0].detach().cpu().double()).sum(1)
    else:
        expected = some(emulated.delta).double()
    # fp32 sums of at most 90 terms about 1 in size, each good to two or three ulp.
    torch.testing.assert_close(some(dump.delta)[0, 0].cpu().double(), expected, rtol=1e-5, atol=2e-5)
    seen = dump.visible.cpu()
    dprobs = some(head.do)[rows] @ head.v.T
    torch.testing.assert_close(some(dump.dprobs).cpu().double()[seen], dprobs[seen], rtol=1e-5, atol=1e-4)
    dscores = torch.where(seen, some(dump.dscores).cpu().double(), 0.0)
    again = dscores @ head.k * (1.0 if recipe.alpha_in_backward == "before-cast" else head.scale)
    torch.testing.assert_close(dq[0, 0].cpu().double()[rows], again, rtol=2.0**-8, atol=1e-6)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", ["absorbed", "narrow"])
def test_a_latent_that_k_and_v_share_has_the_bits_of_a_copy(name: str, device: str) -> None:
    """One tile of both is loaded then, so that there is room to load the next one early."""
    case = CASES["absorbed"] if name == "absorbed" else {"T": 50, "Tk": 130, "D": 32, "H": 4, "Hk": 1}
    q, latent, v, do = kernel_inputs(device, **case)
    shared = latent[..., : v.shape[-1]]
    found = [_both_ways(case, (q, latent, values, do)) for values in (shared, shared.clone())]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _both_ways(case: dict[str, Any], parts: Sequence[Tensor]) -> list[Tensor]:
    """O, dQ, dK and dV from the operators, which see the tensors as they are given."""
    q, k, v, do = parts
    recipe, (visibility, scale) = CUDNN, (Visibility(case.get("causal", "none")), q.shape[-1] ** -0.5)
    found = forward(q, k, v, recipe, visibility, scale=scale, softcap=None)
    back = backward(q, k, v, found.o, found.lse, do, recipe, visibility, scale=scale, softcap=None)
    return [found.o, back.dq, back.dk, back.dv]
