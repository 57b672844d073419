"""What a forward rounds whose kernel has no name here, told by ``inspect`` from the bits of a lossy O."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag.kernels import Schedule, emulate_head, preset
from attn_diag.reference import AttentionHead, Masking
from attn_diag.results.quality import QuantityVerdict


def made(sites: tuple[str, ...], seeds: tuple[int, ...], length: int = 160) -> list[Tensor]:
    """q, k, v and O [1, H, T, D], of a fused kernel that rounds these sites to BF16, of tiles of 32 keys."""
    changed: dict[str, Any] = dict.fromkeys(sites, "bf16")
    recipe = replace(preset("fa2", "bf16", 64), schedule=Schedule(64, 32, "ascending"), **changed)
    heads = []
    for seed in seeds:
        torch.manual_seed(seed)
        q, k, v = (torch.randn(length, 64).bfloat16() for _ in range(3))
        head = AttentionHead(q.double(), k.double(), v.double(), None, 0.125, Masking("none"))
        heads.append((q, k, v, emulate_head(recipe, head).o.bfloat16()))
    return [torch.stack(x)[None] for x in zip(*heads, strict=True)]


def judged(q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> list[QuantityVerdict]:
    found = attn_diag.inspect(q, k, v, o=o)
    return [head.quantities[0] for head in found.captures[0].observations[0].heads if head.head is not None]


@pytest.mark.parametrize("sites", [("row_sum",), ("accumulator",), ("row_sum", "accumulator")])
def test_sums_in_16_bits_are_named(sites: tuple[str, ...]) -> None:
    (o, *_) = judged(*made(sites, (1,)))
    assert o.answer == "lossy"
    said = {"row_sum": "row sum", "accumulator": "O's accumulator"}
    assert f"its bits show {', '.join(said[site] for site in sites)} in BF16" in o.words


def test_of_roundings_that_the_bits_do_not_tell_apart_none_is_named_alone() -> None:
    """Of one tile P V is all of O; 'O's accumulator' was said, and then that no rounding makes it."""
    (o,) = judged(*made(("range_pv",), (1,), length=30))
    assert o.site == "PV of a range (or O's accumulator) in BF16"


def test_only_of_heads_that_have_the_bits() -> None:
    q, k, v, o = made(("row_sum",), (1, 2))
    torch.manual_seed(0)
    # As large an error that is no such rounding.
    o[0, 1] = (made((), (2,))[3][0, 0].float() * (1 + 0.004 * torch.randn(160, 1))).bfloat16()
    first, second = judged(q, k, v, o)
    assert (first.answer, second.answer) == ("lossy", "lossy")
    assert "row sum" in first.words
    assert second.site is None
