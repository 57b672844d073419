"""``identify`` on real kernels' outputs, on emulated kernels that it does not know, and its command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import torch
from builders import CAPTURES, some, stored, true_o
from command_line import Run
from torch import Tensor

import attn_diag
from attn_diag import Identification
from attn_diag.head import recipe_search as search
from attn_diag.head.assumptions import check_assumptions
from attn_diag.head.baseline import recognise
from attn_diag.head.bit_matches import Match
from attn_diag.head.read import NonFiniteCensus, read_head
from attn_diag.head.recipe_candidates import describe_schedule, families, family_name, known_name, mixtures, schedules
from attn_diag.head.recipe_rows import choose_rows
from attn_diag.head.scale_fit import scale_derivative
from attn_diag.kernels import PRESETS, Recipe, Schedule, emulate_head, preset
from attn_diag.reference import reference_rows
from attn_diag.results.identification import Identifications

CPU = torch.device("cpu")


@cache
def found(key: str) -> Identification:
    capture, _, observation = key.partition(":")
    loaded = attn_diag.load(CAPTURES / f"{capture}.safetensors")
    # All rows take 3 s at T = 1024; only the near one-hot head needs them.
    rows = 256 if capture in ("gpt2_step637_L2H6", "failing_step500_L2H7") else None
    return attn_diag.identify(loaded, observation=observation or None, rows=rows, device="cpu")


def emulated(recipe: Recipe, length: int = 256, d: int = 32, seed: int = 0) -> attn_diag.Capture:
    """N(0,1) inputs and what the recipe makes of them."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if recipe.input == "bf16" else torch.float16
    q, k, v = (torch.randn(1, 1, length, d, generator=generator).to(dtype) for _ in range(3))
    capture = attn_diag.Capture.from_tensors({"q": q, "k": k, "v": v}, causal="top-left")
    head = read_head(capture, 0, 0, CPU, NonFiniteCensus()).head
    tensors = {"q": q, "k": k, "v": v, "o": emulate_head(recipe, head).o[None, None]}
    return attn_diag.Capture.from_tensors(tensors, causal="top-left")


# What made each observation, as its own best candidate: (recipe, its schedule).
MADE_BY = {
    "kernels_gauss_T512:flash": ("fa2", "independent splits of 256 keys"),
    "kernels_gauss_T512:flex": ("flex", "last visible 128-key tile of 128 rows first, the others ascending"),
    "kernels_gauss_T512:paper": ("qiu2025", "512-key tiles ascending"),
    "kernels_gauss_T512:stable": ("qiu2025-stabilised", "512-key tiles ascending"),
    "kernels_pair_T512:paper": ("qiu2025", "512-key tiles ascending"),
    "kernels_pair_T512:stable": ("qiu2025-stabilised", "512-key tiles ascending"),
    "gqa_T200": ("cudnn", "128-key tiles ascending"),
    "gpt2_step731_L2H4": ("cudnn", "128-key tiles ascending"),
    "gpt2_step637_L2H6": ("cudnn", "128-key tiles ascending"),
    "failing_step500_L2H7": ("bf16-forward", "all keys at once"),
}


@pytest.mark.parametrize("key", MADE_BY)
def test_kernels_are_identified(key: str) -> None:
    result = found(key)
    assert (result.outcome, result.recipes) == ("identified", MADE_BY[key][:1])
    assert (result.best.recipe, result.best.schedule) == MADE_BY[key]
    assert result.best.agreement >= 0.998
    assert some(result.margin_p_value) <= result.level


# Their bits differ in 1 to 36 of 16,384 (T=256) or 32,768 elements: (those not excluded, who comes nearest).
ALIKE = {
    "kernels_pair_T512:flash": ({"fa2", "cudnn"}, "fa2"),
    "kernels_pair_T512:flex": ({"fa2", "flex"}, "flex"),
    # Two tiles: the diagonal first is the last first.
    "pair_T256:flash": ({"fa2", "flex"}, "fa2"),
}


@pytest.mark.parametrize("key", ALIKE)
def test_what_one_hot_rows_do_not_tell_apart_is_named_together(key: str) -> None:
    result, (names, nearest) = found(key), ALIKE[key]
    assert result.outcome == "ambiguous"
    assert set(result.recipes) == names
    assert result.hardware[0].recipe == nearest
    assert 0 < result.contested < 64
    assert "does not tell them apart" in result.verdict


# What the tensor core's own truncation tells apart: (the kernel, how many elements the next one misses).
BY_HARDWARE = {"pair_T256:cudnn": ("cudnn", 2)}


@pytest.mark.parametrize("key", BY_HARDWARE)
def test_a_kernel_that_has_every_bit_with_the_hardware_sums_is_named(key: str) -> None:
    result, (name, missed) = found(key), BY_HARDWARE[key]
    assert (result.outcome, result.recipes) == ("identified", (name,))
    assert result.hardware[0].missed == 0
    assert result.hardware[1].missed == missed
    assert "as a Hopper tensor core makes them it has every bit" in result.verdict


def test_the_efficient_kernel_is_told_by_its_backward() -> None:
    """Its dS multiplies the cast P: that reproduces dQ where no other preset does."""
    result = found("pair_T256:efficient")
    assert (result.outcome, result.recipes) == ("identified", ("efficient",))
    assert result.backward[0].recipe == "efficient"
    assert result.backward[0].agreement > 0.75 > 0.55 > result.backward[1].agreement


def test_backward_decides_between_equal_forwards() -> None:
    # In one tile of all keys, with alpha a power of two, both round alike: only dQ tells them apart.
    result = found("kernels_pair_T512:paper")
    best, other = result.backward
    assert (best.recipe.split(" or ")[0], other.recipe) == ("qiu2025", "bf16-forward")
    assert best.agreement > 0.99 > 0.1 > other.agreement
    assert other.told_apart


def test_an_unmodelled_accumulation_does_not_hide_the_recipe() -> None:
    """Products truncated as the tensor cores do: the recipe is still the best and still fits."""
    for seed, name in enumerate(("efficient", "cudnn")):
        recipe = replace(preset(name), accumulation="nvidia-tensor-core")
        result = attn_diag.identify(emulated(recipe, d=64, seed=seed), device="cpu")
        assert result.recipes == (name,)
        assert result.threshold <= result.best.agreement < 1


UNKNOWN = {
    "row sum in BF16, 40-key tiles": replace(preset("fa2"), row_sum="bf16", schedule=Schedule(key_tile=40)),
    "40-key tiles": replace(preset("cudnn"), schedule=Schedule(key_tile=40)),
    "P_bar in FP16": replace(preset("cudnn"), probs="fp16"),
    "scores in FP16": replace(preset("cudnn"), scores="fp16"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_other_kernels_are_unknown(case: str) -> None:
    result = attn_diag.identify(emulated(UNKNOWN[case]), device="cpu")
    assert "Next: attn-diag" not in result.report()  # tensors are in no file
    assert (result.outcome, result.recipes) == ("unknown", ())
    assert result.best.agreement < result.threshold
    assert "not modelled may be missing" in result.verdict


def test_unpublished_schedule_is_described() -> None:
    recipe = replace(preset("fa2"), schedule=Schedule(key_tile=32, order="descending"), row_sum_of="cast-probs")
    result = attn_diag.identify(emulated(recipe), device="cpu")
    assert result.outcome == "unnamed"
    assert (result.best.recipe, result.best.roundings, result.best.row_sum_of) == (None, "lowp-row-sum", "cast-probs")
    assert result.best.schedule == "32-key tiles descending"
    assert result.best.agreement == 1


def test_an_unpublished_mixture_of_roundings_is_described() -> None:
    """l and O's accumulator in BF16, scores in fp32: the kernel whose training failed at step 2,109."""
    published = preset("bf16-forward")
    recipe = replace(published, scores="fp32", difference="fp32", alpha="in-exponent", exp="exp2-fma")
    result = attn_diag.identify(emulated(recipe), device="cpu")
    assert (result.outcome, result.best.schedule, result.best.agreement) == ("unnamed", "all keys at once", 1)
    assert result.best.roundings == "fa2 with row sum, O's accumulator in bf16"
    # A preset's own sites are found as that preset.
    assert attn_diag.identify(emulated(published), device="cpu").recipes == ("bf16-forward",)
    assert recipe not in {replace(r, schedule=recipe.schedule, name=recipe.name) for r in families("bf16", 64)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_plain_attention_of_widened_operands_is_known_by_its_single_rounding(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, 150, 32, generator=generator).to(dtype) for _ in range(3))
    scores = (q.float() @ k.float().mT * 0.2).masked_fill(torch.ones(150, 150, dtype=torch.bool).triu(1), -torch.inf)
    o = (scores.softmax(-1) @ v.float()).to(dtype)
    result = attn_diag.identify(q, k, v, o=o, causal=True, scale=0.2, device="cpu")
    assert (result.outcome, result.best.roundings) == ("unnamed", "plain attention in fp32")
    assert "an order of keys that this input does not tell apart" in result.verdict
    recognised = attn_diag.attribute(q, k, v, o=o, causal=True, scale=0.2, device="cpu").heads[0].recipe
    assert recognised.startswith("the roundings of plain attention in fp32, all keys at once")


def test_mixtures_are_no_presets_and_differ() -> None:
    found = mixtures("bf16", 64)
    assert len({r.name for r in found}) == len({replace(r, name="") for r in found}) <= 48
    assert not {family_name(r, 64) for r in found} & set(PRESETS)


@pytest.mark.parametrize("name", ["cudnn", "efficient", "bf16-forward"])
def test_half_precision(name: str) -> None:
    result = attn_diag.identify(emulated(preset(name, "fp16")), device="cpu")
    assert result.recipes == (name,)
    # Eight times as many boundaries between FP16 numbers: eight times as many elements may be missed.
    assert result.threshold == pytest.approx(1 - 8 * 0.002, abs=0.002)


@pytest.mark.parametrize(("share", "outcome"), [(0.0, "identified"), (0.01, "unknown")])
def test_perturbed_outputs_are_not_identified(share: float, outcome: str) -> None:
    capture = stored("gqa_T200")
    tensors = {name: capture.tensors[name][...] for name in ("q", "k", "v", "o")}
    moved = torch.rand(tensors["o"].shape, generator=torch.Generator().manual_seed(0)) < share
    bits = tensors["o"].view(torch.int16)
    tensors["o"] = torch.where(moved, bits + 1, bits).view(torch.bfloat16)
    changed = attn_diag.Capture(tensors, capture.metadata)
    assert attn_diag.identify(changed, device="cpu").outcome == outcome
    fast = recognise(changed, "observed", 0, 0)
    assert (fast is None) == (outcome == "unknown")


def test_wrong_metadata_is_named() -> None:
    capture = attn_diag.load(CAPTURES / "gqa_T200.safetensors", causal="none")
    result = attn_diag.identify(capture, device="cpu")
    assert result.outcome == "unknown"
    assert "causal=top-left" in " ".join(result.notes)


def test_rows_with_nan_are_left_out() -> None:
    capture = emulated(preset("cudnn"))
    tensors = {name: tensor[...].clone() for name, tensor in capture.tensors.items()}
    tensors["k"][0, 0, 200, 3] = torch.nan
    tensors["q"][0, 0, 7] = torch.inf
    tensors["o"][0, 0, 11, 5] = torch.nan
    result = attn_diag.identify(attn_diag.Capture(tensors, capture.metadata), device="cpu")
    assert result.rows == 256 - 56 - 2
    assert result.recipes == ("cudnn",)
    tensors["o"].fill_(torch.nan)
    with pytest.raises(attn_diag.InputError, match="no row of 'observed' can be compared"):
        attn_diag.identify(attn_diag.Capture(tensors, capture.metadata), device="cpu")


def test_chosen_rows_without_blocks() -> None:
    result = attn_diag.identify(attn_diag.load_example(), device="cpu")
    assert "query blocks are not known" in " ".join(result.notes)
    assert all(r.order != "diagonal-first" for r in result.candidates)
    assert "cudnn" in result.recipes


def test_coarse_rows_attend_to_many_keys() -> None:
    # The second half of the rows sees one key, the first many.
    tensors = {name: torch.zeros(1, 1, 64, 16).bfloat16() for name in "qkv"}
    mask = torch.ones(64, 64, dtype=torch.bool)
    mask[32:, 1:] = False
    capture = attn_diag.Capture.from_tensors({**tensors, "mask": mask})
    inputs = read_head(capture, 0, 0, CPU, NonFiniteCensus())
    coarse, final = choose_rows(inputs, tensors["v"][0, 0], 16, 32)
    assert set(range(8)) <= set(coarse.tolist())
    assert set(coarse.tolist()) <= set(final.tolist())
    assert (final >= 32).any()


def match(rows: list[list[int]]) -> Match:
    return Match(torch.tensor(rows, dtype=torch.bool))


def test_significance_counts_rows_not_elements() -> None:
    """Exact sign flips: n rows that all speak for one side have p = 2^-n, however many elements each has."""
    for n in (1, 4, 10):
        one, other = match([[1] * 50] * n + [[1] * 50]), match([[0] * 50] * n + [[1] * 50])
        found = one.compare(other)
        assert (found.won, found.lost, found.rows) == (50 * n, 0, n)
        assert found.p_value == pytest.approx(2.0**-n, rel=1e-12)
        assert other.compare(one).p_value == pytest.approx(1)
    assert one.compare(one).p_value == 1
    # Balances 2, 1 and -1 sum to 2; of the eight choices of signs +2+1+1, +2+1-1 and +2-1+1 reach that.
    mixed = match([[1, 1], [1, 0], [0, 0]]).compare(match([[0, 0], [0, 0], [1, 0]]))
    assert mixed.p_value == pytest.approx(3 / 8)


def test_many_rows_agree_with_the_exact_test() -> None:
    generator = torch.Generator().manual_seed(3)
    equal = torch.rand(2, 60, 40, generator=generator) < torch.tensor([0.93, 0.9])[:, None, None]
    exact = Match(equal[0]).compare(Match(equal[1])).p_value
    twice = [Match(torch.cat([e, e])).compare for e in equal]
    normal = twice[0](Match(torch.cat([equal[1], equal[1]]))).p_value
    # Twice the rows: z grows by sqrt(2).
    z = torch.special.ndtri(torch.tensor([exact, normal], dtype=torch.float64))
    assert float(z[1] / z[0]) == pytest.approx(2**0.5, rel=0.05)


def test_schedules_are_named_once() -> None:
    every = schedules(1024, diagonal=True)
    assert len(every) == len(set(every)) == len({describe_schedule(s) for s in every})
    names = {known_name(replace(preset("fa2"), schedule=s), 64) for s in every}
    assert names == {"fa2", "cudnn", "efficient", "flex", None}


def test_threshold_of_a_small_sample_is_lower() -> None:
    assert search.threshold("bf16", 3000) == pytest.approx(0.9972, abs=1e-4)
    assert search.threshold("bf16", 10**9) == pytest.approx(0.998, abs=1e-5)


@pytest.mark.parametrize("width", [80, 120])
def test_report_keeps_within_its_width(width: int) -> None:
    text = found("pair_T256:efficient").report(width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    for words in ("efficient reproduces", "64-key tiles ascending", "McNemar", "256 of 256 query rows", "dQ: equal"):
        assert words in flat, words


def test_json_round_trip() -> None:
    results = Identifications((found("gqa_T200"),), ())
    document = json.loads(results.to_json())
    jsonschema.Draft202012Validator(Identifications.json_schema()).validate(document)
    assert Identifications.from_json(results.to_json()) == results
    assert document["results"][0]["candidates"][0]["recipe"] == "cudnn"


def test_command_line(tmp_path: Path, run: Run) -> None:
    target = tmp_path / "out.json"
    grouped, pair = (CAPTURES / f"{name}.safetensors" for name in ("gqa_T200", "pair_T256"))
    done = run("identify", grouped, pair, "--rows", 64, "--json", target)
    assert done.code == 0
    document = json.loads(target.read_text())
    assert [r["observation"] for r in document["results"]] == ["observed", "cudnn", "efficient", "flash"]
    assert "cudnn reproduces" in done.out
    alone = run("identify", grouped, "--head", "2,5", "--rows", 64, "--json", "-")
    assert [r["head"] for r in json.loads(alone.out)["results"]] == [2, 5]


def variant(**tensors: Tensor | None) -> attn_diag.Capture:
    capture = emulated(preset("cudnn"), length=64)
    changed = {name: tensor[...] for name, tensor in capture.tensors.items()} | tensors
    return attn_diag.Capture.from_tensors(changed, causal="top-left")


def inputs(dtype: torch.dtype) -> dict[str, Tensor | None]:
    return {name: tensor[...].to(dtype) for name, tensor in variant().tensors.items()}


UNUSABLE: dict[str, tuple[Callable[[], attn_diag.Capture], list[str], str]] = {
    "no o": (lambda: variant(o=None, lse=torch.ones(1, 1, 64)), [], "observation 'observed' has no o: bits of O"),
    "nothing": (lambda: variant(o=None), [], "no observation; capture at least o"),
    "fp32": (lambda: variant(**inputs(torch.float32)), [], "known for bfloat16 and float16 inputs, q is float32"),
    "o in fp32": (lambda: variant(o=torch.ones(1, 1, 64, 32)), [], "o is float32 and q is bfloat16: save O as the"),
    "observation": (variant, ["--observation", "flash"], "no observation 'flash'; it has observed"),
    "head": (variant, ["--head", "3"], "no head 3; the capture has 0"),
    "rows": (variant, ["--rows", "0"], "rows must be at least 1, got 0"),
    "device": (variant, ["--device", "tpu"], "device must be auto, cpu or cuda"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable_input(case: str, tmp_path: Path, run: Run) -> None:
    make, options, message = UNUSABLE[case]
    path = make().save(tmp_path / "capture.safetensors")
    done = run("identify", path, *options, "--json", tmp_path / "out.json")
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert sorted(tmp_path.iterdir()) == [path]


def test_one_unusable_of_several(tmp_path: Path, run: Run) -> None:
    good = variant().save(tmp_path / "a.safetensors")
    bad = variant(o=None).save(tmp_path / "b.safetensors")
    done = run("identify", good, bad, "--json", "-")
    assert done.code == 2
    assert f"{bad}: no observation" in done.err
    document = json.loads(done.out)
    assert len(document["results"]) == len(document["unreadable"]) == 1


def test_several_observations_need_a_name() -> None:
    capture = stored("pair_T256")
    with pytest.raises(attn_diag.InputError, match="name one of its observations: cudnn, efficient, flash"):
        attn_diag.identify(capture)
    with pytest.raises(attn_diag.InputError, match="no head 2; the capture has 0 to 1"):
        attn_diag.identify(capture, observation="flash", head=2)


def test_progress_ends_at_its_total() -> None:
    seen: list[tuple[int, int]] = []
    attn_diag.identify(emulated(preset("cudnn"), length=64), device="cpu", progress=lambda *at: seen.append(at))
    assert all(done <= total for done, total in seen)
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def broken(change: Callable[[Tensor], None], dtype: str = "bf16") -> attn_diag.Capture:
    capture = emulated(preset("fa2", dtype))
    tensors = {name: tensor[...].clone() for name, tensor in capture.tensors.items()}
    change(tensors["o"][0, 0])
    return attn_diag.Capture(tensors, capture.metadata)


def zero_element(o: Tensor) -> None:
    o[200, 7] = 0


def copied_row(o: Tensor) -> None:
    o[130] = o[129]


def swapped_tile(o: Tensor) -> None:
    o[192:] = o[192:].flip(0)


def stale_features(o: Tensor) -> None:
    o[:, 28:] = o[:, :4].clone()


def one_ulp_in_a_tile(o: Tensor) -> None:
    o.view(torch.int16)[64:96, ::3] += 1


FLAWS: dict[str, tuple[Callable[[Tensor], None], str]] = {
    "element": (zero_element, "wrong in feature 7 of row 200: 1 element"),
    "row": (copied_row, "wrong in row 130: "),
    "tile": (swapped_tile, "wrong in rows 192-255: "),
    "features": (stale_features, "wrong in features 28-31: "),
    "roundings": (one_ulp_in_a_tile, "rounds otherwise in rows 64-95: 352 elements up to "),
}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("case", FLAWS)
def test_a_broken_output_is_not_called_a_kernels(case: str, dtype: str) -> None:
    change, where = FLAWS[case]
    capture = broken(change, dtype)
    result = attn_diag.identify(capture, device="cpu")
    assert (result.outcome, result.recipes[:1]) == ("flawed", ("fa2",))
    assert f", but {where}" in result.verdict
    assert some(result.flaw).words in result.verdict
    # The shallow search never recognises it without saying so either.
    fast = recognise(capture, "observed", 0, 0)
    assert fast is None or fast.flaw


@cache
def of_a_tensor_core() -> attn_diag.Capture:
    """Eight rows of up to 2,048 keys as a Hopper tensor core sums their products: fp32 sums miss 0.5 %."""
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(1, 1, 2048, 128, generator=generator).bfloat16() for _ in range(2))
    q = torch.randn(1, 1, 8, 128, generator=generator).bfloat16()
    tensors = {"q": q, "k": k, "v": v, "q_positions": torch.linspace(1024, 2047, 8).long()}
    capture = attn_diag.Capture.from_tensors(tensors, causal="top-left")
    head = read_head(capture, 0, 0, CPU, NonFiniteCensus()).head
    recipe = replace(preset("fa2", "bf16", 128), accumulation="nvidia-tensor-core")
    tensors["o"] = emulate_head(recipe, head).o[None, None]
    return attn_diag.Capture.from_tensors(tensors, causal="top-left")


def test_long_rows_are_recognised_by_a_tensor_cores_sums() -> None:
    known = some(recognise(of_a_tensor_core(), "observed", 0, 0))
    assert (known.words, known.agreement) == ("fa2 with a tensor core's sums", 1)
    # The recipe that analyses go on with has fp32 sums.
    assert known.recipe == preset("fa2", "bf16", 128)


def test_long_rows_are_identified_by_a_tensor_cores_sums() -> None:
    result = attn_diag.identify(of_a_tensor_core(), device="cpu")
    assert (result.outcome, result.recipes) == ("identified", ("fa2",))
    assert "100.000 % of O's elements bit for bit, with sums of products as a Hopper tensor core" in result.verdict


@pytest.mark.parametrize("key", [*MADE_BY, *ALIKE, *BY_HARDWARE])
def test_genuine_outputs_have_no_flaw(key: str) -> None:
    assert found(key).flaw is None


@pytest.mark.parametrize(("off", "name"), [(65, " (1/sqrt(65))"), (66.5, "")])
def test_a_scale_that_is_slightly_off_is_fitted(off: float, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 256, 64, generator=generator).bfloat16() for _ in range(3))
    made = attn_diag.Capture.from_tensors({"q": q, "k": k, "v": v}, causal="top-left", scale=off**-0.5)
    o = emulate_head(preset("fa2"), read_head(made, 0, 0, CPU, NonFiniteCensus()).head).o[None, None]
    stated = attn_diag.Capture.from_tensors({"q": q, "k": k, "v": v, "o": o}, causal="top-left")
    result = attn_diag.identify(stated, device="cpu")
    assert result.outcome == "unknown"
    fitted = result.notes[0].partition("O fits a softmax scale of ")[2]
    assert float(fitted.split()[0].rstrip(",")) == pytest.approx(off**-0.5, rel=1e-4)
    assert name in result.notes[0]
    assert ("1/sqrt" in result.notes[0]) == bool(name)
    assert check_assumptions(stated, ["observed"], CPU).checks[0].better is not None


def test_the_derivative_by_the_scale_is_that_of_differences() -> None:
    head = read_head(emulated(preset("fa2")), 0, 0, CPU, NonFiniteCensus()).head
    rows = torch.arange(0, 256, 17)
    for softcap in (None, 2.0):
        capped, step = replace(head, softcap=softcap), 1e-6
        one, other = (reference_rows(replace(capped, scale=head.scale * (1 + s)), rows).out for s in (step, -step))
        exact = scale_derivative(capped, reference_rows(capped, rows))
        torch.testing.assert_close((one - other) / (2 * step), exact, rtol=0, atol=1e-8)


def test_a_row_whose_heavy_keys_weight_crosses_is_no_flaw() -> None:
    """A healthy kernel's truncated sums move many features of two rows of a short call: no fault of it."""
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(1, 65, 4, 64, generator=generator)[:, :64, :1].transpose(1, 2).bfloat16()
    k, v = (torch.randn(10, 128, 2, 64, generator=generator)[[5, 2, 8, 0, 7], :, 0] for _ in "kv")
    k, v = (t.reshape(1, 1, -1, 64)[:, :, :517].bfloat16() for t in (k, v))
    tensors: dict[str, Tensor | None] = {"q": q, "k": k, "v": v}
    capture = attn_diag.Capture.from_tensors(tensors | {"o": torch.zeros_like(q)}, causal="bottom-right")
    head = read_head(capture, 0, 0, torch.device("cpu"), NonFiniteCensus()).head
    o = emulate_head(replace(preset("fa2"), accumulation="nvidia-tensor-core"), head, key_gradients=False).o
    found = attn_diag.identify(
        attn_diag.Capture.from_tensors(tensors | {"o": o[None, None].bfloat16()}, causal="bottom-right")
    )
    assert (found.outcome, found.recipes) == ("identified", ("fa2",))


def test_an_output_that_is_nothing_but_rounded_is_no_kernel_below_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to the rounded truth only those are run that round q and k alone; others are run where O is far off it."""
    tried = list[bool]()

    def seen(*_: object, scores_alone: bool) -> tuple[list[search.Trial], int]:
        tried.append(scores_alone)
        return [], 0

    monkeypatch.setattr(search, "low_bit_trials", seen)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, 256, 64, generator=generator).bfloat16() for _ in range(3))
    exact = true_o(q, k, v)
    for o in (exact, exact + 0.01 * torch.randn(exact.shape, generator=generator)):
        capture = attn_diag.Capture.from_tensors({"q": q, "k": k, "v": v, "o": o.bfloat16()}, causal="top-left")
        assert recognise(capture, "observed", 0, 0) is None
    assert tried == [True, False]


def other_function(*, times: float = 1.0, window: int = 160) -> attn_diag.Capture:
    """All keys at once, of larger scores, with a window that is not stated, or too large by a factor."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 160, 64, generator=generator) for _ in range(3))
    tensors = {"q": (2.5 * q).bfloat16(), "k": k.bfloat16(), "v": v.bfloat16()}
    scores = tensors["q"].float() @ tensors["k"].float().mT / 8
    ones = torch.ones(160, 160).bool()
    scores = scores.masked_fill(ones.triu(1) | ones.tril(-window), -torch.inf)
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    o = powers.bfloat16().float() @ tensors["v"].float() / powers.sum(-1, keepdim=True)
    return attn_diag.Capture.from_tensors(tensors | {"o": (times * o).bfloat16()}, causal="top-left")


@pytest.mark.parametrize("times", [1.02, 0.97])
def test_an_o_that_is_too_large_is_no_other_scale(times: float) -> None:
    result = attn_diag.identify(other_function(times=times), device="cpu")
    assert result.outcome == "unknown"
    assert "softmax scale" not in result.report(200)


def test_rows_that_are_far_off_do_not_round_otherwise() -> None:
    said = attn_diag.identify(other_function(window=100), device="cpu").report(200)
    assert "wrong in rows 100-159: " in said
    assert "rounds otherwise" not in said


def test_scattered_rows_of_a_short_head_are_no_place() -> None:
    """Any few rows of 48 are at most eight runs; torch's flash kernel of a CPU, whose exponential is its own, was
    "wrong": it 'rounds otherwise in rows …, too many in one place to be chance'."""
    capture = emulated(preset("fa2", "bf16", 16), length=48, d=16)
    features = torch.tensor([3, 14, 0, 8, 11, 5])
    outcomes = []
    for rows in (torch.tensor([20, 23, 31, 36, 41, 46]), torch.arange(30, 36)):
        o = capture.tensors["o"][...].clone()
        o.view(torch.int16)[0, 0, rows[:, None], features] += 1
        result = attn_diag.identify(*(capture.tensors[n][...] for n in "qkv"), o=o, causal=True, device="cpu")
        outcomes.append(result.outcome)
    assert outcomes == ["unknown", "flawed"]


def test_another_scale_of_a_long_head_is_named() -> None:
    """512 rows, of which some are looked at: it stopped with an IndexError."""
    capture = emulated(preset("fa2"), length=512)
    q, k, v = (capture.tensors[n][...] for n in "qkv")
    head = replace(read_head(capture, 0, 0, CPU, NonFiniteCensus()).head, scale=0.2)
    o = emulate_head(preset("fa2"), head).o[None, None]
    result = attn_diag.identify(q, k, v, o=o, causal=True, device="cpu")
    assert "it fits" in result.report(200)
    assert float(result.report(200).partition("--scale ")[2].split()[0]) == pytest.approx(0.2, rel=1e-3)
    found = attn_diag.inspect(q, k, v, o=o, causal=True, device="cpu")
    assert "(1/sqrt(25)) fits" in str(found.captures[0].assumptions.message)
