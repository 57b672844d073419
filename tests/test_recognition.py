"""Which kernel made an O, from a few rows: the shallow end of ``identify``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import some

from attn_diag.captures.capture import Capture
from attn_diag.head import recipe_search
from attn_diag.head.baseline import recognise
from attn_diag.kernels import Recipe, emulate_head, preset
from attn_diag.reference import AttentionHead, Masking


def made_by(recipe: Recipe, *, length: int = 512, spread: float = 1.0) -> Capture:
    """A causal head of D = 16 as the recipe returns it; ``spread``: of the scores."""
    generator = torch.Generator().manual_seed(1)
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
    # Its own order costs most: where another is about right a few rows are looked at first, and may rule it out.
    assert rows == {"fa2": [8], "cudnn": [8, 512], "flex": [512]}[name]


def test_an_order_that_hardly_differs_is_run_on_all_rows(runs: list[tuple[str, int]]) -> None:
    """Scores next to 0: no sum is rescaled, and two orders have all bits."""
    found = some(recognise(made_by(preset("fa2", "bf16", 16), length=256, spread=0.0), "observed", 0, 0))
    assert "fa2" in found.name
    assert "flex" in found.name
    assert [count for recipe, count in runs if recipe == "flex"] == [8, 256]
