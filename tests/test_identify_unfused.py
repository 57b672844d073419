"""``identify`` on attention that is not fused, healthy and with a fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attn_diag

HIDDEN = torch.ones(96, 96).triu(1).bool()


def inputs(dtype: torch.dtype, hot: float) -> list[Tensor]:
    """q, k, v."""
    g = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(1, 2, 96, 32, generator=g) for _ in range(3))
    return [x.to(dtype) for x in (hot * q, k, v)]


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Every step stored in 16 bits."""
    return (q @ k.mT * scale).masked_fill(HIDDEN, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hot", [1.0, 4.0])
def test_plain_torch_is_named(dtype: torch.dtype, hot: float) -> None:
    q, k, v = inputs(dtype, hot)
    found = attn_diag.identify(q, k, v, o=plain(q, k, v, 32**-0.5), causal="top-left")
    assert found.outcome == "unnamed"
    assert found.not_fused is not None
    assert found.not_fused.startswith("S and P are stored in the inputs' format")
    assert "attention that is not fused: S and P are stored" in found.report().splitlines()[0]


def test_attribute_and_what_if_know_it_too() -> None:
    """They said that no known recipe made this O, and called the nearest."""
    q, k, v = inputs(torch.bfloat16, 1.0)
    call: Any = {"o": plain(q, k, v, 32**-0.5), "do": torch.ones_like(q), "causal": True, "device": "cpu"}
    said = "its bits are those of attention that is not fused (S and P are stored in the inputs' format"
    for head in attn_diag.attribute(q, k, v, **call).heads:
        assert said in head.unfit
        assert head.reasons[0].startswith(head.unfit)
    assert said in attn_diag.what_if(q, k, v, only=["uncast-ds"], **call).unfit
    other = call | {"o": plain(q, k, v, 1.01 * 32**-0.5)}
    assert "not fused" not in attn_diag.attribute(q, k, v, **other).heads[0].unfit


def test_the_first_line_does_not_say_of_all_heads_what_is_known_of_one() -> None:
    """It said "H0-2: … its bits are those of attention that is not fused", and of "S and P" where P alone is cast."""
    q, k, v = (t[:, [0, 1, 1]] for t in inputs(torch.bfloat16, 1.0))
    o = plain(q, k, v, 32**-0.5).clone()
    o[0, 1, 30:40] *= 1.02
    o[0, 2] *= 1.02
    call: Any = {"o": o, "causal": True, "device": "cpu"}
    first, *rest = attn_diag.attribute(q, k, v, **call).report().split("\n\n")[0].split("Nothing is attributed")
    assert "H0: No recipe that is known here made this O: its bits are those of attention" in " ".join(first.split())
    assert "fa2 is a fused kernel's" in " ".join(first.split())
    assert "fp32" not in first
    assert "not fused" not in " ".join(rest)
    assert "H1-2: No recipe that is known here made this O (nearest in H1: " in " ".join(" ".join(rest).split())


def test_another_scale_is_not_taken_for_it() -> None:
    q, k, v = inputs(torch.bfloat16, 1.0)
    found = attn_diag.identify(q, k, v, o=plain(q, k, v, 1.01 * 32**-0.5), causal="top-left")
    assert (found.outcome, found.not_fused) == ("unknown", None)


def test_rows_that_are_wrong_are_named() -> None:
    q, k, v = inputs(torch.bfloat16, 1.0)
    o = plain(q, k, v, 32**-0.5)
    o[0, 0, 48:] = plain(q, k, v, 1.02 * 32**-0.5)[0, 0, 48:]
    found = attn_diag.identify(q, k, v, o=o, causal="top-left", head=0)
    assert found.outcome == "flawed"
    assert found.flaw is not None
    assert set(range(50, 95)) <= set(found.flaw.rows) <= set(range(48, 96))
    assert found.verdict.startswith("Attention that is not fused, but ")


@pytest.mark.parametrize("seed", [0, 9, 20, 49])
def test_few_elements_of_torchs_flash_kernel_on_a_cpu_are_no_place(seed: int) -> None:
    """Its exponential is another one; in a short head the few rows that it moves lie close together by chance."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = ((torch.randn(1, 1, 24, 32, generator=g) * by).bfloat16() for by in (4, 1, 1))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert attn_diag.identify(q, k, v, o=o).outcome != "flawed"
