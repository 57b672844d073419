"""Which scales a declared kernel has: powers of two are told from the recipe's, and a stale amax is named."""

from __future__ import annotations

import re

import pytest
import torch
from study_declared import WIDTH, Plan, inputs, run, to_fp8
from test_declared import inspected
from torch import Tensor

from attn_diag.head.declared import dithered, drawn_noise, wrong_factors
from attn_diag.head.declared_scales import ScaleSearch, stale_words
from attn_diag.kernels import emulate_head, preset
from attn_diag.reference import AttentionHead, Masking


def search(name: str, out: Tensor, family: str, seed: int) -> ScaleSearch:
    """O of the first head of a kernel, beside the recipe."""
    q, k, v, _ = (x[0, 0].double() for x in inputs(family, seed))
    head = AttentionHead(q, k, v, None, WIDTH**-0.5, Masking("top-left"))
    draws = [emulate_head(dithered(preset(name), n), head).o.double() for n in range(8)]
    return ScaleSearch(preset(name), head, out[0, 0].double(), drawn_noise(draws))


@pytest.mark.parametrize("family", ["gaussian", "outliers"])
def test_powers_of_two_are_told_from_other_scales(family: str) -> None:
    for plan, said in (
        (Plan(scales="power"), "fa3-fp8 with scales of powers of two"),
        (Plan(), None),
        (Plan(margin=1.05), None),
        (Plan(fault="wrong descale"), None),
    ):
        found = search("fa3-fp8", run(plan, *inputs(family, 5))["o"], family, 5).powers_of_two()
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
    found = search("fa3-fp8", clipped(q, k, v, parts), "outliers", 2).stale()
    assert found == pytest.approx(parts, rel=0.01)


def factors_of(off: Tensor) -> str:
    """What is said of an O that is ``off`` [64, 32] that of a recipe with noise of 1, beside numbers of size 4."""
    g = torch.Generator().manual_seed(0)
    out, by_scale, noise = (
        torch.randn(*s, generator=g, dtype=torch.float64) for s in ((64, 32), (64, 32), (16, 64, 32))
    )
    return wrong_factors([(off + 0.3 * noise[0], 4 * out, 4 * by_scale, noise)], 0.02)


def test_a_factor_is_not_named_beside_another_fault() -> None:
    g = torch.Generator().manual_seed(0)
    out, by_scale = (4 * torch.randn(64, 32, generator=g, dtype=torch.float64) for _ in range(2))
    assert factors_of(0.07 * out).startswith("it is multiplied by 1.07 throughout")
    assert factors_of(0.07 * by_scale).startswith("its scores are multiplied by 1.07 throughout")
    assert factors_of(0.4 * by_scale + 0.05 * out).startswith("its scores are multiplied by about 1.4 throughout")
    rows = torch.zeros(64, 1, dtype=torch.float64)
    rows[:2] = -1.0  # two rows that hold nothing
    assert factors_of(rows * out) == ""
    assert factors_of(0.07 * out + 3 * rows * by_scale) == ""


def test_sound_and_otherwise_broken_kernels_have_none() -> None:
    for plan in (Plan(), Plan(margin=1.05), Plan(fault="wrong descale of v"), Plan(fault="dropped key block")):
        assert search("fa3-fp8", run(plan, *inputs("peaked", 3))["o"], "peaked", 3).stale() == {}, plan


def test_what_is_said() -> None:
    assert stale_words({"k": 0.6, "v": 0.55}).startswith("as where the largest number of k is taken for 0.6 times")
    assert re.search("a stale amax", stale_words({"k": 0.6}))


def test_inspect_names_it() -> None:
    diagnosis = inspected(Plan("int8", "stale amax"), "gaussian", 0, declared="sage2")
    (o,) = [q for head in diagnosis.heads for q in head.quantities if q.quantity == "o"]
    assert o.answer == "lossy"
    assert "the largest number of k is taken for 0.6 times what it is" in o.words
    assert o.patterns[0].kind == "scale"
