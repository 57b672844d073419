"""What the study of verdicts found wrong once stays right; its own bookkeeping of culprits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from planted_heads import inputs as planted_inputs
from study_verdicts import Judged, Place, inspected, matrix, of_place
from torch import Tensor
from verdicts.culprits import named
from verdicts.defects import DEFECTS
from verdicts.effects import Effect
from verdicts.inputs import Inputs, draw
from verdicts.kernels import HEALTHY, Hook, Outputs, Seen, attend

import attn_diag
from attn_diag.kernels import emulate_head, preset
from attn_diag.results.quality import Pattern, Quantity, QuantityVerdict

pytestmark = pytest.mark.slow


def judged(part: str, name: str, family: str, setting: str, dtype: str) -> list[Judged]:
    return of_place(Place(part, family, setting, dtype, 0, (name,)))


def test_one_row_without_its_rescaling_is_found_by_its_lse() -> None:
    """The row's O and dQ are 2.7 and 4.5 times as far off as any healthy kernel's there, all else as good."""
    for head in judged("defects", "rescale_missing_one_row", "near_uniform", "plain", "bf16"):
        assert head.said == "wrong"
        assert "row 300" in head.reason
        assert head.named
        assert not head.false


def test_sums_that_a_tensor_core_truncates_are_no_fault_of_several_sequences_either() -> None:
    """Each leaves it open whether dQ is above 1.25 times a well-rounded kernel's; together they said so."""
    for head in of_place(Place("healthy", "one_hot", "padded", "bf16", 1, ("truncated sums",))):
        assert head.said == "undecided"


def test_a_rounded_delta_shows_where_dq_must_be_zero() -> None:
    head, _ = judged("defects", "delta_16bit", "gaussian", "plain", "bf16")
    assert head.said == "undecided"
    assert "as where delta is rounded to the inputs' format; it should be zero in row 0" in head.reason
    assert not head.false


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


@pytest.mark.parametrize(("broken", "said"), [((0, 1), "worst in batch item "), ((1,), "batch item 1 alone: ")])
def test_a_sequence_is_alone_only_where_the_others_are_right(broken: tuple[int, ...], said: str) -> None:
    """O is 3 % too large; the gradients follow from it in the same sequences."""

    def scale(out: Tensor, seen: Seen) -> Tensor:
        factors = torch.ones(seen.inputs.q.shape[0])
        factors[list(broken)] = 1.03
        return (out.float() * factors[:, None, None, None]).to(out.dtype)

    x = draw("gaussian", "plain", t_q=192, batch=2, heads=1)
    found = inspected(x, attend(x, hooks={"o": scale}), without=("lse",))
    head = found.captures[0].observations[0].heads[0]
    words = [q.words for q in head.quantities if q.patterns]
    assert words
    assert all(said in one for one in words), words


def test_an_lse_that_is_harmless_is_not_called_right() -> None:
    """l sums the cast P: LSE is off by 1e-3, a thousand times what fp32 leaves, and dQ no worse for it."""
    x = draw("gaussian", "plain", t_q=192)
    found = inspected(x, attend(x, HEALTHY["l of cast P"]))
    lse = next(q for q in found.captures[0].observations[0].heads[0].quantities if q.quantity == "lse")
    assert lse.answer == "stated"
    assert "more than fp32 arithmetic makes" in lse.words
    plain = inspected(x, attend(x, HEALTHY["ascending 128"])).captures[0].observations[0].heads[0]
    assert next(q.answer for q in plain.quantities if q.quantity == "lse") == "good"


def test_a_huge_factor_is_not_explained_as_rounding() -> None:
    """V of another sequence in the forward: all rows alike, and no pattern that is known."""
    x = draw("gaussian", "full", t_q=256)
    other = draw("gaussian", "full", t_q=256, seed=1)
    kernel = HEALTHY["ascending 128"]
    out = 0.7 * attend(x, kernel).o.float() + 0.3 * attend(replace(x, v=other.v), kernel).o.float()
    found = attn_diag.inspect(x.q, x.k, x.v, o=out.bfloat16())
    for head in found.captures[0].observations[0].heads:
        (said,) = (q for q in head.quantities if q.quantity == "o")
        assert said.answer == "wrong" or "may be wrong mathematics" in said.words, said.words


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("defect", "family"),
    [
        ("qk_int8", "peaked"),
        ("qk_fp8", "one_hot"),
        ("bwd_lse_16bit", "peaked"),
        ("dp_16bit", "sinks"),
        ("ds_fp8", "sinks"),
    ],
)
def test_a_coarse_rounding_is_no_wrong_mathematics(defect: str, family: str, dtype: str) -> None:
    """It stands out in rows with large scores, beside others that are right: these rows are no place."""
    for head in judged("defects", defect, family, "plain", dtype):
        assert not {"wrong", "clean"} & set(head.labels), head.reason
        assert not head.false


def test_truncated_sums_are_not_accused_where_dp_and_delta_cancel() -> None:
    """Of one-hot rows dQ and dK are next to zero: what truncated sums leave is any number of times as much."""
    for seed, dtype in ((2, "bf16"), (7, "fp16")):
        place = Place("healthy", "one_hot", "loss_2_percent", dtype, seed, ("truncated sums",))
        for head in of_place(place):
            assert head.said not in ("wrong", "lossy"), head.reason


def pages(x: Inputs) -> Outputs:
    """V of keys 128-143 is that of keys 64-79: O is 40 % off in all rows alike."""
    return attend(x, hooks={"v": lambda v, _: torch.cat((v[:, :, :128], v[:, :, 64:80], v[:, :, 144:]), 2)})


@pytest.mark.parametrize("family", ["peaked", "low_rank", "outliers"])
def test_mixed_up_rows_are_no_coarse_rounding(family: str) -> None:
    """As flash-attn-4's dQ at D = 72 on an H200: 8-bit operands leave an error of that size in these heads."""
    for head in judged("defects", "dq_unrelated_then_zero", family, "d72", "bf16"):
        assert head.said == "wrong"
        assert "rows 0-63 are right; rows 64-447 are unrelated to the gradient; rows 448-511 are zero" in head.reason


def test_copies_of_a_sequence_make_no_factor_surer() -> None:
    """Eight copies of one sequence: truncated sums leave 1.34 times the error, which was "1.25 to 1.43"."""
    (head,) = of_place(Place("healthy", "one_hot", "copies", "bf16", 1, ("truncated sums",)))
    assert head.said == "undecided"


def test_what_no_kernel_of_8_bits_leaves_is_wrong() -> None:
    x = draw("gaussian", "full", t_q=256, t_k=256, heads=1)
    out = inspected(x, pages(x)).captures[0].observations[0].heads[0].quantities[0]
    assert (out.quantity, out.answer) == ("o", "wrong")
    assert "which no FP8 rounding makes" in out.words


@pytest.mark.parametrize("family", ["gaussian", "one_hot"])
def test_features_are_a_place_also_where_few_keys_carry_the_error(family: str) -> None:
    x = draw(family, "plain", t_q=256, t_k=256, heads=1)
    outputs = attend(x)
    outputs.dk[..., 32:48] = 0
    found = inspected(x, outputs).captures[0].observations[0].heads[0].quantities
    words = next(q.words for q in found if q.quantity == "dk" and q.answer == "wrong")
    assert "features 32-47" in words
    assert "are zero, as if never written; all other features are right" in words


@pytest.mark.parametrize("family", ["gaussian", "low_rank", "one_hot"])
def test_one_coarse_feature_is_not_lost_among_the_others(family: str) -> None:
    """It adds a few per cent to O's error over all features."""
    x = draw(family, "plain", t_q=256, t_k=256, heads=1)
    outputs = attend(x)
    coarse = outputs.o[..., 7].view(torch.int16) & -4
    outputs.o[..., 7] = coarse.view(torch.bfloat16)
    found = inspected(x, outputs).captures[0].observations[0].heads[0].quantities[0]
    assert found.answer != "good", found.words


BACKWARD: dict[str, tuple[dict[str, Hook], str]] = {
    "scale": (
        {"bwd_scale": lambda s, _: s * 0 + 80**-0.5},
        "(1/sqrt(80)) instead of 0.125 in the backward alone gives",
    ),
    "L in base 2": ({"bwd_lse": lambda lse, _: lse / math.log(2)}, "use L in base 2 as if it were natural"),
    "K one key off": ({"bwd_k": lambda k, _: k.roll(1, 2)}, "are what K of the key before in the backward alone gives"),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_a_wrong_backward_is_named(name: str) -> None:
    hooks, expected = BACKWARD[name]
    x = draw("gaussian", "full", t_q=256, t_k=256, heads=1)
    found = inspected(x, attend(x, hooks=hooks)).captures[0].observations[0].heads[0].quantities
    said = {q.quantity: q.words for q in found if q.answer == "wrong"}
    assert "dq" in said
    assert expected in said["dq"], said


def test_a_softcap_that_was_not_stated_is_named() -> None:
    """It moves large scores alone; the scale that fits best leaves half of the error, and explains nothing."""
    x = draw("peaked", "plain", t_q=256, t_k=256, heads=1)
    found = inspected(x, attend(replace(x, softcap=30.0)))
    said = found.captures[0].assumptions.message
    assert "softcap=30 fits" in said
    assert "scale=" not in said


@pytest.mark.parametrize("alpha", ["before-cast", "after-product"])
def test_a_kernel_whose_ds_multiplies_the_cast_p_is_told_by_its_site(alpha: str) -> None:
    """torch's efficient kernel casts alpha dS, others dS: with D = 72 these are other bits."""
    head = planted_inputs(width=72)
    change: dict[str, Any] = {"alpha_in_backward": alpha}
    made = emulate_head(replace(preset("efficient", "bf16", 72), **change), head)
    assert head.do is not None
    q, k, v, do = (t[None, None].bfloat16() for t in (head.q, head.k, head.v, head.do))
    outputs = {n: t[None, None].bfloat16() for n in ("o", "dq", "dk", "dv") if (t := getattr(made, n)) is not None}
    lse = made.lse[None, None].float()
    found = (
        attn_diag.inspect(q, k, v, do=do, causal="top-left", lse=lse, **outputs).captures[0].observations[0].heads[0]
    )
    sites = {verdict.quantity: (verdict.answer, verdict.site) for verdict in found.quantities}
    assert sites["dq"] == sites["dk"] == ("undecided", "dscores_from")
    assert sites["o"] == sites["dv"] == ("good", None)
