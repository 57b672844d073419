"""Which kernel made an O, from a few rows: the shallow end of ``identify``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import some

from attn_diag.captures.capture import Capture
from attn_diag.head import by_kernels, recipe_search
from attn_diag.head.baseline import recognise
from attn_diag.head.by_kernels import WORTH, recognise_by_kernels, worth_kernels
from attn_diag.kernels import EmulatedHead, Recipe, RecipeNotSupportedError, Schedule, emulate_head, preset, triton_head
from attn_diag.reference import AttentionHead, Masking

CPU = torch.device("cpu")


def made_by(recipe: Recipe, *, length: int = 512, spread: float = 1.0, seed: int = 1) -> Capture:
    """A causal head of D = 16 as the recipe returns it; ``spread``: of the scores."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(length, 16, generator=generator).bfloat16() for _ in range(3))
    q = q * spread
    head = AttentionHead(q.double(), k.double(), v.double(), None, 0.25, Masking("top-left"))
    o = emulate_head(replace(recipe, out="bf16"), head).o
    tensors = {name: t[None, None] for name, t in {"q": q, "k": k, "v": v, "o": o}.items()}
    return Capture.from_tensors(tensors, causal="top-left", scale=0.25)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The recipes that are run, and on how many rows."""
    seen: list[tuple[str, int]] = []
    run = recipe_search.SearchedHead.run

    def counted(self: Any, recipes: Iterable[Recipe], rows: torch.Tensor, **options: Any) -> Any:
        chosen = list(recipes)
        seen.extend((recipe.name, len(rows)) for recipe in chosen)
        return run(self, chosen, rows, **options)

    monkeypatch.setattr(recipe_search.SearchedHead, "run", counted)
    return seen


@pytest.mark.parametrize("name", ["fa2", "cudnn", "flex"])
def test_an_order_of_the_keys_is_told_from_others(name: str, runs: list[tuple[str, int]]) -> None:
    found = some(recognise(made_by(preset(name, "bf16", 16)), "observed", 0, 0))
    assert (found.name, found.agreement) == (name, 1.0)
    rows = [count for recipe, count in runs if recipe == "flex"]
    # Its own order costs most: a few rows are looked at first, and may rule it out.
    assert rows == {"fa2": [8], "cudnn": [8], "flex": [8, 512]}[name]


def test_an_order_that_hardly_differs_is_run_on_all_rows(runs: list[tuple[str, int]]) -> None:
    """Scores next to 0: no sum is rescaled, and two orders have all bits."""
    found = some(recognise(made_by(preset("fa2", "bf16", 16), length=256, spread=0.0), "observed", 0, 0))
    assert "fa2" in found.name
    assert "flex" in found.name
    assert [count for recipe, count in runs if recipe == "flex"] == [8, 256]


def by_emulation(recipe: Recipe, heads: Sequence[AttentionHead], _: torch.Tensor | None = None) -> list[EmulatedHead]:
    """In place of the kernels, with their sums."""
    return [emulate_head(replace(recipe, accumulation="nvidia-tensor-core"), head) for head in heads]


def looked_at(capture: Capture) -> by_kernels.LookedAt:
    return recognise_by_kernels([(capture, "observed", 0, 0)], CPU)[0]


@pytest.mark.parametrize("name", ["fa2", "cudnn", "flex"])
def test_kernels_recognise_what_emulation_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_head, "run_heads", by_emulation)
    captures = [made_by(preset(name, "bf16", 16), length=256, seed=seed) for seed in (1, 2)]
    found = [one.recognised for one in recognise_by_kernels([(c, "observed", 0, 0) for c in captures], CPU)]
    assert [some(one).name for one in found] == [some(recognise(c, "observed", 0, 0)).name for c in captures]
    assert all(name in some(one).name for one in found)


def test_kernels_run_each_recipe_once_for_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    def counted(recipe: Recipe, heads: Sequence[AttentionHead], _: torch.Tensor | None) -> list[EmulatedHead]:
        seen.append((recipe.name, len(heads)))
        return by_emulation(recipe, heads)

    monkeypatch.setattr(triton_head, "run_heads", counted)
    captures = [made_by(preset("cudnn", "bf16", 16), length=256, seed=seed) for seed in (1, 2, 3)]
    recognise_by_kernels([(c, "observed", 0, 0) for c in captures], CPU)
    assert sorted(seen) == [(name, 3) for name in ("cudnn", "efficient", "fa2", "flex", "lowp-row-sum")]


def test_of_a_long_head_kernels_make_what_is_compared_and_more_when_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were not asked for hold nothing that could be compared."""
    asked: list[int] = []

    def in_part(recipe: Recipe, heads: Sequence[AttentionHead], rows: torch.Tensor | None) -> list[EmulatedHead]:
        made = by_emulation(recipe, heads)
        if rows is not None:
            asked.append(len(rows))
            for one in made:
                one.o[[i for i in range(len(one.o)) if i not in rows.tolist()]] = torch.nan
        return made

    monkeypatch.setattr(triton_head, "run_heads", in_part)
    monkeypatch.setattr(by_kernels, "_FEW_OF", 2)
    capture = made_by(preset("fa2", "bf16", 16), length=1024)
    monkeypatch.setattr("attn_diag.head.baseline._SCORES", 2**16)
    assert "fa2" in some(looked_at(capture).recognised).name
    # Of "flex", whose order of keys has another beginning in each block, eight of one block too; it has one of them.
    assert set(asked) == {64, 7}
    # A row of another's: what tells its extent asks for rows beside those compared, of the recipe that fits.
    o = capture.tensors["o"][...].clone()
    o[..., 600:640, :] = o[..., 100:140, :]
    flawed = replace(capture, tensors={**capture.tensors, "o": o})
    told = looked_at(flawed).recognised
    expected = recognise(flawed, "observed", 0, 0)
    assert (told and (told.name, told.flaw)) == (expected and (expected.name, expected.flaw))


def test_a_second_head_of_a_shape_asks_for_no_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a few rows are others; where all rows are compared, the few of a late block come from those."""
    asked: list[bool] = []

    def noted(recipe: Recipe, heads: Sequence[AttentionHead], rows: torch.Tensor | None) -> list[EmulatedHead]:
        asked.append(rows is not None)
        return by_emulation(recipe, heads)

    monkeypatch.setattr(triton_head, "run_heads", noted)
    monkeypatch.setattr(by_kernels, "_FEW_OF", 8)
    capture = made_by(preset("fa2", "bf16", 16), length=256)
    for _ in range(2):
        assert "fa2" in some(looked_at(capture).recognised).name
    assert asked
    assert not any(asked)


def test_kernels_recognise_split_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FlashAttention-2 splits six tiles of 256 keys into two."""
    monkeypatch.setattr(triton_head, "run_heads", by_emulation)
    split = Schedule(128, 256, "descending", 768)
    capture = made_by(replace(preset("fa2", "bf16", 16), schedule=split), length=1536, spread=2.0)
    found = some(looked_at(capture).recognised)
    assert (found.name, found.recipe.schedule) == ("fa2", split)


def test_kernels_with_other_sums_are_recognised_by_a_tensor_core_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the GPU's sums miss too many bits of long rows, those that come near are emulated."""
    monkeypatch.setattr(triton_head, "run_heads", lambda recipe, heads, _: [emulate_head(recipe, h) for h in heads])
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, 64, generator=generator).bfloat16() for n in (32, 8192, 8192))
    head = AttentionHead(q.double(), k.double(), v.double(), None, 0.125, Masking("none"))
    (made,) = by_emulation(preset("fa2", "bf16", 64), [head])
    tensors = {"q": q, "k": k, "v": v, "o": made.o.bfloat16()}
    capture = Capture.from_tensors({n: t[None, None] for n, t in tensors.items()}, causal="none")
    found = some(looked_at(capture).recognised)
    assert (found.cut_off, found.agreement) == (True, 1.0)
    assert "fa2" in found.name
    monkeypatch.setattr(by_kernels, "EMULATED_KEYS", 4096)
    # Emulations of as many keys would tell no more of a kernel that comes near.
    assert looked_at(capture) == (None, True)


def test_what_no_kernel_with_fp32_scores_made_is_left_to_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_head, "run_heads", by_emulation)
    coarse = made_by(preset("bf16-scores", "bf16", 16), length=256)
    assert looked_at(coarse) == (None, False)
    monkeypatch.setattr(by_kernels, "EMULATED_KEYS", 128)
    assert looked_at(coarse) == (None, False)
    assert some(recognise(coarse, "observed", 0, 0)).name == "bf16-scores"


def test_what_the_kernels_do_not_take_is_left_to_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> list[EmulatedHead]:
        raise RecipeNotSupportedError("no mask")

    monkeypatch.setattr(triton_head, "run_heads", refused)
    assert looked_at(made_by(preset("fa2", "bf16", 16))) == (None, False)


def test_kernels_are_not_worth_compiling_for_a_short_head() -> None:
    pytest.importorskip("triton")
    capture = made_by(preset("fa2", "bf16", 16))
    places = [(capture, "observed", 0, 0)]
    assert not worth_kernels(places, torch.device("cuda"))
    assert worth_kernels(places * (WORTH // 512**2), torch.device("cuda"))
    assert not worth_kernels(places * WORTH, CPU)


def test_nan_in_a_row_that_sees_no_key_stops_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(length, 16, generator=generator).bfloat16() for length in (700, 200, 200))
    head = AttentionHead(q.double(), k.double(), v.double(), None, 0.25, Masking("top-left", window=(100, 0)))
    o = emulate_head(preset("fa2", "bf16", 16), head).o
    o[650] = torch.nan
    tensors = {name: t[None, None] for name, t in {"q": q, "k": k, "v": v, "o": o}.items()}
    found = some(
        recognise(Capture.from_tensors(tensors, causal="top-left", scale=0.25, window=(100, 0)), "observed", 0, 0)
    )
    assert "fa2" in found.name
    assert found.flaw.startswith("wrong in row 650: 16 elements, NaN or Inf among them, off its bits")
