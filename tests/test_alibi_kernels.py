"""ALiBi's slopes in the Triton kernels, forward and backward, against the emulation and float64; GPU or interpreted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import some
from kernel_inputs import head_of, kernel_inputs, options
from torch import Tensor

from attn_diag.kernels import Recipe, Schedule, emulate_head, preset
from attn_diag.kernels.attention import attention
from attn_diag.kernels.backend import DTYPES, BackendError
from attn_diag.kernels.triton_head import run_heads
from attn_diag.reference import Alibi, AttentionHead, format_of, reference_head, round_nearest_even

CUDNN = preset("cudnn")
SLOPES = torch.tensor([0.25, 0.017, -0.3, 1.0])
CASES: dict[str, dict[str, Any]] = {
    "causal": {"T": 130, "causal": "top-left", "D": 32},
    "both ways": {"T": 63},
    "bottom-right": {"T": 63, "Tk": 133, "causal": "bottom-right", "D": 80},
    "no key": {"T": 90, "Tk": 63, "causal": "bottom-right", "D": 32},
    "window": {"T": 130, "window": (20, 5), "D": 32},
    "softcap": {"T": 70, "softcap": 2.0},
    "gqa": {"T": 70, "H": 4, "Hk": 2, "D": 16, "causal": "top-left"},
}
GPU_CASES: dict[str, dict[str, Any]] = {
    "long": {"T": 1500, "H": 4, "Hk": 2, "causal": "top-left"},
    "both ways": {"T": 700, "Tk": 900, "D": 128},
    "softcap": {"T": 700, "causal": "top-left", "softcap": 20.0, "D": 128},
    "window": {"T": 900, "causal": "top-left", "window": (300, -1)},
    "wide": {"T": 300, "D": 256, "causal": "top-left"},
}
RECIPES: dict[str, Recipe] = {
    **{f"{alpha}": replace(CUDNN, alpha=alpha) for alpha in ("before-rounding", "after-rounding", "in-exponent")},
    "rounded scores": replace(preset("qiu2025"), alpha="in-exponent"),
    **{name: preset(name) for name in ("qiu2025", "efficient", "bf16-forward", "delta-from-dp")},
    "fp16": preset("fa2", "fp16"),
    "splits": replace(CUDNN, schedule=Schedule(key_tile=64, split_keys=64)),
}  # fmt: skip


def heads_of(case: dict[str, Any], parts: Any, slopes: Tensor, origin: Any = "row") -> list[AttentionHead]:
    q, k, v, do = parts
    plain = [head_of(q, k, v, h, case, do) for h in range(q.shape[1])]
    return [
        replace(head, masking=replace(head.masking, alibi=Alibi(float(s), origin)))
        for head, s in zip(plain, slopes.tolist(), strict=True)
    ]


def check(case: dict[str, Any], recipe: Recipe, device: str, share: float = 0.995) -> None:
    """O has the emulation's bits; errors of gradients are at most twice those of its roundings, plus one rounding."""
    parts = kernel_inputs(device, dtype=DTYPES[recipe.input], **case)
    slopes = SLOPES[: parts[0].shape[1]]
    leaves = [t.clone().requires_grad_() for t in parts[:3]]
    out = attention(*leaves, alibi_slopes=slopes.to(device), recipe=recipe, **options(case))
    found = [g[0].cpu().double() for g in torch.autograd.grad(out, leaves, parts[3])]
    heads = heads_of(case, parts, slopes)
    emulated, truths = [emulate_head(recipe, h) for h in heads], [reference_head(h) for h in heads]
    same = torch.stack([e.o == o.cpu() for e, o in zip(emulated, out[0], strict=True)])
    assert float(same.float().mean()) > share
    for name, gradient in zip(("dq", "dk", "dv"), found, strict=True):
        exact, low = (torch.stack([some(getattr(x, name)).double() for x in those]) for those in (truths, emulated))
        exact, low = (x.view(len(gradient), -1, *x.shape[1:]).sum(1) for x in (exact, low))
        error, expected = gradient - exact, low - exact
        rounding = round_nearest_even(exact, format_of(DTYPES[recipe.input])) - exact
        assert error.norm() <= 2 * expected.norm() + rounding.norm(), name
        assert abs(error.mean()) <= abs(expected.mean()) + 4 * error.std() / math.sqrt(error.numel()), name


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES)
def test_kernels_agree_with_the_emulation_on_every_shape(case: str, device: str) -> None:
    check(CASES[case], CUDNN, device)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", GPU_CASES)
def test_kernels_agree_with_the_emulation_on_long_sequences(case: str, device: str) -> None:
    check(GPU_CASES[case], CUDNN, device)


@pytest.mark.parametrize(
    ("name", "softcap"), [(name, None) for name in RECIPES] + [(n, 3.0) for n in list(RECIPES)[:4]]
)
def test_kernels_agree_with_the_emulation_on_every_recipe(name: str, softcap: float | None, device: str) -> None:
    check({"T": 100, "causal": "top-left", "D": 32, "softcap": softcap, "H": 1}, RECIPES[name], device, 0.99)


@pytest.mark.parametrize("origin", ["row", "first-key", "last-key"])
@pytest.mark.parametrize("causal", ["none", "bottom-right"])
def test_origins_are_the_emulations(origin: str, causal: str, device: str) -> None:
    case: dict[str, Any] = {"T": 63, "Tk": 90, "causal": causal, "D": 32}
    parts = kernel_inputs(device, **case)
    heads = heads_of(case, parts, SLOPES[:2], origin)
    moved = [replace(h, **{n: getattr(h, n).to(device) for n in ("q", "k", "v", "do")}) for h in heads]
    for head, found in zip(heads, run_heads(CUDNN, moved), strict=True):
        emulated = emulate_head(CUDNN, head)
        assert (found.o.cpu() == emulated.o).float().mean() > 0.995
        torch.testing.assert_close(found.lse.cpu(), emulated.lse, rtol=1e-5, atol=1e-5)
        for name in ("dq", "dk", "dv"):
            mine, theirs = some(getattr(found, name)).cpu().double(), some(getattr(emulated, name)).double()
            assert (mine - theirs).norm() <= 2e-3 * theirs.norm()


def test_slopes_of_batch_items_and_none_at_all(device: str) -> None:
    q, k, v, _ = (torch.cat([t, t.flip(2)]) for t in kernel_inputs(device, T=70, D=32))
    slopes = torch.stack([SLOPES[:2], SLOPES[2:]]).to(device)
    out = attention(q, k, v, alibi_slopes=slopes, causal="top-left")
    for b in range(2):
        alone = attention(
            q[b : b + 1], k[b : b + 1], v[b : b + 1], alibi_slopes=slopes[b].bfloat16(), causal="top-left"
        )
        same = torch.equal(slopes[b], slopes[b].bfloat16().float())
        assert torch.equal(alone[0], out[b]) == same
    flat = attention(q, k, v, alibi_slopes=torch.zeros(2, device=device), causal="top-left")
    assert torch.equal(flat, attention(q, k, v, causal="top-left"))
    assert not torch.equal(flat, out)


@pytest.mark.parametrize("recipe", ["fa2", "qiu2025"])
def test_a_dump_has_the_bias_in_its_scores(recipe: str, device: str) -> None:
    q, k, v, _ = kernel_inputs(device, T=70, D=32)
    slopes = SLOPES[:2].to(device)
    out, dump = attention(q, k, v, alibi_slopes=slopes, causal="top-left", recipe=recipe, instrument="full")
    assert torch.equal(out, attention(q, k, v, alibi_slopes=slopes, causal="top-left", recipe=recipe))
    scores = (dump.scores * dump.factor).cpu().view(2, 70, 70)
    at = torch.arange(70)
    exact = q[0].cpu().double() @ k[0, [0, 0]].cpu().double().mT * 32**-0.5
    exact -= SLOPES[:2, None, None].double() * (at[:, None] - at).abs()
    seen = at[:, None] >= at
    # Scores of at most 8 are rounded twice by qiu2025, before the bias.
    tolerance = 1e-5 if recipe == "fa2" else 2 * 2.0**-6
    torch.testing.assert_close(scores[:, seen].double(), exact[:, seen], rtol=0, atol=tolerance)
    counted = (dump.scores == dump.scores.amax(1, keepdim=True)).sum(1).view(2, 70)
    assert torch.equal(dump.multiplicity("as_run")[0].long(), counted)


def test_slopes_that_cannot_be_are_refused(device: str) -> None:
    q, k, v, _ = kernel_inputs(device, T=40, D=32)
    with pytest.raises(ValueError, match=r"alibi_slopes must have shape \[Hq\] = \[2\] or \[B, Hq\]"):
        attention(q, k, v, alibi_slopes=torch.ones(3, device=device))
    with pytest.raises(ValueError, match=r"get no gradient here: pass alibi_slopes\.detach"):
        attention(q, k, v, alibi_slopes=torch.ones(2, device=device, requires_grad=True))
    with pytest.raises(TypeError, match="floating-point"):
        attention(q, k, v, alibi_slopes=torch.ones(2, dtype=torch.int64, device=device))
    with pytest.raises(BackendError, match="alibi_slopes must be where q is"):
        attention(q, k, v, alibi_slopes=torch.ones(2, device="meta"))
