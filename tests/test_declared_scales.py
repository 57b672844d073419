"""What a declared kernel does otherwise than its recipe: other scales, a stale amax, wider blocks, wrong factors."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from study_declared import DECLARED, WIDTH, Plan, inputs, late_of, run, to_fp8
from test_declared import inspected
from torch import Tensor

import attn_diag
from attn_diag.head.declared_beside import BesideRecipe
from attn_diag.head.declared_factors import Factors, FactorSearch
from attn_diag.head.declared_noise import dithered, drawn_noise
from attn_diag.head.declared_scales import ScaleSearch
from attn_diag.head.declared_stale import StaleSearch, Where
from attn_diag.kernels import emulate_head, preset
from attn_diag.reference import AttentionHead, Masking, reference_head


def search(name: str, out: Tensor, family: str, seed: int) -> BesideRecipe:
    """O of the first head of a kernel, beside the recipe."""
    return beside_of(name, out, inputs(family, seed))


def beside_of(name: str, out: Tensor, tensors: list[Tensor]) -> BesideRecipe:
    """The same of these q, k, v, dO."""
    q, k, v, _ = (x[0, 0].double() for x in tensors)
    head = AttentionHead(q, k, v, None, WIDTH**-0.5, Masking("top-left"))
    draws = [emulate_head(dithered(preset(name), n), head).o.double() for n in range(8)]
    made = emulate_head(preset(name), head).o.double()
    return BesideRecipe(preset(name), head, out[0, 0].double(), made, drawn_noise(draws))


@pytest.mark.parametrize("family", ["gaussian", "outliers"])
def test_powers_of_two_are_told_from_other_scales(family: str) -> None:
    for plan, said in (
        (Plan(scales="power"), "fa3-fp8 with scales of powers of two"),
        (Plan(), None),
        (Plan(margin=1.05), None),
        (Plan(fault="wrong descale"), None),
    ):
        found = ScaleSearch(search("fa3-fp8", run(plan, *inputs(family, 5))["o"], family, 5)).powers_of_two()
        assert (found.name if found else None) == said, plan


def clipped(q: Tensor, k: Tensor, v: Tensor, parts: dict[str, float]) -> Tensor:
    """FP8 attention whose scales reach for a part of amax alone, one head after the other."""
    q8, k8, v8 = (
        to_fp8(x.float(), x.float().abs().amax((2, 3), keepdim=True) * parts.get(name, 1.0) / 448)
        for name, x in (("q", q), ("k", k), ("v", v))
    )
    scores: Tensor = ((q8 @ k8.mT) * WIDTH**-0.5).masked_fill(
        torch.ones(q.shape[2], k.shape[2]).triu(1).bool(), -torch.inf
    )
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    cast = (p * 256).to(torch.float8_e4m3fn).float() / 256
    o: Tensor = cast @ v8 / p.sum(-1, keepdim=True)
    return o.bfloat16()


@pytest.mark.parametrize("parts", [{"k": 0.473, "v": 0.45}, {"q": 0.43}, {"v": 0.385}], ids=["k and v", "q", "v"])
def test_a_stale_amax_is_found_with_its_size(parts: dict[str, float]) -> None:
    q, k, v, _ = inputs("outliers", 2)
    found = StaleSearch(search("fa3-fp8", clipped(q, k, v, parts), "outliers", 2)).named()
    assert found == pytest.approx({(name, None): part for name, part in parts.items()}, rel=0.01)


def test_an_amax_that_is_too_large_is_found_with_its_size() -> None:
    """As a history of amax leaves it: nothing is clipped, and O's bits alone tell."""
    q, k, v, _ = inputs("outliers", 2)
    found = search("fa3-fp8", clipped(q, k, v, {"k": 1.37}), "outliers", 2)
    assert StaleSearch(found).named() == {}
    assert StaleSearch(found, wider=True).named() == pytest.approx({("k", None): 1.37}, rel=0.01)
    culprit = ScaleSearch(found).culprit()
    assert culprit is not None
    assert culprit.words == "the largest number of k is taken for 1.4 times what it is (a stale amax)"
    sound = search("fa3-fp8", clipped(q, k, v, {}), "outliers", 2)
    assert StaleSearch(sound, wider=True).named() == {}


_Q, _K, _V = torch.randn(3, 128, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
HEAD = AttentionHead(_Q, _K, _V, None, 0.25, Masking("top-left"))


def factors_of(
    by_key: Tensor | float = 1.0, by_row: Tensor | float = 1.0, out: Tensor | float = 1.0, limit: float = 0.02,
    of_lse: float | None = None,
) -> Factors:  # fmt: skip
    """What is said of an O whose scores and which itself are multiplied by these, beside noise of 2 % of O.

    ``of_lse``: what the scores of L are multiplied by, which has 0.1 of noise; None: L was not captured.
    """
    true, made = reference_head(HEAD), reference_head(replace(HEAD, k=HEAD.k * by_key, q=HEAD.q * by_row))
    off = made.out * out - true.out
    generator = torch.Generator().manual_seed(1)
    noise = 0.02 * off.new_empty(17, *off.shape).normal_(generator=generator)
    lse = None
    if of_lse is not None:
        drawn = 0.1 * off.new_empty(17, 128).normal_(generator=generator)
        lse = reference_head(replace(HEAD, k=HEAD.k * of_lse)).lse - true.lse + drawn[0], drawn[1:]
    search = FactorSearch(HEAD, off + noise[0], noise[1:], lse, torch.arange(128), limit, {"q": None, "k": None})
    return search.named(suspect=True)


def test_a_factor_is_not_named_beside_another_fault() -> None:
    assert factors_of().words == ""
    assert factors_of(out=1.07).words.startswith("it is multiplied by 1.07 throughout")
    assert factors_of(1.4).words.startswith("its scores are multiplied by 1.4 throughout")
    assert factors_of(1.4, out=1.05).words.startswith("it is multiplied by 1.05 throughout")
    rows = torch.ones(128, 1, dtype=torch.float64)
    rows[100:102] = 0.0  # two rows that hold nothing
    assert factors_of(out=rows).words == ""
    assert factors_of(1.07, out=rows).words == ""


def test_a_factor_of_scores_that_lse_denies_is_not_named() -> None:
    assert factors_of(1.1, of_lse=1.1).words.startswith("its scores are multiplied by 1.1 throughout")
    assert factors_of(1.1, of_lse=1.0).words == ""


def test_a_factor_of_some_keys_or_rows_is_not_one_throughout() -> None:
    some = torch.ones(128, 1, dtype=torch.float64)
    some[64:128] = 1.2
    found = factors_of(some)
    assert re.match(r"its scores are multiplied by 1\.(19|2|21)\d? in keys 64-127, as by a scale of k", found.words)
    assert not found.throughout
    assert re.match(
        r"its scores are multiplied by 1\.\d+ in rows 64-127, as by a scale of q", factors_of(by_row=some).words
    )


def test_blocks_that_differ_but_are_each_within_what_may_be_have_no_words() -> None:
    some = torch.full((128, 1), 1.15, dtype=torch.float64)
    some[64:128] = 0.85
    assert re.search("in keys 64-127", factors_of(some).words)
    assert factors_of(some, limit=0.16) == Factors("", throughout=False)


def test_keys_that_some_rows_leave_out_are_no_scale_of_theirs() -> None:
    diagnosis = inspected(Plan("nvfp4", "dropped key block"), "peaked", 203, declared="nvfp4-attention")
    (o,) = [one for head in diagnosis.heads for one in head.quantities if one.quantity == "o"]
    assert o.answer == "wrong"
    assert "scale" not in o.words


def test_sound_and_otherwise_broken_kernels_have_none() -> None:
    for plan in (Plan(), Plan(margin=1.05), Plan(fault="wrong descale of v"), Plan(fault="dropped key block")):
        beside = search("fa3-fp8", run(plan, *inputs("peaked", 3))["o"], "peaked", 3)
        assert StaleSearch(beside).named() == StaleSearch(beside).named_blocks() == {}, plan


@pytest.mark.parametrize(
    ("plan", "declared", "said"),
    [
        (Plan(fault="E5M2"), "fa3-fp8", "v is in e5m2, not in e4m3"),
        (Plan("int8", "shared too widely"), "sage2", "k has a scale for the head, not for 64 rows"),
        (Plan("int8-fp16", "rounded toward zero"), "sage1", "k is rounded toward zero, not to the nearest"),
        (Plan("nvfp4", "shared too widely"), "nvfp4-attention", "k has a scale for a row, not for 16 of a row"),
    ],
    ids=["E5M2", "INT8 shared", "INT8 truncated", "NVFP4 shared"],
)
def test_other_blocks_and_roundings_are_named(plan: Plan, declared: str, said: str) -> None:
    found = ScaleSearch(search(declared, run(plan, *inputs("gaussian", 0))["o"], "gaussian", 0)).culprit()
    assert found is not None
    assert found.words == said


@pytest.mark.parametrize(
    ("plan", "family", "said"),
    [
        (Plan("int8", "one group shared too widely"), "late keys", "k in keys 64-127 has the scale of the head"),
        (
            Plan("int8", "future keys in a scale"),
            "one huge key",
            "k has a scale for 128 rows, not for 64 rows, "
            "or k has scales of 64 rows and the block after it, or all after it (later ones)",
        ),
        (Plan("int8", "running amax"), "one huge key", "k has scales of the largest number so far (a running amax)"),
        (Plan("int8", "amax of the group before"), "gaussian", "k has the scale of the block before"),
        (Plan("int8-fp16", "one group's scale doubled"), "gaussian",
         "k in keys 64-127 is multiplied back with twice its scale"),
        (Plan("int8", "codes that wrap"), "gaussian",
         "the largest number of k is taken for 0.7 times what it is, and what lies beyond wraps around"),
        (Plan("int8", "scale of another feature"), "gaussian",
         "v is divided by the scale of the feature before and multiplied back with its own"),
        (Plan("int8", "scale of the first feature"), "gaussian",
         "v is multiplied back with the scale of the first feature throughout"),
        (Plan("int8", "k's scales for v"), "outliers in v",
         "v has k's scales, or v has the scale of the first feature throughout"),
        (Plan("mxfp8", "all of q's scales halved"), "gaussian",
         "the largest number of q is taken for 0.49 times what it is, and what lies beyond is clipped (a stale amax), "
         "or all scales of q are half of what they should be, and what lies beyond is clipped"),
        (Plan("nvfp4", "transposed scales"), "gaussian", "k is multiplied back with its scales transposed"),
    ],
    ids=lambda x: x.fault if isinstance(x, Plan) else "",
)  # fmt: skip
def test_scales_of_others_are_named(plan: Plan, family: str, said: str) -> None:
    tensors = inputs(family, 3, late_of(plan))
    beside = beside_of(DECLARED[plan.form], run(plan, *tensors)["o"], tensors)
    found = ScaleSearch(beside).culprit()
    assert found is not None
    assert found.words == said


def test_a_scale_that_few_rows_feel_is_named_by_these() -> None:
    """Of rows 64-127; all others attend to larger keys."""
    tensors = inputs("outliers", 300, 8.0)
    made = run(Plan("int8", "one group shared too widely"), *tensors)
    named = {**dict(zip(("q", "k", "v", "do"), tensors, strict=True)), **made}
    first: dict[str, Any] = {name: x[:, :1] for name, x in named.items()}
    found = attn_diag.inspect(**first, causal=True, device="cpu", declared="sage2")
    (o,) = [one for head in found.heads for one in head.quantities if one.quantity == "o"]
    assert o.answer == "lossy"
    assert "k in keys 64-127 has the scale of the head" in o.words


@pytest.mark.parametrize(
    ("declared", "parts"),
    [("sage1", {("k", 1): 0.5}), ("sage2-ada", {("q", 1): 0.55, ("k", 2): 0.7})],
    ids=["k", "q and k by threads"],
)
def test_the_blocks_whose_amax_alone_is_stale_are_found(declared: str, parts: dict[Where, float]) -> None:
    recipe = preset(declared)
    q, k, v, _ = (x[0, 0].double() for x in inputs("gaussian", 7))
    head = AttentionHead(q, k, v, None, WIDTH**-0.5, Masking("top-left"))
    sound = search(declared, torch.zeros(1, 1, *q.shape), "gaussian", 7)
    broken = replace(recipe, **StaleSearch(sound).changed(parts))  # type: ignore[arg-type]
    found = StaleSearch(replace(sound, out=emulate_head(broken, head).o.double(), worst=True))
    assert found.named() == {}
    assert found.named_blocks() == pytest.approx(parts, rel=0.01)


@pytest.mark.parametrize(
    ("family", "parts", "said"),
    [
        ("one huge key", [0.8, 0.8, 0.8, 0.5], {("k", None): 0.8, ("k", 3): 0.5}),
        ("outliers", [0.9, 0.5, 0.7, 0.8], {("k", 0): 0.9, ("k", 1): 0.5, ("k", 2): 0.7, ("k", 3): 0.8}),
    ],
)
def test_blocks_with_parts_of_their_own(family: str, parts: list[float], said: dict[Where, float]) -> None:
    sound = search("sage2", torch.zeros(1, 1, 256, WIDTH), family, 41)
    broken = StaleSearch(sound).changed({("k", block): part for block, part in enumerate(parts)})
    found = StaleSearch(replace(sound, out=emulate_head(replace(sound.recipe, **broken), sound.head).o.double()))  # type: ignore[arg-type]
    if not (named := found.named()):
        named = replace(found, beside=replace(found.beside, worst=True)).named_blocks()
    assert named == pytest.approx(said, rel=0.01)


def test_what_is_said() -> None:
    found = StaleSearch(search("sage2", torch.zeros(1, 1, 256, WIDTH), "gaussian", 0))
    said = "the largest number of k is taken for 0.6 times what it is, and what lies beyond is clipped (a stale amax)"
    assert found.words({("k", None): 0.6}) == said
    assert found.words({("k", None): 0.8, ("k", 0): 0.5}).startswith(
        "the largest number of k in keys 0-63 is taken for 0.5 times what it is and k elsewhere is taken for 0.8 times"
    )
    assert found.words({("k", 1): 0.5, ("q", 3): 0.6, ("v", 5): 0.7}) == (
        "the largest number of k in keys 64-127 is taken for 0.5 times what it is, q in rows 96-127 is taken for "
        "0.6 times what it is and v in feature 5 is taken for 0.7 times what it is, and what lies beyond is clipped "
        "(a stale amax)"
    )


def test_inspect_names_it() -> None:
    diagnosis = inspected(Plan("int8", "stale amax"), "gaussian", 0, declared="sage2")
    (o,) = [q for head in diagnosis.heads for q in head.quantities if q.quantity == "o"]
    assert o.answer == "lossy"
    assert "the largest number of k is taken for 0.6 times what it is" in o.words
    assert o.patterns[0].kind == "scale"


def test_what_follows_from_a_proven_cause_needs_no_interval() -> None:
    """One row carries what a stale amax makes of LSE and the gradients."""
    found = inspected(Plan("int8-fp16", "one group of q clipped"), "outlying features", 720, declared="sage1")
    assert found.labels == {"lossy"}
    for q in found.heads[0].quantities:
        if q.quantity in ("lse", "dq", "dk", "dv"):
            assert (q.answer, q.patterns[0].kind, q.factor_ci95) == ("lossy", "scale", None)
            assert "to decide" not in q.words


def test_what_is_not_as_declared_is_told_first_though_nothing_is_the_worse_for_it() -> None:
    found = inspected(Plan("int8", "future keys in a scale"), "gaussian", 900, declared="sage2")
    assert not found.labels & {"wrong", "lossy", "biased"}
    said = re.sub(r"\s+", " ", found.report(80))
    assert "Not as declared: O's bits in the only head are those of a kernel where k has scales of 64 rows and" in said
    assert "Not as declared" not in inspected(Plan("int8"), "gaussian", 900, declared="sage2").report(80)


def test_blocks_of_zeros_have_any_scale() -> None:
    q, k, v, do = inputs("gaussian", 900)
    q[:, :, 32:64] = 0
    made = run(Plan("int8", "scale of another group"), q, k, v, do)["o"]
    other = ScaleSearch(beside_of("sage2", made, [q, k, v, do])).culprit()
    assert other is not None
