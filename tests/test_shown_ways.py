"""What the first head of a capture shows of its kernel's rounding spares others the search, and decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Any

import planted_heads
import pytest
import torch
from builders import some
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attn_diag
from attn_diag.analyses.patterns import find
from attn_diag.analyses.patterns.backward import of_gradient
from attn_diag.analyses.patterns.evidence import Evidence, Guess
from attn_diag.head import counterfactual
from attn_diag.head.shown_ways import Shown, ShownWays
from attn_diag.reference import AttentionHead, Masking, format_of

T, D, ALPHA = 96, 64, 0.125
LSE, PLAIN, SUMS = "from-l:fused:low", "unfused:scores:cast", "sums in blocks"
BF16 = format_of(torch.bfloat16)
OUTPUTS = ("o", "dq", "dk", "dv")
Said = list[tuple[str, str, str | None, str]]


def head_of(seed: int) -> AttentionHead:
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(T, D, generator=generator).bfloat16().double() for _ in range(4))
    return AttentionHead(4 * q, k, v, do, ALPHA, Masking("top-left"))


def in_blocks(head: AttentionHead) -> dict[str, Tensor]:
    """By torch's SDPA on a CPU, which adds dK and dV up in BF16."""
    q, k, v, do = (t[None].bfloat16().requires_grad_() for t in (head.q, head.k, head.v, some(head.do)))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        o = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=ALPHA)[0]
    gradients = torch.autograd.grad(o, (q, k, v), do.detach())
    return {name: t[0].detach() for name, t in zip(OUTPUTS, (o, *gradients), strict=True)}


def made_by(*recipes: str) -> dict[str, Any]:
    """A capture's tensors, [1, H, T, D], each head by another kernel (``counterfactual.run_counterfactual``)."""
    heads = [head_of(seed) for seed in range(len(recipes))]
    made = [
        in_blocks(h) if r == SUMS else counterfactual.run_counterfactual(h, BF16, {}, recipe=r)
        for h, r in zip(heads, recipes, strict=True)
    ]
    tensors = {name: torch.stack([getattr(head, name) for head in heads]) for name in ("q", "k", "v", "do")}
    tensors |= {name: torch.stack([one[name] for one in made]) for name in OUTPUTS}
    return {name: tensor[None].bfloat16() for name, tensor in tensors.items()}


def said(tensors: dict[str, Any]) -> list[Said]:
    """Of each head, quantity by quantity."""
    found = attn_diag.inspect(**tensors, causal="top-left", scale=ALPHA, device="cpu")
    heads = [h for h in found.heads if h.head is not None]
    return [[(q.quantity, q.answer, q.site, q.words) for q in h.quantities] for h in heads]


KNOWN = {LSE: {None, "lse"}, PLAIN: {"unfused"}, "fa2": {None}, SUMS: {None, "gradient_accumulator"}}


@pytest.mark.parametrize("recipes", [(LSE, LSE, PLAIN, "fa2"), ("fa2", PLAIN, PLAIN, LSE), (SUMS, SUMS, LSE, "fa2")])
def test_heads_are_told_what_they_are_told_alone(recipes: tuple[str, ...]) -> None:
    tensors = made_by(*recipes)
    alone = [said({name: t[:, h : h + 1] for name, t in tensors.items()})[0] for h in range(len(recipes))]
    together = said(tensors)
    assert together == alone
    sites = {recipe: {site for _, _, site, _ in of_head} for recipe, of_head in zip(recipes, together, strict=True)}
    assert sites == {recipe: KNOWN[recipe] for recipe in recipes}


@pytest.mark.parametrize("recipe", [LSE, PLAIN])
def test_others_make_no_search(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    tensors, runs, run = made_by(recipe, recipe, recipe), Counter[float](), counterfactual.run_counterfactual

    def counted(head: AttentionHead, *args: Any, **options: Any) -> dict[str, Tensor]:
        runs[float(head.q[0, 0])] += 1
        return run(head, *args, **options)

    monkeypatch.setattr(counterfactual, "run_counterfactual", counted)
    said(tensors)
    first, *others = (runs[float(q[0, 0])] for q in tensors["q"][0])
    assert all(0 < other < first / 2 for other in others)


@pytest.mark.parametrize("fails", [False, True])
def test_another_thread_waits_for_the_first_head(*, fails: bool) -> None:
    ways, begun, shown = ShownWays(), Event(), Shown(PLAIN, 0.1, None)

    def first() -> None:
        with ways.shown_here():
            begun.set()
            assert ways.of("seen", first=True).look("dq") is None  # it would wait for itself
            if fails:
                raise ValueError
            ways.of("seen", first=True).put("dq", shown)

    with ThreadPoolExecutor(2) as pool:
        looking = pool.submit(ways.of("seen", first=False).look, "dq")
        assert not looking.done()
        showing = pool.submit(first)
        assert begun.wait(5)
        assert looking.result(5) == (None if fails else shown)
        assert isinstance(showing.exception(5), ValueError) == fails
    assert ways.of("other", first=False).look("dq") is None


def test_a_pattern_of_another_head_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It spares the guesses behind it where it fits, and is no answer where it does not."""
    made, own = list[str](), of_gradient

    def recorded(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
        for guess in own(evidence, rows):
            made.append(guess.words)
            yield guess

    def counted(seed: int, shown: set[tuple[str, str]], *, scale_of_delta: float) -> tuple[str, int]:
        head = planted_heads.inputs(seed=seed)
        steps = planted_heads.Steps(head)
        dq = planted_heads.rounded(head.scale * (steps.p * (steps.dp - scale_of_delta * steps.delta)) @ head.k)
        made.clear()
        evidence, _ = planted_heads.evidence_of(head, "dq", dq)
        return find.find_patterns(replace(evidence, shown=shown))[0].words, len(made)

    monkeypatch.setattr(find, "of_gradient", recorded)
    shown = set[tuple[str, str]]()
    words, all_of_them = counted(0, shown, scale_of_delta=0.0)
    assert shown == {("delta", "are without delta (dS = P o dP)")}
    assert counted(1, shown, scale_of_delta=0.0) == (words, 2)  # and once more of the rows that are furthest off
    other, count = counted(1, shown, scale_of_delta=-1.0)
    assert "delta with the wrong sign" in other
    assert count == all_of_them
