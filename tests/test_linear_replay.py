"""``replay_linear``: the function or its inputs, with functions that others wrote, broken ones, and ways to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import Run
from test_linear_check import DELTA

import attn_diag
from attn_diag import InputError, LinearCapture
from attn_diag.results.replay import Replay, ReplayedCapture
from attn_diag.testing.linear.cases import draw, with_outputs
from attn_diag.testing.linear.function import LinearFunction

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions' processes look for modules in the working directory."""
    monkeypatch.chdir(HERE)


def captured(fn: str = "recipe") -> LinearCapture:
    """A call of the gated delta rule and what a function made of it."""
    inputs = draw("initial-state", DELTA, 3, dtype=torch.bfloat16, shape=(1, 130, 2, 16))
    outputs, _ = LinearFunction.of(fn, DELTA, device=torch.device("cpu")).run(inputs)
    return with_outputs(inputs, outputs)


def replayed(capture: LinearCapture, *against: str) -> ReplayedCapture:
    (found,) = attn_diag.replay_linear(capture, against=against, device="cpu").captures
    return found


def test_sound_functions_pass() -> None:
    found = replayed(captured(), "replayed_linear:chunked", "recipe:16")
    assert found.cause == "pass", found.words
    assert [k.name for k in found.kernels] == ["captured", "replayed_linear:chunked", "recipe:16"]
    assert all(k.deterministic for k in found.kernels[1:])
    assert {"o", "final_state", "dq", "dbeta", "dinitial_state"} <= {q.quantity for q in found.kernels[1].quantities}


def test_what_was_captured_is_the_culprit_and_others_are_right() -> None:
    found = replayed(captured("replayed_linear:no_state"), "recipe", "replayed_linear:chunked")
    assert (found.cause, found.culprits) == ("kernel", ("captured",))
    assert set(found.right) == {"recipe", "replayed_linear:chunked"}
    assert "are wrong: O is" in found.words
    assert "the inter-chunk term is missing" in found.words


def test_how_a_function_ended_is_named() -> None:
    names = ("no_state", "without_state", "overwriting", "dying")
    found = replayed(captured(), *(f"replayed_linear:{name}" for name in names))
    ended = {k.name.partition(":")[2]: (k.outcome, k.message or "") for k in found.kernels if not k.captured}
    assert ended["no_state"][0] == "ran"
    assert ended["without_state"][0] == "refused"
    assert "takes no initial_state" in ended["without_state"][1]
    assert ended["overwriting"][0] == "unusable"
    assert "it writes into its input k (" in ended["overwriting"][1]
    assert ended["dying"][0] == "crashed"
    assert "SIGSEGV" in ended["dying"][1]
    assert (found.cause, found.culprits) == ("kernel", ("replayed_linear:no_state",))


def test_the_command(run: Run, tmp_path: Path) -> None:
    file, document, page = (
        captured("replayed_linear:no_state").save(tmp_path / "a.safetensors"),
        tmp_path / "r.json",
        tmp_path / "r.html",
    )
    line = ("replay", file, "--against", "recipe", "--device", "cpu", "--json", document, "--html", page)
    done = run(*line, "--fail-on", "kernel")
    assert done.code == 1, done.err
    assert done.out.startswith("KERNEL: captured")
    assert max(map(len, done.out.splitlines())) <= 80
    found = Replay.from_json(document.read_text())
    assert json.loads(found.to_json()) == json.loads(document.read_text())
    assert found.captures[0].operator == DELTA
    assert "dbeta" in page.read_text()
    done = run("replay", file, "--hunt", "--device", "cpu")
    assert done.code == 2
    assert "linear attention takes no --hunt" in done.err
    assert "`check --operator` runs its own cases" in done.err


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(InputError, match="no function 'fa2' of linear attention"):
        attn_diag.replay_linear(captured(), against=["fa2"], device="cpu")
    with pytest.raises(InputError, match="has to import it"):
        attn_diag.replay_linear(captured(), against=[lambda q: q], device="cpu")
    with pytest.raises(InputError, match="nothing to replay"):
        attn_diag.replay_linear([], device="cpu")
    installed = attn_diag.replay_linear(captured(), device="cpu")
    assert [k.name for k in installed.captures[0].kernels] == ["captured", "recipe"]
    assert all(name.endswith(("(not installed)", "(needs a GPU)")) for name in installed.not_here)
    assert len(installed.not_here) == 2
