"""q and k that RoPE turned by other angles in one run: named; angles that are merely rounded: rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag import Capture
from attn_diag.results.mismatch import Mismatch

LENGTH, WIDTH = 128, 32


def rotated(x: Tensor, *, base: float = 1e4, angles: torch.dtype = torch.float32, inside: bool = False) -> Tensor:
    """x [B, H, T, D] as RoPE turns it; ``angles``: the format of positions times frequencies; ``inside``: products in
    BF16, of a cosine and sine in BF16."""
    frequencies = base ** -(torch.arange(0, WIDTH, 2) / WIDTH)
    turned = (torch.arange(LENGTH)[:, None].to(angles) * frequencies.to(angles)).float()
    cos, sin = (
        torch.cat([t, t], 1).to(torch.bfloat16 if inside else torch.float32) for t in (turned.cos(), turned.sin())
    )
    x = x.bfloat16() if inside else x
    half = torch.cat([-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]], -1)
    return (x * cos + half * sin).bfloat16()


def run(heads: int = 2, seed: int = 0, **other: Any) -> Mismatch:
    draw = torch.Generator().manual_seed(seed)
    q, k, v, x = (torch.randn(1, heads, LENGTH, WIDTH, generator=draw).bfloat16() for _ in range(4))
    sides = []
    for options in ({}, other):
        one, two = rotated(q.float(), **options), rotated(k.float(), **options)
        o = torch.nn.functional.scaled_dot_product_attention(one, two, v, is_causal=True)
        tensors = {"q": one, "k": two, "v": v, "o": o, "x": x.transpose(1, 2).flatten(2)}
        sides.append(Capture.from_tensors(tensors, causal="top-left", layer=0))
    return attn_diag.mismatch(*sides)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("other", [{"angles": torch.bfloat16}, {"base": 5e5}], ids=["bf16", "base"])
def test_other_angles_are_named(other: dict[str, Any], heads: int) -> None:
    """Angles in BF16 were "nothing beyond rounding" (O 9 % apart), another base "the projection is another"."""
    found = run(heads, **other)
    assert [(c.kind, c.label, c.place) for c in found.causes] == [("position", "semantics", "projection")]
    assert "RoPE's angles are others (another base, scaling or precision, other positions, or turned" in found.headline
    assert "): q and k of rollout are train's" in found.headline


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_rotation_that_is_rounded_is_rounding(heads: int, seed: int) -> None:
    assert not run(heads, seed, inside=True).causes
