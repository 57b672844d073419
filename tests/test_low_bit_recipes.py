"""Recipes below 16 bits: against the kernels' own order of operations, written plainly, and against each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from low_bit_heads import FORWARD, real_head, sink_head
from torch import Tensor

import attn_diag
from attn_diag import Capture
from attn_diag.captures.loading import load
from attn_diag.head.underflow import probs_underflow
from attn_diag.kernels import (
    LOW_BIT,
    Recipe,
    RecipeNotSupportedError,
    Schedule,
    emulate_head,
    emulate_rows,
    preset,
    trace_row,
)
from attn_diag.kernels.accumulation import HOPPER_FP16_SUMS, tensor_core_matmul
from attn_diag.kernels.quantize import quantize
from attn_diag.kernels.quantizers import parse_quantizer
from attn_diag.kernels.reciprocals import hopper_quotient, hopper_reciprocal
from attn_diag.kernels.triton_probes import divide
from attn_diag.reference import AttentionHead, Masking, reference_head

EXACT = replace(
    preset("fa2"), arithmetic="fp64", accumulation="exact", backward_scores="as-forward", probs="fp32", out="fp32",
    dscores="fp32", dq="fp32", backward_probs="fp32",
)  # fmt: skip
TRUE = {"o": "out"}  # by the reference's names


def changed(recipe: Recipe, **change: Any) -> Recipe:
    return replace(recipe, **change)


def make_head(length: int = 200, width: int = 64, *, causal: bool = True, seed: int = 0, offset: float = 0.0) -> Any:
    """One head of BF16 numbers; ``offset``: k's mean in the first features."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(length, width, generator=generator) for _ in range(4))
    k[:, :4] += offset
    q, k, v, do = (x.bfloat16().double() for x in (q, k, v, do))
    return AttentionHead(q, k, v, do, width**-0.5, Masking("top-left" if causal else "none"))


def sage1(head: AttentionHead) -> Tensor:
    """SageAttention 1.0.6 after its sources (quant_per_block.py, attn_qk_int8_per_block_causal.py), row by row."""
    q, k = (x.float() for x in (head.q, head.k))
    v = head.v.half().double()
    k = (k - k.mean(0, keepdim=True).bfloat16().float()).bfloat16().float()

    def int8(x: Tensor, rows: int, factor: float) -> tuple[Tensor, Tensor]:
        codes, scales = [], []
        for block in torch.split(x * np.float32(factor).item(), rows):
            scale = block.abs().max() / 127.0
            steps = block * (1 / scale)
            codes.append((steps + 0.5 * torch.where(steps >= 0, 1.0, -1.0)).to(torch.int8))
            scales.append(scale.expand(len(block), 1))
        return torch.cat(codes), torch.cat(scales)

    (q8, qs), (k8, ks) = int8(q, 128, head.scale * 1.44269504), int8(k, 64, 1.0)
    scores = (q8.int() @ k8.int().T).float() * qs * ks.T
    if head.masking.causal != "none":
        scores = scores.masked_fill(torch.ones(len(q), len(k)).triu(1).bool(), -torch.inf)
    out = torch.zeros(len(q), v.shape[1])
    for i in range(len(q)):
        m, total, acc = torch.tensor(-torch.inf), torch.tensor(1.0), torch.zeros(v.shape[1])
        for start in range(0, len(k), 64):
            part = scores[i, start : start + 64]
            new = torch.maximum(m, part.max())
            p, alpha = torch.exp2(part - new), torch.exp2(m - new)
            total, m, acc = total * alpha + p.sum(), new, acc * alpha
            sums = tensor_core_matmul(
                p.half().double()[None], v[start : start + 64], core=HOPPER_FP16_SUMS, operands="fp16"
            )
            acc = acc + sums[0].float()
        out[i] = acc / total
    return out.bfloat16()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_sage1_after_its_sources(causal: bool) -> None:
    """Sums of P_bar and the division round in other orders here: 99 % of O's bits, as of a real kernel."""
    head = make_head(150, causal=causal, offset=3.0)
    got = emulate_head(preset("sage1"), replace(head, do=None)).o
    assert float((got == sage1(head)).double().mean()) > 0.99
    others: list[dict[str, Any]] = [{"quantize_k": "int8 block=64rows"}, {"pv_sums": "fp32"}, {"smooth_k": "none"}]
    for change in others:
        other = emulate_head(replace(preset("sage1"), **change), replace(head, do=None)).o
        assert float((other == got).double().mean()) < 0.999, change


@pytest.mark.parametrize("name", LOW_BIT)
def test_every_recipe_computes_attention(name: str) -> None:
    """Within what the operands' relative steps leave: of INT4 and FP4 they are up to 1/4."""
    head = make_head(130, offset=1.0)
    got, truth = emulate_head(preset(name), head), reference_head(head)
    limit = 0.35 if "4-" in name or name in ("sage2-int4", "sage3") else 0.12
    for output in ("o", "dq", "dk", "dv"):
        found, true = getattr(got, output).double(), getattr(truth, TRUE.get(output, output))
        assert float((found - true).norm() / true.norm()) < limit, output
    rows = torch.tensor([3, 77, 129])
    # Products of other shapes may differ in their last bit, and so now and then turn a code of P_bar.
    apart = (emulate_rows(preset(name), head, rows).double() - got.o[rows].double()).norm()
    assert float(apart / got.o[rows].double().norm()) < limit / 8


@pytest.mark.parametrize(
    ("field", "text"),
    [("quantize_q", "mxfp8"), ("quantize_k", "nvfp4"), ("quantize_k", "int8 block=64rows"), ("quantize_q", "fp8"),
     ("quantize_v", "fp8 block=column"), ("quantize_v", "mxfp4 block=32x1"), ("quantize_v", "int4 block=64rows")],
)  # fmt: skip
def test_an_operand_is_quantised_as_by_hand(field: str, text: str) -> None:
    """In float64, where codes times scale may be multiplied in any order."""
    exact: dict[str, Any] = {
        "arithmetic": "fp64",
        "accumulation": "exact",
        "probs": "fp32",
        "out": "fp32",
        "exp": "exact",
    }
    recipe = replace(preset("fa2"), **exact)
    head = replace(make_head(100), do=None)
    name, by = field[-1], parse_quantizer(text)
    assert by is not None
    by_hand = replace(head, **{name: quantize(getattr(head, name), by).values})
    got = emulate_head(changed(recipe, **{field: text}), head)
    expected = emulate_head(recipe, by_hand)
    torch.testing.assert_close(got.o, expected.o, rtol=1e-6, atol=1e-7)  # the scales are fp32
    assert not torch.equal(got.o, emulate_head(recipe, head).o)


@pytest.mark.parametrize(
    "change",
    [{"smooth_k": "mean"}, {"smooth_q": "block-mean"}, {"smooth_q": "block-mean", "smooth_k": "mean"},
     {"rotation": "hadamard"}, {"alpha": "in-q", "exp": "exp2"}, {"alpha": "in-q", "exp": "exact"},
     {"pv_levels": "two"},
     {"backward_operands": "quantized", "smooth_k": "mean", "alpha": "in-q"}],
    ids=str,
)  # fmt: skip
def test_what_surrounds_a_quantiser_changes_no_mathematics(change: dict[str, Any]) -> None:
    head = make_head(100)
    got, truth = emulate_head(replace(EXACT, **change), head), reference_head(head)
    for output in ("o", "dq", "dk", "dv"):
        found, true = getattr(got, output), getattr(truth, TRUE.get(output, output))
        torch.testing.assert_close(found, true, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(got.lse, truth.lse, rtol=1e-12, atol=1e-12)


def test_smoothing_and_rotation_help_where_k_has_a_mean_or_outliers() -> None:
    head = replace(make_head(128, offset=20.0), do=None)
    truth = reference_head(head).out

    def error(**change: Any) -> float:
        base = replace(preset("fa2"), quantize_q="int8", quantize_k="int8 block=64rows")
        return float((emulate_head(replace(base, **change), head).o.double() - truth).norm())

    assert error(smooth_k="mean") < error() / 3
    assert error(rotation="hadamard") < error()
    assert error(quantize_k="int4 block=64rows") > 3 * error()


def test_block_scales_of_dscores_are_seen_in_dq_and_dk_alone() -> None:
    head, base = make_head(128), preset("fa2")
    plain, got = emulate_head(base, head), emulate_head(replace(base, quantize_dscores="int8 block=64x64"), head)
    assert torch.equal(plain.o, got.o)
    assert torch.equal(plain.dv, got.dv)  # type: ignore[arg-type]
    assert not torch.equal(plain.dq, got.dq)  # type: ignore[arg-type]
    assert not torch.equal(plain.dk, got.dk)  # type: ignore[arg-type]


def test_what_cannot_be_says_so() -> None:
    with pytest.raises(ValueError, match=r"quantize_q: unknown quantizer 'int9'"):
        replace(preset("fa2"), quantize_q="int9")
    with pytest.raises(ValueError, match=r"a quantizer.s field is field=value"):
        replace(preset("fa2"), quantize_k="int8 64rows")
    head = replace(make_head(40), do=None)
    with pytest.raises(RecipeNotSupportedError, match=r"exp=exp2 without alpha=in-q"):
        emulate_head(replace(preset("fa2"), exp="exp2"), head)
    with pytest.raises(RecipeNotSupportedError, match=r"in blocks of several rows"):
        emulate_head(replace(preset("fa2"), quantize_probs="int8 block=64x64"), head)
    odd = replace(make_head(40, width=48), do=None)
    with pytest.raises(RecipeNotSupportedError, match=r"a head dimension of 48, which is no power of two"):
        emulate_head(replace(preset("fa2"), rotation="hadamard"), odd)
    assert math.isfinite(float(emulate_head(preset("fa3-fp8"), odd).o.double().sum()))


def captured(name: str, *, gradients: bool = True, seed: int = 0) -> Capture:
    """One head that a recipe made."""
    head = make_head(128, offset=3.0, seed=seed)
    made = emulate_head(preset(name), head)
    names = ("o", "dq", "dk", "dv") if gradients else ("o",)
    tensors = {n: getattr(head, n).bfloat16() for n in ("q", "k", "v", "do")} | {n: getattr(made, n) for n in names}
    return Capture.from_tensors({n: x[None, None] for n, x in tensors.items()}, causal="top-left")


def test_the_quantisation_of_dscores_is_guilty_of_sage_bwds_dq() -> None:
    """arXiv 2603.02170 found so in training; O has nothing of it."""
    (found,) = attn_diag.attribute(captured("sage-bwd")).heads
    assert found.recipe.startswith("sage-bwd, recognised")
    sites = {site.site: site.effects for site in found.sites}
    assert found.guilty["dq"] == "quantize_dscores"
    assert sites["quantize_dscores"]["dq"].share > 0.8
    assert abs(sites["quantize_dscores"]["o"].share) < 0.01


@pytest.mark.parametrize("name", ["sage1", "fa3-fp8", "sage2-int4"])
def test_identify_names_kernels_below_16_bits(name: str) -> None:
    found = attn_diag.identify(captured(name, gradients=False))
    assert found.heads[0].outcome == "identified"
    assert found.heads[0].recipes == (name,)


def test_what_if_offers_other_scales_and_whole_operands() -> None:
    found = attn_diag.what_if(
        captured("sage1"), recipe="sage1", seeds=0, betas=(), only=["whole-*", "*k*", "*-sums", "hadamard"]
    )
    names = {c.name: c.errors for c in found.candidates}
    assert {"whole-q", "whole-k", "no-smooth-k", "hadamard", "k-scale-token", "exact-sums"} <= names.keys()
    assert found.baseline.errors.o is not None
    assert names["whole-k"].o < found.baseline.errors.o < names["no-smooth-k"].o  # type: ignore[operator]


def test_a_kernel_is_held_against_its_own_format() -> None:
    """INT8's own error is no fault of the kernel; P_bar in FP8 beside it is."""
    head = make_head(128, offset=3.0)
    tensors = {n: getattr(head, n).bfloat16()[None, None] for n in ("q", "k", "v")}
    for change, words in ({}, "as good as that format allows"), ({"probs": "e4m3"}, "more coarsely than this recipe"):
        made = emulate_head(changed(preset("sage1"), **change), replace(head, do=None)).o
        capture = Capture.from_tensors(tensors | {"o": made[None, None]}, causal="top-left")
        found = attn_diag.what_if(capture, recipe="sage1", seeds=0, betas=(), only=["whole-q"])
        assert any(words in sentence for sentence in found.summary), found.summary


@pytest.mark.parametrize(("block", "passed"), [("64rows", False), ("row", True)])
def test_future_tokens_in_a_causal_blocks_scale_are_named(block: str, passed: bool) -> None:
    """k's scale of a block holds keys that its earlier rows may not see; a scale a token does not."""
    recipe = replace(preset("fa2"), schedule=Schedule(key_tile=64), quantize_q="int8", quantize_k=f"int8 block={block}")

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = zip(*(x.double().flatten(0, 1) for x in (q, k, v)), strict=True)
        heads = [emulate_head(recipe, AttentionHead(a, b, c, None, 0.125, Masking("top-left"))).o for a, b, c in rows]
        return torch.stack(heads).reshape(q.shape)

    found = attn_diag.invariance(kernel, causal="top-left", only=["future-token"], shape=(1, 1, 150, 64))
    assert found.passed == passed
    assert passed or "later tokens" in found.report()


@pytest.mark.parametrize(
    ("head", "least"),
    [(lambda: sink_head(4.0), 0.05), (lambda: sink_head(6.0), 0.5), (lambda: sink_head(8.0), 0.9),
     (lambda: real_head("gpt2_step637_L2H6"), 0.3), (lambda: real_head("failing_step500_L2H7"), 0.9),
     (lambda: real_head("pair_T256"), 0.7)],
    ids=["sink 4", "sink 6", "sink 8", "GPT-2", "before its failure", "pairs"],
)  # fmt: skip
def test_underflow_of_p_bar_is_predicted_within_two_percent(head: Callable[[], AttentionHead], least: float) -> None:
    found = probs_underflow(FORWARD, head())
    assert [u.words for u in found] == [
        "as it is", "times 256", "as it is, keys descending", "times 256, keys descending",
    ]  # fmt: skip
    for variant in found:
        assert abs(variant.counted - variant.predicted) < 0.02, variant
    assert max(u.counted for u in found) > least
    assert found[1].counted < found[0].counted


def test_underflow_is_counted_as_the_emulation_casts() -> None:
    """P_bar that is 0 after its cast though not before, range by range."""
    head = sink_head(6.0, length=80)
    counted = probs_underflow(FORWARD, head)[0].counted
    ranges = [found for row in range(80) for found in trace_row(FORWARD, head, row).ranges]
    zeros = sum(int(((r.cast_probs == 0) & (r.scores > -torch.inf)).sum()) for r in ranges)
    assert zeros == round(counted * 80 * 80)


def test_the_closed_form_is_the_papers_where_a_sink_towers() -> None:
    """And far off on a real head, whose scores have another mean near the query: reversed keys lose more there."""
    own = probs_underflow(FORWARD, sink_head(6.0))[0]
    assert own.closed_form == pytest.approx(own.counted, abs=0.03)
    real = probs_underflow(FORWARD, real_head("gpt2_step637_L2H6"))
    assert real[0].counted < 0.02 < 0.3 < real[2].counted


def test_the_microscope_says_that_it_does_not_follow() -> None:
    with pytest.raises(attn_diag.InputError, match="does not follow sage1's quantised operands"):
        attn_diag.microscope(captured("sage1", gradients=False), recipe="sage1")


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_sageattention_bit_for_bit(width: int, causal: bool) -> None:
    """SageAttention 1.0.6's own Triton kernels: 99 % of O's elements."""
    sageattention = pytest.importorskip("sageattention.core")
    head = make_head(512, width, causal=causal, offset=2.0)
    q, k, v = (x.bfloat16().cuda()[None, None] for x in (head.q, head.k, head.v))
    got = sageattention.sageattn(q, k.clone(), v, is_causal=causal)[0, 0]  # it takes k's mean off in place
    on_gpu = replace(head, **{name: getattr(head, name).cuda() for name in "qkv"}, do=None)
    expected = emulate_head(preset("sage1", head_dim=width), on_gpu).o
    assert float((got == expected).double().mean()) >= 0.99


def test_the_kept_call_of_sageattention_is_recognised() -> None:
    """A head from an H200 of which all but 1 in 5,000 elements have the recipe's bits (95 % by nearest reciprocals)."""
    kept = Path(__file__).parent.parent / "benchmarks" / "results" / "sageattention_h200.safetensors"
    found = attn_diag.identify(load(kept), head=3, rows=128, device="cpu")
    assert found.outcome == "identified"
    assert found.recipes == ("sage1",)
    assert found.candidates[0].agreement > 0.999


@pytest.mark.gpu
def test_the_reciprocals_are_this_gpus() -> None:
    """All 2**23 mantissas, and divisions of Triton's that are nothing else than products with them."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the table is Hopper's")
    mantissas = (torch.arange(2**23, 2**24, dtype=torch.int32).float() / 2**23).cuda()
    assert torch.equal(divide(torch.ones_like(mantissas), mantissas), hopper_reciprocal(mantissas))
    x, y = (torch.randn(2**20, generator=torch.Generator().manual_seed(seed)).cuda() for seed in (0, 1))
    assert torch.equal(divide(x, y * 2.0**40), hopper_quotient(x, y * 2.0**40))


def test_hopper_quotients_are_fp32_divisions_but_for_their_last_bits() -> None:
    x, y = (torch.randn(2**16, generator=torch.Generator().manual_seed(seed)) for seed in (2, 3))
    got = hopper_quotient(x, y)
    apart = (got.view(torch.int32) - (x.double() / y.double()).float().view(torch.int32)).abs()
    # One unit from the reciprocal, half a unit of a smaller binade doubled, and one more rounding.
    assert int(apart.max()) <= 2
    assert 0 < float((apart > 0).double().mean()) < 0.5
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 2.0**-149, 2.0**127, 1.0, -2.0])
    torch.testing.assert_close(hopper_reciprocal(special), special.reciprocal(), rtol=0, atol=0)
    assert bool(hopper_reciprocal(torch.tensor(torch.nan)).isnan())
