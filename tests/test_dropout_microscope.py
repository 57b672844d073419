"""The microscope under dropout: the walk is the emulation's bits, and its sites' contributions carry 1 / (1 - p)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from planted_dropouts import captured, computed, drawn

import attn_diag
from attn_diag.analyses.microscopy.closed_form import closed_form
from attn_diag.kernels import Recipe, emulate_head, preset
from attn_diag.reference import AttentionHead, Dropout, Masking

CAUSAL = Masking("top-left")
# All in fp32 but for one site of the sum.
PLAIN = replace(preset("fa2", "bf16", 32), probs="fp32", out="fp32")
RECIPES = {
    "accumulator": replace(PLAIN, name="accumulator", accumulator="bf16"),
    "range_pv": replace(PLAIN, name="range_pv", range_pv="bf16"),
    "numerator": replace(PLAIN, name="numerator", out="bf16", division="after-last-cast"),
    "out": replace(PLAIN, name="out", out="bf16"),
}


def head_of(p: float, seed: int = 0, rows: int = 160) -> AttentionHead:
    call = drawn(seed, p=p, batch=1, heads=1, kv_heads=1, rows=rows)
    q, k, v = (x[0, 0].double() for x in (call.q, call.k, call.v))
    return AttentionHead(q, k, v, None, 32**-0.5, CAUSAL, dropout=Dropout(call.kept[0, 0], p))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_sites_of_the_sum_make_all_of_the_error(recipe: Recipe, p: float) -> None:
    head = head_of(p)
    for row, feature in ((3, 1), (90, 7), (159, 31)):
        found = attn_diag.microscope(head, recipe=recipe, row=row, feature=feature, whole_head=False, device="cpu")
        assert found.bit_equal
        # What is left are fp32's roundings of 160 terms.
        assert abs(found.before_sum) < 160 * 2.0**-24 * (1 + abs(found.reference)) / (1 - p)
        assert abs(found.error) > 8 * abs(found.before_sum) or abs(found.error) < found.ulp / 8


def test_a_dropped_key_adds_nothing_and_counts_in_the_row_sum() -> None:
    head = head_of(0.5)
    assert head.dropout is not None
    found = attn_diag.microscope(head, recipe="fa2", row=40, feature=2, whole_head=False, device="cpu")
    for term in found.terms:
        dropped = not bool(head.dropout.kept[40, term.key])
        assert (term.cast_probs == 0) == dropped or term.probs < 1e-30
    assert found.keys == 41


@pytest.mark.parametrize("recipe", ["fa2", "bf16-forward"])
def test_a_captured_element_is_walked_bit_for_bit(recipe: str) -> None:
    call = drawn(1, batch=1, rows=96)
    capture = captured(call, computed(call, CAUSAL, recipe=recipe), causal="top-left")
    for row in (0, 17, 95):
        found: Any = attn_diag.microscope(capture, recipe=recipe, row=row, feature=5, device="cpu")
        assert found.bit_equal
        assert found.walked == found.observed


def test_the_closed_form_knows_ties_and_swamping_where_they_are() -> None:
    """p = 1/2 keeps powers of two in the format: O = 2 V / l of one key of P_bar = 1 and a tiny rest."""
    head = head_of(0.5, seed=4)
    assert head.dropout is not None
    q = torch.zeros_like(head.q)
    k = torch.zeros_like(head.k)
    q[:, 0], k[0, 0] = 8.0, 8.0
    kept = torch.ones_like(head.dropout.kept)
    one = replace(head, q=q, k=k, dropout=Dropout(kept, 0.5))
    recipe = preset("fa2", "bf16", 32)
    observed = emulate_head(recipe, one).o
    found = closed_form(one, recipe=recipe, observed=observed, device="cpu")
    assert found.totals.elements["swamped"] > 0.9 * 159 * 32
    assert found.totals.o.share is not None
    assert found.totals.o.share > 0.99
    # With the hot key dropped nothing is swamped by it.
    kept[:, 0] = False
    dropped = replace(one, dropout=Dropout(kept, 0.5))
    found = closed_form(dropped, recipe=recipe, observed=emulate_head(recipe, dropped).o, device="cpu")
    assert found.totals.elements["swamped"] == 0
