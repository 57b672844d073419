"""Mistakes in dropout are wrong and named; healthy kernels are neither."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import labels_of
from planted_dropouts import Call, Change, captured, computed, drawn, memory_efficient, with_lost_keys
from torch import Tensor

import attn_diag
from attn_diag.reference import Dropout, Masking
from attn_diag.results.diagnosis import CaptureDiagnosis

pytestmark = pytest.mark.slow


def kept(change: Any) -> Change:
    return lambda d: replace(d, kept=change(d.kept))


def same(d: Dropout) -> Dropout | None:
    return d


def anew(d: Dropout) -> Dropout | None:
    """Another mask of the same p, another one for every mask."""
    draw = torch.Generator().manual_seed(int(d.kept[:4].double().cumsum(1).sum()))
    return replace(d, kept=torch.rand(d.kept.shape, generator=draw) >= d.p)


# What the forward and the backward make of the dropout, other arguments, and the words.
FAULTS: dict[str, tuple[Change, Change | None, dict[str, Any], str]] = {
    "forgotten": (lambda _: None, None, {}, "no dropout (the mask forgotten)"),
    "of another head": (same, None, {"off": 1}, "the dropout mask"),
    "without the factor": (lambda d: replace(d, p=0.0), None, {}, "dropout without the factor 1/(1-p)"),
    "inverted": (kept(lambda t: ~t), None, {}, "the dropout mask inverted"),
    "of the next row": (kept(lambda t: t.roll(-1, 0)), None, {}, "the dropout mask of the next row"),
    "forgotten in the backward": (
        same, lambda _: None, {}, "no dropout (the mask forgotten) in the backward alone",
    ),
    "of another head in the backward": (same, same, {"off": 1}, "in the backward alone"),
    "without the factor in the backward": (
        same, lambda d: replace(d, p=0.0), {}, "dropout without the factor 1/(1-p)",
    ),
    "forgotten in dP": (
        same, lambda _: None, {"parts": ("dq", "dk")}, "no dropout (the mask forgotten) in the backward alone",
    ),
    "without the factor in dV": (
        same, lambda d: replace(d, p=0.0), {"parts": ("dv",)}, "dropout without the factor 1/(1-p)",
    ),
}  # fmt: skip
SEEDS = range(1, 3)


def setting(seed: int) -> tuple[Call, Masking]:
    """GQA and not, causal and not, square and not, with a window; p of 0.1, 0.25, 0.5."""
    sizes = {"heads": 3, "kv_heads": 3} if seed % 2 else {}
    call = drawn(seed, p=(0.1, 0.25, 0.5)[seed // 2 % 3], keys=(64, 80)[seed % 3 == 1], batch=1, **sizes)
    masking = (Masking("bottom-right"), Masking(), Masking("bottom-right", window=(24, 0)))[seed % 3]
    return call, masking


def inspected(call: Call, outputs: dict[str, Tensor], masking: Masking) -> CaptureDiagnosis:
    capture = captured(call, outputs, causal=masking.causal, window=masking.window)
    return attn_diag.inspect_captures([capture], device="cpu").captures[0]


def named(found: CaptureDiagnosis) -> str:
    heads = found.observations[0].heads
    return "; ".join(
        p.words for h in heads for q in h.quantities for p in q.patterns if p.kind in ("dropout", "factor")
    )


@pytest.mark.parametrize("seed", range(6))
def test_healthy_kernels_are_not_accused(seed: int) -> None:
    call, masking = setting(seed)
    found = inspected(call, computed(call, masking), masking)
    assert labels_of(found) <= {"clean", "undecided"}
    assert not named(found)
    answers = {q.quantity: q.answer for q in found.observations[0].heads[0].quantities}
    assert (answers["o"], answers["lse"]) == ("good", "good")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_wrong_by_name(fault: str, seed: int) -> None:
    forward, backward, options, words = FAULTS[fault]
    call, masking = setting(seed)
    found = inspected(call, computed(call, masking, forward, backward, **options), masking)
    assert "wrong" in labels_of(found)
    assert words in named(found)


@pytest.mark.parametrize("parts", [("dq", "dk", "dv"), ("dq", "dk"), ("dv",)])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_mask_drawn_anew_in_the_backward_is_told_by_the_size_of_its_error(seed: int, parts: tuple[str, ...]) -> None:
    call, masking = setting(seed)
    found = inspected(call, computed(call, masking, same, anew, parts=parts), masking)
    told = [q for h in found.observations[0].heads for q in h.quantities if q.answer == "wrong"]
    assert {q.quantity for q in told} == set(parts)
    assert sum("another dropout mask of the same p" in q.words for q in told) >= 0.5 * len(told)


@pytest.mark.parametrize("change", ["one head of a group", "half of the keys", "another p"])
def test_a_mask_that_is_wrong_in_a_part_is_not_called_another_one(change: str) -> None:
    call = drawn(2, p=0.25, batch=1, rows=128, heads=2, kv_heads=1 if change == "one head of a group" else 2)

    def changed(d: Dropout) -> Dropout | None:
        if change == "one head of a group" and torch.equal(d.kept, call.kept[0, 0]):
            return d
        other = anew(replace(d, p=0.4) if change == "another p" else d)
        assert other is not None
        if change == "half of the keys":
            return replace(d, kept=torch.where(torch.arange(d.kept.shape[1]) < 64, d.kept, other.kept))
        return other

    found = inspected(call, computed(call, Masking(), same, changed), Masking())
    told = {
        (h.head, q.quantity): "another dropout mask of the same p" in q.words
        for h in found.observations[0].heads if h.head is not None
        for q in h.quantities if q.answer == "wrong"
    }  # fmt: skip
    assert told
    whole = {(1, "dq")} if change == "one head of a group" else set()
    assert {where for where, said in told.items() if said} <= whole


# What takes the place of dS = P o (W o dP - delta), with P o W, dP without W, O without dropout, and the words.
PLACES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "on P": (lambda p, w, dp, delta, _: p * w * (w * dp - delta), "use P after dropout in dS = P o (dP - delta)"),
    "on dS": (lambda p, w, dp, delta, _: p * w * (dp - delta), "have delta dropped with dP"),
    "not on O": (lambda p, w, dp, _, bare: p * (w * dp - bare), "have the delta of an O without dropout"),
    "right": (lambda p, w, dp, delta, _: p * (w * dp - delta), ""),
}


@pytest.mark.parametrize("place", PLACES)
def test_dropout_in_another_place_of_ds_is_named(place: str) -> None:
    call = drawn(6, p=0.1, batch=1, rows=128)
    made, words = PLACES[place]
    k, v = (x.double().repeat_interleave(2, 1) for x in (call.k, call.v))
    q, do = call.q.double(), call.do.double()
    probs, kept = (q @ k.mT * 32**-0.5).softmax(-1), call.kept / (1 - call.p)
    deltas = [(do * (weights @ v)).sum(-1, keepdim=True) for weights in (probs * kept, probs)]
    ds = made(probs, kept, do @ v.mT, *deltas).bfloat16().double() * 32**-0.5
    dk = (ds.mT @ q).unflatten(1, (2, 2)).sum(2)
    outputs = computed(call, Masking()) | {"dq": (ds @ k).bfloat16(), "dk": dk.bfloat16()}
    found = inspected(call, outputs, Masking())
    assert ("wrong" in labels_of(found)) == bool(words)
    wrong = [q for h in found.observations[0].heads for q in h.quantities if q.answer == "wrong"]
    assert all(words in q.words for q in wrong)
    assert {q.quantity for q in wrong} == ({"dq", "dk"} if words else set())


def test_dropout_that_the_kernel_ignored_is_told_in_the_assumptions() -> None:
    call = drawn(2, p=0.5)
    found = inspected(call, computed(call, Masking(), lambda _: None), Masking())
    assert "dropout forgotten: O fits attention without it" in found.assumptions.message
    found = inspected(call, computed(call, Masking(), off=1), Masking())
    assert "O fits the one of the head before" in found.assumptions.message
    assert not found.assumptions.refused


def test_a_row_of_which_nothing_is_kept_is_right() -> None:
    call = drawn(3, p=0.9, rows=16)
    call.kept[:, :, 5] = False
    found = inspected(call, computed(call, Masking()), Masking())
    assert labels_of(found) <= {"clean", "undecided"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_judged(dtype: torch.dtype) -> None:
    """Plain torch, and the same without the factor of dV."""
    call = drawn(4, p=0.25, heads=2)
    leaves = [t.to(dtype).requires_grad_() for t in (call.q, call.k, call.v)]
    q, k, v = leaves
    scores = (q.float() * 32**-0.5) @ k.float().transpose(-1, -2)
    probs = scores.softmax(-1)
    o = ((probs * call.kept / 0.75) @ v.float()).to(dtype)
    dq, dk, dv = torch.autograd.grad(o, leaves, call.do.to(dtype))
    given = replace(call, q=q.detach(), k=k.detach(), v=v.detach(), do=call.do.to(dtype))
    outputs = {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv}
    assert not labels_of(inspected(given, outputs, Masking())) & {"wrong", "lossy"}
    found = inspected(given, {**outputs, "dv": dv * 0.75}, Masking())
    assert "wrong" in labels_of(found)
    assert "without the factor" in named(found)


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_plain_torch_in_bf16_is_lossy_by_its_casts(p: float) -> None:
    """Its mask holds 1 / (1 - p) in BF16, which for p = 0.1 is 0.16 % too small; 2 it holds exactly."""
    call = drawn(1, p=p, batch=1, heads=2, rows=128)
    leaves = [t.clone().requires_grad_() for t in (call.q, call.k, call.v)]
    q, k, v = leaves
    probs = ((q @ k.transpose(2, 3)) * 32**-0.5).softmax(-1, torch.float32).bfloat16()
    factor = torch.ones((), dtype=torch.bfloat16) / (1 - p)
    o = (probs * (call.kept * factor)) @ v
    dq, dk, dv = torch.autograd.grad(o, leaves, call.do)
    found = inspected(call, {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv}, Masking())
    assert "wrong" not in labels_of(found)
    words = " ".join(q.words for q in found.observations[0].heads[0].quantities)
    assert ("1 / (1 - p) of dropout are rounded" if p < 0.5 else "S and P are stored") in words


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("p", "rounded"), [(0.1, True), (0.2, False), (0.5, False)])
def test_a_rounded_factor_in_a_fused_kernel_is_named(p: float, rounded: bool, causal: bool) -> None:
    """1 / 0.9 in BF16 is 0.16 % too small; 1 / 0.8 and 2 it holds exactly."""
    call = drawn(3, p=p, batch=1, heads=2, kv_heads=2, rows=256, keys=256, d=64)
    found = inspected(call, memory_efficient(call, causal=causal), Masking("bottom-right" if causal else "none"))
    assert "wrong" not in labels_of(found)
    quantities = [q for h in found.observations[0].heads for q in h.quantities if q.answer == "lossy"]
    named = ["1 / (1 - p) of dropout is rounded to the inputs' format" in q.words for q in quantities]
    assert bool(named) == rounded
    assert all(named)
    assert ("biased" in labels_of(found)) == rounded


# Which keys are counted how often in P V and in the row sum, and the words.
LOST: dict[str, tuple[slice, dict[str, float], str]] = {
    "a tile": (slice(32, 48), {}, "miss keys 32-47"),
    "a tile of P V": (slice(16, 32), {"row_sum": 1.0}, "miss keys 16-31 in P V, though not in the row sum"),
    "a tile of the row sum": (slice(0, 32), {"pv": 1.0}, "miss keys 0-31 in the row sum, though not in P V"),
    "a tile twice": (slice(48, 64), {"pv": 2.0, "row_sum": 2.0}, "count keys 48-63 twice"),
    "all from 48 on": (slice(48, 80), {}, "miss all keys from 48 on"),
    "a key": (slice(21, 22), {}, "miss key 21"),
    "a key twice": (slice(7, 8), {"pv": 2.0, "row_sum": 2.0}, "count key 7 twice"),
    "none": (slice(16, 32), {"pv": 1.0, "row_sum": 1.0}, ""),
}


def lost(fault: str, seed: int) -> tuple[CaptureDiagnosis, str]:
    """Its diagnosis, and the words that name it."""
    part, counted, words = LOST[fault]
    call = drawn(seed, p=(0.1, 0.25, 0.5)[seed % 3], keys=80, batch=1, heads=2)
    return inspected(call, {"o": with_lost_keys(call, part, **counted)}, Masking()), words


@pytest.mark.parametrize("fault", ["a tile", "a tile of the row sum", "all from 48 on", "a key twice"])
def test_lost_keys_are_named_under_dropout(fault: str) -> None:
    found, words = lost(fault, 1)
    assert "wrong" in labels_of(found)
    said = [p.words for h in found.observations[0].heads for q in h.quantities for p in q.patterns if p.kind == "part"]
    assert any(words in one for one in said), said


def test_whole_keys_are_not_called_lost() -> None:
    assert labels_of(lost("none", 5)[0]) <= {"clean", "undecided"}
