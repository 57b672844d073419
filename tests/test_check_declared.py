"""``check`` and ``hunt`` of kernels below 16 bits: held against the format that they are declared to have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from command_line import Run
from declared_models import kernel
from study_declared import Plan
from study_declared import run as attend

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.results.check import CheckReport
from attn_diag.testing.hunting.hunt import declaring, drawn_capture
from attn_diag.testing.hunting.inputs import Material
from attn_diag.testing.hunting.judging import CPU, CaseJudge
from attn_diag.testing.replaying.processes import Ran
from attn_diag.testing.stated import Stated

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("check_declared")]
FA3 = "fa3-fp8"


def checked(plan: Plan, declared: str | None = FA3, **options: Any) -> CheckReport:
    given: dict[str, Any] = {"cases": ["normal"], "causal": True, "device": "cpu", "name": "mine"} | options
    return attn_diag.check(kernel(plan), declared=declared, **given)


@pytest.mark.parametrize(("plan", "declared"), [(Plan(), FA3), (Plan("int8-fp16"), "sage1")], ids=["FP8", "INT8"])
def test_a_sound_kernel_passes_as_what_it_is(plan: Plan, declared: str) -> None:
    found = checked(plan, declared, seed=3)
    assert found.passed, found.failures
    assert found.declared == declared
    assert f"as good as the recipe {declared}" in found.report()
    assert f"declared {declared}" in found.key
    (case,) = found.cases
    assert {q.declared for q in case.quantities if q.quantity != "lse"} == {declared}


def test_undeclared_it_is_lossy() -> None:
    found = checked(Plan(), None)
    assert not found.passed
    assert found.declared is None


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("wrong descale", "scores are multiplied by 1.0"),
        ("stale amax", "O is"),
        ("dropped key block", "has another mask in rows 128-191"),
    ],
)
def test_faults_are_named(fault: str, said: str) -> None:
    found = checked(Plan(fault=fault))
    assert not found.passed
    first = " ".join(" ".join(found.report().splitlines()[:6]).split())
    assert said in first
    assert "FAIL mine" in first


def test_sixteen_bits_that_are_declared_to_be_eight_pass_and_fewer_bits_do_not() -> None:
    assert attn_diag.check("sdpa:math", declared=FA3, cases=["normal"], causal=True, device="cpu").passed
    assert not checked(Plan("nvfp4"), backward=False).passed


def test_what_captures_declare_holds_for_their_stored_outputs() -> None:
    generator = torch.Generator().manual_seed(5)
    q, k, v, do = (torch.randn(1, 1, 256, 64, generator=generator).bfloat16() for _ in range(4))
    made = attend(Plan(), q, k, v, do)
    tensors = {"q": q, "k": k, "v": v, "do": do, **made}
    capture = Capture.from_tensors(tensors, causal="top-left", declared=FA3)
    found = attn_diag.check(capture, device="cpu")
    assert found.declared == FA3
    assert found.passed, found.failures
    assert not attn_diag.check(Capture.from_tensors(tensors, causal="top-left"), device="cpu").passed
    with pytest.raises(attn_diag.InputError, match=r"declare several kernels \(fa3-fp8, sage2\)"):
        attn_diag.check([capture, Capture.from_tensors(tensors, causal="top-left", declared="sage2")])


def test_a_baseline_is_of_what_was_declared(tmp_path: Any) -> None:
    file = tmp_path / "kernels.json"
    assert checked(Plan(), baseline=file, save=True, backward=False).passed
    again = checked(Plan(), baseline=file, backward=False)
    assert again.passed
    assert again.baseline_key == again.key
    assert "has no entry" in " ".join(checked(Plan(), None, baseline=file, backward=False).notes)


def test_the_command(run: Run) -> None:
    given = ("--declared", FA3, "--cases", "normal", "--device", "cpu", "--no-backward")
    code, out, _ = run("check", "sdpa:math", *given)
    assert code == 0
    assert "as good as the recipe fa3-fp8" in out
    code, _, err = run("check", "sdpa", "--declared", "fa2")
    assert code == 2
    assert "declared must be a recipe below 16 bits" in err


class TestHunt:
    def verdict(self, plan: Plan, declared: str | None, name: str = "mine:kernel") -> set[str]:
        material = Material.of(declaring(drawn_capture(Stated("top-left", 0.125), seed=2), declared))
        case = replace(material.build(material.as_captured), causal="top-left")
        assert case.do is not None
        outputs = attend(plan, case.q, case.k, case.v, case.do)
        judge = CaseJudge.for_capture(name, material.capture, CPU, fixed=True)
        return set(judge.of(case, Ran("ran", outputs=outputs)).faults)

    def test_a_declared_kernel_is_held_against_its_format(self) -> None:
        assert self.verdict(Plan(), None)
        assert not self.verdict(Plan(), FA3)
        assert "o" in self.verdict(Plan(fault="wrong descale"), FA3)

    def test_a_library_of_16_bits_is_not(self) -> None:
        assert self.verdict(Plan(), FA3, "sdpa:flash")

    def test_there_must_be_such_a_recipe(self) -> None:
        with pytest.raises(attn_diag.InputError, match="declared must be a recipe below 16 bits"):
            attn_diag.hunt("sdpa:math", declared="fa2")
