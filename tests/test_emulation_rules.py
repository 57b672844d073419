"""What recipes can vary: rules, formats, instructions, masks. Sharing work and choosing rows change nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import some
from torch import Tensor

from attn_diag.kernels import (
    PRESETS,
    EmulatedHead,
    Recipe,
    Schedule,
    SoftmaxRule,
    emulate_blocks,
    emulate_head,
    emulate_rows,
    emulate_rows_of_several,
    preset,
    trace_row,
)
from attn_diag.kernels.accumulation import HOPPER_K8, tensor_core_matmul
from attn_diag.kernels.emulation_backward import KeyGradients
from attn_diag.kernels.emulation_operands import Rounder
from attn_diag.kernels.recipe import FORMATS
from attn_diag.reference import AttentionHead, Dropout, Masking, reference_head

# No rounding but float64's own, whatever the preset rounds.
EXACT: dict[str, Any] = {
    **dict.fromkeys(FORMATS[1:], "fp32"),
    "arithmetic": "fp64",
    "accumulation": "exact",
    "row_sum_clamp": None,
}
# Sums whose bits do not depend on how many rows are multiplied at once.
STEADY: dict[str, Any] = {"accumulation": "nvidia-tensor-core"}
OUTPUTS = {"o": "out", "lse": "lse", "delta": "delta", "dq": "dq", "dk": "dk", "dv": "dv"}
SCHEDULES = [
    Schedule(query_block=32, key_tile=32),
    Schedule(query_block=32, key_tile=16, order="descending"),
    Schedule(query_block=64, key_tile=32, order="diagonal-first"),
    Schedule(query_block=32, key_tile=16, split_keys=48),
    Schedule(query_block=16, key_tile=16, order="descending", split_keys=32),
]
by_preset = pytest.mark.parametrize("name", PRESETS)


def make_head(
    q_length: int = 70,
    k_length: int = 70,
    masking: Masking | None = None,
    *,
    scale: float = 0.25,
    softcap: float | None = None,
    seed: int = 0,
) -> AttentionHead:
    """BF16 normal numbers, D = 16, Dv = 24; one key comes again and again, and is long: many maxima are repeated."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((q_length, 16), (k_length, 16), (k_length, 24), (q_length, 24))
    q, k, v, do = (torch.randn(*size, generator=generator).bfloat16().double() for size in sizes)
    k[3::9] = 2 * k[3:4]
    return AttentionHead(q, k, v, do, scale, masking or Masking("bottom-right"), softcap)


def some_masks(rows: int, keys: int) -> dict[str, Masking]:
    generator = torch.Generator().manual_seed(4)
    sparse = torch.rand(rows, keys, generator=generator) < 0.3
    sparse[5], sparse[40:60] = False, False
    additive = torch.randn(rows, keys, generator=generator).double()
    additive[:, ::7] = -torch.inf
    return {
        "none": Masking(),
        "causal": Masking("bottom-right"),
        "top-left": Masking("top-left"),
        "window": Masking("bottom-right", window=(20, 0)),
        "two-sided": Masking(window=(9, 13)),
        "bool": Masking(mask=sparse),
        "additive": Masking("bottom-right", mask=additive),
        "positions": Masking("bottom-right", positions=torch.arange(rows) // 2 + 3),
    }


def with_site(recipe: Recipe, site: str, fmt: Any) -> Recipe:
    return replace(recipe, **{site: fmt})


def unlike(got: EmulatedHead, head: AttentionHead) -> dict[str, float]:
    """The largest error of every output, relative to the output's own largest value (absolute where that is 0)."""
    truth = reference_head(head)
    errors = {}
    for name, other in OUTPUTS.items():
        value, expected = getattr(got, name), getattr(truth, other)
        infinite = expected == -torch.inf
        assert torch.equal(value == -torch.inf, infinite), name
        difference = (value - expected).masked_fill(infinite, 0.0)
        size = expected.masked_fill(infinite, 0.0).abs().max() if expected.numel() else torch.ones(())
        errors[name] = float(difference.abs().max() / (size or 1.0)) if expected.numel() else 0.0
    return errors


def assert_exact(recipe: Recipe, head: AttentionHead) -> None:
    errors = unlike(emulate_head(recipe, head), head)
    assert all(error <= 1e-12 for error in errors.values()), errors


def same(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None and b is None) or (
        a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b) and not a.isnan().any()
    )


class TestExactRecipe:
    """float64 between sites that round nothing is the reference, whatever the order of the computation."""

    @by_preset
    def test_every_preset(self, name: str) -> None:
        assert_exact(replace(preset(name), **EXACT), make_head())

    @pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
    @pytest.mark.parametrize("name", ["fa2", "qiu2025-stabilised", "delta-from-dp"])
    def test_every_schedule(self, name: str, schedule: Schedule) -> None:
        assert_exact(replace(preset(name), **EXACT, schedule=schedule), make_head())

    @pytest.mark.parametrize("mask", some_masks(90, 90))
    @pytest.mark.parametrize("shape", [(70, 70), (33, 90), (90, 33)], ids=str)
    @pytest.mark.parametrize("name", ["fa2", "flex", "qiu2025-stabilised", "qiu2025-stabilised-unclamped"])
    def test_masks(self, name: str, shape: tuple[int, int], mask: str) -> None:
        """Fully masked rows, tiles and blocks among them: O = 0, L = -inf, no gradient."""
        recipe = replace(preset(name), **EXACT, schedule=Schedule(query_block=32, key_tile=16, split_keys=48))
        masking = some_masks(90, 90)[mask]
        if masking.mask is not None:
            masking = replace(masking, mask=masking.mask[: shape[0], : shape[1]])
        if masking.positions is not None:
            masking = replace(masking, positions=masking.positions[: shape[0]])
        assert_exact(recipe, make_head(*shape, masking))

    @pytest.mark.parametrize("name", ["fa2", "qiu2025", "bf16-forward", "delta-from-dp"])
    @pytest.mark.parametrize("mask", ["causal", "additive"])
    def test_softcap(self, name: str, mask: str) -> None:
        assert_exact(replace(preset(name), **EXACT), make_head(masking=some_masks(70, 70)[mask], softcap=2.0))

    @pytest.mark.parametrize(
        "change",
        [{"alpha": "before-rounding"}, {"alpha": "after-rounding"}, {"alpha": "in-exponent"}, {"exp": "exact"},
         {"row_sum_of": "cast-probs"}, {"division": "after-last-cast"}, {"lse_from": "rounded-l"},
         {"delta_from": "dp"}, {"delta_from": "fp32-o"}, {"backward_scores": "as-forward"},
         {"alpha_in_backward": "before-cast"}, {"probs_scale": 448.0}],
        ids=lambda change: "-".join(map(str, *change.items())),
    )  # fmt: skip
    def test_choices_of_order_round_nothing(self, change: dict[str, Any]) -> None:
        assert_exact(replace(preset("fa2"), **EXACT, schedule=SCHEDULES[1], **change), make_head())

    @pytest.mark.parametrize("site", FORMATS[1:])
    def test_guard_every_site_would_be_seen(self, site: str) -> None:
        """One site in BF16 moves some output by more than the tolerance above, and only what comes after it."""
        recipe = replace(preset("fa2"), **EXACT, schedule=SCHEDULES[0])
        if site == "difference":
            recipe = replace(recipe, exp="exact")  # the other exponentials do not form S - m
        if site == "row_max":
            recipe = replace(recipe, row_sum="bf16")  # a rounded maximum alone changes nothing in exact arithmetic
        head = make_head()
        if site == "dropout_factor":
            head = replace(head, dropout=Dropout(torch.rand(len(head.q), len(head.k)) > 0.1, 0.1))
        plain, got = (emulate_head(r, head) for r in (recipe, with_site(recipe, site, "bf16")))
        moved = {n for n in OUTPUTS if not torch.equal(getattr(plain, n).double(), getattr(got, n).double())}
        after = {
            "dv": ["backward_probs"],
            "dq dk": ["dprobs", "dscores"],
            "dq dk dv": ["gradient_accumulator", "dq"],
            "delta dq dk": ["delta_products", "delta"],
            "o delta dq dk dv": ["dropout_factor"],
            "o delta dq dk": ["out", "pv_sums", "range_pv", "accumulator", "row_sum", "probs"],
        }
        assert moved == next((set(outputs.split()) for outputs, sites in after.items() if site in sites), set(OUTPUTS))


class TestSoftmaxRules:
    STALE = SoftmaxRule("stale", threshold=3.0)

    @pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
    @pytest.mark.parametrize(
        "rule", [STALE, SoftmaxRule("stale", threshold=0.0), SoftmaxRule("stabilised", beta=3.0)], ids=str
    )
    @pytest.mark.parametrize("mask", ["causal", "bool", "window"])
    def test_exact_arithmetic_is_unchanged(self, rule: SoftmaxRule, schedule: Schedule, mask: str) -> None:
        recipe = replace(preset("fa2"), **EXACT, softmax=rule, schedule=schedule)
        assert_exact(recipe, make_head(masking=some_masks(70, 70)[mask], scale=1.0))

    def test_a_stale_maximum_moves_only_past_the_threshold(self) -> None:
        """One key a tile, scores 0, 2, 3, 3.5, 7 with threshold 3: m stays at 0 through 3, goes to 3.5, then to 7."""
        scores = torch.tensor([0.0, 2.0, 3.0, 3.5, 7.0, 5.0]).double()
        one = torch.ones(1, 1).double()
        head = AttentionHead(one, scores[:, None], torch.ones(6, 1).double(), None, 1.0)
        recipe = replace(preset("fa2"), softmax=self.STALE, schedule=Schedule(key_tile=1), exp="exact")
        trace = trace_row(recipe, head, 0)
        assert [step.row_max for step in trace.ranges] == [0.0, 0.0, 0.0, 3.5, 7.0, 7.0]
        assert [float(step.probs) for step in trace.ranges] == pytest.approx(
            [1.0, math.exp(2), math.exp(3), 1.0, 1.0, math.exp(-2)], rel=2**-22
        )
        assert trace.lse == pytest.approx(float(scores.logsumexp(0)), rel=2**-20)

    def test_probabilities_stay_below_exp_of_the_threshold(self) -> None:
        head = make_head(scale=1.0)
        recipe = replace(preset("fa2"), softmax=self.STALE, schedule=SCHEDULES[0], alpha="before-rounding")
        tops = [float(step.probs.max()) for row in range(0, 70, 3) for step in trace_row(recipe, head, row).ranges]
        assert 1.0 < max(tops) <= math.exp(3.0) * (1 + 2**-20)
        safe = replace(recipe, softmax=SoftmaxRule())
        # exp2(fma(S, c, -m c)) at the maximum itself may exceed 1 by a rounding of m c (here below 2**5).
        tops = [float(step.probs.max()) for row in range(0, 70, 3) for step in trace_row(safe, head, row).ranges]
        assert max(tops) <= 1 + 2**-18

    @pytest.mark.parametrize("order", ["ascending", "descending", "diagonal-first"])
    @pytest.mark.parametrize("tile", [1, 2, 16])
    def test_masked_keys_are_no_repeated_maximum(self, tile: int, order: str) -> None:
        """A range that a row does not see leaves its maximum (negative here) alone, whenever it comes."""
        scores = torch.full((32, 1), -5.0).double()
        visible = torch.zeros(1, 32, dtype=torch.bool)
        visible[0, 0] = True
        ones = torch.ones(1, 1).double()
        head = AttentionHead(ones, scores, torch.ones_like(scores), None, 1.0, Masking(mask=visible))
        schedule = Schedule(key_tile=tile, order=order)  # type: ignore[arg-type]
        trace = trace_row(replace(preset("qiu2025-stabilised"), schedule=schedule), head, 0)
        assert trace.ranges[-1].row_max == -5.0

    @pytest.mark.parametrize(("score", "moved"), [(-5.0, 0.0), (5.0, 10.0), (0.0, 0.0)])
    def test_guard_a_visible_repeated_maximum_moves(self, score: float, moved: float) -> None:
        ones = torch.ones(2, 1).double()
        head = AttentionHead(ones[:1], score * ones, ones, None, 1.0)
        assert trace_row(preset("qiu2025-stabilised"), head, 0).ranges[-1].row_max == moved

    @by_preset
    def test_rows_without_keys(self, name: str) -> None:
        masking = Masking(mask=torch.zeros(5, 40, dtype=torch.bool))
        got = emulate_head(preset(name), make_head(5, 40, masking))
        assert (got.lse == -torch.inf).all()
        for output in ("o", "delta", "dq", "dk", "dv"):
            value = getattr(got, output)
            assert not value.any(), output
            assert not value.isnan().any(), output


class TestInstructions:
    def test_sums_are_cut_off_as_often_as_instructions_end(self) -> None:
        """O and dQ of a head with one row of queries, whose products are added 8 or 16 at a time."""
        head = make_head(q_length=1, k_length=64, masking=Masking())
        unrounded = {"probs": "fp32", "out": "fp32", "dq": "fp32"}
        recipe = replace(preset("efficient"), accumulation="nvidia-tensor-core", **unrounded)  # type: ignore[arg-type]
        eight, sixteen = (emulate_head(replace(recipe, mma_k=k), head) for k in (8, 16))
        assert not torch.equal(eight.o, sixteen.o)
        assert not torch.equal(some(eight.dq), some(sixteen.dq))
        products = tensor_core_matmul(head.q, head.k.T, core=HOPPER_K8)
        p = torch.exp2(products.float() * torch.tensor(0.25 * math.log2(math.e), dtype=torch.float32))
        torch.testing.assert_close(eight.o.double(), (p / p.sum()).double() @ head.v, rtol=1e-4, atol=1e-5)

    def test_other_instructions_are_refused(self) -> None:
        with pytest.raises(ValueError, match="mma_k must be one of 8, 16, got 4"):
            replace(preset("fa2"), mma_k=4)  # type: ignore[arg-type]


class TestCasts:
    def test_division_after_the_last_cast(self) -> None:
        """Two keys with equal scores: O_bar = 1 + (1 + 2**-7) is rounded before it is halved, in BF16 to even."""
        ones = torch.ones(2, 1).double()
        v = torch.tensor([[1.0], [1 + 2.0**-7]]).double()
        head = AttentionHead(ones[:1], ones, v, None, 1.0)
        before, after = (
            trace_row(replace(preset("fa2"), division=d), head, 0) for d in ("before-last-cast", "after-last-cast")
        )
        assert (float(before.unrounded), float(before.out)) == (1 + 2.0**-8, 1.0)
        assert float(after.unrounded) == 1.0
        v[1] = 1 + 3 * 2.0**-7  # 2 + 3/128 lies between 2 + 2/128 and 2 + 4/128, a tie
        tie = replace(head, v=v)
        assert float(trace_row(replace(preset("fa2"), division="after-last-cast"), tie, 0).unrounded) == 1 + 2.0**-6

    @pytest.mark.parametrize("scale", [2.0**-3, 2.0**8])
    def test_a_power_of_two_changes_no_bf16_probability(self, scale: float) -> None:
        head = make_head()
        plain, scaled = (emulate_head(r, head) for r in (preset("fa2"), replace(preset("fa2"), probs_scale=scale)))
        assert all(same(getattr(plain, n), getattr(scaled, n)) for n in OUTPUTS)

    def test_fp8_probabilities_need_their_scale(self) -> None:
        """E4M3 holds nothing between 0 and 2**-9; times 448 its range starts at 4e-6."""
        head = make_head(masking=Masking(), scale=0.5)
        truth = reference_head(head).out

        def run(scale: float) -> tuple[float, float]:
            recipe = replace(preset("fa2"), probs="e4m3", out="fp32", probs_scale=scale)
            steps = [step for row in range(0, 70, 10) for step in trace_row(recipe, head, row).ranges]
            lost = [((step.cast_probs == 0) & (step.probs > 0)).double().mean() for step in steps]
            return float(torch.stack(lost).mean()), float((emulate_head(recipe, head).o.double() - truth).norm())

        (lost, error), (lost_scaled, error_scaled) = run(1.0), run(256.0)
        assert lost_scaled < 0.8 * lost
        assert error_scaled < error
        # Above 448 the cast saturates: P_bar = 1 becomes 448 / 512.
        step = trace_row(replace(preset("fa2"), probs="e4m3", probs_scale=512.0), head, 0).ranges[0]
        assert float(step.cast_probs.max()) == 448 / 512

    def test_cast_row_sums_use_the_scale(self) -> None:
        recipe = replace(preset("fa2"), probs="e4m3", probs_scale=256.0, row_sum_of="cast-probs")
        for step in trace_row(recipe, make_head(), 40).ranges:
            assert step.row_sum == pytest.approx(float(step.cast_probs.sum()), rel=2**-20)

    def test_outputs_are_stored_in_their_formats(self) -> None:
        head = make_head()
        for fmt, dtype in {
            "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "bf16:up": torch.bfloat16,
            "e4m3": torch.float32, "bf16:random-sign": torch.float32,
        }.items():  # fmt: skip
            got = emulate_head(replace(preset("fa2"), out=fmt, dq=fmt), head)
            assert {getattr(got, n).dtype for n in ("o", "dq", "dk", "dv")} == {dtype}, fmt


MIXED = [
    preset("fa2"),
    replace(preset("fa2"), probs="e4m3", probs_scale=256.0),
    replace(preset("fa2"), scores="bf16"),
    replace(preset("fa2"), scores="bf16", backward_scores="as-forward"),
    replace(preset("fa2"), scores="bf16:stochastic", seed=1),
    replace(preset("fa2"), scores="bf16:stochastic", seed=2, backward_scores="as-forward"),
    replace(preset("fa2"), delta_from="dp"),
    replace(preset("fa2"), row_sum_of="cast-probs", lse_from="rounded-l", row_sum="bf16"),
    replace(preset("fa2"), lse_from="rounded-l", row_sum="fp16"),
    replace(preset("fa2"), accumulation="nvidia-tensor-core"),
    replace(preset("fa2"), accumulation="nvidia-tensor-core", accumulator="bf16", range_pv="bf16:up"),
    replace(preset("fa2"), softmax=SoftmaxRule("stale", threshold=4.0), schedule=Schedule(key_tile=16)),
    replace(preset("fa2"), softmax=SoftmaxRule("stabilised", beta=2.0)),
    replace(preset("fa2"), exp="polynomial", exp_degree=3),
    replace(preset("fa2"), exp="polynomial", exp_degree=4),
    replace(preset("fa2"), exp="exact", difference="bf16", row_max="bf16"),
    replace(preset("fa2"), gradient_accumulator="bf16", dprobs="bf16", backward_probs="fp32"),
    replace(preset("fa2"), arithmetic="fp64"),
    replace(preset("fa2"), **EXACT),
    replace(preset("fa2"), **EXACT | {"dq": "bf16", "delta": "bf16"}),
    replace(preset("fa2"), division="after-last-cast", row_sum_clamp=1e-3),
    replace(preset("fa2"), alpha="after-rounding", scores="fp16"),
    replace(preset("fa2"), schedule=Schedule(key_tile=32, split_keys=32)),
]  # fmt: skip


class TestSharing:
    @pytest.mark.parametrize("order", [1, -1], ids=["forwards", "backwards"])
    @pytest.mark.parametrize("mask", ["causal", "additive"])
    def test_side_by_side_is_one_by_one(self, order: int, mask: str) -> None:
        head = make_head(150, 150, some_masks(150, 150)[mask])
        recipes = MIXED[::order]
        parts: list[list[Any]] = [[] for _ in recipes]
        rows = []
        for block_rows, results in emulate_blocks(recipes, head):
            rows.append(block_rows)
            for mine, result in zip(parts, results, strict=True):
                mine.append(result)
        assert torch.equal(torch.cat(rows), torch.arange(150))
        for recipe, mine in zip(recipes, parts, strict=True):
            alone = emulate_head(recipe, head, key_gradients=False)
            for theirs, name in (("out", "o"), ("lse", "lse"), ("delta", "delta"), ("dq", "dq")):
                joined = torch.cat([getattr(result, theirs) for result in mine])
                assert torch.equal(joined, getattr(alone, name).to(joined.dtype)), (recipe.sites(), name)

    def test_guard_the_recipes_differ(self) -> None:
        """Or sharing too much could not be seen."""
        head = make_head()
        found = [emulate_head(recipe, head, key_gradients=False) for recipe in MIXED]
        outputs = [(f.o.double(), f.lse.double(), f.dq.double()) for f in found if f.dq is not None]
        for i, a in enumerate(outputs):
            for b in outputs[:i]:
                assert any(not torch.equal(x, y) for x, y in zip(a, b, strict=True)), MIXED[i].sites()

    def test_key_gradients_do_not_change_dq(self) -> None:
        """Where dQ is linear in delta it is computed in two products: to float64's precision the same."""
        head = make_head()
        for recipe in MIXED:
            one, other = (some(emulate_head(recipe, head, key_gradients=flag).dq).double() for flag in (True, False))
            tolerance = 1e-12 if recipe.arithmetic == "fp64" and recipe.dq == "fp32" else 0
            assert torch.allclose(one, other, rtol=tolerance, atol=1e-14)

    def test_query_blocks_must_agree(self) -> None:
        with pytest.raises(ValueError, match="query_block"):
            list(emulate_blocks([preset("fa2"), preset("efficient")], make_head()))

    def test_random_scores_are_drawn_once(self) -> None:
        """A backward "as-forward" meets the forward's scores: P sums to 1, so dV of constant dO does to the rows."""
        head = make_head(masking=Masking())
        ones = torch.ones_like(head.v[:1])
        head = replace(head, do=torch.ones(70, 24).double())
        recipe = replace(
            preset("fa2"), **EXACT | {"scores": "e5m2:stochastic"}, backward_scores="as-forward", schedule=SCHEDULES[0]
        )
        dv = some(emulate_head(recipe, head).dv)
        assert torch.allclose(dv.sum(0), 70 * ones[0], rtol=1e-12)
        # Guard: other scores than the forward's do not.
        other = some(emulate_head(replace(recipe, backward_scores="fp32"), head).dv)
        assert not torch.allclose(other.sum(0), 70 * ones[0], rtol=1e-3)


class TestRows:
    ROWS = torch.tensor([69, 3, 40, 3, 0, 41, 69, 31, 32])

    def check(self, recipe: Recipe, head: AttentionHead) -> None:
        whole = emulate_head(recipe, head, key_gradients=False).o
        assert same(emulate_rows(recipe, head, self.ROWS), whole[self.ROWS])
        assert same(emulate_rows(recipe, head, self.ROWS[:1]), whole[self.ROWS[:1]])

    @by_preset
    @pytest.mark.parametrize("model", ["exact", "nvidia-tensor-core"])
    def test_presets(self, name: str, model: str) -> None:
        """Unsorted rows, some of them twice, alone or together. (fp32 sums depend on the library's blocking.)"""
        self.check(replace(preset(name), accumulation=model), make_head())  # type: ignore[arg-type]

    @pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
    @pytest.mark.parametrize("mask", ["causal", "window", "bool", "positions", "additive"])
    def test_schedules(self, schedule: Schedule, mask: str) -> None:
        self.check(replace(preset("qiu2025"), **STEADY, schedule=schedule), make_head(masking=some_masks(70, 70)[mask]))

    @pytest.mark.parametrize("model", ["exact", "nvidia-tensor-core"])
    def test_recipes_side_by_side_have_the_bits_of_each_alone(self, model: Any) -> None:
        """Whatever they share: presets, two schedules with one tile, a random rounding of the scores."""
        recipes = [replace(preset(name), accumulation=model) for name in PRESETS]
        one = recipes[0]
        recipes += [replace(one, schedule=replace(one.schedule, order="ascending")), replace(one, row_sum="bf16")]
        recipes += [replace(one, scores="bf16:stochastic", seed=seed) for seed in (0, 1)]
        head = make_head()
        together = emulate_rows_of_several(recipes, head, self.ROWS)
        assert all(
            same(out, emulate_rows(recipe, head, self.ROWS)) for recipe, out in zip(recipes, together, strict=True)
        )
        # Random draws are told apart by their seed, and shared by nobody else.
        assert not same(together[-1], together[-2])
        assert not same(together[-1], together[0])

    def test_no_rows(self) -> None:
        assert emulate_rows(preset("fa2"), make_head(), torch.empty(0, dtype=torch.int64)).shape == (0, 24)


class TestTraces:
    @pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
    @pytest.mark.parametrize("name", ["fa2", "qiu2025", "qiu2025-stabilised", "lowp-row-sum"])
    def test_a_row_is_that_of_the_head(self, name: str, schedule: Schedule) -> None:
        head = make_head()
        recipe = replace(preset(name), **STEADY, schedule=schedule)
        whole = emulate_head(recipe, head, key_gradients=False)
        for row in (0, 33, 69):
            trace = trace_row(recipe, head, row)
            assert torch.equal(trace.out, whole.o[row].double())
            assert trace.lse == float(whole.lse[row])
            span = head.visible_span(slice(row - row % schedule.query_block, min(70, row + 1)))
            seen = sorted(j for step in trace.ranges for j in range(step.keys.start, step.keys.stop))
            assert seen[: span.stop - span.start] == list(range(span.start, span.stop))

    def test_steps_are_the_online_softmax(self) -> None:
        """Replayed by hand from the trace, in float64: l, O_bar and O."""
        head, row = make_head(), 69
        recipe = replace(preset("fa2"), **EXACT, schedule=SCHEDULES[0])
        trace = trace_row(recipe, head, row)
        row_sum, numerator, maximum = 0.0, torch.zeros(24).double(), -math.inf
        for step in trace.ranges:
            assert step.row_max == max(maximum, float(step.scores.max()))
            assert step.rescale == pytest.approx(math.exp((maximum - step.row_max) * head.scale), rel=1e-13)
            assert torch.allclose(step.probs, torch.exp((step.scores - step.row_max) * head.scale), rtol=1e-13)
            row_sum = row_sum * step.rescale + float(step.probs.sum())
            numerator = numerator * step.rescale + step.cast_probs @ head.v[step.keys]
            maximum = step.row_max
            assert step.row_sum == pytest.approx(row_sum, rel=1e-13)
        assert torch.allclose(trace.unrounded, numerator / row_sum, rtol=1e-12, atol=1e-14)

    @pytest.mark.parametrize("row", [-1, 70])
    def test_rows_that_are_not_there(self, row: int) -> None:
        with pytest.raises(IndexError, match="between 0 and 69"):
            trace_row(preset("fa2"), make_head(), row)


class TestGradientAccumulator:
    def test_key_gradients_round_per_query_block(self) -> None:
        """Each block's contribution, and the running sum, are rounded to BF16: replayed by hand."""
        head, size = make_head(masking=Masking()), 32
        recipe = replace(
            preset("fa2"), **EXACT | {"gradient_accumulator": "bf16"}, schedule=Schedule(query_block=size, key_tile=16)
        )
        got = emulate_head(recipe, head)

        def bf16(x: Tensor) -> Tensor:
            return Rounder(recipe, 0)("gradient_accumulator", x)

        dk, dv = torch.zeros_like(head.k), torch.zeros_like(head.v)
        for start in range(0, 70, size):
            rows = slice(start, min(start + size, 70))
            part = reference_head(replace(head, q=head.q[rows], do=None if head.do is None else head.do[rows]))
            dk, dv = bf16(dk + bf16(some(part.dk))), bf16(dv + bf16(some(part.dv)))
        # Near ties may go the other way: one BF16 spacing then, in less than one element in a thousand.
        for value, expected in ((some(got.dk), dk), (some(got.dv), dv)):
            assert float((value != expected).double().mean()) <= 1e-3

    @pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
    def test_query_gradients_round_per_key_range(self, schedule: Schedule) -> None:
        """In exact arithmetic ranges change nothing; in BF16 more ranges mean more roundings."""
        head = make_head(masking=Masking())
        truth = some(reference_head(head).dq)

        def error(tile: int) -> float:
            recipe = replace(
                preset("fa2"),
                **EXACT | {"gradient_accumulator": "bf16"},
                schedule=replace(schedule, key_tile=tile, split_keys=None),
            )
            dq = some(emulate_head(recipe, head).dq)
            return float((dq - truth).norm() / truth.norm())

        # One rounding to BF16 of each element: at most 2**-9 of it.
        assert 0 < error(128) <= 2.0**-9
        # Ten contributions and ten sums, each rounded by 2**-9 of something not larger than a few times dQ.
        assert error(128) < error(7) <= 20 * 3 * 2.0**-9

    def test_rows_done_in_parts_share_one_query_block(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """How many rows fit the working memory changes neither roundings nor their place."""
        from attn_diag.kernels import emulation

        head = make_head()
        recipe = replace(preset("qiu2025"), arithmetic="fp64", accumulation="exact")
        ends: list[Rounder] = []
        end_query_block: Callable[[KeyGradients, Rounder], None] = KeyGradients.end_query_block

        def counted(gradients: KeyGradients, rounder: Rounder) -> None:
            ends.append(rounder)
            end_query_block(gradients, rounder)

        monkeypatch.setattr(KeyGradients, "end_query_block", counted)
        whole = emulate_head(recipe, head)
        monkeypatch.setattr(emulation, "_CPU_ELEMENTS", 1)
        parts = emulate_head(recipe, head)
        assert len(ends) == 2
        assert all(same(getattr(whole, n), getattr(parts, n)) for n in OUTPUTS)


class TestRecipes:
    def test_json_round_trip(self) -> None:
        for recipe in [*PRESETS.values(), *MIXED]:
            again = Recipe.from_json(recipe.json)
            assert again == recipe
            assert again.json == recipe.json
            assert again.forward_json == recipe.forward_json

    def test_forward_json_forgets_names_and_the_backward_only(self) -> None:
        base = preset("fa2")
        assert replace(base, name="x", dq="fp32", delta_from="dp", dprobs="bf16").forward_json == base.forward_json
        for change in ({"seed": 1}, {"probs_scale": 2.0}, {"exp_degree": 3}, {"out": "fp16"}, {"arithmetic": "fp64"}):
            assert replace(base, **change).forward_json != base.forward_json

    @pytest.mark.parametrize("field", ["accumulation", "exp", "alpha", "delta_from", "dscores_from", "arithmetic"])
    def test_an_unknown_way_is_named(self, field: str) -> None:
        values = json.loads(preset("fa2").json) | {field: "nvidia"}
        with pytest.raises(ValueError, match=f"{field} must be one of .*, got 'nvidia'"):
            Recipe.from_json(json.dumps(values))

    def test_for_input_keeps_modes_and_other_formats(self) -> None:
        recipe = replace(preset("fa2"), scores="bf16:toward-zero", out="bf16:stochastic", probs="e4m3", row_max="e8m11")
        half = recipe.for_input("fp16")
        assert (half.input, half.scores, half.out) == ("fp16", "fp16:toward-zero", "fp16:stochastic")
        assert (half.dscores, half.probs, half.row_max, half.row_sum) == ("fp16", "e4m3", "e8m11", "fp32")
        assert half.for_input("bf16") == recipe

    @pytest.mark.parametrize("site", FORMATS)
    def test_an_unknown_format_names_its_site(self, site: str) -> None:
        with pytest.raises(ValueError, match=f"^{site}: a format is one of bf16.*'bf8'"):
            with_site(preset("fa2"), site, "bf8")

    def test_random_recipes_are_reproducible(self) -> None:
        head = make_head()
        recipe = replace(preset("fa2"), scores="bf16:stochastic", out="bf16:stochastic")
        first, again, other = (emulate_head(r, head) for r in (recipe, recipe, replace(recipe, seed=1)))
        assert all(same(getattr(first, n), getattr(again, n)) for n in OUTPUTS)
        assert not torch.equal(first.o, other.o)
