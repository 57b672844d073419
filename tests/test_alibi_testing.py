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
from attn_diag.errors import InputError
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
    # Where one such length alone was reached in time, dV is coarse wherever O is wrong.
    assert (first.fault, first.outputs["o"]) == ("wrong", "wrong")
    assert set(first.outputs.values()) <= {"wrong", "lossy"}
    (condition,) = first.conditions
    # Square lengths are right, others are not.
    assert all(len(set(length.split("x"))) == 1 for length in condition.passing if length != "128x1")
    script = found.findings[0].script
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr


SLOPES = alibi_functions.SLOPES.tolist()


@pytest.mark.parametrize(
    ("name", "slopes", "words"),
    [
        ("sound", SLOPES, None),
        ("off_by_one_head", SLOPES, "it has ALiBi slopes off by one head: O fits those of the head before"),
        ("sound", None, "it has ALiBi's usual slopes, which are not stated: O fits them"),
        ("sound", [1.5 * slope for slope in SLOPES], "it has other ALiBi slopes: O fits 0.25, 0.0625, 0.0156, 0.0039"),
    ],
)
def test_probe_knows_slopes(name: str, slopes: list[float] | None, words: str | None) -> None:
    """What is given are the kernel's own slopes or not; behind a factor of 1.5 these are read off O."""
    found = attn_diag.probe(
        getattr(alibi_functions, name), shape=(2, 4, 96, 32), causal="top-left", alibi_slopes=slopes, device="cpu",
        probes=["normal", "unit-vectors", "length"],
    )  # fmt: skip
    unsaid = "other-function" if slopes is None else "fail"
    assert found.outcome == ("ok" if words is None else unsaid), found.report()
    assert words is None or str(found.suspect).startswith(words), found.report()
    assert found.assumptions.alibi_slopes == (None if slopes is None else tuple(slopes))
    assert attn_diag.ProbeReport.from_json(found.to_json()) == found


def test_slopes_that_cannot_be_probed_are_refused() -> None:
    with pytest.raises(InputError, match="alibi_slopes must be 4 finite numbers, one a head of the call, got 3"):
        attn_diag.probe("fa2", shape=(2, 4, 96, 32), alibi_slopes=[0.5, 0.25, 0.125])
    with pytest.raises(InputError, match="batch is no probe of a kernel with alibi_slopes"):
        attn_diag.probe("fa2", alibi_slopes=SLOPES, probes=["batch"])
