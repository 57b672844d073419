"""Emulated recipes against real kernels' outputs, bit for bit, and the rules that recipes and schedules keep."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders import equal_bits, some, stored

from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.selection import Selection
from attn_diag.kernels import (
    PRESETS,
    Recipe,
    RecipeNotSupportedError,
    Schedule,
    SoftmaxRule,
    emulate_head,
    preset,
)
from attn_diag.reference import AttentionHead, Masking, reference_head

SPLIT = Schedule(key_tile=256, split_keys=256)


def agreement(name: str, observation: str, recipe: Recipe, output: str = "o") -> float:
    """Fraction of bit-equal elements over all heads."""
    return float(equal_bits(stored(name), observation, recipe, output).double().mean())


@pytest.mark.parametrize(
    ("name", "observation", "recipe", "least"),
    [
        ("kernels_gauss_T512", "paper", preset("qiu2025"), 0.999),
        ("kernels_pair_T512", "paper", preset("qiu2025"), 0.999),
        ("kernels_gauss_T512", "stable", preset("qiu2025-stabilised"), 0.999),
        ("kernels_pair_T512", "stable", preset("qiu2025-stabilised"), 0.999),
        ("kernels_gauss_T512", "flash", replace(preset("fa2"), schedule=SPLIT), 0.998),
        ("kernels_pair_T512", "flash", replace(preset("fa2"), schedule=SPLIT), 0.999),
        ("kernels_gauss_T512", "flex", preset("flex"), 0.998),
        ("kernels_pair_T512", "flex", preset("flex"), 0.999),
        ("pair_T256", "flash", preset("fa2"), 0.999),
        ("pair_T256", "efficient", preset("efficient"), 0.997),
        ("pair_T256", "cudnn", preset("cudnn"), 0.997),
        ("gqa_T200", "observed", preset("cudnn"), 0.998),
        ("gpt2_step731_L2H4", "observed", preset("cudnn"), 0.999),
        ("gpt2_step637_L2H6", "observed", preset("cudnn"), 0.999),
        ("failing_step500_L2H7", "observed", preset("bf16-forward"), 0.999),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_real_outputs_are_reproduced(name: str, observation: str, recipe: Recipe, least: float) -> None:
    assert agreement(name, observation, recipe) >= least


def test_wrong_schedule_is_told_apart() -> None:
    assert agreement("gqa_T200", "observed", preset("fa2")) < 0.95


def test_backward_of_a_fused_kernel_is_reproduced() -> None:
    assert agreement("gqa_T200", "observed", preset("cudnn"), "dq") > 0.99


@pytest.mark.parametrize("name", ["kernels_gauss_T512", "kernels_pair_T512"])
@pytest.mark.parametrize(("observation", "recipe"), [("paper", "qiu2025"), ("stable", "qiu2025-stabilised")])
def test_the_backward_of_the_papers_code_is_reproduced(name: str, observation: str, recipe: str) -> None:
    """dQ bit for bit in 99 %, and its error's size and mean within the uncertainty of the captured ones."""
    assert agreement(name, observation, preset(recipe), "dq") > 0.99
    diagnosis = inspect_captures([stored(name)], selection=Selection(observation), recipes=[recipe], device="cpu")
    captured, emulated = (o.pooled for o in diagnosis.captures[0].observations)
    size, expected = (some(head.propagation.dq).relative_error for head in (emulated, captured))
    assert size == pytest.approx(expected, rel=1e-3)
    low, high = some(some(captured.bias.dq).ci95)
    assert low < some(some(emulated.bias.dq).mean) < high


def make_head(dtype: torch.dtype = torch.bfloat16, softcap: float | None = None) -> AttentionHead:
    generator = torch.Generator().manual_seed(2)
    q, k, v, do = (torch.randn(n, 80, generator=generator).to(dtype).double() for n in (77, 333, 333, 77))
    return AttentionHead(q, k, v, do, 80**-0.5, Masking("bottom-right", window=(200, 0)), softcap)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_error_is_of_the_order_of_the_format(name: str, fmt: str, softcap: float | None) -> None:
    """Every recipe computes attention: within a few roundings of 2^-9 (BF16) or 2^-12 (FP16) in norm."""
    dtype, unit = (torch.bfloat16, 2.0**-9) if fmt == "bf16" else (torch.float16, 2.0**-12)
    head = make_head(dtype, softcap)
    recipe = preset(name, fmt)
    got, truth = emulate_head(recipe, head), reference_head(head)
    coarse = 8 if recipe.scores != "fp32" else 1
    for output in ("o", "dq", "dk", "dv"):
        expected = getattr(truth, output if output != "o" else "out")
        value = getattr(got, output)
        assert value.dtype == dtype
        assert (value.double() - expected).norm() <= 3 * coarse * unit * expected.norm(), output
    # Summing the cast P_bar moves l, relatively, by at most one rounding of P_bar.
    cast = unit if recipe.row_sum_of == "cast-probs" else 0.0
    assert (got.lse.double() - truth.lse).abs().max() <= (0.2 if coarse > 1 else 1e-5 + cast)


@pytest.mark.parametrize(
    "schedule", [Schedule(), Schedule(order="descending"), Schedule(order="diagonal-first"), SPLIT], ids=str
)
@pytest.mark.parametrize("keys", [slice(0, 1), slice(0, 333), slice(100, 300), slice(256, 512)], ids=str)
def test_schedules_cover_every_key_once(schedule: Schedule, keys: slice) -> None:
    seen = [j for tiles in schedule.ranges(keys) for tile in tiles for j in range(tile.start, tile.stop)]
    assert sorted(seen) == list(range(keys.start, keys.stop))


def test_orders() -> None:
    def starts(order: str) -> list[int]:
        schedule = Schedule(key_tile=10, order=order)  # type: ignore[arg-type]
        return [t.start for tiles in schedule.ranges(slice(0, 35)) for t in tiles]

    assert starts("ascending") == [0, 10, 20, 30]
    assert starts("descending") == [30, 20, 10, 0]
    assert starts("diagonal-first") == [30, 0, 10, 20]


@pytest.mark.parametrize(
    "change",
    [{"exp": "polynomial"}, {"softmax": SoftmaxRule("stale")}, {"softmax": SoftmaxRule("stabilised")}],
    ids=["exp", "stale", "stabilised"],
)
def test_an_incomplete_recipe_is_named(change: dict[str, object]) -> None:
    recipe = replace(preset("fa2"), **change)  # type: ignore[arg-type]
    with pytest.raises(RecipeNotSupportedError, match=next(iter(change))):
        emulate_head(recipe, make_head())


def test_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match="fa2, cudnn, efficient, flex, qiu2025"):
        preset("fa9")


def test_recipe_as_a_table() -> None:
    sites = preset("qiu2025").sites()
    assert sites["scores"] == "bf16"
    assert sites["schedule"] == "512 rows x 512 keys, ascending"
    assert preset("qiu2025").table().row_count == len(sites)


def test_for_input_changes_only_the_input_format() -> None:
    half = preset("qiu2025", "fp16")
    assert (half.input, half.scores, half.row_sum, half.exp) == ("fp16", "fp16", "fp16", "exact")
    assert preset("fa2", "fp16").scores == "fp32"


@pytest.mark.parametrize("name", ["fa2", "cudnn", "efficient", "flex"])
def test_a_mask_of_the_lowest_number_hides_whole_tiles_as_infinity_does(name: str) -> None:
    """Hugging Face's masks: times log2(e) that number left fp32, and rows whose first tile it hides were NaN."""
    g = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(200, 64, generator=g, dtype=torch.float64).bfloat16().double() for _ in range(4))
    made = []
    for lowest in (torch.finfo(torch.bfloat16).min, -torch.inf):
        mask = torch.full((200, 200), lowest, dtype=torch.bfloat16).triu(1)
        made.append(emulate_head(preset(name), AttentionHead(q, k, v, do, 0.125, Masking(mask=mask))))
    for output in ("o", "lse", "dq", "dk", "dv"):
        assert torch.equal(getattr(made[0], output), getattr(made[1], output)), output
