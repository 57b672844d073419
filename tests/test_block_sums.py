"""Gradients that are added up in the inputs' format, as torch's SDPA does it on a CPU, are named; others are not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attn_diag
from attn_diag.analyses.patterns.evidence import Evidence
from attn_diag.analyses.patterns.find import find_patterns
from attn_diag.head import counterfactual
from attn_diag.reference import AttentionHead
from attn_diag.reports.following import commands
from attn_diag.reports.opening import next_command
from attn_diag.results.quality import Pattern, QuantityVerdict

LENGTH, DIM = 256, 32


def inputs(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, LENGTH, DIM, generator=generator).bfloat16() for _ in range(4)]


def by_hand(
    tensors: list[Tensor], block: int | None, *, truncated: bool = False, of_keys: int | None = None
) -> dict[str, Any]:
    """A fused kernel's outputs; dK and dV rounded after every ``block`` of query rows (None: once), dQ ``of_keys``."""
    wide = [x.double() for x in tensors]
    scores = (wide[0] @ wide[1].mT * DIM**-0.5).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    lse, probs = scores.logsumexp(-1), scores.softmax(-1)
    o = (probs @ wide[2]).bfloat16()
    delta = (wide[3] * o).sum(-1, keepdim=True)
    dscores = (probs * (wide[3] @ wide[2].mT - delta)).bfloat16().double()
    probs = (
        (probs.float().view(torch.int32) & -65536).view(torch.float32).double()
        if truncated
        else probs.bfloat16().double()
    )
    dq = torch.zeros_like(wide[0])
    for start in range(0, LENGTH, of_keys or LENGTH):
        keys = slice(start, start + (of_keys or LENGTH))
        dq = (dq + dscores[..., keys] @ wide[1][:, :, keys] * DIM**-0.5).bfloat16().double()
    found = {"o": o, "lse": lse.float(), "dq": dq.bfloat16()}
    dk, dv = torch.zeros_like(wide[1]), torch.zeros_like(wide[2])
    for start in range(0, LENGTH, block or LENGTH):
        rows = slice(start, start + (block or LENGTH))
        dk = (dk + dscores[:, :, rows].mT @ wide[0][:, :, rows] * DIM**-0.5).bfloat16().double()
        dv = (dv + probs[:, :, rows].mT @ wide[3][:, :, rows]).bfloat16().double()
    return found | {"dk": dk.bfloat16(), "dv": dv.bfloat16()}


def judged(tensors: list[Tensor], outputs: dict[str, Any]) -> tuple[Any, list[QuantityVerdict]]:
    q, k, v, do = tensors
    found = attn_diag.inspect(q, k, v, do=do, causal=True, device="cpu", **outputs)
    heads = [h for h in found.captures[0].observations[0].heads if h.head is not None]
    return found, [x for h in heads for x in h.quantities if x.quantity in ("dk", "dv")]


@pytest.mark.parametrize("block", [32, 64])
def test_sums_in_the_inputs_format_are_named(block: int) -> None:
    tensors = inputs(block)
    found, quantities = judged(tensors, by_hand(tensors, block))
    assert {x.answer for x in quantities} <= {"lossy", "undecided"}
    assert {x.site for x in quantities} == {"gradient_accumulator"}
    assert "the sums of dK and dV in the inputs' format" in found.report().replace("\n", " ")
    assert "look for scores" not in found.report().replace("\n", " ")


def test_the_next_command_is_one_that_says_something_of_dk_and_dv(tmp_path: Path) -> None:
    tensors = inputs(64)
    stated = {"format": "attn-diag-capture", "format_version": "1.1", "causal": "top-left"}
    named = dict(zip(("q", "k", "v", "do"), tensors, strict=True))
    save_file(
        {n: t.contiguous() for n, t in (named | by_hand(tensors, 64)).items()}, tmp_path / "a.safetensors", stated
    )
    found = attn_diag.inspect(tmp_path / "a.safetensors", device="cpu")
    assert [f.quantities for f in found.findings] == [("dv",)]
    assert next_command(found).said.startswith("attn-diag replay ")
    assert [name for _, name in commands(found)] == [next_command(found).said]


def test_sums_of_dq_are_named() -> None:
    tensors = inputs(7)
    outputs = by_hand(tensors, None, of_keys=32)
    found = attn_diag.inspect(*tensors[:3], do=tensors[3], causal=True, device="cpu", **outputs)
    quantities = {x.quantity: x for h in found.captures[0].observations[0].heads for x in h.quantities}
    assert {name for name, x in quantities.items() if x.site == "gradient_accumulator"} == {"dq"}
    assert quantities["dq"].answer == "lossy"
    assert "the sums of dQ in the inputs' format" in found.report().replace("\n", " ")


@pytest.mark.parametrize("lost", [1, 16])
@pytest.mark.parametrize("block", [16, 64])
def test_keys_that_were_never_written_are_wrong_in_a_coarse_kernel_too(block: int, lost: int) -> None:
    tensors = inputs(block)
    outputs = by_hand(tensors, block)
    for name in ("dk", "dv"):
        outputs[name][:, :, LENGTH - lost :] = 0
    _, quantities = judged(tensors, outputs)
    last = f"keys {LENGTH - lost}-255 are zero" if lost > 1 else "key 255 is zero"
    assert {x.answer for x in quantities} == {"wrong"}
    assert all(last in x.words and x.site is None for x in quantities)


@pytest.mark.parametrize("truncated", [False, True])
def test_other_kernels_are_not_said_to_do_that(truncated: bool) -> None:
    tensors = inputs(3)
    found, quantities = judged(tensors, by_hand(tensors, None, truncated=truncated))
    assert all(x.site is None for x in quantities)
    assert ("lossy" in {x.answer for x in quantities}) == truncated
    assert "the sums of dK and dV" not in found.report().replace("\n", " ")


@pytest.mark.parametrize("length", [128, 200])
def test_query_heads_that_are_rounded_and_added_up_beside_a_coarse_lse_are_not_sums_in_blocks(length: int) -> None:
    """repeat_kv and autograd, with an L in BF16: that is what dK and dV are off by."""
    g = torch.Generator().manual_seed(length)
    shapes = [(1, heads, length, DIM) for heads in (4, 2, 2, 4)]
    q, k, v, do = (torch.randn(shape, generator=g).bfloat16() for shape in shapes)
    k = (k + 8 * torch.randn(1, 2, 1, DIM, generator=g)).bfloat16()
    kk, vv = (x.double().repeat_interleave(2, 1) for x in (k, v))
    wide, gradient = q.double(), do.double()
    scores = (wide @ kk.mT * DIM**-0.5).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    lse = scores.logsumexp(-1).bfloat16()
    o = (scores.softmax(-1) @ vv).bfloat16()
    probs = (scores - lse.double()[..., None]).exp()
    dscores = (probs * (gradient @ vv.mT - (gradient * o).sum(-1, keepdim=True))).bfloat16().double()
    parts = dscores.mT @ wide * DIM**-0.5, probs.bfloat16().double().mT @ gradient
    dk, dv = (x.bfloat16().unflatten(1, (2, 2)).double().sum(2).bfloat16() for x in parts)
    dq = (dscores @ kk * DIM**-0.5).bfloat16()
    _, quantities = judged([q, k, v, do], {"o": o, "lse": lse.float(), "dq": dq, "dk": dk, "dv": dv})
    assert {x.answer for x in quantities} == {"lossy"}
    assert {x.site for x in quantities} == {"lse"}


def test_torchs_own_is_lossy_for_no_other_reason() -> None:
    tensors = inputs(5)
    q, k, v = (x.requires_grad_() for x in tensors[:3])
    o = scaled_dot_product_attention(q, k, v, is_causal=True)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), tensors[3])
    _, quantities = judged([x.detach() for x in tensors], {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv})
    assert all(x.site == "gradient_accumulator" for x in quantities if x.answer == "lossy"), quantities


@pytest.mark.parametrize(("dtype", "groups"), [(torch.bfloat16, 2), (torch.float16, 4)])
def test_query_heads_that_share_a_sum_are_named_too(dtype: torch.dtype, groups: int) -> None:
    """Torch's SDPA on a CPU under ``enable_gqa``, as transformers call it."""
    g = torch.Generator().manual_seed(groups)
    shapes = [(2, heads, LENGTH, DIM) for heads in (2 * groups, 2, 2, 2 * groups)]
    q, k, v, do = (torch.randn(shape, generator=g).to(dtype).requires_grad_() for shape in shapes)
    o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)
    outputs = {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv}
    _, quantities = judged([x.detach() for x in (q, k, v, do)], outputs)
    assert "lossy" in {x.answer for x in quantities}
    assert {x.site for x in quantities if x.answer == "lossy"} == {"gradient_accumulator"}


def test_mistakes_are_looked_for_beside_them_only_where_they_leave_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bit-exact name a search of a second per gradient would find nothing; a mistake beside them is found."""
    looked_at = list[str]()

    def search(evidence: Evidence) -> list[Pattern]:
        looked_at.append(evidence.quantity)
        return find_patterns(evidence)

    monkeypatch.setattr("attn_diag.analyses.patterns.of_capture.find_patterns", search)
    tensors = [x[:, :1] for x in inputs(11)]
    outputs = by_hand(tensors, 64)
    _, quantities = judged(tensors, outputs)
    assert {x.site for x in quantities} == {"gradient_accumulator"}
    assert not looked_at
    outputs["dk"] = (outputs["dk"] * 1.05).bfloat16()
    _, quantities = judged(tensors, outputs)
    assert {x.quantity for x in quantities if x.answer == "wrong"} == {"dk"} == set(looked_at)


def test_other_heads_are_asked_for_the_first_ones_sums_before_any_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each head of torch's SDPA on a CPU went through all 38 other ways: 0.8 s of T = 512."""
    tensors, runs, run = inputs(3), Counter[float](), counterfactual.run_counterfactual

    def counted(head: AttentionHead, *args: Any, **options: Any) -> dict[str, Tensor]:
        runs[float(head.q[0, 0])] += 1
        return run(head, *args, **options)

    monkeypatch.setattr(counterfactual, "run_counterfactual", counted)
    _, found = judged(tensors, by_hand(tensors, 64))
    assert [one.site for one in found if one.quantity in ("dk", "dv")] == ["gradient_accumulator"] * 4
    first, other = (runs[float(q[0, 0])] for q in tensors[0][0])
    assert 0 < other < first / 4
