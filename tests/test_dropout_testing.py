"""Dropout in replay, check and hunt: kernels that are handed which probabilities to keep, and those that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dropout_functions as planted
import pytest
import torch
from command_line import Programs
from planted_dropouts import captured, computed, drawn

import attn_diag
from attn_diag import Capture
from attn_diag.errors import InputError
from attn_diag.reference import Masking
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.probing.search import row_factor
from attn_diag.testing.regression.cases import case_of_capture, choose
from attn_diag.testing.target import Target

CPU = torch.device("cpu")


def made(seed: int = 0, **options: Any) -> Capture:
    call = drawn(seed, batch=1, rows=96)
    return captured(call, computed(call, Masking(), **options))


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.mark.slow
@pytest.mark.usefixtures("importable")
def test_replay_hands_kernels_the_mask_and_refuses_those_that_draw_one() -> None:
    against: list[Any] = [planted.sound, planted.next_row, planted.draws_its_own]
    found = attn_diag.replay(made(1, off=1), against=against, device="cpu").captures[0]
    assert found.cause == "kernel"
    kernels = {k.name.removeprefix("dropout_functions:"): k for k in found.kernels}
    assert "the dropout mask of head" in kernels["captured"].quantities[0].words
    assert "the dropout mask of the next row" in kernels["next_row"].quantities[0].words
    assert not kernels["sound"].faults, kernels["sound"].quantities
    assert kernels["draws_its_own"].outcome == "refused"
    assert "takes no dropout_mask" in str(kernels["draws_its_own"].message)


@pytest.mark.parametrize("name", ["sdpa", "sdpa:flash", "flex_attention", "attn_diag.attention"])
def test_a_kernel_that_draws_its_own_mask_is_refused(name: str) -> None:
    case = case_of_capture(made(2))
    with pytest.raises(InputError, match="cannot be handed a dropout mask: it draws one of its own, or has no dropout"):
        Target.of(name, dtype=torch.bfloat16, head_dim=32, device=CPU).call(case)


@pytest.mark.parametrize("target", ["sdpa:math", planted.sound])
def test_a_sound_kernel_passes_its_case(target: Any) -> None:
    found = attn_diag.check(target, cases=["dropout"], device="cpu")
    assert found.passed, found.failures


def test_a_function_is_asked_for_dropout_where_it_takes_a_mask() -> None:
    def cases(target: Any) -> set[str]:
        return set(choose(None, Target.of(target, dtype=torch.bfloat16, head_dim=32, device=CPU), None))

    assert cases(planted.sound) - cases(planted.draws_its_own) == {"dropout"}
    assert "dropout" not in cases("fa2")
    assert attn_diag.check(planted.sound, cases=["normal"], device="cpu").passed


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (planted.without_factor, "(dropout without the factor 1/(1-p))"),
        (planted.before_the_row_sum, "dropout before the row sum"),
    ],
)
def test_faults_are_named_and_nothing_else_is_suspected(target: Any, words: str) -> None:
    found = attn_diag.check(target, cases=["dropout"], device="cpu")
    assert found.failures
    assert words in found.failures[0].message
    assert not any("row sum l" in str(f.suspect) for f in found.failures)


def test_kernels_that_draw_their_own_mask_cannot_be_checked_with_one() -> None:
    for target in ("sdpa", planted.draws_its_own):
        with pytest.raises(InputError, match="dropout"):
            attn_diag.check(target, cases=["dropout"], device="cpu")


def test_captures_are_checked_with_their_masks() -> None:
    options: dict[str, Any] = {"cases": [], "captures": [made(2)], "head_dim": 32, "device": "cpu"}
    assert attn_diag.check(planted.sound, **options).passed
    assert attn_diag.check(planted.of_other_heads, **options).failures
    assert not attn_diag.check([made(3)], device="cpu").failures


def test_a_module_is_told_what_its_forward_takes() -> None:
    class Attend(torch.nn.Module):
        def forward(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_mask: torch.Tensor | None = None
        ) -> torch.Tensor:
            return planted.sound(q, k, v, dropout_mask, 0.1)

    case = case_of_capture(made(4))
    target = Target.of(Attend(), dtype=torch.bfloat16, head_dim=32, device=CPU)
    assert target.takes == ["dropout_mask"]
    o = target.call(case).outputs["o"]
    assert torch.equal(o, planted.sound(case.q, case.k, case.v, case.dropout_mask, 0.1))


def test_the_row_factor_is_that_of_the_attention_with_its_mask() -> None:
    case = case_of_capture(made(5))
    o = planted.sound(case.q, case.k, case.v, case.dropout_mask, 0.1)
    assert row_factor(case, o, CPU) is None


def test_inputs_with_another_mask_have_another_fingerprint() -> None:
    case = case_of_capture(made(6))
    assert case.dropout_mask is not None
    plain = CaseInputs("a", case.q, case.k, case.v, case.do, case.scale, "none")
    other = CaseInputs("a", case.q, case.k, case.v, case.do, case.scale, "none", dropout_mask=~case.dropout_mask,
                       dropout_p=0.1)  # fmt: skip
    assert len({plain.fingerprint, case.fingerprint, other.fingerprint}) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("importable")
def test_a_hunt_draws_masks_for_other_shapes_and_its_script_shows_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, programs: Programs
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    found = attn_diag.hunt(
        "dropout_functions:wrong_where_lengths_differ", dropout_p=0.1, folder=tmp_path, only=["length"], budget_s=20.0,
        device="cpu",
    ).kernels[0]  # fmt: skip
    first = found.findings[0]
    assert first.fault == "wrong"
    assert all(len(set(length.split("x"))) == 1 for c in first.conditions for length in c.passing if length != "128x1")
    assert first.script is not None
    done = programs.run_file(first.script)
    assert done.code == 1, done.out + done.err
