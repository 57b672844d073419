"""Dropout whose mask was not captured is no kernel's fault: it is told by O's weights, or its size, and what to do."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag import Capture
from attn_diag.captures.dropout import KEPT
from attn_diag.head.read import read_head
from attn_diag.head.unseen_dropout import in_size, in_weights
from attn_diag.reference import AttentionHead, format_of, reference_head

CPU = torch.device("cpu")


def made(p: float, causal: bool, seed: int, kind: str = "dropout", length: int = 160) -> tuple[Capture, Tensor]:
    """N(0,1) inputs, O with dropout (or something like it), and which probabilities were kept."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, length, 64, generator=draw).bfloat16() for _ in range(3))
    scores = q.float() @ k.float().mT / 8
    if causal:
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
    shape = {"rows alike": (1, 2, 1, length), "keys alike": (1, 2, length, 1)}.get(kind, scores.shape)
    kept = (torch.rand(shape, generator=draw) >= p).expand(scores.shape)
    weights = kept / {"without the factor": 1.0, "the factor twice": (1 - p) ** 2}.get(kind, 1 - p)
    probs = scores.softmax(-1) * weights
    if kind == "before the row sum":
        probs = scores.masked_fill(~kept, -1e30).softmax(-1)
    values = (v.float() / 0.8).round() * 0.8 if kind == "coarse v" else v.float()
    o = (probs @ values).bfloat16()
    return Capture.from_tensors({"q": q, "k": k, "v": v, "o": o}, causal="top-left" if causal else "none"), kept


def heads(capture: Capture) -> list[tuple[AttentionHead, Tensor]]:
    o = capture.tensors["o"][...]
    return [(replace(read_head(capture, 0, h, CPU).head, do=None), o[0, h].double()) for h in (0, 1)]


@pytest.mark.parametrize("p", [0.05, 0.1, 0.3])
def test_rows_that_see_few_keys_tell_dropout_for_certain(p: float) -> None:
    capture, kept = made(p, causal=True, seed=round(100 * p))
    found = in_weights(heads(capture), format_of(torch.bfloat16))
    assert found is not None
    assert found.p == pytest.approx(p, rel=0.02)
    assert found.error < (0.01**2) * found.reference
    told = attn_diag.inspect(capture, device="cpu").captures[0]
    assert told.unjudged
    assert f"attention dropout with p = {p:.2g} whose mask was not captured" in told.assumptions.message
    assert "Add the mask (dropout_mask" in told.assumptions.message
    given = Capture.from_tensors({**{n: t[...] for n, t in capture.tensors.items()}, KEPT: kept.contiguous()},
                                 causal="top-left", dropout_p=p)  # fmt: skip
    assert not attn_diag.inspect(given, device="cpu").captures[0].unjudged


@pytest.mark.parametrize(
    "kind", ["none", "rows alike", "keys alike", "without the factor", "before the row sum", "coarse v"]
)
def test_what_no_dropout_makes_is_none(kind: str) -> None:
    for seed in range(3):
        p = 0.0 if kind in ("none", "coarse v") else 0.1
        capture, _ = made(p, causal=True, seed=seed, kind=kind)
        assert in_weights(heads(capture), format_of(torch.bfloat16)) is None, seed
        if kind != "before the row sum":  # which is dropout, though a wrong one
            capture, _ = made(p, causal=False, seed=seed, kind=kind)
            assert in_size(*heads(capture)[0], torch.arange(160)) is None, seed


@pytest.mark.parametrize("p", [0.2, 0.3])
def test_a_factor_that_is_multiplied_in_twice_is_no_larger_p(p: float) -> None:
    """Of p = 0.2 it was "attention dropout with p = 0.36", though 16 % of the probabilities were 0."""
    capture, _ = made(p, causal=True, seed=1, kind="the factor twice")
    found = in_weights(heads(capture), format_of(torch.bfloat16))
    assert found is not None
    assert found.twice
    assert found.p == pytest.approx(p, rel=0.02)
    assert "whose factor 1 / (1 - p) is multiplied in twice" in found.sentence
    assert f"{found.zeros} of {found.weights} probabilities are 0" in found.sentence


def test_dropout_without_its_factor_is_wrong_by_name() -> None:
    p = 0.1
    capture, _ = made(p, causal=True, seed=1, kind="without the factor")
    told = attn_diag.inspect(capture, device="cpu")
    assert [f.label for f in told.findings] == ["wrong"]
    assert re.search(
        r"dropout with p near 0\.\d makes them that lacks the factor 1 / \(1 - p\)", told.findings[0].words
    )
    for kind in ("rows alike", "keys alike", "before the row sum", "dropout", "none"):
        capture, _ = made(0.0 if kind == "none" else p, causal=True, seed=1, kind=kind)
        assert all(in_weights([head], format_of(torch.bfloat16), unscaled=True) is None for head in heads(capture))


def test_a_fault_in_some_rows_and_a_v_of_zeros_are_no_dropout() -> None:
    """Of peaked rows dropout makes errors of all sizes: a fault of every 16th row seemed to agree with that."""
    capture, _ = made(0.0, causal=False, seed=3)
    head, o = heads(capture)[0]
    sharp = replace(head, q=head.q * 16)
    truth = reference_head(sharp).out
    truth[::16] = 0
    assert in_size(sharp, truth, torch.arange(160)) is None
    causal, _ = made(0.1, causal=True, seed=3)
    head, o = heads(causal)[0]
    hollow = head.v.clone()
    hollow[:8] = 0
    assert in_weights([(replace(head, v=hollow), o)], format_of(torch.bfloat16)) is None


def test_where_all_rows_see_many_keys_its_size_says_that_it_may_be_dropout() -> None:
    capture, _ = made(0.1, causal=False, seed=7)
    found = attn_diag.inspect(capture, device="cpu")
    head = found.captures[0].observations[0].heads[0]
    assert head.verdict is not None
    said = re.search(
        r"as attention dropout with p near ([0-9.]+) makes them, whose mask was not", head.verdict.reasons[0]
    )
    assert said is not None
    assert float(said[1]) == pytest.approx(0.1, rel=0.25)
    assert "If attention dropout was on, this is no fault" in head.verdict.suggestions[0]
    told = " ".join(found.report().split())
    assert "but dropout would, and is no fault of the kernel" in told
    assert "kernel at fault" not in told
    assert "another function than meant" not in told


def test_features_that_are_right_are_none_of_dropout() -> None:
    """Features of another row behind the 64th were said to be "off at random as attention dropout makes them"."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 320, 80, generator=draw) for _ in range(3))
    q, v = q + 0.5 * torch.randn(1, 2, 1, 80, generator=draw), v + 0.3 * torch.randn(1, 2, 1, 80, generator=draw)
    q, k, v = (x.bfloat16() for x in (q, k + 1.5 * torch.randn(1, 2, 1, 80, generator=draw), v))
    scores = (q.double() @ k.double().mT / 80**0.5).masked_fill(torch.ones(320, 320).triu(1) > 0, -torch.inf)
    o = (scores.softmax(-1) @ v.double()).bfloat16()
    o[..., 64:] = o[..., 64:].roll(1, -2)
    found = attn_diag.inspect(q, k, v, o=o, causal="top-left", device="cpu").captures[0].observations[0]
    words = " ".join(q.words for h in found.heads for q in h.quantities)
    assert "no rounding makes" in words
    assert "dropout" not in words


@pytest.mark.parametrize("noisy", [True, False])
def test_an_lse_that_is_off_too_is_none_of_dropout(noisy: bool) -> None:
    """Keys in 3 bits move O as dropout does, and LSE, which dropout does not reach."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 256, 64, generator=draw).bfloat16() for _ in range(3))
    step = k.double().abs().amax(-1, keepdim=True) / 3
    scores = q.double() @ ((k.double() / step).round() * step).mT / 8
    o, lse = (scores.softmax(-1) @ v.double()).bfloat16(), scores.logsumexp(-1).float()
    found = attn_diag.inspect(q, k, v, o=o, lse=lse if noisy else None, device="cpu").captures[0].observations[0]
    words = [x.words for h in found.heads for x in h.quantities if x.quantity == "o"]
    assert all(("no FP8 rounding makes" if noisy else "no rounding makes") in w for w in words)
    assert any("attention dropout" in w for w in words) != noisy
