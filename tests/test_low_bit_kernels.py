"""The Triton forward in INT8 and FP8: the emulation's bits, on a GPU from the hardware's own products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_inputs import head_of, kernel_inputs, options

from attn_diag.kernels import Recipe, Schedule, emulate_head, preset
from attn_diag.kernels.attention import attention
from attn_diag.kernels.emulation import RecipeNotSupportedError
from attn_diag.kernels.triton_head import run_head
from attn_diag.reference import reference_head

CASES: dict[str, dict[str, Any]] = {
    "both ways": {"T": 63, "Tk": 150},
    "causal": {"T": 140, "causal": "top-left", "D": 32},
    "gqa": {"T": 70, "H": 4, "Hk": 2, "D": 48, "causal": "bottom-right"},
    "window": {"T": 130, "window": (20, 5)},
}
# SageAttention's, and INT8 with a scale a token.
INT8: dict[str, Recipe] = {
    **{name: preset(name) for name in ("sage1", "sage2", "sage2-hopper")},
    "a scale a token": replace(
        preset("sage1"), quantize_q="int8", quantize_k="int8", alpha="in-exponent", exp="exp2-fma"
    ),
    "rotated": replace(preset("sage2"), rotation="hadamard", smooth_k="none"),
}
GPU_CASES: dict[str, dict[str, Any]] = {
    "causal": {"T": 1000, "causal": "top-left"},
    "both ways": {"T": 700, "Tk": 900, "D": 128},
    "gqa": {"T": 512, "H": 4, "Hk": 2, "D": 128, "causal": "bottom-right"},
    "other features": {"T": 300, "D": 96, "Dv": 64, "causal": "top-left"},
}


def recipe_of(width: int, **changes: Any) -> Recipe:
    """FlashAttention-3's in FP8, in a tile that Triton has."""
    return replace(preset("fa3-fp8", "bf16", width), schedule=Schedule(128, 128, "descending"), **changes)


def agreement(case: dict[str, Any], recipe: Recipe, device: str) -> tuple[float, float]:
    """The share of O's elements with the emulation's bits; the largest difference of L."""
    q, k, v, _ = kernel_inputs(device, **case)
    o = attention(q, k, v, recipe=recipe, **options(case))
    equal, apart = [], 0.0
    for h in range(q.shape[1]):
        head = head_of(q, k, v, h, case)
        expected = emulate_head(recipe, head)
        got = run_head(recipe, replace(head, q=head.q.to(device), k=head.k.to(device), v=head.v.to(device)))
        assert torch.equal(got.o.cpu(), o[0, h].cpu())
        equal.append((o[0, h].cpu() == expected.o).double().mean())
        apart = max(apart, float((got.lse.cpu() - expected.lse).abs().nan_to_num(0).max()))
    return float(torch.stack(equal).mean()), apart


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_o_has_the_emulations_bits(case: dict[str, Any], device: str) -> None:
    sums = "nvidia-tensor-core" if device == "cuda" else "fp32-nearest"
    share, apart = agreement(case, recipe_of(case.get("D", 64), accumulation=sums), device)
    assert share > 0.995
    assert apart < 1e-4


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, "both ways") for name in INT8] + [("sage1", "causal"), ("sage2", "window"), ("sage2-hopper", "causal")],
)
def test_int8_has_the_emulations_bits(name: str, case: str, device: str) -> None:
    sums = "nvidia-tensor-core" if device == "cuda" else "fp32-nearest"
    recipe = replace(INT8[name], accumulation=sums)  # type: ignore[arg-type]
    share, apart = agreement(CASES[case], recipe, device)
    assert share > 0.99
    assert apart < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sage1", "sage2", "sage2-hopper"])
@pytest.mark.parametrize("case", ["causal", "gqa"])
def test_real_int8_products_are_reproduced(name: str, case: str) -> None:
    recipe = preset(name, head_dim=GPU_CASES[case].get("D", 64))
    share, apart = agreement(GPU_CASES[case], recipe, "cuda")
    assert share > 0.99, share
    assert apart < 1e-4
    # Without the tensor core's own sums of P_bar V it would be another kernel.
    plain = replace(recipe, accumulation="fp32-nearest", pv_sums="fp32")
    assert agreement(GPU_CASES[case], plain, "cuda")[0] < share


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_sageattentions_own_kernels_bits(width: int, causal: bool) -> None:
    """sageattention 1.0.6 (a Triton wheel) beside our kernel with its recipe."""
    sageattn = pytest.importorskip("sageattention").sageattn
    q, k, v, _ = kernel_inputs("cuda", T=512, D=width, H=4, Hk=4)
    theirs = sageattn(q, k.clone(), v, is_causal=causal)  # it takes k's mean off in place
    ours = attention(q, k, v, recipe=preset("sage1", head_dim=width), causal="top-left" if causal else "none")
    share = float((ours == theirs).double().mean())
    assert share > 0.99, share


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES.values(), ids=GPU_CASES)
def test_real_fp8_products_are_reproduced(case: dict[str, Any]) -> None:
    recipe = recipe_of(case.get("D", 64))
    share, apart = agreement(case, recipe, "cuda")
    assert share > 0.998, share
    assert apart < 1e-4
    # Sums in fp32 would not do: what is measured is the tensor core's own.
    assert agreement(case, replace(recipe, accumulation="fp32-nearest"), "cuda")[0] < 0.9


def test_the_backward_is_that_of_the_given_tensors(device: str) -> None:
    case = CASES["causal"]
    q, k, v, do = kernel_inputs(device, **case)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    attention(*leaves, recipe=recipe_of(32), **options(case)).backward(do)
    for h in range(q.shape[1]):
        expected = emulate_head(recipe_of(32, accumulation="fp32-nearest"), head_of(q, k, v, h, case, do))
        truth = reference_head(head_of(q, k, v, h, case, do))
        assert leaves[0].grad is not None
        assert expected.dq is not None
        assert truth.dq is not None
        ours, theirs = (float((x.double().cpu() - truth.dq).norm()) for x in (leaves[0].grad[0, h], expected.dq))
        assert ours == pytest.approx(theirs, rel=0.05)


def test_what_fp8_kernels_lack_is_refused(device: str) -> None:
    q, k, v, _ = kernel_inputs(device, T=64)
    with pytest.raises(RecipeNotSupportedError, match="key_tile=160"):
        attention(q, k, v, recipe="fa3-fp8")
    borders = torch.tensor([0, 64], dtype=torch.int32).to(q.device)
    for given in ({"instrument": "rows"}, {"cu_seqlens_q": borders, "cu_seqlens_k": borders}):
        with pytest.raises(RecipeNotSupportedError, match="no instruments, no packed sequences"):
            attention(q, k, v, recipe=recipe_of(64), **given)
    with pytest.raises(RecipeNotSupportedError, match="probs=e4m3"):
        attention(q, k, v, recipe=recipe_of(64, quantize_v="none"))
    with pytest.raises(RecipeNotSupportedError, match="quantize_q=int8 block=128rows"):
        attention(q, k, v, recipe=replace(preset("sage1"), name="", quantize_k="none"))
    with pytest.raises(RecipeNotSupportedError, match="smooth_q=block-mean"):
        attention(q, k, v, recipe="sage2-int4")
    with pytest.raises(RecipeNotSupportedError, match="need the scores themselves"):
        attention(q, k, v, recipe="sage1", softcap=20.0)
    with pytest.raises(RecipeNotSupportedError, match="need the scores themselves"):
        attention(q, k, v, recipe="sage1", sinks=torch.zeros(2, device=q.device))
