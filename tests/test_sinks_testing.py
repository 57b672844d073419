"""Attention sinks in check, hunt and replay: functions that are given their logits, and the gradient of these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sinks_functions as planted
import torch
from command_line import Programs
from planted_sinks import computed, drawn

import attn_diag
from attn_diag import Capture
from attn_diag.errors import InputError
from attn_diag.reference import Masking
from attn_diag.testing.regression.cases import case_of_capture, choose, stored_outputs
from attn_diag.testing.target import Target

CPU = torch.device("cpu")


def made(seed: int = 0, **changed: Any) -> Capture:
    call = drawn(seed, batch=1, rows=64)
    outputs = {**computed(call, call.sinks, call.sinks, Masking()), **changed}
    return Capture.from_tensors({"q": call.q, "k": call.k, "v": call.v, "do": call.do, "sinks": call.sinks, **outputs})


def target(fn: Any) -> Target:
    return Target.of(fn, dtype=torch.bfloat16, head_dim=32, device=CPU)


def test_a_function_is_asked_for_sinks_where_it_takes_them() -> None:
    def own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return planted.sound(q, k, v, None)

    assert set(choose(None, target(planted.sound), None)) - set(choose(None, target(own), None)) == {"sink-logits"}
    assert attn_diag.check(planted.sound, cases=["sink-logits", "normal"], device="cpu").passed


@pytest.mark.parametrize(
    ("fn", "quantity", "words"),
    [
        (planted.dropped, "o", "it drops its sinks: O fits attention without them"),
        (planted.wrong_sign, "dsinks", "it has the wrong sign"),
        (planted.mean_over_the_batch, "dsinks", "it is a mean over the batch, not a sum"),
    ],
)
def test_faults_are_named(fn: Any, quantity: str, words: str) -> None:
    found = attn_diag.check(fn, cases=["sink-logits"], device="cpu")
    assert [f.quantity for f in found.failures] == [quantity]
    assert words in found.failures[0].message


def test_sinks_without_a_gradient_are_told() -> None:
    def frozen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        return planted.sound(q, k, v, None if sinks is None else sinks.detach())

    found = attn_diag.check(frozen, cases=["sink-logits"], device="cpu")
    assert found.passed
    assert [note for note in found.notes if "dSink was not judged" in note] == [
        "sink-logits: autograd gives the sinks no gradient: dSink was not judged"
    ]
    assert not attn_diag.check(planted.sound, cases=["sink-logits"], device="cpu").notes


def test_dsinks_is_the_gradient_of_the_sinks() -> None:
    case = case_of_capture(made(1))
    assert case.sinks is not None
    found = target(planted.sound).call(case, gradients=True).outputs
    leaf = case.sinks.clone().requires_grad_()
    (expected,) = torch.autograd.grad(planted.sound(case.q, case.k, case.v, leaf), leaf, case.do)
    assert torch.equal(found["dsinks"], expected)
    assert case.sinks.grad is None
    assert not case.sinks.requires_grad
    # Sinks of a function's own have no gradient here.
    plain = target(lambda q, k, v: planted.sound(q, k, v, None))
    assert "dsinks" not in plain.call(case, gradients=True).outputs


def test_captures_with_sinks_are_checked() -> None:
    options: dict[str, Any] = {"cases": [], "captures": [made(2)], "head_dim": 32, "device": "cpu"}
    assert attn_diag.check(planted.sound, **options).passed
    (first, *_) = attn_diag.check(planted.of_other_heads, **options).failures
    assert (first.kind, first.quantity, first.suspect) == ("wrong", "o", None)
    assert {f.quantity for f in attn_diag.check(planted.twice, **options).failures} == {"dsinks"}


def test_a_captured_dsinks_is_checked_too() -> None:
    capture = made(3)
    assert not attn_diag.check([capture], device="cpu").failures
    wrong = made(3, dsinks=-stored_outputs(capture, "observed")["dsinks"])
    assert [f.quantity for f in attn_diag.check([wrong], device="cpu").failures] == ["dsinks"]


@pytest.mark.parametrize("name", ["sdpa", "sdpa:math", "flex_attention"])
def test_kernels_without_sinks_refuse_them(name: str) -> None:
    with pytest.raises(InputError, match="has no sinks"):
        target(name).call(case_of_capture(made(4)))


@pytest.mark.slow
def test_a_wrong_dsinks_is_hunted_down_and_its_script_shows_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, programs: Programs
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.chdir(Path(__file__).parent)
    found = attn_diag.hunt(
        "sinks_functions:wrong_where_lengths_differ", made(5), folder=tmp_path, only=["length"], budget_s=20.0,
        device="cpu",
    ).kernels[0]  # fmt: skip
    (first,) = found.findings
    assert (first.fault, set(first.outputs)) == ("wrong", {"dsinks"})
    assert first.script is not None
    done = programs.run_file(first.script)
    assert done.code == 1, done.out + done.err
