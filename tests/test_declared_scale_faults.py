"""Scales and zero points that change few bits of a declared kernel's O, planted in plain torch, are named by these."""

from __future__ import annotations

from typing import Any

import pytest
import study_scale_adversary
import torch
from scale_faults import SOUND, Fault, Kernel, inputs

import attn_diag
from attn_diag.head.assumptions import check_assumptions
from attn_diag.head.declared import DeclaredKernel
from attn_diag.head.declared_beside import Culprit
from attn_diag.kernels import preset
from attn_diag.kernels.quantize import quantize
from attn_diag.kernels.quantizers import quantizer
from attn_diag.reference import AttentionHead, Masking, format_of


def culprit(recipe: str, fault: Fault, family: str, seed: int, *, thorough: bool) -> Culprit | None:
    q, k, v = inputs(family, seed)
    out, lse = Kernel(recipe, fault, 64, seed)(q.float(), k.float(), v.float())
    head = AttentionHead(q.double(), k.double(), v.double(), None, 0.125, Masking("top-left"))
    declared = DeclaredKernel(preset(recipe), head, format_of(torch.bfloat16), {}, key_gradients=False)
    return declared.scales_of(out.bfloat16().double(), lse.double()).culprit(thorough=thorough)


@pytest.mark.parametrize(
    ("recipe", "fault", "family", "said"),
    [
        ("kv-int8", Fault(of="k", what="zero point", number=1), "blocks alike",
         "k's integers are multiplied back one too large (a zero point off by one)"),
        ("kv-int8", Fault(of="v", what="wide", number=2), "blocks alike", "v has a scale for 2 rows, not for a row"),
        ("kv-int8", Fault(of="k", what="next"), "a sink", "k has scales of a row and the block after it (later ones)"),
        ("sage2", Fault(of="v", what="wide along rows", number=2), "growing keys",
         "v has a scale for 2 features, not for a feature"),
        ("mxfp8-attention", Fault(of="k", what="wide along rows", number=2), "blocks alike",
         "k has a scale for a row, not for 32 of a row"),
        ("mxfp8-attention", Fault(of="p", what="masked"), "blocks alike",
         "the scales of P_bar's blocks are those of keys that are masked as well"),
        ("nvfp4-attention", Fault(of="p", what="wide along rows", number=2), "blocks alike",
         "P_bar has a scale for 32 of a row, not for 16 of a row"),
        ("nvfp4-attention", Fault(of="q", what="scale cut"), "peaked", "q's scales are rounded down"),
    ],
    ids=lambda x: f"{x.of} {x.what}" if isinstance(x, Fault) else "",
)  # fmt: skip
def test_few_codes_name_their_cause(recipe: str, fault: Fault, family: str, said: str) -> None:
    found = culprit(recipe, fault, family, 31, thorough=False)
    assert found is not None
    assert said in found.words


def test_a_stale_amax_of_two_levels() -> None:
    fault = Fault(of="k", what="stale level", number=0.6)
    found = culprit("nvfp4-attention", fault, "blocks alike", 32, thorough=True)
    assert found is not None
    assert "the largest number of k as a whole is taken for 0.6 times" in found.words


def test_a_stale_amax_of_each_token_its_own() -> None:
    found = culprit("kv-int8", Fault(of="k", what="stale by block"), "heavy tails", 33, thorough=True)
    assert found is not None
    assert found.words.startswith("the largest number of k is taken for 0.")
    assert "of 256 blocks, each by its own" in found.words


@pytest.mark.parametrize("recipe", ["kv-int8", "sage2", "mxfp8-attention", "nvfp4-attention"])
def test_sound_kernels_have_no_cause(recipe: str) -> None:
    for seed, family in enumerate(("blocks alike", "growing keys")):
        assert culprit(recipe, SOUND, family, 40 + seed, thorough=False) is None


def test_an_lse_without_the_mean_of_k() -> None:
    q, k, v = inputs("blocks alike", 34)
    for what, times in (("mean not added", 0), ("", 1)):
        out, lse = Kernel("sage1", Fault(what=what))(q.float(), k.float(), v.float())
        shaped: list[Any] = [x[None, None] for x in (q, k, v, out.bfloat16(), lse)]
        found = attn_diag.inspect(*shaped[:3], o=shaped[3], lse=shaped[4], causal=True, declared="sage1", device="cpu")
        (verdict,) = [x for x in found.heads[0].quantities if x.quantity == "lse"]
        assert ("the mean that is taken off k is not added back" in verdict.words) == (times == 0)


@pytest.mark.parametrize(
    ("family", "seed", "what", "amount"), [("outliers", 51, "shared", 2.0), ("sink", 55, "stale", 0.6)]
)
def test_a_scale_fault_in_int4_is_no_other_softmax_scale(family: str, seed: int, what: str, amount: float) -> None:
    # The recipe itself is 62 % to 112 % off here: under another softmax scale O is no nearer than that to anything.
    q, k, v = study_scale_adversary.made(family, seed, "sage2-int4")
    fault = study_scale_adversary.Fault(what, "k", amount)
    causal = seed % 3 != 0
    out, lse = study_scale_adversary.kernel("sage2-int4", q[0], k[0], v[0], causal, fault)
    tensors = {"q": q[None], "k": k[None], "v": v[None], "o": out[None, None], "lse": lse[None, None]}
    capture = attn_diag.Capture.from_tensors(tensors, causal="top-left" if causal else "none", declared="sage2-int4")
    found = check_assumptions(capture, ["observed"], torch.device("cpu"))
    assert found.ok, found.message


def test_codes_that_a_large_scale_leaves_unused_are_no_rounding_toward_zero() -> None:
    q, k, v = study_scale_adversary.made("outliers", 20056, "sage2-int4")
    fault = study_scale_adversary.Fault("stale", "k", 1.7)
    out, lse = study_scale_adversary.kernel("sage2-int4", q[0], k[0], v[0], True, fault)
    head = AttentionHead(q[0].double(), k[0].double(), v[0].double(), None, 0.125, Masking("top-left"))
    declared = DeclaredKernel(preset("sage2-int4"), head, format_of(torch.bfloat16), {}, key_gradients=False)
    found = declared.scales_of(out.double(), lse.double()).culprit()
    assert found is not None
    assert found.words == "the largest number of k is taken for 1.7 times what it is (a stale amax)"


def test_planted_faults_of_quantisers() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).double()
    sound, shifted = quantize(x, quantizer("int8")), quantize(x, quantizer("int8", code_offset=1.0))
    assert torch.allclose(shifted.values - sound.values, sound.scale.double().expand(4, 64))
    stale = quantize(x, quantizer("nvfp4", level=0.5))
    # Blocks that reach half of the tensor's amax have the largest scale that E4M3 has.
    assert float(stale.scale.max()) == 448.0
    assert not bool(stale.values.isnan().any())
    with pytest.raises(ValueError, match="code_offset is for integers"):
        quantizer("mxfp8", code_offset=1.0)
    with pytest.raises(ValueError, match="level is a number above 0, of two levels"):
        quantizer("mxfp8", level=0.5)
    with pytest.raises(ValueError, match="masked wants the amax of P_bar"):
        quantize(x, quantizer("mxfp8", masked=True))
