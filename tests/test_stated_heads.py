"""ALiBi's slopes and attention sinks that are stated: what check, probe, invariance and hunt make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stated_heads as kernels
import torch
from builders import some
from stated_heads import SINKS, SLOPES

import attn_diag
from attn_diag.cli.limits import Limits
from attn_diag.errors import InputError
from attn_diag.reference import reference_rows
from attn_diag.testing.hunting.hunt import drawn_capture
from attn_diag.testing.hunting.inputs import Material
from attn_diag.testing.next_command import Again
from attn_diag.testing.other_function import as_counted, fit_of, nearly, other_limit
from attn_diag.testing.probing.search import Suspect, limit_suspect
from attn_diag.testing.regression import cases as suite
from attn_diag.testing.seen_keys import mask_fault
from attn_diag.testing.stated import Stated, fitting, hides_appended, same_function
from attn_diag.testing.target import Target

CPU = torch.device("cpu")
ASKED: dict[str, Any] = {"causal": True, "device": "cpu"}
SMALL: dict[str, Any] = {"head_dim": 16, "length": 64, "backward": False, **ASKED}
SHAPE = (2, 3, 48, 16)
SOUND: dict[str, tuple[Any, dict[str, Any]]] = {
    "slopes": (kernels.sloped, {"alibi_slopes": SLOPES}),
    "sinks": (kernels.sunk, {"sinks": SINKS}),
    "everything": (kernels.everything, {"alibi_slopes": SLOPES, "sinks": SINKS, "softcap": 20.0}),
    "told": (kernels.told, {"alibi_slopes": SLOPES, "sinks": SINKS}),
    "told other ones": (kernels.told, {"sinks": [0.3, 2.0]}),
    "sinks that it needs": (kernels.needs_sinks, {"sinks": SINKS}),
    "sinks by default": (kernels.by_default, {"sinks": SINKS}),
    "a recipe": ("fa2", {"alibi_slopes": SLOPES, "sinks": SINKS}),
}
FAULTY: dict[str, tuple[Any, dict[str, Any], str]] = {
    "slopes of other heads": (kernels.other_heads, {"alibi_slopes": SLOPES}, "it has ALiBi slopes off by one head"),
    "no slopes": (kernels.plain, {"alibi_slopes": SLOPES}, "it drops its ALiBi slopes: O fits attention without them"),
    "no sinks": (kernels.plain, {"sinks": SINKS}, "it drops its sinks: O fits attention without them"),
    "sinks in base 2": (kernels.base_2, {"sinks": SINKS}, "it has other sinks: O fits a sink in base 2"),
}


def case(name: str, dtype: torch.dtype = torch.bfloat16, **said: Any) -> Any:
    """The first two sequences of a case."""
    drawn = suite.draw(name, 0, dtype=dtype, head_dim=64, stated=Stated.of(True, None, 64, **said), length=64)
    return replace(drawn, q=drawn.q[:2], k=drawn.k[:2], v=drawn.v[:2], do=None)


def target(fn: Any) -> Target:
    return Target.of(fn, dtype=torch.bfloat16, head_dim=64, device=CPU)


@pytest.mark.parametrize(("kernel", "said"), SOUND.values(), ids=SOUND)
@pytest.mark.slow
def test_a_sound_kernel_passes_once_its_heads_are_stated(kernel: Any, said: dict[str, Any]) -> None:
    found = attn_diag.check(kernel, **{**SMALL, **said, "cases": ["normal", "tails"]})
    assert found.passed, found.report()
    assert all(c.shape[1] == len(next(iter(said.values()))) for c in found.cases)
    heads = len(next(iter(said.values())))
    probed = attn_diag.probe(
        kernel, shape=(2, heads, 96, 32), probes=["normal", "unit-vectors", "length"], **ASKED, **said
    )
    assert probed.outcome == "ok", probed.report()
    only = ["padding", "prefill", "future-token", "gqa", "batch-size", "head-order"]
    moved = attn_diag.invariance(kernel, shape=(2, heads, 48, 16), only=only, **ASKED, **said)
    assert moved.passed, moved.report()
    assert [p.words for p in moved.paths if p.arrangement == "head-order"] == [
        "every head has a slope or a sink of its own"
    ]
    assert attn_diag.Invariance.from_json(moved.to_json()) == moved
    assert attn_diag.ProbeReport.from_json(probed.to_json()) == probed


def test_a_kernel_is_checked_with_as_many_heads_as_are_stated() -> None:
    found = attn_diag.check(
        kernels.everything, cases=["normal"], alibi_slopes=SLOPES, sinks=SINKS, softcap=20.0, **SMALL
    )
    assert found.passed, found.report()
    assert found.cases[0].shape == (8, 3, 64, 16)
    assert "softcap 20, ALiBi slopes 0.25 0.0625 0.01562, sinks 1 -0.5 2" in found.key


@pytest.mark.parametrize(("kernel", "said", "words"), FAULTY.values(), ids=FAULTY)
def test_faults_of_stated_heads_are_named(kernel: Any, said: dict[str, Any], words: str) -> None:
    given = case("normal", **said)
    _, other = fit_of(given, kernel(given.q, given.k, given.v), target(kernel), CPU)
    assert other is not None
    assert f"it {other.words}".startswith(words)
    # They are the kernel's fault, not another statement.
    assert not other.known


def test_an_lse_may_count_alibi_from_the_first_key() -> None:
    given = case("normal", alibi_slopes=SLOPES)
    o, lse = kernels.from_first_key(given.q, given.k, given.v)
    truth = given.head(0, 0, CPU)
    shift = torch.tensor(SLOPES)[:, None] * torch.arange(lse.shape[2])
    assert torch.allclose((lse - shift)[0, 0].double(), reference_rows(truth, torch.arange(64)).lse, atol=1e-5)

    def origin(found: torch.Tensor) -> str:
        return as_counted(given, {"o": o, "lse": found}, CPU).alibi_origin

    assert [origin(x) for x in (lse, lse - shift, lse - shift / 2, 1.2 * lse)] == ["first-key", "row", "row", "row"]
    found = attn_diag.check(kernels.from_first_key, cases=["normal"], alibi_slopes=SLOPES, **SMALL)
    assert found.passed, found.report()
    assert "lse" in [q.quantity for q in found.cases[0].quantities]
    assert any(note.startswith("LSE counts ALiBi's bias from the first key") for note in found.notes)


@pytest.mark.slow
def test_an_lse_from_the_first_key_is_held_to_it() -> None:
    def off(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = kernels.from_first_key(q, k, v)
        return o, lse + 0.3

    said: dict[str, Any] = {"alibi_slopes": SLOPES, **ASKED}
    asked: dict[str, Any] = {"shape": (2, 3, 96, 32), "probes": ["normal"], **said}
    found = attn_diag.check(off, cases=["normal"], **SMALL, alibi_slopes=SLOPES)
    assert [f.quantity for f in found.failures] == ["lse"]
    assert attn_diag.probe(off, **asked).outcome == "fail"
    probed = attn_diag.probe(kernels.from_first_key, **asked)
    assert probed.outcome == "ok"
    assert probed.summary[-1].startswith("LSE counts ALiBi's bias from the first key")
    moved = attn_diag.invariance(
        kernels.from_first_key, shape=(2, 3, 48, 16), only=["run-to-run", "batch-size"], **said
    )
    assert moved.passed, moved.report()


def test_sinks_that_are_not_stated_are_read_off_o() -> None:
    given = case("normal")
    _, other = fit_of(given, kernels.one_sink(given.q, given.k, given.v), target(kernels.one_sink), CPU)
    assert other is not None
    assert other.words == "has sinks that are not stated (logits 1.5): O fits them"
    following = other.again("check", Again("m:f", "bf16", Stated("top-left", 0.125)))
    assert following == (
        "attn-diag check m:f --causal top-left --sinks 1.5 (with the kernel's own: these are read off O)"
    )


def test_usual_slopes_lead_to_the_same_command() -> None:
    q, k, v = (torch.randn(1, 4, 96, 32, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(3))
    given = Stated.of(True, None, 32).case("normal", q, k, v)
    _, other = fit_of(given, kernels.usual(given.q, given.k, given.v), target(kernels.usual), CPU)
    assert other is not None
    for name in ("check", "probe", "invariance"):
        following = other.again(name, Again("m:f", "bf16", Stated("top-left", 0.125)))
        assert following == f"attn-diag {name} m:f --causal top-left --alibi-slopes 0.25,0.0625,0.015625,0.00390625"


def test_a_function_of_several_heads_is_told_how_it_is_asked() -> None:
    found = attn_diag.check(kernels.sunk, cases=["normal"], **SMALL)
    assert any("is asked with --alibi-slopes or --sinks" in note for note in found.notes)
    needed = attn_diag.check(kernels.needs_sinks, cases=["normal"], **SMALL)
    assert any("or must be given them" in note for note in needed.notes)


def test_cases_whose_casts_do_not_average_out_are_left_out() -> None:
    stated, alone = Stated.of(True, None, 64, sinks=SINKS), Stated.of(True, None, 64)
    left = set(suite.choose(None, target(kernels.told), None, stated=alone))
    left -= set(suite.choose(None, target(kernels.told), None, stated=stated))
    assert left == {"constant-rows", "normaliser-down", "normaliser-up", "sink-logits"}
    assert "real-head" not in suite.choose(None, target(kernels.told), None, stated=stated, dtype=torch.float16)
    for name in ("batch", "constant-rows", "normaliser-up"):
        with pytest.raises(InputError, match=f"{name} is no probe of a kernel with sinks"):
            attn_diag.probe(kernels.sunk, sinks=SINKS, probes=[name], **ASKED)


def test_captures_of_other_numbers_are_not_run() -> None:
    own = case("normal", sinks=SINKS)
    other = Stated.of(True, None, 64, sinks=[1.0, -0.5, 2.5])
    assert same_function(own, Stated.of(True, None, 64, sinks=SINKS))
    assert not same_function(own, other)
    assert same_function(own, other, told=("sinks",))
    assert same_function(own, Stated.of(True, None, 64))
    held = own.captured({"o": kernels.sunk(own.q, own.k, own.v)})
    with pytest.raises(InputError, match=r"sinks 1 -0.5 2; fn is said to compute .* sinks 1 -0.5 2.5"):
        attn_diag.check(kernels.sunk, cases=[], captures=[held], sinks=[1.0, -0.5, 2.5], **ASKED)


def test_keys_are_not_hidden_by_a_score_that_a_slope_raises() -> None:
    assert hides_appended(Stated.of(False, None, 64, alibi_slopes=SLOPES))
    assert not hides_appended(Stated.of(False, None, 64, alibi_slopes=[0.25, -0.1]))
    assert hides_appended(Stated.of(True, None, 64, alibi_slopes=[-0.1]))


def test_a_hunt_keeps_the_heads_of_a_kernel_that_has_numbers_of_its_own() -> None:
    capture = drawn_capture(Stated.of(True, None, 64, alibi_slopes=SLOPES, sinks=SINKS))
    material = Material.of(capture)
    assert material.case.q.shape[1] == 3
    own = material.of_kernel("stated_heads:sloped", CPU)
    assert (own.heads, material.of_kernel("stated_heads:told", CPU).heads) == (3, None)
    assert material.of_kernel("fa2", CPU).heads is None
    own.build(own.as_captured)
    with pytest.raises(InputError, match="one a head: of 3 heads alone"):
        own.build(replace(own.as_captured, key_heads=2))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_hunt_draws_inputs_with_the_stated_heads(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"causal": "top-left", "only": ["length"], "device": "cpu", "alibi_slopes": SLOPES}
    for name, cap in (("everything", 20.0), ("told", None)):
        # All the time that there is goes into a sound one.
        stated: dict[str, Any] = {"sinks": torch.tensor(SINKS), "softcap": cap, "budget_s": 1.0}
        found = attn_diag.hunt(f"stated_heads:{name}", **stated, **asked)
        assert found.passed, found.report()
        assert any(level.outcome == "passed" for axis in found.kernels[0].axes for level in axis.levels)
    found = attn_diag.hunt("stated_heads:other_heads", folder=tmp_path, budget_s=3.0, **asked)
    assert not found.passed


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two numbers": ({"alibi_slopes": SLOPES, "sinks": [1.0]}, "sinks must be 3 finite numbers, .* got 1"),
    "NaN": ({"sinks": [1.0, float("nan"), 0.0]}, "sinks must be finite .*the first that is none: nan"),
    "Inf": ({"sinks": [1.0, -np.inf, 0.0]}, "sinks must be finite"),
    "too large": ({"alibi_slopes": [1e39, 1.0, 1.0]}, "finite numbers of fp32, one a head"),
    "bools": ({"sinks": torch.ones(3, dtype=torch.bool)}, "got torch.bool of shape"),
    "complex": ({"sinks": torch.ones(3) * 1j}, "got torch.complex64 of shape"),
    "two axes": ({"alibi_slopes": torch.ones(2, 3)}, r"got torch.float32 of shape \[2, 3\]"),
    "one number": ({"alibi_slopes": 0.5}, "got 0.5"),
    "of no axis": ({"alibi_slopes": torch.tensor(0.5)}, r"of shape \[\]"),
    "none": ({"alibi_slopes": []}, r"got \[\]"),
    "text": ({"alibi_slopes": "0.5,0.25"}, "got '0.5,0.25'"),
    "texts": ({"sinks": ["a"]}, r"got \['a'\]"),
}
TAKES: dict[str, Callable[..., Any]] = {
    "check": lambda **said: attn_diag.check(kernels.told, **said),
    "probe": lambda **said: attn_diag.probe(kernels.told, **said),
    "invariance": lambda **said: attn_diag.invariance(kernels.told, **said),
    "hunt": lambda **said: attn_diag.hunt("stated_heads:told", **said),
}


@pytest.mark.parametrize("takes", TAKES.values(), ids=TAKES)
@pytest.mark.parametrize(("said", "words"), REFUSED.values(), ids=REFUSED)
def test_numbers_that_are_none_are_refused(said: dict[str, Any], words: str, takes: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match=words):
        takes(**said)


def test_numbers_of_other_heads_than_the_shape_s_are_refused() -> None:
    for run in (attn_diag.probe, attn_diag.invariance):
        with pytest.raises(InputError, match="alibi_slopes must be 4 finite numbers, one a head of the call, got 3"):
            run(kernels.told, shape=(2, 4, 48, 16), alibi_slopes=SLOPES)
    with pytest.raises(InputError, match="--sinks must be numbers between commas, one a head, got '1,x'"):
        Limits(sinks="1,x").stated()


@pytest.mark.parametrize(
    "given",
    [SINKS, tuple(SINKS), np.array(SINKS), torch.tensor(SINKS).bfloat16(), torch.nn.Parameter(torch.tensor(SINKS))],
    ids=["list", "tuple", "NumPy", "BF16", "parameter"],
)
def test_numbers_of_other_libraries_are_taken(given: Any) -> None:
    assert Stated.of(True, None, 64, sinks=given).sinks == tuple(SINKS)
    assert fitting((2, 4, 48, 16), None, given) == (2, 3, 48, 16)
    assert fitting((2, 4, 48, 16), None, None) == (2, 4, 48, 16)


def test_the_next_command_states_the_heads() -> None:
    stated = Stated.of(True, 0.125, 64, (64, 0), 30.0, SLOPES, [0.3, 1.0, -2.0])
    command = Again("m:f", "bf16", stated).command("invariance")
    assert command == (
        "attn-diag invariance m:f --causal top-left --window 64,0 --softcap 30 "
        "--alibi-slopes 0.25,0.0625,0.015625 --sinks 0.3,1.0,-2.0"
    )
    call = Again(None, "bf16", Stated.of(True, 0.125, 64, sinks=SINKS)).command("check")
    assert call == "attn_diag.check(fn, causal='top-left', sinks=[1.0, -0.5, 2.0])"
    limits = Limits(window="64,0", softcap=30.0, alibi_slopes="0.25,0.0625,0.015625", sinks="0.3,1,-2")
    assert Stated.of(True, 0.125, 64, **limits.stated()) == stated


def test_a_softcap_that_is_not_stated_leads_to_a_command_that_states_it() -> None:
    given = case("normal")
    o = kernels.capped_30(given.q, given.k, given.v)
    found = limit_suspect(given, o, CPU)
    assert found is not None
    assert (found.words, found.options) == ("it caps its scores at 30 (softcap)", ("--softcap 30",))
    assert limit_suspect(given, kernels.plain(given.q, given.k, given.v), CPU) is None
    too_small = (0.997 * kernels.plain(given.q.float(), given.k.float(), given.v.float())).bfloat16()
    assert limit_suspect(given, too_small, CPU) is None


def test_a_softcap_of_coarse_scores_is_no_scale() -> None:
    """x-transformers' softclamp in BF16: "it scales by 0.119169, not 0.125 (sure)", as a scale took two thirds away."""
    given = case("pairs")

    def coarse(factor: float, cap: float) -> Suspect | None:
        scores = (given.q @ given.k.mT) * (factor * given.q.shape[3] ** -0.5)
        scores = cap * torch.tanh(scores / cap) if cap else scores
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -1e30)
        return limit_suspect(given, (scores.float().softmax(-1).to(given.v.dtype) @ given.v), CPU)

    assert some(coarse(1.0, 10.0)).words == "it caps its scores at 10 (softcap)"
    assert some(coarse(0.95, 0.0)).words.startswith("it scales by ")


def test_a_softcap_near_the_stated_one_is_no_other_scale() -> None:
    given = case("large-logits", softcap=30.0)
    _, other = fit_of(given, kernels.capped_33(given.q, given.k, given.v), None, CPU)
    assert other is not None
    assert other.options == ("--softcap 33",)
    assert other_limit(given, kernels.capped_30(given.q, given.k, given.v), CPU) is None


@pytest.mark.slow
def test_probe_finds_a_softcap_in_the_probe_that_shows_it() -> None:
    found = attn_diag.probe(kernels.capped_33, shape=(2, 8, 96, 32), softcap=30.0, probes=["one-hot"], **ASKED)
    assert found.suspect == "it caps its scores at 33 (softcap)"
    assert found.next is not None
    assert found.next.endswith("softcap=33)")


def test_a_mask_before_the_softcap_is_named() -> None:
    given = case("large-logits", softcap=30.0)
    words = "masks scores before it caps them (hidden ones are then -30, not -inf)"
    assert mask_fault(given, target(kernels.masked_first)) == words
    assert nearly(given, given.v, None, None, CPU, limits=True) is None


@pytest.mark.slow
def test_check_asks_a_kernel_for_its_mask_where_o_is_wrong() -> None:
    found = attn_diag.check(kernels.masked_first, cases=["large-logits"], softcap=30.0, backward=False, **ASKED)
    assert found.failures[0].suspect == "it masks scores before it caps them (hidden ones are then -30, not -inf)"


def words(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, **said: Any) -> str:
    found = attn_diag.inspect(q, k, v, o=o, device="cpu", **said)
    return "; ".join(p.words for h in found.heads for one in h.quantities for p in one.patterns)


@pytest.mark.parametrize(("rows", "keys"), [(96, 40), (120, 30)])
def test_inspect_names_a_window_from_the_first_key(rows: int, keys: int) -> None:
    """Of more rows than keys the judged ones are zero then, or see no key ahead: the others show it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 32, generator=generator).bfloat16() for n in (rows, keys, keys))
    far = torch.arange(rows)[:, None] - torch.arange(keys)
    scores = (q.float() @ k.float().mT * 32**-0.5).masked_fill((far > 16) | (far < -8), -torch.inf)
    o = (scores.softmax(-1).nan_to_num(0.0) @ v.float()).bfloat16()
    said = words(q, k, v, o, window=(16, 8))
    assert said == "all rows are what a window counted from the first key (top-left) gives"


def test_inspect_names_a_mask_before_the_softcap() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 96, 64, generator=generator) for _ in range(3))
    q[:, :, :4] = -k[:, :, :1]  # whose scores with the first keys are the lowest
    q, k, v = (4.5 * q).bfloat16(), (4.5 * k).bfloat16(), v.bfloat16()
    o = kernels.attend(q, k, v, cap=10.0, mask_first=True)
    assert "a mask that is applied before the softcap gives" in words(q, k, v, o, causal="top-left", softcap=10.0)


def test_a_slope_that_is_a_little_off_is_no_other_scale_or_softcap() -> None:
    given = case("normal", alibi_slopes=[0.25])
    o = kernels.attend(given.q, given.k, given.v, torch.tensor([0.2625]))
    found = limit_suspect(given, o, CPU)
    assert found is None
    _, other = fit_of(given, kernels.attend(given.q, given.k, given.v, torch.tensor([0.4])), None, CPU)
    assert other is not None
    assert other.words == "has other ALiBi slopes: O fits 0.4"
