"""Kernels with a window or a softcap: what check, probe, invariance and hunt are told of them, and find out."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import limited_kernels as kernels
import numpy as np
import pytest
import torch

import attn_diag
from attn_diag.cli.limits import window_of
from attn_diag.errors import InputError
from attn_diag.reports.check import _tells_less
from attn_diag.results.hunt import HuntFinding, Variant
from attn_diag.results.quality import Pattern
from attn_diag.testing.hunting.script import script
from attn_diag.testing.next_command import Again
from attn_diag.testing.probing.inputs import Draw, duplicate_keys
from attn_diag.testing.probing.search import row_factor
from attn_diag.testing.regression import cases as suite
from attn_diag.testing.stated import Stated

SHAPE = (2, 8, 96, 32)
# A kernel and what is said of it.
SOUND = {
    "local": (kernels.local, {"window": (32, 0)}),
    "local, causal too": (kernels.local, {"window": (32, -1), "causal": True}),
    "around": (kernels.around, {"window": (32, 16)}),
    "capped": (kernels.capped, {"softcap": 7.5}),
    "capped_30": (kernels.capped_30, {"softcap": 30.0, "causal": True}),
}
# What is said, and what comes back in its stead.
OTHER: dict[str, tuple[Any, dict[str, Any], str, str | None]] = {
    "window": (kernels.local, {"causal": True}, "it sees a window: 32 keys back", "window=(32, 0)"),
    "cap": (kernels.capped, {}, "it caps its scores at 7.5 (softcap)", "softcap=7.5"),
    "no window": (kernels.unlimited, {"causal": True, "window": (32, 0)}, "it sees no window", "causal='top-left')"),
    "no cap": (kernels.unlimited, {"causal": True, "softcap": 1.0}, "it does not cap its scores", "causal='top-left')"),
    "a key more": (
        kernels.one_more, {"causal": True, "window": (32, 0)},
        "it lets row t see keys t-33 to t; it should see keys t-32 to t", None,
    ),
    "alibi": (kernels.with_alibi, {"causal": True}, "it has ALiBi's usual slopes", "alibi_slopes=["),
    "more than V": (kernels.shifted, {}, "it returns an O of up to 1 where V is all zeros", None),
}  # fmt: skip


@pytest.mark.parametrize(("kernel", "said"), SOUND.values(), ids=SOUND)
@pytest.mark.slow
def test_a_sound_kernel_passes_once_its_limits_are_stated(kernel: Any, said: dict[str, Any]) -> None:
    cases = ["normal", "pairs", "large-logits"]
    found = attn_diag.check(kernel, cases=cases, head_dim=32, length=96, device="cpu", **said)
    assert found.passed, found.report()
    probes = ["normal", "duplicates", "tails"]
    probed = attn_diag.probe(kernel, shape=SHAPE, device="cpu", probes=probes, **said)
    assert probed.outcome == "ok", probed.report()
    moved = attn_diag.invariance(
        kernel, shape=(2, 2, 96, 32), device="cpu", only=["padding", "prefill", "future-token"], **said
    )
    assert moved.passed, moved.report()


def test_casts_behind_a_small_cap_that_all_err_to_one_side_are_no_fault() -> None:
    said: dict[str, Any] = {"shape": (4, 4, 96, 16), "device": "cpu", "softcap": 0.1}
    sound = attn_diag.probe(kernels.capped_tenth, probes=["normal", "ramp"], **said)
    assert "biased" in sound.labels
    assert sound.outcome == "ok", sound.report()
    assert "behind a softcap of 0.1 no P̄ is below 0.82" in " ".join(sound.report().split())
    coarse = attn_diag.probe(kernels.truncated, probes=["normal"], **said)
    assert coarse.outcome == "fail", coarse.report()


def test_coarse_scores_of_equal_keys_behind_a_cap_are_no_rounded_row_sum() -> None:
    stated = Stated.of("none", None, 32, None, 30.0)
    given = suite.draw("pairs", 0, dtype=torch.bfloat16, head_dim=32, stated=stated, length=96)
    assert row_factor(given, kernels.coarse_tanh(given.q, given.k, given.v), torch.device("cpu")) is None


@pytest.mark.parametrize(("kernel", "said", "words", "right"), OTHER.values(), ids=OTHER)
@pytest.mark.slow
def test_other_limits_than_the_stated_ones_are_named(
    kernel: Any, said: dict[str, Any], words: str, right: str | None
) -> None:
    found = attn_diag.check(kernel, cases=["normal"], device="cpu", **said)
    (failure,) = found.failures
    assert failure.suspect is not None
    assert failure.suspect.startswith(words)
    following = failure.look_closer
    assert following is not None
    if right is None:
        assert following.endswith("cases=['normal'], folder='failing')")
    else:
        assert right in following
    probed = attn_diag.probe(kernel, device="cpu", **said)
    assert probed.suspect is not None
    assert probed.suspect.startswith(words)
    # The same command again would find the same.
    assert probed.next is not None
    assert ("attn_diag.check" in probed.next) == (right is None)
    assert probed.outcome == ("fail" if right is None else "other-function")


@pytest.mark.slow
def test_a_wrong_o_that_nobody_knows_is_saved_to_be_looked_into(tmp_path: Path) -> None:
    found = attn_diag.check(kernels.shifted, cases=["normal"], device="cpu", folder=tmp_path)
    assert found.failures[0].look_closer == f"attn-diag inspect {tmp_path / 'normal.safetensors'}"
    assert (tmp_path / "normal.safetensors").exists()


def test_what_is_said_to_run_on_a_capture_names_its_file(tmp_path: Path) -> None:
    q, k, v = (torch.randn(1, 1, 64, 32, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(3))
    case = Stated.of("none", None, 32, (32, 16)).case("x", q, k, v)
    held = case.captured({"o": kernels.shifted(q, k, v)})

    def told(target: Any, **options: Any) -> str | None:
        (failure,) = attn_diag.check(target, device="cpu", **options).failures
        return failure.look_closer

    saved = attn_diag.load(held.save(tmp_path / "a b.safetensors"))
    asked: dict[str, Any] = {"window": (32, 16), "head_dim": 32, "cases": []}
    assert told(held) is None
    assert told(saved) == f"attn-diag inspect '{saved.source}'"
    assert told(kernels.shifted, captures=[saved], **asked) is None
    expected = (
        f"attn-diag check limited_kernels:shifted --window 32,16 --head-dim 32 --out failing --capture '{saved.source}'"
    )
    assert told("limited_kernels:shifted", captures=[saved], **asked) == expected


def test_how_an_error_is_made_is_told_before_where_it_is() -> None:
    some, everywhere = (
        Pattern("factor", "rows 1-2 are 1.08 times the true ones"),
        Pattern("factor", "all rows are 1.06"),
    )
    made = Pattern("formula", "rows 0-9 are without the softcap's derivative")
    assert sorted([some, everywhere, made], key=_tells_less) == [made, everywhere, some]


@pytest.mark.slow
def test_a_backward_without_the_softcap_s_derivative_is_named_by_the_case_that_shows_it() -> None:
    said: dict[str, Any] = {"causal": True, "softcap": 30.0, "head_dim": 32, "length": 96, "device": "cpu"}
    found = attn_diag.check(kernels.unsloped, cases=["sinks", "large-logits"], **said)
    first = " ".join(found.report(120).split())
    assert "dQ is wrong in 2 of 2 cases, of which all rows are without the softcap's derivative" in first


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_hunt_draws_inputs_with_the_stated_limits() -> None:
    # pytest has put the folder of this file on the path; a worker process looks there too.
    found = attn_diag.hunt(
        "limited_kernels:local", causal="top-left", window=(32, 0), only=["batch"], budget_s=10.0, device="cpu"
    )
    assert found.passed, found.report()
    assert found.kernels[0].cases


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_hunt_that_judged_nothing_has_not_passed() -> None:
    found = attn_diag.hunt("no_such_module:kernel", only=["batch"], device="cpu")
    assert not found.findings
    assert not found.passed
    assert found.report().startswith("NOT RUN")


@pytest.mark.parametrize(
    ("name", "rows", "said", "off"),
    [
        # One row is the last one of as many as there are keys; the kernel takes it for the first.
        ("around", 1, {"window": (32, 16)}, 1.0),
        # Three roundings of BF16, and wrong: a script that asked for four found nothing.
        ("capped", 64, {"softcap": 8.0}, 5e-3),
    ],
)
def test_the_script_of_a_hunt_finds_again_what_was_wrong(
    name: str, rows: int, said: dict[str, Any], off: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, do = (torch.randn(1, 1, rows, 16, generator=generator).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, 1, 64, 16, generator=generator).bfloat16() for _ in range(2))
    Stated.of("none", 0.25, 16, **said).case("x", q, k, v, do).captured({}).save(tmp_path / "x.safetensors")
    smallest = Variant(1, 1, 1, rows, 64, 16, "none")
    finding = HuntFinding("wrong", {"o": "wrong"}, (), smallest, {"o": off}, "", alone=True, words="O is wrong")
    kernel = f"limited_kernels:{name}"
    folder = Path(kernels.__file__).parent
    text = script(kernel, None, finding, capture="x.safetensors", folder=folder, scale=0.25, device="cpu", **said)
    (tmp_path / "x.py").write_text(text)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tmp_path / "x.py"))
    assert ended.value.code == 1


@pytest.mark.parametrize("window", [None, (8, 0), (12, 4), (-1, 3), (3, -1)], ids=str)
@pytest.mark.parametrize("causal", ["none", "top-left"])
def test_inputs_are_drawn_of_keys_that_rows_see(causal: str, window: tuple[int, int] | None) -> None:
    stated = Stated.of(causal, None, 16, window)
    draw = Draw(1, 2, 64, 16, torch.bfloat16, stated, torch.Generator().manual_seed(0))
    rows, keys = torch.arange(64)[:, None], torch.arange(64)
    left, right = window or (-1, -1)
    expected = torch.ones(64, 64, dtype=torch.bool)
    if causal == "top-left":
        expected &= keys <= rows
    if left >= 0:
        expected &= keys >= rows - left
    if right >= 0:
        expected &= keys <= rows + right
    assert torch.equal(draw.seen, expected)
    assert bool(draw.seen.expand(1, 2, 64, 64).gather(3, draw.visible_key()[..., None]).all())
    made = duplicate_keys(draw)
    scores = (made.q.double() @ made.k.double().mT).masked_fill(~expected, -torch.inf)
    top = scores.topk(2, -1).values
    # Where the row sees a pair whole its two keys tie.
    tied = (top[..., 0] == top[..., 1]).double().mean()
    assert tied > (0.7 if left < 0 else 0.05)


def test_inputs_of_other_limits_are_other_inputs() -> None:
    def fingerprint(**limits: Any) -> str:
        stated = Stated.of("top-left", None, 16, **limits)
        return suite.draw("normal", 0, dtype=torch.bfloat16, head_dim=16, stated=stated, length=64).fingerprint

    assert len({fingerprint(), fingerprint(window=(8, 0)), fingerprint(softcap=5.0), fingerprint(window=(-1, -1))}) == 3


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "cap": (lambda: attn_diag.check(kernels.capped, softcap=-1.0), "softcap must be a finite number above 0"),
    "window": (lambda: attn_diag.probe(kernels.local, window=(3,)), "window must be 'left,right'"),
    "one number": (lambda: attn_diag.check(kernels.local, window=cast("Any", 32)), r"32 keys, .* are \(31, 0\)"),
    "one on a command line": (lambda: window_of("32"), "--window must be LEFT,RIGHT .*: 32 keys, .* are 31,0 under"),
    "text": (lambda: attn_diag.check(kernels.local, window=cast("Any", "32,0")), "two integers, .* got '32,0'"),
    "one of NumPy": (lambda: attn_diag.probe(kernels.local, window=cast("Any", np.int64(32))), r"are \(31, 0\)"),
    "no integers": (lambda: attn_diag.hunt("m:f", window=cast("Any", (32.0, 0.0))), "two integers"),
    "no side": (lambda: attn_diag.invariance(kernels.local, window=cast("Any", (None, 0))), "two integers"),
    "text of a cap": (lambda: attn_diag.check(kernels.capped, softcap=cast("Any", "30")), "softcap must be a number"),
    "a bool": (lambda: attn_diag.probe(kernels.capped, softcap=True), "softcap must be a number, got True"),
    "caps": (lambda: attn_diag.check(kernels.capped, softcap=cast("Any", [30.0])), "softcap must be a number"),
    "scale": (lambda: attn_diag.check(kernels.capped, scale=cast("Any", "x")), "scale must be a number, got 'x'"),
    "mask": (lambda: attn_diag.invariance(kernels.local, causal="sideways"), "causal must be none, top-left"),
    "casts": (
        lambda: attn_diag.probe(kernels.capped, softcap=7.5, probes=["normaliser-up"]),
        "normaliser-up is no probe of capped scores",
    ),
    "leader": (
        lambda: attn_diag.probe(kernels.capped, softcap=2.0, probes=["one-hot"]), "one-hot is no probe below a softcap",
    ),
    "padding": (
        lambda: attn_diag.probe(kernels.capped, softcap=7.5, probes=["length"]), "length is no probe below a softcap",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_limits_that_are_none_are_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


@pytest.mark.parametrize("window", [[8, 0], np.array([8, 0]), torch.tensor([8, 0])], ids=["list", "NumPy", "torch"])
def test_numbers_of_other_libraries_become_python_s(window: Any) -> None:
    stated = Stated.of("none", np.float32(0.25), 16, window, torch.tensor(30.0))  # type: ignore[arg-type]
    assert stated == Stated("none", 0.25, (8, 0), 30.0)
    assert [type(x) for x in (stated.scale, *(stated.window or ()), stated.softcap)] == [float, int, int, float]
    q, k, v = (torch.randn(1, 1, 16, 16).bfloat16() for _ in range(3))
    found = attn_diag.inspect(q, k, v, o=v, window=window, softcap=np.int64(30))  # type: ignore[arg-type]
    assert type(found).from_json(found.to_json()) == found


def test_the_next_command_states_the_limits_and_leaves_out_what_is_none() -> None:
    asked = Again("m:f", "bf16", Stated("top-left", 0.125, (64, 0), 30.0))
    assert asked.command("check") == "attn-diag check m:f --causal top-left --window 64,0 --softcap 30"
    assert asked.command("check", ["--window -1,-1"]) == "attn-diag check m:f --causal top-left --softcap 30"
    call = Again(None, "bf16", Stated("none", 0.125, (64, 0), 30.0)).command("check")
    assert call == "attn_diag.check(fn, window=(64, 0), softcap=30)"
