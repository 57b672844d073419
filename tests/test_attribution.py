"""Attribution: Shapley values, planted sites among louder decoys, real captures, and the command."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from builders import some
from rich.cells import cell_len

import attn_diag
from attn_diag.analyses.attribution.attribute import attribute
from attn_diag.analyses.attribution.shapley import Array, Subset, SubsetPlan
from attn_diag.analyses.attribution.site_shares import attribute_sites
from attn_diag.analyses.attribution.sites import rounding_sites, with_low, with_mode
from attn_diag.captures.capture import Capture
from attn_diag.captures.loading import load
from attn_diag.captures.selection import Selection
from attn_diag.errors import InputError
from attn_diag.head.read import HeadInputs, read_head
from attn_diag.head.truth import exact_recipe, head_truth, measure_variants
from attn_diag.kernels import PRESETS, Recipe, Schedule, SoftmaxRule, emulate_head, preset
from attn_diag.kernels.exponential import exp2_polynomial
from attn_diag.kernels.formats import Mode
from attn_diag.reference import AttentionHead, Masking, format_of, reference_head
from attn_diag.results.attribution import CANCELLED, Attribution, HeadAttribution
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.target import emulate

SEEDS = range(20)


def inputs_of(head: AttentionHead, dtype: torch.dtype = torch.bfloat16) -> HeadInputs:
    none = torch.zeros(len(head.q), dtype=torch.bool)
    return HeadInputs(head, none, none.new_empty(0, dtype=torch.int64), format_of(dtype))


def random_head(seed: int, T: int = 256, D: int = 32, *, do: bool = False) -> AttentionHead:
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad = (torch.randn(T, D, generator=generator).bfloat16().double() for _ in range(4))
    return AttentionHead(q, k, v, grad if do else None, D**-0.5, Masking("top-left"))


class RandomGame(dict[Subset, Array]):
    """A value of three numbers for every subset, drawn when asked for."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def __missing__(self, subset: Subset) -> Array:
        self[subset] = self._generator.standard_normal(3)
        return self[subset]


@pytest.mark.parametrize("count", [1, 3, 5])
def test_shapley_is_the_mean_over_all_orders(count: int) -> None:
    game, players = RandomGame(count), [f"p{i}" for i in range(count)]
    plan = SubsetPlan.make(players)
    found = plan.values({s: game[s] for s in plan.subsets})
    for player in players:
        gains = []
        for order in permutations(players):
            before = frozenset(order[: order.index(player)])
            gains.append(game[before | {player}] - game[before])
        np.testing.assert_allclose(found[player][0], np.mean(gains, 0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [2, 5, 8])
@pytest.mark.parametrize("first", [(), ("z",), ("y", "z")])
def test_contributions_add_up(count: int, first: tuple[str, ...]) -> None:
    game, players = RandomGame(count), [f"p{i}" for i in range(count)]
    plan = SubsetPlan.make(players, first)
    found = plan.values({s: game[s] for s in plan.subsets})
    total = game[frozenset([*players, *first])] - game[frozenset()]
    np.testing.assert_allclose(sum(phi for phi, _ in found.values()), total, rtol=0, atol=1e-10)


def test_sampled_values_state_their_error() -> None:
    """Over many seeds the exact value lies within three stated standard errors about as often as t with 1 df says."""
    players = [f"p{i}" for i in range(6)]
    game = RandomGame(7)
    full = SubsetPlan.make(players, exact_up_to=6)
    exact = full.values({s: game[s] for s in full.subsets})["p0"][0]
    inside, trials = 0, 100
    for seed in range(trials):
        plan = SubsetPlan.make(players, pairs=8, seed=seed)
        value, error = plan.values({s: game[s] for s in plan.subsets})["p0"]
        inside += int(abs(value[0] - exact[0]) < 3 * some(error)[0])
    # t with 7 df lies within 3 in 98 % of cases; 90 of 100 leaves room for chance (p < 1e-4).
    assert inside >= 90


def test_a_player_without_effect_gets_nothing() -> None:
    def value(subset: Subset) -> Array:
        return np.array([float(len(subset - {"dummy"})) ** 2])

    plan = SubsetPlan.make(["a", "b", "dummy"])
    found = plan.values({s: value(s) for s in plan.subsets})
    assert found["dummy"][0] == 0
    assert found["a"][0] == found["b"][0] == 2


@pytest.mark.parametrize("name", PRESETS)
def test_without_its_sites_a_recipe_is_exact(name: str) -> None:
    recipe, head = preset(name), random_head(0, T=70, do=True)
    sites = rounding_sites(recipe)
    exact = emulate_head(with_low(recipe, sites, ()), head)
    truth = reference_head(head)
    assert with_low(recipe, sites, [s.name for s in sites]) == recipe
    # A clamp on l (1e-10) and the stabilised rule change nothing in exact arithmetic here.
    for found, expected in ((exact.o, truth.out), (some(exact.dq), some(truth.dq))):
        assert (found - expected).norm() <= 1e-12 * expected.norm()


def test_every_subset_is_a_run_of_its_own() -> None:
    """Shares come from independently evaluated subsets: v of any of them is what a plain emulation gives."""
    head = random_head(3, do=True)
    truth, recipe = head_truth(inputs_of(head)), preset("fa2")
    sites = rounding_sites(recipe)
    names = [s.name for s in sites if s.name != "arithmetic"]
    plan = SubsetPlan.make(names, ["arithmetic"])
    together = measure_variants(truth, [with_low(recipe, sites, s) for s in plan.subsets])
    values: dict[Subset, Array] = {}
    for subset, shared in zip(plan.subsets, together, strict=True):
        alone = emulate_head(with_low(recipe, sites, subset), head)
        error = (some(alone.dq).double() - some(truth.reference.dq)).square().sum()
        # float64 arithmetic shares (P o dP) K and P K between runs: equal to its precision.
        assert float(some(shared.dq_square).sum()) == pytest.approx(float(error), rel=1e-9, abs=1e-25)
        values[subset] = np.array([float(error)])
    found = plan.values(values)
    total = values[frozenset([*names, "arithmetic"])] - values[frozenset()]
    assert abs(sum(float(phi[0]) for phi, _ in found.values()) - float(total[0])) <= 1e-10 * float(total[0])
    shares = {s.site: s.effects["dq"].share for s in attribute_sites([truth], recipe)[0].sites}
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-10)
    for name, (phi, _) in found.items():
        assert shares[name] == pytest.approx(float(phi[0] / total[0]), abs=1e-9)


QUIET = replace(
    preset("cudnn"), probs="fp32", dscores="fp32", dq="fp32", arithmetic="fp64", schedule=Schedule(key_tile=64)
)
# Formats are chosen so that the planted mean lies between 0.02 and 0.05 ulp; the decoy is the last rounding of O, made
# stochastic: no bias, and at least five times the error.
PLANTED: dict[str, dict[str, Any]] = {
    "probs": {"probs": "e8m10:toward-zero"},
    "row_sum": {"row_sum": "e8m12:toward-zero"},
    "accumulator": {"accumulator": "e8m12:toward-zero"},
}


def assert_named(head: AttentionHead, recipe: Recipe, planted: str, dtype: torch.dtype = torch.bfloat16) -> None:
    truth = head_truth(inputs_of(head, dtype))
    (found,) = attribute_sites([truth], recipe)
    sites = {s.site: s.effects["o"] for s in found.sites}
    alone = some(sites[planted].bias_alone)
    assert 0.02 <= abs(alone) <= 0.05
    assert sites["out"].alone > 5 * sites[planted].alone
    assert found.biased == {"o": planted}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_site_is_named_beside_a_louder_decoy(planted: str) -> None:
    for seed in SEEDS:
        recipe = replace(QUIET, out="bf16:stochastic", seed=seed, **PLANTED[planted])
        assert_named(random_head(seed), recipe, planted)


def two_level_head(seed: int) -> AttentionHead:
    """Rows whose other keys all lie where the polynomial exp2 is furthest off, and whose top key carries most of O."""
    x = torch.linspace(-1, 0, 10001, dtype=torch.float64)
    worst = float(x[(exp2_polynomial(x, 3) / torch.exp2(x) - 1).abs().argmax()])
    generator = torch.Generator().manual_seed(seed)
    T, D = 128, 32
    q, k = torch.zeros(T, D), torch.zeros(T, D)
    # alpha q.k of the top key above the others, in units of ln 2: a whole number less the worst fraction.
    step = (5 - worst) * 0.6931471805599453 / D**-0.5
    q[torch.arange(T), torch.arange(T) % D] = 1.0
    k[torch.arange(D), torch.arange(D)] = step
    v = torch.randn(T, D, generator=generator)
    v[:D] = 8 + v[:D]
    q, k, v = (t.half().double() for t in (q, k, v))
    return AttentionHead(q, k, v, None, D**-0.5)


def test_a_polynomial_exponential_is_named_beside_a_louder_decoy() -> None:
    for seed in SEEDS:
        recipe = replace(QUIET.for_input("fp16"), exp="polynomial", exp_degree=3, out="fp16:stochastic", seed=seed)
        assert_named(two_level_head(seed), recipe, "exp", torch.float16)


def test_nothing_is_named_where_only_the_decoy_rounds() -> None:
    named = [
        attribute_sites([head_truth(inputs_of(random_head(seed)))], replace(QUIET, out="bf16:stochastic", seed=seed))[0]
        for seed in SEEDS
    ]
    # At level 0.01 one false alarm in twenty seeds has probability 0.18, three have 0.001.
    assert sum("o" in found.biased for found in named) < 3


def test_a_sham_keeps_the_size_and_takes_the_bias() -> None:
    truth = head_truth(inputs_of(random_head(1)))
    recipe = replace(QUIET, probs="e8m10:toward-zero")
    (site,) = [s for s in rounding_sites(recipe) if s.name == "probs"]
    sham, plain = measure_variants(
        truth, [with_mode(recipe, [site], Mode.RANDOM_SIGN), with_mode(recipe, [site], Mode.NEAREST_EVEN)]
    )
    assert sham.o_square == pytest.approx(plain.o_square, rel=0.2)


def test_a_recipe_that_rounds_nowhere_has_nothing_to_attribute(captures: Path) -> None:
    recipe = replace(exact_recipe(preset("cudnn")), name="exact")
    found = attribute(load(captures / "pair_T256.safetensors"), recipe=recipe)
    assert found.heads[0].sites == ()
    assert "no error to attribute" in found.heads[0].reasons[0]
    assert "all of them" in found.report()


@pytest.fixture(scope="module")
def step731(captures: Path) -> HeadAttribution:
    return attribute(load(captures / "gpt2_step731_L2H4.safetensors")).heads[0]


def left(found: HeadAttribution, quantity: str = "dq") -> Mapping[str, float]:
    return {repair.site: repair.left[quantity] for repair in found.repairs}


def test_an_ill_conditioned_head_is_explained_in_words(step731: HeadAttribution) -> None:
    assert step731.guilty == dict.fromkeys(("o", "delta", "dq", "dw_q"), "out")
    assert step731.totals["dq"].error == pytest.approx(step731.totals["dq"].captured, rel=0.01)
    words = " ".join(step731.reasons)
    for said in (
        "the cause is the last rounding of O, through delta = rowsum(dO∘O)",
        "dQ's error is 1 times a well-rounded kernel's",
        "the head is ill-conditioned (conditioning 91)",
        "near one-hot rows have almost no dQ of their own",
        "Repeated row maxima have no part in it",
        "Swamped rows have no part in it: 16 of 1024 rows",
    ):
        assert said in words
    assert not re.search(r"\d%", words)  # "43 %", as everywhere else in this report
    # 8 % -> 1.4 % with O exact (P_bar still cast), 1.2 % with P_bar uncast, 0.15 % with dS uncast.
    assert step731.totals["dq"].error == pytest.approx(0.0804, abs=5e-4)
    assert list(left(step731))[:3] == ["out", "probs", "dscores"]
    assert list(left(step731).values())[:3] == pytest.approx([0.0142, 0.0116, 0.0015], abs=3e-4)
    hot = step731.row_kinds["near_one_hot"]
    assert hot.error_share == pytest.approx(0.66, abs=0.01)
    assert hot.reference_share == pytest.approx(0.0083, abs=5e-4)


def test_shams_repair_nothing(step731: HeadAttribution) -> None:
    out = next(s for s in step731.sites if s.site == "out").effects["dq"]
    assert out.repaired < 0.2 * step731.totals["dq"].error < 0.8 * step731.totals["dq"].error < some(out.sham)
    assert step731.inert == ("backward_probs", 0.0)


def test_the_failing_capture_names_the_scores(captures: Path) -> None:
    found = attribute(load(captures / "failing_step500_L2H7.safetensors")).heads[0]
    assert found.guilty == dict.fromkeys(("o", "delta", "dq", "dw_q"), "scores")
    assert found.orders == 4
    assert found.sites[0].effects["dq"].share > 0.95
    assert found.noise_factor == pytest.approx(10.97, abs=0.01)
    assert left(found)["scores"] == pytest.approx(0.0208, abs=5e-4)
    assert "the cause is the rounding of the scores S" in found.reasons[0]


def test_without_gradients_only_o_is_attributed() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 32, generator=generator).bfloat16() for _ in range(3))
    found = attribute(Capture.from_tensors({"q": q, "k": k, "v": v}, causal="top-left"), recipe="qiu2025")
    assert len(found.heads) == 2
    assert set(found.heads[0].totals) == {"o"}
    assert found.heads[0].conditioning is None
    assert any("dO was not captured" in note for note in found.heads[0].notes)
    assert found.report(80)


def test_json_round_trip_and_schema(captures: Path) -> None:
    found = attribute(load(captures / "pair_T256.safetensors"), selection=Selection("flash"))
    assert Attribution.from_json(found.to_json()) == found
    jsonschema.validate(json.loads(found.to_json()), Attribution.json_schema())
    assert found.observation == "flash"
    for width in (80, 120):
        assert max(map(cell_len, found.report(width).splitlines())) <= width


def test_bad_requests_are_named(captures: Path) -> None:
    capture = load(captures / "pair_T256.safetensors")
    with pytest.raises(InputError, match="no observation 'x' with an O"):
        attribute(capture, selection=Selection("x"))
    with pytest.raises(InputError, match="no recipe 'x'"):
        attribute(capture, recipe="x")
    with pytest.raises(InputError, match="level must lie between"):
        attribute(capture, level=0)
    wrong = load(captures / "pair_T256.safetensors", causal="none")
    with pytest.raises(InputError, match="causal"):
        attribute(wrong)


def test_stabilised_recipes_are_taken_apart_too(captures: Path) -> None:
    recipe = replace(preset("qiu2025"), softmax=SoftmaxRule("stabilised", beta=3.0), name="beta-3")
    found = attribute(load(captures / "kernels_pair_T512.safetensors"), selection=Selection("stable"), recipe=recipe)
    assert sum(s.effects["dq"].share for s in found.heads[0].sites) == pytest.approx(1.0, abs=1e-10)


def test_a_recipe_that_is_not_the_captured_kernel_is_said_to_be_so(captures: Path) -> None:
    found = attribute(load(captures / "failing_step500_L2H7.safetensors"), recipe="fa2").heads[0]
    assert some(found.noise_factor) < 2  # the captured kernel's is 11
    assert "not what the captured kernel does" in found.reasons[0]
    assert "11 noise floors captured, 1.1" in found.reasons[0]
    assert {"o", "delta", "dq"} <= set(found.differences)


def altered(capture: Capture, **outputs: torch.Tensor) -> Capture:
    tensors = {name: capture.tensors[name][...] for name in capture.tensors} | outputs
    return Capture(tensors, capture.metadata)


def test_nothing_is_blamed_where_no_recipe_made_the_output(captures: Path) -> None:
    capture = load(captures / "gqa_T200.safetensors")
    bits = capture.tensors["o"][...].view(torch.int16)
    moved = torch.rand(bits.shape, generator=torch.Generator().manual_seed(0)) < 0.05
    found = attribute(altered(capture, o=torch.where(moved, bits + 1, bits).view(torch.bfloat16))).heads[0]
    assert found.recipe_from == "assumed"
    assert found.reasons[0].startswith("No recipe that is known here made this O (nearest: ")
    assert found.guilty == found.biased == {}
    assert not any("the cause" in reason or "The kernel" in reason for reason in found.reasons)


def test_a_gradient_that_is_not_the_recipes_is_not_explained(captures: Path) -> None:
    capture = load(captures / "gqa_T200.safetensors")
    found = attribute(altered(capture, dq=capture.tensors["dq"][...] * 1.0625)).heads[0]
    assert set(found.differences) == {"dq"}
    assert {"dq", "dw_q"}.isdisjoint(found.guilty)
    assert found.guilty["o"] == "out"
    assert "no cause of the error of dQ is named" in found.reasons[0]
    # Of O's repairs those of dS were told, which leave all of it.
    assert any(reason.startswith("Repairs, one after the other, of O's error") for reason in found.reasons)
    assert not any("the cast of dS exact leaves" in reason for reason in found.reasons)


def test_a_mixture_in_no_presets_schedule_is_followed() -> None:
    """What inspect's next command follows is what ``identify`` finds, not an assumed recipe."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 1, 256, 32, generator=generator).bfloat16() for _ in range(3))
    made = replace(preset("fa2"), row_sum="bf16", accumulator="bf16", schedule=Schedule(key_tile=64))
    given = read_head(Capture.from_tensors({"q": q, "k": k, "v": v}, causal="top-left"), 0, 0, torch.device("cpu"))
    o = emulate_head(made, given.head).o[None, None]
    capture = Capture.from_tensors({"q": q, "k": k, "v": v, "o": o}, causal="top-left")
    found = attribute(capture).heads[0]
    assert found.recipe_from == "recognised"
    assert {"row_sum", "accumulator"} <= {site.site for site in found.sites}
    assert any("What a well-rounded kernel does not round: the rounding of the row sum" in r for r in found.reasons)


def test_rows_with_nan_have_no_part_in_the_conditioning() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 1, 64, 16, generator=generator).bfloat16() for _ in range(4))
    q[0, 0, 5] = math.nan
    found = attribute(Capture.from_tensors({"q": q, "k": k, "v": v, "do": do}, causal="top-left")).heads[0]
    q, k, v, do = (t[0, 0].double() for t in (q, k, v, do))
    kept = q.isfinite().all(1)
    scores = (q @ k.T / 4).masked_fill(~torch.ones(64, 64).tril().bool(), -math.inf)
    probs = scores.softmax(1)
    delta = (do * (probs @ v)).sum(1, keepdim=True)
    dq, direction = (probs * (do @ v.T - delta)) @ k, delta * (probs @ k)
    assert found.conditioning == pytest.approx(float(direction[kept].norm() / dq[kept].norm()), rel=1e-9)


@pytest.mark.parametrize("factor", [1.0, 0.5], ids=["as the recipe", "halved"])
def test_a_captured_gradient_that_no_rounding_makes_is_not_called_normal(factor: float) -> None:
    q, k, v, do = (torch.randn(1, 1, 128, 32, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(4))
    made = emulate(preset("fa2"), CaseInputs("normal", q, k, v, do, 32**-0.5, "top-left"), torch.device("cpu"))
    found = attn_diag.attribute(q, k, v, o=made["o"], do=do, dq=(made["dq"] * factor).bfloat16(), causal=True)
    first = " ".join(found.report().partition("\n\n")[0].split())
    if factor == 1.0:
        assert first.startswith("NORMAL")
    else:
        assert first.startswith("UNKNOWN memory: H0: the captured dQ is 50 % off, and not as the recipe")
        assert "No cause" in first


def test_shares_that_cancel_name_no_site() -> None:
    """Rows that look at the first key alone have next to no dQ: what P and O leave of it cancels."""
    torch.manual_seed(12)
    q, k, v, do = (torch.randn(1, 1, 128, 32).bfloat16() for _ in range(4))
    k[:, :, 0] *= 4
    v[:, :, 0] *= 0.01
    found, beyond = (
        attn_diag.attribute((q + part * k[:, :, :1]).bfloat16(), k, v, o=None, do=do, causal=True, recipe="fa2")
        for part in (0.4, 0.8)
    )
    (head,) = found.heads
    assert max(site.effects["dq"].share for site in head.sites) > CANCELLED
    assert "cancel in dQ" in " ".join(found.report().split())
    assert "the cause is" not in head.reasons[0]
    # The other dQ is 2^88 times smaller than its terms: float64 does not know it.
    assert "dq" not in beyond.heads[0].totals
