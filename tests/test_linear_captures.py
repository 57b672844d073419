"""Captures of linear attention: written and read, refused by name, judged; planted defects are found and named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Run
from linear_kernels import DEFECTS, observed, recurrent
from torch import Tensor

import attn_diag
from attn_diag.captures.linear import LinearCapture, load_linear
from attn_diag.errors import InputError
from attn_diag.head.linear import LinearRun
from attn_diag.reference.linear import LINEAR_OPERATORS
from attn_diag.results.linear import LinearDiagnosis
from attn_diag.testing.linear.inputs import LONG, linear_inputs, rounded

NAMED = {
    "state_bf16": ("lossy", "state_step"),
    "decay_bf16": ("lossy", "decay_step"),
    "boundary": ("wrong", "boundary_write"),
    "no_inter_chunk": ("wrong", "no_inter_chunk"),
    "no_initial_state": ("wrong", "no_initial_state"),
    "no_decay_gradient": ("wrong", "zero"),
}


def call_of(operator: str, seed: int, steps: int = 192) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments as in training, with an initial state, and dO."""
    make = torch.Generator().manual_seed(seed)
    tensors = rounded(linear_inputs(operator, (1, steps, 1, 32, 32), seed, kind=LONG))
    tensors["initial_state"] = torch.randn(1, 1, 32, 32, generator=make) * 0.3
    return tensors, torch.randn(1, steps, 1, 32, generator=make).bfloat16()


def captured(operator: str, seed: int, defect: str | None = None) -> LinearCapture:
    tensors, do = call_of(operator, seed)
    scale = LinearCapture(operator, tensors).call.used_scale
    return LinearCapture(operator, {**tensors, "do": do, **observed(tensors, do, scale=scale, defect=defect)})


def emulated(operator: str, chunk: int = 64, **sites: Any) -> LinearCapture:
    """What a chunked kernel returns, in its formats."""
    tensors, do = call_of(operator, 0)
    capture = LinearCapture(operator, {**tensors, "do": do})
    run = LinearRun(capture, torch.device("cpu"))
    found = run.emulated(replace(run.recipe, chunk=chunk, **sites))
    kept = {}
    for name, value in found.items():
        like = torch.bfloat16 if name == "o" else torch.float32 if name == "final_state" else tensors[name[1:]].dtype
        kept[name] = value.to(like)
    return replace(capture, tensors={**capture.tensors, **kept})


@pytest.mark.parametrize("operator", ["gla", "gated_delta_rule", "rwkv7"])
def test_healthy_kernels_are_clean(operator: str) -> None:
    found = attn_diag.inspect_linear([captured(operator, 0), emulated(operator, 32)])
    assert found.labels == {"clean"}, found.sentence
    assert found.tests > 0


def test_one_step_that_is_lost_is_no_boundary() -> None:
    tensors, do = call_of("gla", 0, steps=120)
    scale = LinearCapture("gla", tensors).call.used_scale
    made = observed(tensors, do, scale=scale, defect="boundary", chunk=64)
    found = attn_diag.inspect_linear(LinearCapture("gla", {**tensors, "do": do, **made}))
    named = {q.quantity: q for q in found.captures[0].observations[0].heads[0].quantities if q.answer == "wrong"}
    assert {"o", "final_state", "dq", "dk", "dv"} <= set(named)
    assert {q.cause for q in named.values()} == {"lost_write"}
    assert "what one step writes does not reach the state (step 63)" in named["o"].words
    # A last state without the last step, behind an o that is right, names nothing either.
    whole = captured("gla", 0)
    state = whole.tensors["final_state"] - whole.tensors["k"][:, -1, ..., None] * whole.tensors["v"][:, -1, :, None]
    found = attn_diag.inspect_linear(replace(whole, tensors={**whole.tensors, "final_state": state.float()}))
    assert {
        (q.quantity, q.cause) for q in found.captures[0].observations[0].heads[0].quantities if q.answer == "wrong"
    } == {("final_state", None)}


def test_a_last_state_whose_gradient_is_ignored_is_named() -> None:
    tensors, do = call_of("simple_gla", 0, steps=70)
    # Gradients of o alone.
    made = observed(tensors, do, scale=LinearCapture("simple_gla", tensors).call.used_scale)
    given = {**tensors, "do": do, "dfinal_state": torch.ones(1, 1, 32, 32)}
    found = attn_diag.inspect_linear(LinearCapture("simple_gla", {**given, **made}))
    named = {q.quantity: q.cause for q in found.captures[0].observations[0].heads[0].quantities if q.answer == "wrong"}
    assert named == dict.fromkeys(("dk", "dv", "dg", "dinitial_state"), "no_last_gradient")


@pytest.mark.parametrize("operator", list(LINEAR_OPERATORS))
def test_every_operator_is_emulated_like_its_reference(operator: str) -> None:
    tensors = linear_inputs(operator, (1, 70, 2, 8, 8), 0)
    draw = torch.Generator().manual_seed(0)
    tensors["do"] = torch.randn(1, 70, 2, 8, generator=draw)
    tensors["initial_state"] = torch.randn(1, 2, 8, 8, generator=draw)
    run = LinearRun(LinearCapture(operator, tensors), torch.device("cpu"))
    found, true = run.emulated(run.recipe), run.reference.values
    assert set(true) == set(found)
    for name, value in true.items():
        # fp32 arithmetic: some hundred roundings of 2**-24. dA is one sum over all steps, which cancels.
        assert (found[name] - value).norm() <= (1e-4 if name == "dA" else 1e-5) * value.norm(), name


@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_are_found_and_named(defect: str) -> None:
    operator = {"state_bf16": "gla", "decay_bf16": "kda", "boundary": "rwkv7"}.get(defect, "gated_delta_rule")
    found = attn_diag.inspect_linear(captured(operator, 1, defect))
    label, cause = NAMED[defect]
    assert found.findings[0].label == label, found.sentence
    assert found.findings[0].cause == cause, found.sentence


def test_a_backward_that_is_wrong_alone_is_not_told_as_a_fault_of_the_forward() -> None:
    sound, faulty = captured("gla", 1), captured("gla", 1, "no_inter_chunk")
    gradients = {name: faulty.tensors[name] for name in ("dq", "dk", "dv", "dg")}
    found = attn_diag.inspect_linear(replace(sound, tensors={**sound.tensors, **gradients}))
    answers = {q.quantity: q for q in found.heads[0].quantities}
    assert answers["o"].answer == "good"
    assert answers["dv"].cause == "no_inter_chunk"
    assert "in the backward alone, the inter-chunk term is missing" in answers["dv"].words
    # A fault that explains most of one gradient's error, and would have changed the others too, is not it.
    apart = faulty.tensors["dv"].float() - sound.tensors["dv"].float()
    near = (sound.tensors["dv"].float() + 0.8 * apart).bfloat16()
    found = attn_diag.inspect_linear(replace(sound, tensors={**sound.tensors, "dv": near}))
    (wrong,) = [q for q in found.heads[0].quantities if q.answer == "wrong"]
    assert (wrong.quantity, wrong.cause) == ("dv", None)


@pytest.mark.parametrize("site", ["state", "decay", "accumulator"])
def test_coarse_sites_of_a_chunked_kernel_are_named(site: str) -> None:
    found = attn_diag.inspect_linear(emulated("simple_gla", 32, **{site: "bf16"}))
    named = {q.cause for h in found.heads for q in h.quantities}
    assert "lossy" in found.labels
    assert site in named


def test_a_truncating_kernel_is_biased() -> None:
    capture = captured("gla", 2)
    true = LinearRun(capture, torch.device("cpu")).reference.values["o"].float()
    truncated = (true.view(torch.int32) & -65536).view(torch.float32).bfloat16()
    found = attn_diag.inspect_linear(replace(capture, tensors={**capture.tensors, "o": truncated}))
    assert "biased" in found.labels
    assert "towards" in " ".join(found.heads[0].reasons)


def test_a_scale_a_hundredth_off_is_told_from_rounding() -> None:
    capture = emulated("gated_delta_rule")
    scaled = {n: (capture.tensors[n].float() * 1.01).to(capture.tensors[n].dtype) for n in ("o", "dq", "dv")}
    found = attn_diag.inspect_linear(replace(capture, tensors={**capture.tensors, **scaled}))
    told = {q.quantity: (q.answer, q.cause) for q in found.heads[0].quantities if q.answer != "good"}
    assert told == dict.fromkeys(scaled, ("wrong", "factor")), found.report()


def test_a_last_state_in_the_other_order_is_named() -> None:
    capture = emulated("kda")
    turned = capture.tensors["final_state"].mT.contiguous()
    found = attn_diag.inspect_linear(replace(capture, tensors={**capture.tensors, "final_state": turned}))
    (wrong,) = (q for q in found.heads[0].quantities if q.answer == "wrong")
    assert (wrong.quantity, wrong.cause) == ("final_state", "transposed"), wrong.words


def test_a_gradient_of_zeros_is_wrong_however_small_it_should_be() -> None:
    # Decays of e^-10 a step: the gradient is far below what terms that cancel may leave.
    tensors: dict[str, Any] = rounded(linear_inputs("gated_delta_rule", (1, 96, 1, 32, 32), 0))
    tensors |= {"g": tensors["g"] - 10, "do": torch.randn(1, 96, 1, 32, generator=torch.Generator().manual_seed(1))}
    capture = LinearCapture("gated_delta_rule", tensors)
    run = LinearRun(capture, torch.device("cpu"))
    for dg, labels in ((run.emulated(run.recipe)["dg"].float(), {"clean"}), (torch.zeros(1, 96, 1), {"wrong"})):
        found = attn_diag.inspect_linear(replace(capture, tensors={**tensors, "dg": dg}))
        assert found.labels == labels, found.report()


def test_nan_and_what_float64_does_not_know() -> None:
    capture = captured("gla", 3)
    o = capture.tensors["o"].clone()
    o[0, 100, 0, 5] = torch.nan
    found = attn_diag.inspect_linear(replace(capture, tensors={**capture.tensors, "o": o}))
    assert found.labels == {"nonfinite"}
    # A state that grows by 40 times a step leaves float64's range: nothing is said of it.
    tensors: dict[str, Any] = rounded(linear_inputs("iplr", (1, 256, 1, 8, 8), 0))
    tensors |= {"a": tensors["a"] * 40, "b": -tensors["b"] * 40}
    grown = attn_diag.inspect_linear(operator="iplr", **tensors, o=torch.zeros_like(tensors["v"]))
    assert grown.labels == {"undecided"}


def test_a_state_beyond_fp32_is_no_kernels_fault() -> None:
    tensors: dict[str, Any] = rounded(linear_inputs("simple_gla", (1, 128, 1, 8, 8), 0))
    # e^1 a step: e^128 is beyond fp32, and nothing for float64.
    capture = LinearCapture("simple_gla", {**tensors, "g": torch.ones_like(tensors["g"])})
    run = LinearRun(capture, torch.device("cpu"))
    o = run.emulated(run.recipe)["o"].float()
    assert not o.isfinite().all()
    found = attn_diag.inspect_linear(replace(capture, tensors={**capture.tensors, "o": o.bfloat16()}))
    assert found.labels == {"undecided"}
    assert "leaves the range of fp32" in found.heads[0].quantities[0].words
    worse = torch.full_like(o, torch.nan).bfloat16()
    found = attn_diag.inspect_linear(replace(capture, tensors={**capture.tensors, "o": worse}))
    assert found.labels == {"nonfinite"}


@pytest.mark.parametrize("name", ["final_state", "dinitial_state"])
def test_what_is_handed_back_in_16_bits_is_told_by_its_bits(name: str) -> None:
    whole = emulated("simple_gla")
    stored = whole.tensors[name].bfloat16().float()
    found = attn_diag.inspect_linear(replace(whole, tensors={**whole.tensors, name: stored}))
    (coarse,) = (q for q in found.heads[0].quantities if q.answer != "good")
    assert (coarse.quantity, coarse.answer, coarse.cause) == (name, "lossy", "handed_back"), coarse.words
    # Where a coarser site is behind it, that is named.
    steps = emulated("simple_gla", 1, operands="fp32", state="bf16")
    found = attn_diag.inspect_linear(steps)
    assert {q.cause for q in found.heads[0].quantities if q.quantity == "final_state"} == {"state_step"}


def test_a_number_that_is_all_but_exact_by_chance_does_not_stand_out() -> None:
    # Keys that are orthogonal: o is beta v, dbeta is do v; of step 9 exactly 4, where the others have some 0.01.
    make, steps = torch.Generator().manual_seed(0), torch.eye(32)[None, :20, None]
    tensors = {"q": steps, "k": steps, "v": torch.randn(1, 20, 1, 32, generator=make), "beta": torch.ones(1, 20, 1)}
    tensors = {n: x.bfloat16() for n, x in tensors.items()}
    do = torch.randn(1, 20, 1, 32, generator=make).bfloat16() * 2**-9
    tensors["v"][0, 9], do[0, 9] = torch.eye(32)[:1], torch.eye(32)[:1] * 4
    capture = LinearCapture("delta_rule", {**tensors, "do": do}, scale=1.0)
    run = LinearRun(capture, torch.device("cpu"))
    dbeta = run.emulated(run.recipe)["dbeta"].bfloat16()
    off = dbeta.clone()
    off[0, 9] = off[0, 9] * (1 + 2**-7)
    assert off[0, 9] != dbeta[0, 9] == run.reference.values["dbeta"][0, 9]
    found = attn_diag.inspect_linear(replace(capture, tensors={**capture.tensors, "dbeta": off}))
    assert "wrong" not in found.labels, found.sentence
    off[0, 9] = off[0, 9] * (1 + 2**-3)
    found = attn_diag.inspect_linear(replace(capture, tensors={**capture.tensors, "dbeta": off}))
    assert found.labels == {"wrong"}


def test_files_keep_everything(tmp_path: Path) -> None:
    tensors = rounded(linear_inputs("rwkv7", (1, 20, 2, 8, 8), 0))
    named = {"r": tensors["q"], "w": tensors["g"], **{n: tensors[n] for n in ("k", "v", "a", "b")}}
    capture = LinearCapture.from_tensors(
        "rwkv7", {**named, "o": tensors["v"], "cu_seqlens": torch.tensor([0, 5, 20])}, scale=0.5, layer=3, kernel="fla"
    )
    again = load_linear(capture.save(tmp_path / "c.safetensors"))
    assert again.operator == "rwkv7"
    assert again.scale == 0.5
    assert again.metadata.layer == 3
    assert {name: t.tolist() for name, t in again.tensors.items()} == {
        n: t.tolist() for n, t in capture.tensors.items()
    }
    with pytest.raises(InputError, match="linear attention"):
        attn_diag.load(tmp_path / "c.safetensors")
    with pytest.raises(InputError, match="not a capture of linear attention"):
        load_linear("tests/captures/failing_step500_L2H7.safetensors")


@pytest.mark.parametrize(
    ("operator", "change", "said"),
    [
        ("kda", {"beta": None}, "'beta' is missing"),
        ("kda", {"beta": torch.ones(1, 20, 3)}, "beta must have shape"),
        ("gla", {"v": torch.ones(1, 20, 2, 8, dtype=torch.int32)}, "dtype"),
        ("gla", {"do": torch.ones(1, 19, 2, 8)}, "do must have shape"),
        ("gla", {"cu_seqlens": torch.tensor([0, 30])}, "cu_seqlens must rise"),
        ("gla", {"q": torch.ones(1, 20, 3, 8), "k": torch.ones(1, 20, 3, 8)}, "multiple"),
        ("delta_rule", {"g": torch.ones(1, 20, 2)}, "has no decay"),
        ("attention", {}, "operator must be one of"),
    ],
)
def test_bad_captures_are_refused_by_name(operator: str, change: dict[str, Tensor | None], said: str) -> None:
    known = operator if operator in LINEAR_OPERATORS else "gla"
    tensors: dict[str, Any] = {**linear_inputs(known, (1, 20, 2, 8, 8), 0), **change}
    with pytest.raises(InputError, match=said):
        LinearCapture.from_tensors(operator, tensors)


def test_shared_heads_and_packed_sequences_are_judged() -> None:
    tensors = rounded(linear_inputs("kda", (1, 150, 4, 16, 16), 0, key_heads=2))
    capture = LinearCapture(
        "kda", {**tensors, "do": tensors["v"], "cu_seqlens": torch.tensor([0, 50, 150])}, l2norm=True
    )
    run = LinearRun(capture, torch.device("cpu"))
    out = {
        n: x.to(torch.float32 if n in ("dg", "final_state") else torch.bfloat16)
        for n, x in run.emulated(run.recipe).items()
    }
    found = attn_diag.inspect_linear(replace(capture, tensors={**capture.tensors, **out}))
    assert not found.labels & {"wrong", "lossy", "biased", "nonfinite"}
    assert [sum(q.quantity == "dq" for q in h.quantities) for h in found.heads] == [1, 0, 1, 0]


def as_released(operator: str, steps: int, lengths: tuple[int, ...] = ()) -> LinearCapture:
    """What the released kernel returns, emulated, with states at both ends; D = 64."""
    make, count = torch.Generator().manual_seed(0), len(lengths) or 1
    given = rounded(linear_inputs(operator, (1, steps, 1, 64, 64), 0, kind=LONG))
    given |= {n: torch.randn(count, 1, 64, 64, generator=make) * 0.3 for n in ("initial_state", "dfinal_state")}
    given["do"] = torch.randn(given["v"].shape, generator=make).bfloat16()
    if lengths:
        given["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    capture = LinearCapture(operator, given)
    run = LinearRun(capture, torch.device("cpu"))
    like = {"o": torch.bfloat16, "final_state": torch.float32}
    found = run.emulated(replace(run.recipe, chunk=64, **run.released()[0]))
    kept = {n: x.to(like[n] if n in like else given[n[1:]].dtype) for n, x in found.items()}
    return replace(capture, tensors={**capture.tensors, **kept})


def test_what_few_numbers_have_in_common_is_no_proof() -> None:
    # 17 gradients of a decay: 88 % of their squared error look like a BF16 state's.
    found = attn_diag.inspect_linear(as_released("gated_delta_rule", 17), device="cpu")
    assert not found.labels & {"wrong", "lossy", "biased"}, found.sentence
    assert "dg" in {q.quantity for q in found.heads[0].quantities if q.answer == "undecided"}
    # As many numbers that are a factor too large, each by the same, are no chance.
    capture = as_released("gated_delta_rule", 80)
    large = {**capture.tensors, "dv": (capture.tensors["dv"].float() * 1.02).bfloat16()}
    found = attn_diag.inspect_linear(replace(capture, tensors=large), device="cpu")
    assert ("wrong", "factor") in {(q.answer, q.cause) for q in found.heads[0].quantities if q.quantity == "dv"}


def test_a_packed_sequence_of_no_steps_has_its_first_state() -> None:
    capture = as_released("gla", 40, (24, 0, 16, 0))
    assert torch.equal(capture.tensors["final_state"][1], capture.tensors["initial_state"][1])
    assert torch.equal(capture.tensors["dinitial_state"][3], capture.tensors["dfinal_state"][3])
    found = attn_diag.inspect_linear(capture, device="cpu")
    assert not found.labels & {"wrong", "lossy", "biased"}, found.sentence
    lost = capture.tensors["final_state"].clone()
    lost[1] = 0
    found = attn_diag.inspect_linear(replace(capture, tensors={**capture.tensors, "final_state": lost}), device="cpu")
    assert {q.answer for q in found.heads[0].quantities if q.quantity == "final_state"} == {"wrong"}


def test_the_command_says_what_is_wrong(tmp_path: Path, run: Run) -> None:
    captured("gated_delta_rule", 1, "no_inter_chunk").save(tmp_path / "bad.safetensors")
    out, page = tmp_path / "found.json", tmp_path / "page.html"
    done = run("inspect", tmp_path / "bad.safetensors", "--json", out, "--html", page, "--fail-on", "wrong")
    assert done.code == 1
    assert done.out.startswith("WRONG")
    assert "inter-chunk" in done.out
    assert "inter-chunk" in page.read_text()
    document = LinearDiagnosis.from_json(out.read_text())
    assert document.findings[0].cause == "no_inter_chunk"
    assert json.loads(out.read_text())["schema"] == "attn-diag-linear"
    assert run("inspect", tmp_path, "tests/captures/pair_T256.safetensors").code == 2
    done = run("inspect", tmp_path / "bad.safetensors", "--scale", "3", "--causal", "none", "--details", "2")
    assert (done.code, done.out) == (2, "")
    assert "linear attention takes no --details, --causal, --scale: leave it out" in done.err
    unread = ("--certify-bits", "64", "--engine", "triton", "--no-merge-ranks")
    done = run("inspect", tmp_path / "bad.safetensors", *unread)
    assert (done.code, done.out) == (2, "")
    assert "linear attention takes no --certify-bits, --engine, --no-merge-ranks: leave it out" in done.err
    done = run("what-if", tmp_path / "bad.safetensors", "--seeds", "2")
    assert (done.code, done.out) == (2, "")
    assert "captures of linear attention take no --seeds" in done.err


def test_what_fp32_leaves_and_what_cancels_is_no_fault() -> None:
    # Sums in another order, and a decay's gradient that is next to nothing, made of terms that cancel.
    tensors = rounded(linear_inputs("linear_attn", (1, 130, 1, 33, 8), 1, kind=LONG), torch.float16)
    gone = rounded(linear_inputs("kda", (1, 130, 1, 8, 8), 1, kind="tiny_decay"), torch.float16)
    for operator, given in (("linear_attn", tensors), ("kda", gone)):
        capture = LinearCapture(operator, {**given, "do": given["v"]})
        run = LinearRun(capture, torch.device("cpu"))
        found = run.emulated(replace(run.recipe, chunk=128))
        kept = {n: x.to(torch.float32 if n in ("final_state", "dg") else torch.float16) for n, x in found.items()}
        verdict = attn_diag.inspect_linear(replace(capture, tensors={**capture.tensors, **kept}))
        assert not verdict.labels & {"wrong", "lossy"}, verdict.sentence


def test_a_fragile_head_is_told_from_a_bad_kernel() -> None:
    tensors = rounded(linear_inputs("delta_rule", (1, 130, 1, 16, 8), 3, kind="repeated"))
    tensors["initial_state"] = torch.randn(1, 1, 16, 8)
    run = LinearRun(LinearCapture("delta_rule", tensors), torch.device("cpu"))
    out = run.emulated(run.recipe, forward=True)["o"].bfloat16()
    verdict = attn_diag.inspect_linear(LinearCapture("delta_rule", {**tensors, "o": out}))
    assert not verdict.labels & {"wrong", "lossy", "biased"}, verdict.sentence
    assert verdict.report()


def test_decays_that_are_made_in_16_bits_throughout_are_named() -> None:
    # As exp(-exp(w)) all in BF16, with a w that hardly changes: both roundings add up over the steps.
    tensors, do = call_of("rwkv7", 0, steps=96)
    rates = torch.linspace(-5, -3, tensors["g"].shape[3]).exp()
    tensors["g"] = (-rates).expand_as(tensors["g"]).float().contiguous()
    made = observed({**tensors, "g": tensors["g"].bfloat16().float()}, do, scale=1.0, defect="decay_bf16")
    del made["dg"]
    found = attn_diag.inspect_linear(LinearCapture("rwkv7", {**tensors, "do": do, **made}))
    quantities = [q for head in found.heads for q in head.quantities]
    assert {q.answer for q in quantities} == {"lossy"}, found.report()
    assert {q.cause for q in quantities} == {"decay_steps"}, found.report()


@pytest.mark.parametrize("cause", ["decay_exponential", "decay_clamped"])
def test_what_rwkv_lm_calls_w_is_no_logarithm(cause: str) -> None:
    tensors, _ = call_of("rwkv7", 0, steps=48)
    w = tensors["g"]
    g = -w.exp() if cause == "decay_exponential" else -0.6065306597 * w.sigmoid()
    o, _ = recurrent({**tensors, "g": g}, scale=1.0)
    found = attn_diag.inspect_linear(LinearCapture("rwkv7", {**tensors, "o": o.bfloat16()}))
    assert [q.cause for q in found.heads[0].quantities] == [cause], found.report()


def test_a_site_that_is_there_does_not_cover_what_is_beyond_every_rounding() -> None:
    # In BF16 a decay of 0.998 is 0.996 or 1: far off after some hundred steps, and all of that is the site's.
    given = rounded(linear_inputs("simple_gla", (1, 128, 1, 16, 16), 1))
    given["g"] = torch.full_like(given["g"], -0.0022)
    o, _ = recurrent(given, scale=0.25, defect="decay_bf16")
    true = LinearRun(LinearCapture("simple_gla", given), torch.device("cpu")).reference.values["o"]
    noise = torch.randn(o.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    other = o + noise / noise.norm() * (o - true).norm()
    for made, answer, cause in ((o, "lossy", "decay_step"), (other, "wrong", None)):
        found = attn_diag.inspect_linear(LinearCapture("simple_gla", {**given, "o": made.bfloat16()}), device="cpu")
        (q,) = found.heads[0].quantities
        assert (q.answer, q.cause) == (answer, cause), q.words
