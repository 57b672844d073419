"""Mistakes in ALiBi slopes are wrong and named; healthy kernels are neither."""

from __future__ import annotations

import pytest
import torch
from builders import labels_of
from planted_slopes import Call, Change, captured, computed, drawn
from torch import Tensor

import attn_diag
from attn_diag.reference import Masking
from attn_diag.reference.masking import AlibiOrigin
from attn_diag.results.diagnosis import CaptureDiagnosis

SEEDS = range(1, 3)
FORWARD: dict[str, tuple[Change, Change | None, str]] = {
    "dropped": (lambda _: None, None, "no ALiBi slope (the bias dropped)"),
    "off by one head": (lambda s: s.roll(1, -1), None, "the ALiBi slope of head"),
    "of the wrong sign": (lambda s: -s, None, "an ALiBi slope of the wrong sign"),
    "not in the backward": (lambda s: s, lambda _: None, "no ALiBi slope (the bias dropped) in the backward alone"),
    "another head's in the backward": (lambda s: s, lambda s: s.roll(1, -1), "in the backward alone"),
}  # fmt: skip


def setting(seed: int) -> tuple[Call, Masking, AlibiOrigin]:
    """GQA and not, causal and not, square and not, with a window, and as flash_attn 2 adds the bias."""
    call = drawn(seed, heads=3 if seed % 2 else 4, kv_heads=3 if seed % 2 else 2, keys=(64, 80)[seed % 3 == 1], batch=1)
    masking = (Masking("bottom-right"), Masking(), Masking("bottom-right", window=(24, 0)))[seed % 3]
    return call, masking, "first-key" if masking.causal != "none" and masking.window is None else "row"


def inspected(
    call: Call, outputs: dict[str, Tensor], masking: Masking, origin: AlibiOrigin, *, slopes: bool = True
) -> CaptureDiagnosis:
    options = {"alibi_origin": origin} if slopes else {}
    capture = captured(call, outputs, slopes=slopes, causal=masking.causal, window=masking.window, **options)
    return attn_diag.inspect_captures([capture], device="cpu").captures[0]


def named(found: CaptureDiagnosis) -> str:
    heads = found.observations[0].heads
    return "; ".join(p.words for h in heads for q in h.quantities for p in q.patterns if p.kind == "alibi")


@pytest.mark.parametrize("seed", range(4))
def test_healthy_kernels_are_not_accused(seed: int) -> None:
    call, masking, origin = setting(seed)
    found = inspected(call, computed(call, call.slopes, call.slopes, masking, origin=origin), masking, origin)
    assert labels_of(found) <= {"clean", "undecided"}
    assert not named(found)
    answers = {q.quantity: q.answer for q in found.observations[0].heads[0].quantities}
    assert (answers["o"], answers["lse"]) == ("good", "good")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", FORWARD)
def test_faults_are_wrong_by_name(fault: str, seed: int) -> None:
    forward, backward, words = FORWARD[fault]
    call, masking, origin = setting(seed)
    made = forward(call.slopes)
    other = made if backward is None else backward(call.slopes)
    found = inspected(call, computed(call, made, other, masking, origin=origin), masking, origin)
    assert "wrong" in labels_of(found)
    assert words in named(found)


def test_slopes_that_are_not_stated_are_named() -> None:
    call, masking, _ = setting(2)
    found = inspected(call, computed(call, call.slopes, call.slopes, masking), masking, "row", slopes=False)
    assert "wrong" in labels_of(found)
    assert "ALiBi's usual slopes, which are not stated" in found.assumptions.message
    assert "ALiBi's usual slopes, which are not stated" in named(found)


def test_slopes_that_the_kernel_ignored_are_told_in_the_assumptions() -> None:
    call, masking, _ = setting(2)
    found = inspected(call, computed(call, None, None, masking), masking, "row")
    assert "ALiBi slopes dropped: O fits attention without them" in found.assumptions.message
    assert not found.assumptions.refused
    rolled = call.slopes.roll(1, -1)
    found = inspected(call, computed(call, rolled, rolled, masking), masking, "row")
    assert "ALiBi slopes off by one head: O fits those of the head before" in found.assumptions.message


def test_another_origin_than_stated_is_told_of_an_lse() -> None:
    call = drawn(1)
    outputs = computed(call, call.slopes, call.slopes, Masking("bottom-right"), origin="first-key")
    found = inspected(call, outputs, Masking("bottom-right"), "row")
    assert found.assumptions.refused
    assert "alibi_origin=first-key fits" in found.assumptions.message


def test_a_softmax_without_bias_gets_none() -> None:
    call = drawn(1)
    outputs = computed(call, None, None, Masking("bottom-right"))
    found = inspected(call, {**outputs, "o": outputs["o"] * torch.tensor(0.75)}, Masking("bottom-right"), "row",
                      slopes=False)  # fmt: skip
    assert "wrong" in labels_of(found)
    assert "ALiBi" not in found.assumptions.message + named(found)
