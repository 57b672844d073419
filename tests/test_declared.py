"""A kernel that is declared to work below 16 bits is held against its format; declaring acquits no fault."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from study_declared import Plan, inputs, run
from torch import Tensor

import attn_diag
from attn_diag import Capture
from attn_diag.captures.loading import load
from attn_diag.captures.metadata import Metadata
from attn_diag.head.assumptions import check_assumptions
from attn_diag.head.declared_noise import directions_of, drawn_noise, smoothed_variance
from attn_diag.kernels import emulate_head, preset
from attn_diag.reference import AttentionHead, Masking
from attn_diag.results.diagnosis import Diagnosis

NAMES = ("q", "k", "v", "do")


def inspected(plan: Plan, family: str = "gaussian", seed: int = 0, **options: Any) -> Diagnosis:
    """A plain torch kernel's call of one head."""
    tensors = inputs(family, seed)
    made = run(plan, *tensors)
    named = {**dict(zip(NAMES, tensors, strict=True)), **made}
    one: dict[str, Any] = {name: x[:, :1] for name, x in named.items()}
    return attn_diag.inspect(**one, causal=True, device="cpu", **options)


@pytest.fixture(scope="module")
def sound() -> Diagnosis:
    """FP8 with a scale a head, as declared."""
    return inspected(Plan(), declared="fa3-fp8")


def test_a_sound_fp8_kernel_is_as_good_as_its_format_allows(sound: Diagnosis) -> None:
    (head,) = sound.heads
    found = {q.quantity: q for q in head.quantities}
    assert not {"wrong", "lossy", "biased"} & sound.labels
    assert found["o"].answer == found["dv"].answer == "good"
    assert "O is as good as fa3-fp8 allows" in found["o"].words
    # A well-rounded BF16 kernel's O is 0.2 % off: FP8 costs twenty times that.
    assert found["o"].declared == "fa3-fp8"
    assert 0.0015 < (found["o"].relative_error_16_bit or 0.0) < 0.0025 < 0.03 < (found["o"].relative_error or 0.0)


def test_a_large_feature_makes_a_sound_kernels_lse_and_what_follows_from_it_coarse() -> None:
    """L is 6 % off in MXFP8 and P above 1 in the backward, which rounds it by as much more."""
    tensors = inputs("gaussian", 0)
    tensors[1][..., 3] *= 40
    named = {**dict(zip(NAMES, tensors, strict=True)), **run(Plan("mxfp8"), *tensors)}
    first: dict[str, Any] = {name: x[:, :1] for name, x in named.items()}
    found = attn_diag.inspect(**first, causal=True, device="cpu", declared="mxfp8-attention")
    assert found.captures[0].assumptions.ok
    assert not {"wrong", "lossy", "biased"} & found.labels


def test_undeclared_it_is_lossy_as_before() -> None:
    assert "lossy" in inspected(Plan()).labels


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("wrong descale", r"scores are multiplied by 1\.0[678]"),
        ("wrong descale of v", r"it is multiplied by 1\.0[678]"),
        ("mask off by one", "a causal border one key further on"),
    ],
)
def test_no_fault_is_acquitted_by_declaring(fault: str, said: str) -> None:
    diagnosis = inspected(Plan(fault=fault), declared="fa3-fp8")
    assert "wrong" in diagnosis.labels
    assert any(re.search(said, reason) for head in diagnosis.heads if head.verdict for reason in head.verdict.reasons)


def test_clipped_values_are_not_put_down_to_a_descale_factor_alone() -> None:
    """O is 0.98 times as large then: no factor, and no stale amax, whose numbers would all be rounded elsewhere."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, do = (torch.randn(1, n, 256, 64, generator=generator)[:, :1].bfloat16() for n in (2, 1, 1, 2))
    made: dict[str, Any] = run(Plan(fault="v clipped where E4M3FNUZ ends"), q, k, v, do)
    found = attn_diag.inspect(q, k, v, do=do, **made, causal=True, device="cpu", declared="fa3-fp8")
    (o,) = [one for head in found.heads for one in head.quantities if one.quantity == "o"]
    assert "it is multiplied by 0.98 throughout" in o.words
    assert "or numbers of v that are clipped" in o.words


def test_a_gradient_of_fp8_where_16_bits_were_declared() -> None:
    """Hidden behind an L that FP8 made coarse: dV's whole error is hardly larger than the recipe's."""
    diagnosis = inspected(Plan(fault="dV of FP8"), "peaked", 3, declared="fa3-fp8")
    assert "lossy" in diagnosis.labels
    (dv,) = [q for head in diagnosis.heads for q in head.quantities if q.quantity == "dv"]
    assert dv.factor is not None
    assert dv.factor < 1.25
    assert "off what the captured LSE gives" in dv.words


def test_a_finer_format_that_is_not_kept_is_lossy() -> None:
    """An FP4 kernel that is declared to be FP8."""
    assert {"lossy", "wrong"} & inspected(Plan("nvfp4"), declared="fa3-fp8").labels


def test_the_bits_of_a_kernel_below_16_bits_are_named_where_it_is_not_declared() -> None:
    q, k, v, _ = inputs("gaussian", 0)
    head = AttentionHead(q[0, 0].double(), k[0, 0].double(), v[0, 0].double(), None, 0.125, Masking("top-left"))
    o = emulate_head(preset("kv-int8"), head).o[None, None]
    found = attn_diag.inspect(q[:, :1], k[:, :1], v[:, :1], o=o, causal=True, device="cpu")
    assert found.heads[0].verdict is not None
    assert any("--declared kv-int8" in reason for reason in found.heads[0].verdict.reasons)


def test_what_cannot_be_declared() -> None:
    with pytest.raises(attn_diag.InputError, match="declared must be a recipe below 16 bits"):
        inspected(Plan(), declared="bf16-forward")
    assert Metadata.parse(Metadata(declared="sage2").to_text()).declared == "sage2"


def test_the_noise_that_is_drawn() -> None:
    """Of errors that are one number a row the directions are one, of independent ones as many as there are."""
    generator = torch.Generator().manual_seed(0)
    free = torch.randn(16, 1, 200, generator=generator)
    shared = torch.randn(16, 1, 1, generator=generator) * torch.randn(1, 1, 200, generator=generator)
    assert 130 < float(directions_of(free - free.mean(0))[0]) <= 200
    assert float(directions_of(shared - shared.mean(0))[0]) < 1.5
    # Stochastic rounding has twice the variance of rounding to nearest.
    noise = drawn_noise(list(torch.randn(16, 50, 40, generator=generator)))
    assert float(smoothed_variance(noise).mean()) == pytest.approx(0.5, rel=0.2)


def test_replay_holds_what_was_captured_against_what_it_is_declared_to_be() -> None:
    kept = load(Path(__file__).parent.parent / "benchmarks" / "results" / "sageattention_h200.safetensors")
    tensors = {name: kept.tensors[f"sage.{name}" if name == "o" else name][...][:, :1] for name in "qkvo"}
    for declared, cause, said in (
        (None, "kernel", "too coarse"),
        ("sage1", "pass", "as good as the declared sage1 allows"),
    ):
        capture = Capture.from_tensors(tensors, causal="top-left", declared=declared)
        (found,) = attn_diag.replay(capture, against=["sdpa:math"], device="cpu").captures
        assert found.cause == cause
        assert said in found.words


def test_a_scale_under_which_o_is_further_off_is_not_what_it_has() -> None:
    tensors = inputs("outlying features", 0, 8.0)
    made = run(Plan("int8-fp16", "future keys in a scale"), *tensors)
    one = {name: x[:, :1] for name, x in {**dict(zip(NAMES, tensors, strict=True)), "o": made["o"]}.items()}
    capture = attn_diag.Capture.from_tensors(one, causal="top-left", declared="sage1")
    found = check_assumptions(capture, ["observed"], torch.device("cpu"))
    # O has 1.3 times the recipe's error, little more than a sound kernel may: the verdict tells, and names the fault.
    assert found.ok, found.message
    assert "the declared recipe's error, or scores in 16 bits" in found.message
    assert "fits" not in found.message


def test_an_lse_that_is_as_far_off_as_the_recipes_is_no_fault() -> None:
    """One huge key: L is off by whole units, and what that makes of dQ is no longer its square."""
    generator = torch.Generator().manual_seed(20 * 101 + 7)
    q, k, v = (torch.randn(1, 2, 256, 64, generator=generator) for _ in range(3))
    k[:, :, 85] *= 15
    q, k, v = (x.bfloat16() for x in (q, k, v))
    made = [
        emulate_head(preset("mxfp8-attention"), AttentionHead(q[0, h].double(), k[0, h].double(), v[0, h].double(),
                     None, 0.125, Masking("top-left")))
        for h in range(2)
    ]  # fmt: skip
    out, lse = (torch.stack([getattr(one, name) for one in made])[None] for name in ("o", "lse"))
    found = attn_diag.inspect(q, k, v, o=out.bfloat16(), lse=lse.float(), causal=True, declared="mxfp8-attention")
    assert not found.findings


def int8_attention(q: Tensor, k: Tensor, v: Tensor, rounding: Any) -> tuple[Tensor, Tensor]:
    """SageAttention 1 of one head, by plain torch, k rounded as stated; O and L of the k that is not smoothed."""
    mean = k.mean(0)
    less = k - mean

    def codes(x: Tensor, rows: int, how: Any) -> Tensor:
        blocks = x.reshape(-1, rows, x.shape[1])
        scale = blocks.abs().amax((1, 2), keepdim=True) / 127
        rounded: Tensor = how(blocks / scale)
        return (rounded.clamp(-127, 127) * scale).reshape(x.shape)

    scores = codes(q * 0.125, 128, torch.round) @ codes(less, 64, rounding).T
    scores = scores.masked_fill(torch.ones(scores.shape).triu(1).bool(), -torch.inf)
    probs = (scores - scores.amax(1, keepdim=True)).exp()
    lse = scores.logsumexp(1) + 0.125 * q @ mean
    out = (probs.half().float() @ v.half().float()).div(probs.sum(1, keepdim=True))
    return out, lse


def test_floor_that_shows_in_lse_first_is_named() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, 256, 64, generator=generator).bfloat16() for _ in range(3))
    for how, said in ((torch.floor, True), (torch.round, False)):
        out, lse = int8_attention(q[0, 0].float(), k[0, 0].float(), v[0, 0].float(), how)
        o = out[None, None].bfloat16()
        found = attn_diag.inspect(q, k, v, o=o, lse=lse[None, None], causal=True, declared="sage1")
        assert ("k is rounded down, not to the nearest" in found.report().partition("Since")[0]) == said
        assert said or not found.findings


def test_a_truncated_p_in_blocks_has_one_culprit() -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 1, 256, 64, generator=generator).bfloat16() for _ in range(3))
    recipe = preset("nvfp4-attention")
    cut = replace(recipe, quantize_probs=f"{recipe.quantize_probs} elements=e2m1:toward-zero")
    head = AttentionHead(q[0, 0].double(), k[0, 0].double(), v[0, 0].double(), None, 0.125, Masking("top-left"))
    made = emulate_head(cut, head)
    o, lse = made.o[None, None].bfloat16(), made.lse[None, None].float()
    found = attn_diag.inspect(q, k, v, o=o, lse=lse, causal=True, declared="nvfp4-attention")
    words = next(x.words for x in found.heads[0].quantities if x.quantity == "o")
    assert "P_bar is rounded toward zero, not to the nearest" in words
    assert "scores" not in words
