"""An O that is finite where its inputs hold NaN was not made of these inputs; where a mask hides the NaN, it may be."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attn_diag
from attn_diag.results.diagnosis import Diagnosis

MADE = {n: torch.randn(1, 2, 128, 64, generator=torch.Generator().manual_seed(at)).bfloat16()
        for at, n in enumerate("qkv")}  # fmt: skip


def damaged(name: str, *where: int | slice, by: float = torch.nan) -> dict[str, Any]:
    found = MADE[name].clone()
    found[where] = by
    return {**MADE, name: found}


def attention(given: dict[str, Any]) -> Tensor:
    return scaled_dot_product_attention(given["q"], given["k"], given["v"], is_causal=True)


def rows(found: Diagnosis) -> list[int]:
    """How many rows of each head are finite though they cannot be."""
    of_o = [next(q for q in h.quantities if q.quantity == "o") for _, _, h in found.ranked() if h.quantities]
    told = [re.search(r"O is finite in (\d+) rows? whose own q", q.words) for q in of_o if q.answer == "wrong"]
    return sorted(int(t[1]) for t in told if t)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (damaged("q", 0, 1, 5, 3), [1]),
        (damaged("k", 0, slice(None), slice(100, None)), [28, 28]),
        (damaged("k", 0, 0, 0, 7), [128]),
        (damaged("v", 0, 1, 120), [8]),
        (damaged("v", 0, 1, 120, 9, by=torch.inf), [8]),
    ],
    ids=["q", "k of the last keys", "the first key", "v", "Inf in v"],
)
def test_inputs_that_were_damaged_after_o_was_made_are_told(given: dict[str, Any], expected: list[int]) -> None:
    assert rows(attn_diag.inspect(**given, o=attention(MADE), causal=True)) == expected
    # The kernel's own answer to these is not finite where that counts.
    assert rows(attn_diag.inspect(**given, o=attention(given), causal=True)) == []


def test_what_no_row_sees_may_hold_nan() -> None:
    given = damaged("k", 0, slice(None), slice(100, None))
    seen = (torch.arange(128) < 100)[None, None, None]
    lowest = torch.finfo(torch.bfloat16).min
    for mask in (seen, torch.where(seen, 0.0, lowest).bfloat16()):
        o = scaled_dot_product_attention(MADE["q"], MADE["k"], MADE["v"], attn_mask=mask)
        found = attn_diag.inspect(**given, o=o, mask=mask)
        assert rows(found) == []


def test_an_infinite_score_may_leave_a_key_out() -> None:
    given = damaged("k", 0, 0, 100, by=-torch.inf)
    assert rows(attn_diag.inspect(**given, o=attention(MADE), causal=True)) == []
