"""What a GPU does otherwise, on a CPU: many heads, many query blocks and all key ranges at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from builders import some
from torch import Tensor

import attn_diag
from attn_diag.analyses.attribution import attribute as attribution
from attn_diag.analyses.attribution import variants
from attn_diag.captures.capture import Capture
from attn_diag.head import by_kernels, emulated_together, fidelity
from attn_diag.head.identification import identify_head
from attn_diag.kernels import (
    Recipe,
    Schedule,
    SoftmaxRule,
    emulate_blocks,
    emulate_head,
    emulate_stack,
    emulation,
    emulation_forward,
    emulation_ranges,
    preset,
    triton_head,
)
from attn_diag.kernels.emulation_operands import HeadLike
from attn_diag.kernels.formats import parse, round_to
from attn_diag.kernels.triton_carried import carried
from attn_diag.reference import AttentionHead, Masking
from attn_diag.results.several import Several

FIELDS = ("out", "lse", "delta", "dq")
FA2 = preset("fa2", "bf16", 32)
COARSE = replace(preset("bf16-forward", "bf16", 32), schedule=replace(FA2.schedule, order="ascending", key_tile=64))
RECIPES = {
    "fa2": FA2,
    "exact": replace(FA2, arithmetic="fp64", accumulation="exact", probs="fp32", out="fp32", dq="fp32", dscores="fp32"),
    "coarse": COARSE,
    "stale, fused": replace(
        FA2, rescaling="fused", softmax=SoftmaxRule("stale", threshold=0.5), schedule=Schedule(128, 32, "ascending")
    ),
    "stale, clamped": replace(COARSE, softmax=SoftmaxRule("stale", threshold=0.5), row_sum_clamp=0.5),
    "stabilised": replace(COARSE, softmax=SoftmaxRule("stabilised", beta=2.0)),
    "splits": replace(FA2, schedule=replace(FA2.schedule, key_tile=64, split_keys=128, order="ascending")),
    "splits from behind": replace(COARSE, row_sum_clamp=0.5, schedule=Schedule(128, 32, "descending", 128)),
    "splits of a tile": replace(FA2, rescaling="fused", schedule=Schedule(128, 64, "ascending", 64)),
    "splits within tiles": replace(FA2, schedule=Schedule(128, 64, "ascending", 96)),
    "splits, diagonal first": replace(FA2, rescaling="fused", schedule=Schedule(128, 32, "diagonal-first", 128)),
    "diagonal first": replace(FA2, schedule=replace(FA2.schedule, key_tile=64, order="diagonal-first")),
    "fused": replace(FA2, rescaling="fused", schedule=replace(FA2.schedule, key_tile=32, order="ascending")),
    "clamped": replace(COARSE, row_sum_clamp=0.5, row_sum="bf16", lse_from="rounded-l"),
    "cast sums": replace(FA2, row_sum_of="cast-probs", rescaling="fused", row_sum="bf16", lse_from="rounded-l"),
}
MASKS = {"causal": Masking("top-left"), "none": Masking("none"), "window": Masking("top-left", window=(75, 0))}


def heads(count: int, length: int = 333, masking: Masking = MASKS["causal"], seed: int = 0) -> list[AttentionHead]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(count, length, 32, generator=generator).bfloat16().double() for _ in range(4)]
    return [AttentionHead(4 * q, k, v, do, 32**-0.5, masking) for q, k, v, do in zip(*made, strict=True)]


def joined(recipe: Recipe, head: HeadLike) -> dict[str, Tensor]:
    parts = [made for _, (made,) in emulate_blocks([recipe], head)]
    return {name: torch.cat([getattr(part, name) for part in parts]) for name in FIELDS}


def assert_as_good(found: Tensor, expected: Tensor) -> None:
    """But for the order in which products add: few elements differ, by an ulp of fp32 or one rounding across."""
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 2**-5 * float(expected.abs().max())
    assert float((found - expected).norm()) <= 1e-4 * float(expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("shape", "ordered"), [((1, 5, 3, 7), False), ((2, 3, 9, 17, 16), True), ((3, 2, 1, 130), False)]
)
def test_sums_carried_in_one_launch_have_the_bits_of_the_walk(
    device: str, shape: tuple[int, ...], dtype: torch.dtype, *, ordered: bool
) -> None:
    *many, splits, steps, rows, width = shape
    generator = torch.Generator().manual_seed(0)
    factors = torch.rand(*many, splits, rows, steps, generator=generator, dtype=dtype).to(device)
    terms = torch.randn(*many, splits * steps, rows, width, generator=generator, dtype=dtype).to(device)
    terms[..., 0, 0], factors[..., 1] = -0.0, 0.0
    places = torch.arange(splits * steps).view(splits, steps)
    if not ordered:
        places = places[:, torch.randperm(steps, generator=generator)]
    total = torch.zeros(*many, splits, rows, width, dtype=dtype, device=device)
    for step in range(steps):
        total = total.mul_(factors[..., step, None]).add_(terms[..., places[:, step].tolist(), :, :])
    found = carried(factors, terms, None if ordered else places.to(device))
    assert torch.equal(found, total)
    assert torch.equal(found.signbit(), total.signbit())


@pytest.mark.parametrize("name", RECIPES)
def test_rows_of_ranges_carried_in_one_launch_have_the_same_bits(device: str, name: str) -> None:
    every, found = [], []
    for head in heads(2):
        q, k, v, do = (t.to(device) for t in (head.q, head.k, head.v, some(head.do)))
        every.append(replace(head, q=q, k=k, v=v, do=do))
    for one_launch in (False, True):
        with (
            patch.object(emulation, "launches", lambda _: True),
            patch.object(emulation_forward, "launches", lambda _: True),
            patch.object(emulation_ranges, "compiles_for", lambda _, yes=one_launch: yes),
        ):
            found.append([made for _, (made,) in emulate_stack([RECIPES[name]], every)])
    for one, other in zip(*found, strict=True):
        for field in FIELDS:
            assert torch.equal(getattr(one, field), getattr(other, field))


@pytest.mark.parametrize("name", RECIPES)
def test_heads_together_have_what_each_has_alone(name: str) -> None:
    every = heads(3)
    parts = [made for _, (made,) in emulate_stack([RECIPES[name]], every)]
    for i, head in enumerate(every):
        alone = joined(RECIPES[name], head)
        for field in FIELDS:
            assert_as_good(torch.cat([getattr(part, field)[i] for part in parts]), alone[field])


@pytest.mark.parametrize("mode", ["stochastic", "random-sign", "toward-zero", "up"])
def test_heads_together_draw_what_each_draws_alone(mode: str) -> None:
    rounding = parse(f"bf16:{mode}")
    x = (
        torch.randn(3, 20, 7, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 1e39, 1e-42])[:, None, None]
    )
    found = round_to(x, rounding, 5, heads=1)
    torch.testing.assert_close(found, torch.stack([round_to(t, rounding, 5) for t in x]), rtol=0, atol=0)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", RECIPES)
def test_all_ranges_at_once_are_the_walk(name: str, mask: str) -> None:
    (head,) = heads(1, masking=MASKS[mask], seed=1)
    walked = joined(RECIPES[name], head)
    with patch.object(emulation_forward, "launches", lambda _: True):
        found = joined(RECIPES[name], head)
    for field in FIELDS:
        assert_as_good(found[field], walked[field])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", RECIPES)
def test_rows_of_many_query_blocks_are_those_of_each(name: str, mask: str) -> None:
    (head,) = heads(1, masking=MASKS[mask], seed=2)
    recipe = RECIPES[name]
    with (
        patch.object(emulation, "launches", lambda _: True),
        patch.object(emulation_forward, "launches", lambda _: True),
    ):
        found, blocks = joined(recipe, head), len(list(emulation.places_of([recipe], head)))
    assert blocks == (3 if "diagonal first" in name else 1)
    for field in FIELDS:
        assert_as_good(found[field], joined(recipe, head)[field])


def test_a_tensor_core_counts_keys_from_the_first_that_a_query_block_sees() -> None:
    (head,) = heads(1, masking=MASKS["window"], seed=2)
    recipe = replace(RECIPES["fused"], schedule=Schedule(), accumulation="nvidia-tensor-core", pv_sums="fp16")
    with (
        patch.object(emulation, "launches", lambda _: True),
        patch.object(emulation_forward, "launches", lambda _: True),
    ):
        found = joined(recipe, head)
    for field, expected in joined(recipe, head).items():
        assert torch.equal(found[field], expected)


def capture(seed: int, count: int = 2, length: int = 200) -> Capture:
    every = heads(count, length, seed=seed)
    made = [emulate_head(FA2, head, key_gradients=False) for head in every]
    tensors = {n: torch.stack([getattr(h, n) for h in every])[None].bfloat16() for n in ("q", "k", "v", "do")}
    tensors |= {n: torch.stack([getattr(m, n) for m in made])[None] for n in ("o", "dq")}
    generator = torch.Generator().manual_seed(seed)
    return Capture.from_tensors(tensors | {"x": torch.randn(1, length, 48, generator=generator)}, causal="top-left")


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Heads are joined, and the kernels emulated."""

    def run_heads(recipe: Recipe, some: Sequence[HeadLike], _: Any) -> list[Any]:
        return [emulate_head(recipe, head, key_gradients=False) for head in some]

    with ExitStack() as stack:
        for module, name, value in (
            (variants, "joins", lambda _: True),
            (fidelity, "joins", lambda _: True),
            (attribution, "joins", lambda _: True),
            (triton_head, "run_heads", run_heads),
            (by_kernels, "worth_kernels", lambda places, _: bool(places)),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


def test_attribute_of_many_heads_at_once_is_that_of_each() -> None:
    captures = [capture(0, length=150), capture(1, length=90)]
    each = attn_diag.attribute(captures, device="cpu")
    with as_on_a_gpu():
        joint = attn_diag.attribute(captures, device="cpu")
    assert isinstance(each, Several)
    assert isinstance(joint, Several)
    for one, other in zip(each, joint, strict=True):
        assert [h.head for h in one.heads] == [h.head for h in other.heads]
        for a, b in zip(one.heads, other.heads, strict=True):
            assert b.recipe == a.recipe.replace("recognised", "recognised by its Triton kernel")
            assert (a.recipe_json, a.guilty, a.biased, a.runs) == (b.recipe_json, b.guilty, b.biased, b.runs)
            for quantity, total in a.totals.items():
                assert b.totals[quantity].error == pytest.approx(total.error, rel=1e-4)
                for s, t in zip(a.sites, b.sites, strict=True):
                    assert t.effects[quantity].share == pytest.approx(s.effects[quantity].share, abs=1e-4)


def test_the_published_kernels_identify_what_the_search_does() -> None:
    found = capture(3)
    places = [(found, "observed", 0, head) for head in range(2)]
    with as_on_a_gpu():
        by_own = by_kernels.identify_by_kernels(places, torch.device("cpu"))
    for place, known in zip(places, by_own, strict=True):
        searched = identify_head(*place, torch.device("cpu"))
        assert known is not None
        assert searched is not None
        assert (known.recipe, known.name, known.outcome) == (searched.recipe, searched.name, searched.outcome)
        assert [m.agreement for m in known.backward] == pytest.approx(
            [m.agreement for m in searched.backward], abs=1e-3
        )


def test_identify_says_that_the_kernels_were_run_and_what_was_not_tried() -> None:
    with as_on_a_gpu():
        found = attn_diag.identify(capture(4), device="cpu")
    assert found.backend.startswith("triton")
    assert any("were not tried" in note for note in found.notes)
    assert "fa2" in found.recipes


def test_identify_searches_where_no_published_kernel_has_every_bit() -> None:
    other = capture(5)
    o = other.tensors["o"][:].clone()
    o[0, 0, 7, 3] *= 1.25
    broken = replace(other, tensors={**other.tensors, "o": o})
    with as_on_a_gpu():
        found = attn_diag.identify(broken, device="cpu")
    assert found.backend == "emulation on cpu"
    assert found.outcome == "flawed"


@pytest.mark.parametrize("place", ["emulate_stack", "run_heads", "outputs_together"])
def test_heads_are_taken_by_halves_where_memory_does_not_suffice(place: str) -> None:
    """Each of the heads alone fits; two together never do."""
    found = capture(6, count=3, length=90)
    each = attn_diag.attribute(found, device="cpu")
    refused = []

    def at_most_one(run: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(recipes: Any, some: Sequence[Any], *rows: Any) -> Any:
            if len(some) > 1:
                refused.append(len(some))
                raise torch.OutOfMemoryError("CUDA out of memory")
            return run(recipes, some, *rows)

        return wrapped

    with as_on_a_gpu(), ExitStack() as stack:
        for module in (triton_head, variants, fidelity, by_kernels):
            if hasattr(module, place):
                stack.enter_context(patch.object(module, place, at_most_one(getattr(module, place))))
        parts = attn_diag.attribute(found, device="cpu")
    assert refused
    assert ("memory did not suffice" in parts.backend) == (place != "run_heads")
    assert [(h.head, h.recipe_json, h.guilty, h.biased) for h in parts.heads] == [
        (h.head, h.recipe_json, h.guilty, h.biased) for h in each.heads
    ]


def test_memory_that_does_not_suffice_for_one_head_is_an_error() -> None:
    def never(_: Sequence[int]) -> list[int]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        emulated_together.in_parts(never, [1, 2, 3])


def test_rows_are_taken_by_halves_where_memory_does_not_suffice() -> None:
    every, sizes, run = heads(2), list[int](), emulation._run_block

    def at_most_fifty(recipes: Any, block: Any, gradients: Any) -> Any:
        sizes.append(len(block.rows))
        if len(block.rows) > 50:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(recipes, block, gradients)

    expected = joined(FA2, every[1])
    with patch.object(emulation, "_run_block", at_most_fifty):
        alone = joined(FA2, every[1])
        rows, parts = zip(*((rows, made) for rows, (made,) in emulate_stack([FA2], every)), strict=True)
    assert max(sizes) > 50
    assert torch.cat(rows).tolist() == list(range(333))
    for field in FIELDS:
        assert_as_good(alone[field], expected[field])
        assert_as_good(torch.cat([getattr(part, field)[1] for part in parts]), expected[field])


def test_no_recipes_are_run_on_a_gpu() -> None:
    with patch.object(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**34)):
        assert emulation._on_cuda(torch.device("cuda"), 0) >= emulation._on_cuda(torch.device("cuda"), 8)
    emulation._on_cuda.cache_clear()
