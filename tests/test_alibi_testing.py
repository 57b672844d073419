"""ALiBi in check and hunt: kernels that are run on captures with slopes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import alibi_functions
import pytest
from planted_slopes import captured, computed, drawn

import attn_diag
from attn_diag import Capture
from attn_diag.reference import Masking


def made(seed: int = 0) -> Capture:
    call = replace(drawn(seed, batch=1, rows=96), slopes=alibi_functions.SLOPES[None])
    return captured(call, computed(call, call.slopes, call.slopes, Masking("bottom-right")), causal="bottom-right")


def checked(target: Any, **options: Any) -> Any:
    return attn_diag.check(
        target, cases=[], captures=[replace(made(), source="alibi")], causal="bottom-right", head_dim=32, device="cpu",
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("target", [alibi_functions.sound, "fa2", "cudnn", "sdpa:math"])
def test_a_sound_kernel_passes(target: Any) -> None:
    found = checked(target)
    assert found.passed, found.failures


def test_slopes_of_other_heads_fail() -> None:
    found = checked(alibi_functions.off_by_one_head)
    assert found.failures
    assert "which no rounding explains" in found.failures[0].message


def test_flex_attention_is_checked_with_its_slopes() -> None:
    found = checked("flex_attention", backward=False)
    assert {f.kind for f in found.failures} <= {"bias"}


def test_stored_outputs_are_checked() -> None:
    assert not attn_diag.check([made(1)], device="cpu").failures


def hunted(name: str, **options: Any) -> Any:
    chosen: dict[str, Any] = {"only": ["group", "length"], "budget_s": 40.0, **options}
    return attn_diag.hunt(f"alibi_functions:{name}", made(), device="cpu", **chosen).kernels[0]


def test_a_hunt_follows_the_slopes_of_other_heads_and_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    found = hunted("sound")
    assert found.cases > 10
    assert not found.findings, found.findings


@pytest.mark.slow
def test_a_fault_of_slopes_is_hunted_down_and_its_script_shows_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.chdir(Path(__file__).parent)
    found = hunted("wrong_where_lengths_differ", folder=tmp_path, only=["length"], budget_s=15.0)
    first = found.findings[0]
    assert (first.fault, set(first.outputs)) == ("wrong", {"o"})
    (condition,) = first.conditions
    # Square lengths are right, others are not.
    assert all(len(set(length.split("x"))) == 1 for length in condition.passing if length != "128x1")
    script = found.findings[0].script
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
