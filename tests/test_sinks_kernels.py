"""Sinks in the emulation and in the Triton kernels, forward and backward, on a GPU or interpreted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_inputs import head_of, kernel_inputs, options
from torch import Tensor

import attn_diag
from attn_diag.kernels import PRESETS, Recipe, Schedule, SoftmaxRule, emulate_head, preset
from attn_diag.kernels.attention import attention
from attn_diag.kernels.backend import DTYPES, BackendError
from attn_diag.kernels.triton_head import run_head
from attn_diag.reference import AttentionHead, Masking, reference_head

FA2 = preset("fa2")
SINKS = torch.tensor([1.5, -0.5, 4.0, 0.0])
CASES: dict[str, dict[str, Any]] = {
    "causal": {"T": 130, "causal": "top-left"},
    "no key": {"T": 90, "Tk": 63, "causal": "bottom-right"},
    "window": {"T": 130, "window": (20, 5), "D": 32},
    "softcap": {"T": 70, "softcap": 2.0},
    "gqa": {"T": 70, "H": 4, "Hk": 2, "D": 16, "causal": "top-left"},
}
RECIPES: dict[str, Recipe] = {
    "splits": replace(FA2, schedule=Schedule(key_tile=64, split_keys=64)),
    "one split": replace(FA2, schedule=Schedule(key_tile=64, split_keys=256)),
    "stale": replace(FA2, softmax=SoftmaxRule("stale", threshold=2.0)),
    "fp16": preset("fa2", "fp16"),
    **{name: preset(name) for name in ("qiu2025", "bf16-forward", "lowp-row-sum", "delta-from-dp", "cudnn")},
}


def heads(case: dict[str, Any], parts: Any, sinks: Tensor) -> list[AttentionHead]:
    q, k, v, do = parts
    found = [head_of(q, k, v, h, case, do) for h in range(q.shape[1])]
    return [replace(head, sink=None if s == -torch.inf else float(s)) for head, s in zip(found, sinks, strict=True)]


def off(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm().clamp(min=1e-30))


@pytest.mark.parametrize("sink", [-200.0, -3.0, 0.0, 5.0, 60.0, 1000.0])
@pytest.mark.parametrize("name", PRESETS)
def test_emulation_is_the_reference_but_for_its_roundings(name: str, sink: float) -> None:
    case: dict[str, Any] = {"T": 90, "Tk": 63, "causal": "bottom-right", "D": 32, "H": 1}
    (plain,) = heads(case, kernel_inputs("cpu", **case), torch.zeros(1))
    head = replace(plain, sink=sink)
    truth, found = reference_head(head), emulate_head(preset(name, "bf16", 32), head)
    assert found.dq is not None
    assert found.dsink is not None
    assert truth.dq is not None
    assert truth.dsink is not None
    # Without a sink this recipe is as far off.
    usual = emulate_head(preset(name, "bf16", 32), plain)
    bare = reference_head(plain)
    assert bare.dq is not None
    assert usual.dq is not None
    assert off(found.o, truth.out) <= 2 * off(usual.o, bare.out) + 1e-30
    assert off(found.dq, truth.dq) <= 2 * off(usual.dq, bare.dq)
    assert found.lse[:27].tolist() == pytest.approx([sink] * 27)
    assert not found.o[:27].any()
    assert abs(found.dsink - truth.dsink.sum()) <= 0.1 * truth.dsink.norm() + 1e-30


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES)
def test_kernels_agree_with_the_emulation_on_every_shape(case: str, device: str) -> None:
    check(CASES[case], FA2, device)


@pytest.mark.parametrize("name", RECIPES)
def test_kernels_agree_with_the_emulation_on_every_recipe(name: str, device: str) -> None:
    recipe = RECIPES[name]
    check({"T": 100, "causal": "top-left", "D": 32, "dtype": DTYPES[recipe.input]}, recipe, device)


def check(case: dict[str, Any], recipe: Recipe, device: str) -> None:
    parts = kernel_inputs(device, **case)
    sinks = SINKS[: parts[0].shape[1]].to(device)
    leaves = [t.clone().requires_grad_() for t in (*parts[:3], sinks)]
    out = attention(*leaves[:3], sinks=leaves[3], recipe=recipe, **options(case))
    dq, dk, dv, dsinks = (g.cpu() for g in torch.autograd.grad(out, leaves, parts[3]))
    plain = heads(case, parts, sinks)
    emulated, truths = [emulate_head(recipe, h) for h in plain], [reference_head(h) for h in plain]
    same = torch.stack([e.o == o.cpu() for e, o in zip(emulated, out[0], strict=True)])
    assert float(same.float().mean()) > 0.99
    group = len(plain) // parts[1].shape[1]
    for h, (e, truth) in enumerate(zip(emulated, truths, strict=True)):
        assert e.dq is not None
        assert e.dsink is not None
        assert truth.dq is not None
        assert off(dq[0, h], truth.dq) <= 1.5 * off(e.dq, truth.dq)
        assert float(dsinks[h]) == pytest.approx(float(e.dsink), rel=0.02, abs=2e-3)
        one = run_head(recipe, replace(plain[h], q=plain[h].q.to(device), k=plain[h].k.to(device),
                                       v=plain[h].v.to(device), do=parts[3][0, h].double()))  # fmt: skip
        assert torch.equal(one.o.cpu(), out[0, h].cpu())
        assert one.dsink is not None
        assert float(one.dsink) == pytest.approx(float(dsinks[h]), rel=1e-4, abs=1e-5)
    for index, name in ((dk, "dk"), (dv, "dv")):
        true, low = (
            torch.stack([getattr(x, name).double() for x in found]).view(-1, group, *index.shape[2:]).sum(1)
            for found in (truths, emulated)
        )
        assert off(index[0], true) <= 1.5 * off(low, true) + 2.0**-9


def test_no_sink_and_a_sink_of_minus_infinity_are_one(device: str) -> None:
    case: dict[str, Any] = {"T": 90, "Tk": 63, "causal": "bottom-right", "D": 32}
    q, k, v, do = kernel_inputs(device, **case)
    sinks = torch.full((2,), -math.inf, device=device, requires_grad=True)
    for recipe in (FA2, RECIPES["splits"]):
        out = attention(q, k, v, causal="bottom-right", sinks=sinks, recipe=recipe)
        assert torch.equal(out, attention(q, k, v, causal="bottom-right", recipe=recipe))
        assert not torch.autograd.grad(out, sinks, do)[0].any()


def test_far_sinks_neither_overflow_nor_leave_anything(device: str) -> None:
    q, k, v, _ = kernel_inputs(device, T=40, D=32)
    out, dump = attention(q, k, v, sinks=torch.tensor([100.0, 1e30], device=device), instrument="rows")
    assert not out[0, 1].any()
    assert out.isfinite().all()
    assert dump.lse[0, 0].tolist() == pytest.approx([100.0] * 40)
    assert dump.lse[0, 1].tolist() == pytest.approx([1e30] * 40)


def test_sinks_in_bf16_get_a_gradient_in_bf16(device: str) -> None:
    q, k, v, do = kernel_inputs(device, T=40, D=32)
    sinks = SINKS[:2].bfloat16().to(device).requires_grad_()
    (gradient,) = torch.autograd.grad(attention(q, k, v, sinks=sinks), sinks, do)
    assert gradient.dtype == torch.bfloat16
    assert gradient.abs().min() > 0


def test_what_the_kernels_cannot_take_is_refused(device: str) -> None:
    q, k, v, _ = kernel_inputs(device, T=40, D=32)
    with pytest.raises(ValueError, match=r"sinks must have shape \[Hq\] = \[2\]"):
        attention(q, k, v, sinks=torch.ones(3, device=device))
    with pytest.raises(TypeError, match="floating-point logits"):
        attention(q, k, v, sinks=torch.ones(2, dtype=torch.int64, device=device))
    with pytest.raises(BackendError, match="sinks must be where q is"):
        attention(q, k, v, sinks=torch.ones(2, device="meta"))


def test_a_dump_is_inspected_with_its_sinks(device: str) -> None:
    q, k, v, do = (t.requires_grad_() for t in kernel_inputs(device, T=64, D=32))
    sinks = SINKS[:2].to(device).requires_grad_()
    out, dump = attention(q, k, v, causal="top-left", sinks=sinks, instrument="rows")
    dq, dk, dv, dsinks = torch.autograd.grad(out, (q, k, v, sinks), do.detach())
    found = attn_diag.inspect(q, k, v, do=do, dq=dq, dk=dk, dv=dv, dsinks=dsinks, dump=dump)
    head = found.captures[0].observations[0].heads[0]
    assert found.captures[0].metadata["format_version"] == "1.1"
    assert {q.quantity: q.answer for q in head.quantities} == dict.fromkeys(
        ("o", "lse", "delta", "dq", "dk", "dv", "dsinks"), "good"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_with_sinks(device: str) -> None:
    q, k, v, _ = kernel_inputs(device, T=40, D=32)
    sinks = SINKS[:2].to(device).requires_grad_()

    def work(sinks: Tensor) -> Tensor:
        return attention(q, k, v, causal="top-left", sinks=sinks * 2)

    found = torch.compile(work, fullgraph=True, backend="aot_eager")(sinks)
    assert torch.equal(found, work(sinks))
    one, other = (torch.autograd.grad(o.float().square().sum(), sinks)[0] for o in (found, work(sinks)))
    assert torch.equal(one, other)


def test_masked_rows_of_the_emulation_have_the_sink_alone() -> None:
    mask = torch.ones(6, 9, dtype=torch.bool)
    mask[2] = False
    q, k, v = (torch.randn(n, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) for n in (6, 9, 9))
    found = emulate_head(FA2, AttentionHead(q, k, v, q, 0.25, Masking(mask=mask), sink=-2.5))
    assert float(found.lse[2]) == -2.5
    assert not found.o[2].any()
