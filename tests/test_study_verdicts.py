"""What the study of verdicts found wrong once stays right; its own bookkeeping of culprits."""

from __future__ import annotations

import pytest
from study_verdicts import Judged, Place, matrix, of_place
from verdicts.culprits import named
from verdicts.defects import DEFECTS
from verdicts.effects import Effect

from attn_diag.results.quality import Pattern, Quantity, QuantityVerdict


def judged(part: str, name: str, family: str, setting: str, dtype: str) -> list[Judged]:
    return of_place(Place(part, family, setting, dtype, 0, (name,)))


def test_one_row_without_its_rescaling_is_found_by_its_lse() -> None:
    """The row's O and dQ are 2.7 and 4.5 times as far off as any healthy kernel's there, all else as good."""
    for head in judged("defects", "rescale_missing_one_row", "near_uniform", "plain", "bf16"):
        assert head.said == "wrong"
        assert "row 300" in head.reason
        assert head.named
        assert not head.false


def test_a_rounded_delta_shows_where_dq_must_be_zero() -> None:
    head, _ = judged("defects", "delta_16bit", "gaussian", "plain", "bf16")
    assert head.said == "undecided"
    assert "it should be zero in row 0: dP and delta do not cancel there, as where delta is rounded" in head.reason


@pytest.mark.parametrize("kernel", ["split 3 of 64", "stale maximum"])
def test_few_rows_with_gradient_in_few_directions_are_no_pattern(kernel: str) -> None:
    """Ten rows of dQ whose errors lie along P K: "all rows count key 94 twice" fitted them."""
    heads = judged("healthy", kernel, "low_rank", "loss_2_percent", "bf16")
    assert {head.said for head in heads} <= {"undecided", "ill_conditioned", "clean"}


def test_the_documented_factor_has_its_site_where_few_keys_have_the_error() -> None:
    for head in judged("healthy", "dS of cast P", "one_hot", "d32", "fp16"):
        assert head.said != "lossy" or "dS multiplies the cast P" in head.reason


def effect(quantity: Quantity, factor: float, rows: tuple[int, ...] = ()) -> Effect:
    return Effect(quantity, 0, 0, factor, 1.0, factor, 1.0, 0.0, 0, factor, rows, 1.0, 0.01, 1)


def said(quantity: Quantity, *patterns: Pattern) -> QuantityVerdict:
    return QuantityVerdict(quantity, "wrong", "", patterns=patterns)


def test_culprits() -> None:
    tile, off = DEFECTS["dq_last_tile_zero"], tuple(range(384, 512))
    did = [effect("dq", 30.0, off), effect("dk", 1.0)]
    right = named(tile, [said("dq", Pattern("zeros", "rows 384-511", rows=((384, 511),)))], did)
    assert (right.right, right.false) == (True, ())
    elsewhere = named(tile, [said("dq", Pattern("zeros", "rows 0-127", rows=((0, 127),)))], did)
    assert elsewhere.false == ("dq: place: rows 0-127",)
    other = named(tile, [said("dk"), said("dq", Pattern("scale", "all rows are what the scale 1 gives"))], did)
    assert other.false == ("dk is right but called wrong", "dq: scale: all rows are what the scale 1 gives")
    blamed = named(tile, [said("dq", Pattern("forward", "follow from O"))], did)
    assert blamed.false == ("dq: the forward is blamed",)


def test_the_matrix_counts_heads_by_effect_and_answer() -> None:
    heads = [*judged("defects", "dq_zero", "gaussian", "plain", "fp16")]
    assert matrix(heads) == {"above 1.5": {"wrong": 2}}
