"""Probes: every one finds a defect planted for it, none alarms on a kernel that only rounds correctly."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import some
from command_line import Run
from rich.cells import cell_len
from scipy import stats
from torch import Tensor

import attn_diag
from attn_diag.head.signed_errors import of_elements
from attn_diag.kernels.formats import parse, round_to
from attn_diag.reference import format_of, round_nearest_even
from attn_diag.statistics.means import estimate_bias
from attn_diag.statistics.welch import p_beyond
from attn_diag.testing.probing import head_errors
from attn_diag.testing.probing.catalogue import PROBES
from attn_diag.testing.probing.inputs import Draw, cast_gap
from attn_diag.testing.probing.pointers import TABLE, matches_prediction, pointers
from attn_diag.testing.probing.probe import MIN_HEADS

pytestmark = pytest.mark.slow

SHAPE = (2, 8, 96, 32)
QUIET = {"exact", "within-rounding"}
Fn = Callable[[Tensor, Tensor, Tensor], Tensor]


def nearest(o: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return round_nearest_even(o.contiguous(), format_of(dtype)).to(dtype)


def rounding(mode: str) -> Callable[[Tensor], Tensor]:
    draws = iter(range(10**9))
    return lambda o: round_to(o, parse(f"bf16:{mode}"), next(draws)).bfloat16()


def kernel(
    *,
    cast: Callable[[Tensor], Tensor] = nearest,
    scale: float = 1.0,
    scores: Callable[[Tensor], Tensor] = lambda s: s,
    probs: Callable[[Tensor], Tensor] = lambda p: p,
    row_sum: Callable[[Tensor], Tensor] = lambda p: p.sum(-1, keepdim=True),
    out: Callable[[Tensor], Tensor] = lambda o: o,
) -> Fn:
    """Attention in float64 with one rounding at the end, and the hooks at which a defect can be planted.

    ``probs`` changes the P_bar that multiplies V, ``row_sum`` makes l of the unchanged one.
    """

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q.double() @ k.double().mT * (scale / q.shape[-1] ** 0.5))
        p = (s - s.amax(-1, keepdim=True)).exp()
        return cast(out(probs(p) @ v.double() / row_sum(p)))

    return attention


def changed_columns(p: Tensor, columns: slice) -> Tensor:
    """These keys weigh a third less: on N(0,1) inputs little enough for the function to be the one asked for."""
    p = p.clone()
    p[..., columns] *= 2 / 3
    return p


def consistently(change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The same changed P_bar in l and for V."""
    return {"probs": change, "row_sum": lambda p: change(p).sum(-1, keepdim=True)}


def once_each(p: Tensor) -> Tensor:
    """Of keys that tie for the maximum only the first counts."""
    tied = p == 1
    return torch.where(tied & (tied.cumsum(-1) > 1), 0.0, p)


def in_length_dependent_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """P_bar V in tiles of an eighth of the keys, the accumulator in BF16."""
    p = (q.double() @ k.double().mT / q.shape[-1] ** 0.5).softmax(-1)
    total = torch.zeros_like(q).double()
    for tile in torch.arange(k.shape[2]).chunk(8):
        total = nearest(total + p[..., tile] @ v.double()[:, :, tile]).double()
    return total.to(q.dtype)


def batch_dependent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return kernel(cast=rounding("toward-zero") if len(q) * q.shape[1] == 1 else nearest)(q, k, v)


TRUNCATING = kernel(cast=rounding("toward-zero"))
CAST_PROBS = kernel(probs=lambda p: nearest(p).double())
EPSILON = kernel(row_sum=lambda p: p.sum(-1, keepdim=True) + 0.02)

# Probe -> what it must see: a planted defect and the label.
DEFECTS: dict[str, tuple[Fn, str]] = {
    "normal": (TRUNCATING, "biased"),
    "ones": (EPSILON, "biased"),
    "unit-vectors": (kernel(**consistently(lambda p: p.masked_fill(p < 2.0**-8, 0.0))), "too-large"),
    "ramp": (kernel(**consistently(lambda p: changed_columns(p, slice(-1, None)))), "too-large"),
    "constant-rows": (kernel(row_sum=lambda p: p.sum(-1, keepdim=True).clamp(max=64)), "biased"),
    "one-hot": (EPSILON, "too-large"),
    "duplicates": (kernel(**consistently(once_each)), "too-large"),
    "sinks": (kernel(**consistently(lambda p: changed_columns(p, slice(0, 1)))), "too-large"),
    "tails": (kernel(probs=lambda p: p.masked_fill(p < 2.0**-8, 0.0)), "biased"),
    "outliers": (kernel(scores=lambda s: s.clamp(-8, 8)), "too-large"),
    "normaliser-down": (CAST_PROBS, "biased"),
    "normaliser-up": (CAST_PROBS, "biased"),
    "repeat": (kernel(cast=rounding("stochastic")), "not-invariant"),
    "batch": (batch_dependent, "not-invariant"),
    "length": (in_length_dependent_tiles, "not-invariant"),
    "sign": (kernel(cast=rounding("up")), "not-invariant"),
    "power-of-two": (kernel(out=lambda o: o.clamp(max=4.0)), "not-invariant"),
}


def run(fn: Any, **options: Any) -> attn_diag.ProbeReport:
    return attn_diag.probe(fn, **{"shape": SHAPE, "device": "cpu", **options})


def test_every_probe_has_a_defect_of_its_own() -> None:
    assert list(DEFECTS) == list(PROBES)


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_sees_its_defect_and_is_quiet_without(name: str) -> None:
    fn, label = DEFECTS[name]
    found = run(fn, probes=[name])[name]
    assert label in found.labels, found.words
    assert run(kernel(), probes=[name])[name].labels == ("exact",)


def test_a_defect_leaves_other_probes_quiet() -> None:
    """Scores clamped at +-8 show where scores are large ("length" hides keys by scores of -300), and nowhere else."""
    found = run(DEFECTS["outliers"][0])
    loud = {f.name for f in found.findings if not set(f.labels) <= QUIET}
    assert loud == {"outliers", "one-hot", "duplicates", "length"}, loud
    assert found.assumptions.ok


@pytest.mark.parametrize("mode", ["up", "down"])
def test_rounding_to_one_side_is_an_upward_bias(mode: str) -> None:
    tests = {t.direction: t for t in run(kernel(cast=rounding(mode)), probes=["normal"])["normal"].tests}
    assert not tests["away from zero"].biased
    assert tests["upward"].biased
    # Half a spacing, either way.
    mean = some(tests["upward"].mean_ulp)
    assert mean == pytest.approx(0.5 if mode == "up" else -0.5, abs=0.02)


@pytest.mark.parametrize("causal", ["none", "top-left"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_fa2_shows_the_normaliser_mismatch_as_predicted(dtype: torch.dtype, causal: str) -> None:
    """FlashAttention PR #2721: l sums fp32 P_bar, P_bar V takes the cast one. The sign follows the cast's."""
    options = {"probes": ["ones", "normaliser-down", "normaliser-up"], "dtype": dtype, "causal": causal}
    found = run("fa2", **options)
    assert found["ones"].labels == ("exact",), "V = 1 hides it below half a spacing"
    for name, sign in (("normaliser-down", -1), ("normaliser-up", 1)):
        finding = found[name]
        assert finding.labels == ("biased",)
        assert some(finding.relative) * sign > 0
        assert some(finding.predicted) * sign > (1e-3 if dtype == torch.bfloat16 else 1e-4)
        assert matches_prediction(finding), finding
    assert "does not match the weights that multiply V" in found.summary[0]
    repaired = run(replace(attn_diag.preset("fa2"), row_sum_of="cast-probs"), **options)
    # O is mended; that l is no longer the sum of P, and L says so.
    assert repaired.labels <= {*QUIET, "lse-biased"}
    assert "The row sum matches the weights" in " ".join(repaired.summary)
    for name, sign in (("normaliser-down", -1), ("normaliser-up", 1)):
        moved, kept = some(repaired[name].lse), some(found[name].lse)
        assert sign * (moved.error.mean or 0.0) > (1e-3 if dtype == torch.bfloat16 else 1e-4)
        assert (moved.biased, kept.biased) == (True, False)
    # The check can fail: without the mismatch the prediction does not hold.
    assert not matches_prediction(repaired["normaliser-up"])


def pivoting_on_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As flash_attn_triton.py: every tile's P_bar is scaled to max(its scores, the LSE so far), not to the maximum."""
    o = torch.zeros_like(q).double()
    lse = torch.full((*q.shape[:3], 1), -math.inf, dtype=torch.float64)
    before = lse
    for tile in torch.split(torch.arange(k.shape[2]), 64):
        s = q.double() @ k.double()[:, :, tile].mT / q.shape[-1] ** 0.5
        pivot = torch.maximum(s.amax(-1, keepdim=True), lse)
        p = (s - pivot).exp()
        o = o * (before - pivot).exp() + nearest(p).double() @ v.double()[:, :, tile]
        lse, before = pivot + ((lse - pivot).exp() + p.sum(-1, keepdim=True)).log(), pivot
    return nearest(o * (before - lse).exp()), lse[..., 0].float()


def test_a_part_of_the_mismatch_is_normal_too() -> None:
    """Later tiles of such a kernel cast another P_bar, so that a part of the mismatch is left: a sound, public one."""
    found = run(pivoting_on_lse, shape=(2, 8, 192, 64))
    shares = [some(f.relative) / some(f.predicted) for f in found.findings if f.predicted is not None]
    assert all(0.1 < share < 0.9 for share in shares), shares
    assert not any(matches_prediction(f) for f in found.findings if f.predicted is not None)
    assert found.outcome == "ok", found.suspect
    truncating = run(lambda q, k, v: (TRUNCATING(q, k, v), pivoting_on_lse(q, k, v)[1]), shape=(2, 8, 192, 64))
    assert truncating.outcome == "fail"


@pytest.mark.parametrize("last", [192, 8])
@pytest.mark.parametrize("fused", [False, True])
def test_the_mismatch_is_normal_beside_an_lse_that_is_wrong_by_itself(*, fused: bool, last: int) -> None:
    """That O is too small in the mean was said, though it is as any FlashAttention-2's."""

    def in_base_2(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = pivoting_on_lse(q, k, v)
        lse[..., -last:] *= math.log2(math.e)
        return kernel(probs=lambda p: nearest(p).double())(q, k, v) if fused else o, lse

    found = run(in_base_2, shape=(2, 8, 192, 64))
    assert found.outcome == "fail"
    assert found.suspect is not None
    assert found.suspect.startswith("L "), found.suspect


def test_a_kernel_that_returns_fp32_shows_the_mismatch_too() -> None:
    def fp32(change: Callable[[Tensor], Tensor]) -> attn_diag.ProbeReport:
        return run(kernel(probs=change, cast=lambda o: o.float()), probes=["normaliser-up"])

    mismatched = fp32(lambda p: nearest(p).double())
    assert mismatched.out_dtype == "fp32"
    assert matches_prediction(mismatched["normaliser-up"])
    assert fp32(lambda p: p)["normaliser-up"].labels == ("exact",)


def mathematics(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Everything in fp32, alpha too; O in fp32."""
    p: Tensor = (q.float() @ k.float().mT / q.shape[-1] ** 0.5).softmax(-1)
    return p @ v.float()


BIASED_IN_FP32 = ["normal", "sinks", "tails", "outliers"]


def test_plain_fp32_mathematics_is_not_biased() -> None:
    """Its O shows alpha's rounding, exp and sums by tenths of a spacing, beyond chance."""
    found = run(mathematics, shape=(2, 8, 64, 32), probes=[*BIASED_IN_FP32, "normaliser-down", "normaliser-up"])
    assert found.out_dtype == "fp32"
    assert found.labels <= QUIET
    tests = [test for finding in found.findings for test in finding.tests]
    assert any((test.excess.p_value or 1) < 1e-4 for test in tests), "else it shows nothing"
    assert all(0 < test.allowed_ulp < 2.0**16 / 4 for test in tests), "a quarter of a BF16 spacing and more would show"
    assert "The row sum matches the weights" in " ".join(found.summary)
    report = " ".join(found.report(80).split())
    assert "An fp32 O shows fp32 arithmetic itself" in report
    assert "no bias beyond fp32 arithmetic's (±" in report


def test_an_fp32_o_is_biased_beyond_what_fp32_makes() -> None:
    def cast_probs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q.float() @ k.float().mT / q.shape[-1] ** 0.5
        p: Tensor = (s - s.amax(-1, keepdim=True)).exp()
        return p.bfloat16().float() @ v.float() / p.sum(-1, keepdim=True)

    found = run(cast_probs, shape=(2, 8, 64, 32), probes=["normal", "normaliser-down", "normaliser-up"])
    assert {f.name for f in found.findings if "biased" in f.labels} == {"normaliser-down", "normaliser-up"}
    assert "does not match the weights" in found.summary[0]
    twice = run(lambda q, k, v: mathematics(q, k, v) * 1.01, shape=(2, 8, 64, 32), probes=["normal", "sinks"])
    assert all("biased" in f.labels for f in twice.findings)


@pytest.mark.parametrize("true_mean", [0.9, 1.0, 1.3])
def test_a_mean_at_the_allowed_one_is_called_bias_no_more_often_than_the_level(true_mean: float) -> None:
    draws = true_mean + torch.randn(1000, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 4
    heads = np.arange(16)
    errors = [of_elements(d[:, None], 0.0) for d in draws]
    estimates = [estimate_bias(e, heads, LEVEL, with_drift=False) for e in errors]
    p_values = [p_beyond(estimate, 1.0) for estimate in estimates]
    alarms = sum(p is not None and p <= LEVEL for p in p_values)
    assert (alarms > stats.binom.ppf(0.999, 1000, LEVEL)) == (true_mean > 1)
    assert [p_beyond(e, 0.0) for e in estimates] == [e.p_value for e in estimates]


def test_a_16_bit_o_allows_nothing() -> None:
    fine = kernel(cast=lambda o: nearest(o, torch.float16))
    found = run(fine, dtype=torch.float16, shape=(2, 8, 32, 16), probes=["normal"])
    assert all(test.allowed_ulp == 0 for test in found["normal"].tests)


@pytest.mark.parametrize(("flushed_below", "cast"), [(-126, nearest), (-126, Tensor.float), (-100, nearest)])
def test_a_kernel_may_flush_subnormal_numbers(flushed_below: int, cast: Callable[[Tensor], Tensor]) -> None:
    """ex2.approx.ftz and CPUs' vectorised exp do; numbers that fp32 keeps must not be lost."""

    def flush(p: Tensor) -> Tensor:
        return p.masked_fill(p.abs() < 2.0**flushed_below, 0.0)

    scale = 4.0
    fn = kernel(scale=scale * SHAPE[3] ** 0.5, out=flush, cast=cast, **consistently(flush))
    finding = run(fn, shape=(2, 8, 64, 32), scale=scale, probes=["unit-vectors"])["unit-vectors"]
    if flushed_below == -126:
        assert set(finding.labels) <= QUIET, finding.words
        assert (finding.max_error_ulp or 0) > 10, "an answer was flushed"
    else:
        assert "too-large" in finding.labels


OWN_ROUNDING = "O itself is rounded"
MISMATCH = "The row sum does not match the weights"
# A kernel, and which of the two sentences its report must have; "" for neither.
CAUSES: dict[str, tuple[Fn, str, dict[str, Any]]] = {
    "truncates O": (TRUNCATING, OWN_ROUNDING, {}),
    "rounds O up": (kernel(cast=rounding("up")), OWN_ROUNDING, {}),
    "casts P": (CAST_PROBS, MISMATCH, {}),
    "sums cast P alone": (kernel(row_sum=lambda p: nearest(p).double().sum(-1, keepdim=True)), "", {}),
    "adds to l": (EPSILON, "", {}),
    "is right": (kernel(), "", {}),
    "returns zeros": (lambda q, k, v: torch.zeros_like(q), "", {}),  # noqa: ARG005
    "is not causal": (CAST_PROBS, "", {"causal": True}),
}


@pytest.mark.parametrize("kind", CAUSES)
def test_the_report_speaks_of_l_only_where_l_is_wrong(kind: str) -> None:
    fn, sentence, options = CAUSES[kind]
    found = run(fn, shape=(2, 8, 64, 32), probes=[n for n, p in PROBES.items() if p.build is not None], **options)
    text = " ".join(found.summary)
    assert [s for s in (OWN_ROUNDING, MISMATCH) if s in text] == ([sentence] if sentence else [])
    if sentence == OWN_ROUNDING:
        assert ("toward zero" if kind == "truncates O" else "upward") in text
        mean = float(text.split("in the mean, by ")[1].split()[0])
        # Half a spacing; 16 heads of 64 rows and 32 features, which V may share, know it to a few per cent.
        assert mean == pytest.approx(-0.5 if kind == "truncates O" else 0.5, abs=0.03)
    if not sentence and "biased" in found.labels:
        assert "Biased beyond correct rounding: " in text
    assert found.assumptions.ok == (kind not in ("returns zeros", "is not causal"))


@pytest.mark.parametrize("fn", [TRUNCATING, CAST_PROBS], ids=["truncates O", "casts P"])
def test_one_normaliser_probe_alone_gives_numbers_and_no_pointer(fn: Fn) -> None:
    found = run(fn, shape=(2, 8, 64, 32), probes=["constant-rows", "normaliser-down"])
    assert "biased" in found["normaliser-down"].labels
    assert "In the normaliser probes O is off by" in " ".join(found.summary)
    assert not pointers(found.findings)


def step(x: Tensor, dtype: torch.dtype, how: str) -> Tensor:
    rounded: Tensor = round_to(x, parse(f"{'bf16' if dtype == torch.bfloat16 else 'fp16'}:{how}"), 7)
    return rounded.double()


def l_of(q: Tensor, k: Tensor) -> Tensor:
    scores: Tensor = q.double() @ k.double().mT / q.shape[-1] ** 0.5
    return scores.logsumexp(-1)


LARGE_L = kernel(row_sum=lambda p: 1.01 * p.sum(-1, keepdim=True))
# A kernel with L, and the sites of pointers.TABLE that may speak of it; more are in benchmarks/study_probe.py.
POINTED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], set[str]]] = {
    "O is truncated": (lambda q, k, v: (TRUNCATING(q, k, v), l_of(q, k)), {"O"}),
    "O is 0.27 % too small": (lambda q, k, v: (kernel(out=lambda o: o * 0.9973)(q, k, v), l_of(q, k)), set()),
    "P is cast for PV alone": (lambda q, k, v: (CAST_PROBS(q, k, v), l_of(q, k)), {"l sums P̄ uncast"}),
    "P is truncated for PV alone": (
        lambda q, k, v: (kernel(probs=lambda p: step(p, q.dtype, "toward-zero"))(q, k, v), l_of(q, k)), {"P̄"},
    ),
    "l is too large by 0.01": (
        lambda q, k, v: (LARGE_L(q, k, v), l_of(q, k) + math.log(1.01)),
        {"row sum"},
    ),
    "1/l is too small by 0.01": (
        lambda q, k, v: (LARGE_L(q, k, v), l_of(q, k)), set(),
    ),
    "L is stored in BF16": (lambda q, k, v: (kernel()(q, k, v), l_of(q, k).bfloat16().float()), {"LSE"}),
    "L is stored in FP16": (lambda q, k, v: (kernel()(q, k, v), l_of(q, k).half().float()), {"LSE"}),
    "L is returned in BF16": (lambda q, k, v: (kernel()(q, k, v), l_of(q, k).bfloat16()), set()),
}  # fmt: skip


@pytest.mark.parametrize("kind", POINTED)
def test_a_pointer_is_given_to_its_own_site_alone(kind: str) -> None:
    fn, sites = POINTED[kind]
    found = run(fn, probes=[n for n, p in PROBES.items() if p.build is not None])
    by_name = {f.name: f for f in found.findings}
    assert {p.site for p in TABLE if p.speaks(by_name) is not None} == sites, found.summary
    assert {words for words in found.summary if words in pointers(found.findings)} == set(pointers(found.findings))


@pytest.mark.parametrize("scale", [1 / 8, 128**-0.5, 1.0, 0.01])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("sign", [1, -1])
def test_cast_gap_is_exact_and_far_from_a_tie(dtype: torch.dtype, scale: float, sign: int) -> None:
    a, b, x, cast = cast_gap(dtype, scale, sign)
    assert torch.tensor([a, b]).to(dtype).tolist() == [a, b]
    assert x == pytest.approx(float(torch.tensor(-a * b * scale).double().exp()), rel=1e-6)
    for wobble in (1 - 2.0**-14, 1 + 2.0**-14):
        assert float(nearest(torch.tensor([x * wobble]).double(), dtype)) == cast
    assert sign * (cast / x - 1) > (2e-3 if dtype == torch.bfloat16 else 2e-4)


def null(kind: str) -> Fn:
    """Kernels without bias, and one with."""
    noise = torch.Generator().manual_seed(1)
    if kind == "stochastic rounding":
        return kernel(cast=rounding("stochastic"))
    if kind == "noise before nearest-even":
        return kernel(out=lambda o: o * (1 + 2.0**-9 * torch.randn(o.shape, generator=noise, dtype=o.dtype)))
    stochastic = rounding("stochastic")
    return kernel(cast=lambda o: stochastic(o * (1 + 2.0**-8 * 0.06)))


SEEDS, LEVEL = 100, 0.05


@cache
def calibration_runs(kind: str, probes: tuple[str, ...], seeds: int) -> list[attn_diag.ProbeReport]:
    fn = null(kind)
    return [run(fn, shape=(4, 4, 32, 16), probes=probes, seed=s, level=LEVEL) for s in range(seeds)]


@pytest.mark.parametrize(
    ("kind", "probes", "seeds", "alarms_often"),
    [
        ("stochastic rounding", ("normaliser-down",), SEEDS, False),
        ("noise before nearest-even", ("tails",), SEEDS, False),
        ("bias of 0.06 ulp and more", ("tails", "normaliser-down"), 20, True),
    ],
)
def test_false_alarms_stay_under_the_level(kind: str, probes: tuple[str, ...], seeds: int, alarms_often: bool) -> None:
    """Runs with any alarm: Benjamini-Hochberg holds their rate at the level, whatever the number of tests."""
    alarms = sum("biased" in r.labels for r in calibration_runs(kind, probes, seeds))
    allowed = stats.binom.ppf(0.999, seeds, LEVEL)
    assert (alarms > allowed) == alarms_often, f"{alarms} of {seeds}"


@pytest.mark.parametrize("clusters", ["heads", "rows"])
def test_both_p_values_are_uniform_with_heads_as_clusters(clusters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So each of the two tests rejects as often as it says; rows of one head, which share V, are no clusters."""
    seeds = SEEDS
    if clusters == "rows":
        monkeypatch.setattr(head_errors, "estimate_bias", lambda e, _, level, **kw: estimate_bias(e, None, level, **kw))
        seeds = 50  # and so no run that is cached
    reports = calibration_runs("stochastic rounding", ("normaliser-down",), seeds)
    tests = [r["normaliser-down"].tests[0] for r in reports]
    least, most = (stats.binom.ppf(q, seeds, 0.2) for q in (0.0005, 0.9995))
    uniform = [least <= sum(p is not None and p < 0.2 for p in values) <= most for values in (
        [t.error.p_value for t in tests], [t.excess.p_value for t in tests],
    )]  # fmt: skip
    assert all(uniform) == (clusters == "heads")


def test_heads_are_independent_draws_and_the_clusters() -> None:
    found = run(kernel(), shape=(1, 3, 40, 16), probes=["normal"])
    assert found.heads == 18 >= MIN_HEADS
    assert found.rounds == 6
    test = found["normal"].tests[0]
    assert test.error.n_clusters == 18
    assert test.error.n == 18 * 40 * 16
    # Correct rounding has no excess, and so no test of it.
    assert test.p_value is None
    assert found.family_size == 0


@pytest.mark.parametrize("causal", ["none", "top-left"])
@pytest.mark.parametrize("name", [n for n, p in PROBES.items() if p.build])
def test_true_outputs_lie_evenly_between_two_numbers_where_bias_is_tested(name: str, causal: str) -> None:
    """Else correct rounding would look biased, or an unbiased kernel would. Exact answers apart."""

    def no_future(s: Tensor) -> Tensor:
        return s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)

    fn = kernel() if causal == "none" else kernel(scores=no_future)
    # The mean error of correct rounding itself, in spacings.
    for test in run(fn, probes=[name], causal=causal, shape=(2, 8, 128, 32))[name].tests:
        if test.error.mean_ulp:
            assert abs(test.error.mean_ulp) < 0.01


@pytest.mark.parametrize(("recipe", "causal"), [("cudnn", "none"), ("flex", "top-left"), ("lowp-row-sum", "none")])
def test_published_recipes_stay_within_rounding_but_for_the_normaliser(recipe: str, causal: str) -> None:
    found = run(recipe, shape=(2, 4, 160, 32), causal=causal)
    assert found.backend == "emulation on cpu"
    for finding in found.findings:
        mismatch = "lse-biased" if recipe == "lowp-row-sum" else "biased"
        expected = QUIET if finding.predicted is None else {mismatch}
        assert set(finding.labels) <= expected, finding


def test_bf16_scores_are_beyond_the_bound() -> None:
    """The bound holds for fp32 scores (above), and is not so wide that rounded scores pass."""
    found = run("qiu2025", probes=["outliers", "unit-vectors"])
    assert all("too-large" in f.labels for f in found.findings)


def test_fp32_is_probed_without_the_normaliser() -> None:
    found = run(kernel(cast=lambda o: o.float()), dtype=torch.float32)
    assert {f.name for f in found.findings} == {n for n in PROBES if not n.startswith("normaliser")}
    assert found.labels == {"exact"}


def fp32_lse(q: Tensor, k: Tensor, row_sum: Callable[[Tensor], Tensor] = lambda p: p.sum(-1)) -> Tensor:
    """L as kernels make it: exp2, everything in fp32."""
    scores = q.float() @ k.float().mT
    scale = torch.tensor(q.shape[-1] ** -0.5 / math.log(2)).float()
    largest = scores.amax(-1, keepdim=True)
    total = row_sum((scores * scale - largest * scale).exp2())
    return (largest[..., 0] * scale + total.log2()) * math.log(2)


# L from q, k; and what its labels must be.
LSE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], set[str]]] = {
    "fp32": (fp32_lse, set()),
    "fp32, flushed": (lambda q, k: fp32_lse(q, k, lambda p: p.masked_fill(p < 2.0**-126, 0).sum(-1)), set()),
    "float64": (lambda q, k: (q.double() @ k.double().mT / q.shape[-1] ** 0.5).logsumexp(-1), set()),
    "bf16": (lambda q, k: fp32_lse(q, k).bfloat16(), set()),
    "zero": (lambda q, k: 0 * fp32_lse(q, k), {"lse-too-large", "lse-biased"}),
    "base 2": (lambda q, k: fp32_lse(q, k) / math.log(2), {"lse-too-large", "lse-biased"}),
    "no alpha": (lambda q, k: fp32_lse(q * q.shape[-1] ** 0.5, k), {"lse-too-large", "lse-biased"}),
    "m alone": (lambda q, k: (q.float() @ k.float().mT / q.shape[-1] ** 0.5).amax(-1), {"lse-too-large", "lse-biased"}),
    "a key lost": (lambda q, k: fp32_lse(q, k, lambda p: p[..., 1:].sum(-1)), {"lse-too-large", "lse-biased"}),
    # A cast of the P_bar that l sums may do as much, but not everywhere to one side.
    "l off by 1e-3": (lambda q, k: fp32_lse(q, k, lambda p: p.sum(-1) * 1.001), {"lse-biased"}),
    "nan": (lambda q, k: fp32_lse(q, k).index_fill(2, torch.tensor([3]), torch.nan), {"nonfinite", "broken"}),
}


@pytest.mark.parametrize("kind", LSE)
def test_lse_is_judged_where_it_comes(kind: str) -> None:
    lse, labels = LSE[kind]
    found = run(lambda q, k, v: (kernel()(q, k, v), lse(q, k)), probes=["normal", "ones", "tails"])
    assert found.assumptions.ok
    for finding in found.findings:
        assert set(finding.labels) == (labels or {"exact"}), finding
        judged = some(finding.lse)
        assert judged.fits_base_2 == (kind == "base 2")
        assert (judged.of_budget > 1) == ("lse-too-large" in labels)
    text = " ".join(found.summary)
    assert text.startswith("Nothing was found in O and L of" if not labels else "NaN" if kind == "nan" else "L (lse)")
    assert ("L ln 2 fits: return the natural logarithm" in text) == (kind == "base 2")
    report = found.report(80)
    assert "L of" in report
    assert max(map(cell_len, report.splitlines())) <= 80


def test_where_no_lse_comes_the_report_says_so() -> None:
    found = run(kernel(), probes=["normal"])
    assert found["normal"].lse is None
    assert "L (lse) was not judged" in " ".join(found.report().split())


def test_wrong_assumptions_are_named() -> None:
    unscaled = kernel(scale=SHAPE[3] ** 0.5)
    found = run(unscaled, probes=["normal"])
    assert not found.assumptions.ok
    assert found.assumptions.fits == "scale 1, causal none"
    assert "probe it so" in found.summary[0]
    assert run(unscaled, probes=["normal"], scale=1.0).labels == {"exact"}


def test_same_seed_same_report_and_probes_do_not_disturb_each_other() -> None:
    alone, among = run("fa2", probes=["tails"]), run("fa2", probes=["normal", "tails"])
    # The adjusted p-value alone depends on the family.
    assert alone["tails"].tests[0].error == among["tails"].tests[0].error
    assert run("fa2", probes=["tails"]).findings == alone.findings
    assert run("fa2", probes=["tails"], seed=1).findings != alone.findings


def test_the_builders_see_no_future_key() -> None:
    draw = Draw(1, 2, 33, 16, torch.bfloat16, 0.25, True, torch.Generator().manual_seed(0))
    assert (draw.visible_key() <= torch.arange(33)).all()


def test_json_and_report() -> None:
    found = run("fa2")
    document = json.loads(found.to_json())
    pytest.importorskip("jsonschema").validate(document, attn_diag.ProbeReport.json_schema())
    assert (document["schema"], document["schema_version"]) == ("attn-diag-probe", 1)
    assert attn_diag.ProbeReport.from_json(found.to_json()) == found
    for width in (80, 120):
        lines = found.report(width).splitlines()
        assert max(map(cell_len, lines)) <= width
        text = " ".join(" ".join(lines).split())
        assert "The row sum does not match the weights that multiply V" in text
        assert all(name in text for name in PROBES)
    with pytest.raises(KeyError, match="no probe 'none'; there are normal"):
        found["none"]


def test_the_shape_may_be_any_sequence() -> None:
    found = [run(kernel(), probes=["ones"], shape=kind((1, 2, 16, 8))) for kind in (tuple, list, torch.Size)]
    assert [type(f.shape) for f in found] == [tuple] * 3
    # Warnings are errors: a list would make Pydantic warn.
    assert len({f.to_json() for f in found}) == 1


def test_progress_counts_probes() -> None:
    steps: list[tuple[int, int]] = []
    run(kernel(), probes=["normal", "sign"], progress=lambda done, total: steps.append((done, total)))
    assert steps == [(1, 2), (2, 2)]


def raising(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.shape[2] > SHAPE[2]:
        raise RuntimeError("T must be 96")
    return kernel()(q, k, v)


def returning(change: Callable[[Tensor], Any]) -> Fn:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return change(kernel()(q, k, v))

    return fn


def vandal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = kernel()(q, k, v)
    k.zero_()
    return o


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "shape": (returning(lambda o: o[:, :, 1:]), {}, r"\[B, H, T, D\] \[2, 8, 96, 32\], got \[2, 8, 95, 32\]"),
    "dtype": (returning(lambda o: o.double()), {}, "o in torch.bfloat16 or torch.float32, got torch.float64"),
    "device": (returning(lambda o: o.to("meta")), {}, "must return o on cpu, got meta"),
    "nothing": (returning(repr), {}, "must return a tensor o, .* got str"),
    "raises": (raising, {}, "probe 'length': raising raised RuntimeError .*: T must be 96; leave this probe out"),
    "in place": (vandal, {}, "probe 'normal': vandal changed its input k in place, which its caller's backward needs"),
    "no callable": (3, {}, "expected a callable fn"),
    "recipe": ("fa9", {}, "no recipe 'fa9'; known: fa2"),
    "incomplete": (replace(attn_diag.preset("fa2"), exp="polynomial"), {}, "without exp_degree"),
    "recipe dtype": ("fa2", {"dtype": torch.float32}, "recipes are run for bfloat16 and float16"),
    "probe": (kernel(), {"probes": ["one"]}, "no probe 'one'; known: normal"),
    "no probe": (kernel(), {"probes": []}, "at least one"),
    "probes in a string": (kernel(), {"probes": "ones"}, r"a list of names, got the string 'ones'; pass \['ones'\]"),
    "int dtype": (kernel(), {"dtype": torch.int8}, "dtype must be torch.bfloat16"),
    "three sizes": (kernel(), {"shape": (1, 2, 3)}, "four positive integers"),
    "short": (kernel(), {"shape": (1, 2, 3, 16)}, "length T must be at least 16, got 3"),
    "level": (kernel(), {"level": 0}, "level must lie between 0 and 1"),
    "scale": (kernel(), {"scale": -1}, "scale must be a positive number"),
    "causal": (kernel(), {"causal": "left"}, "causal must be none, top-left"),
    "normaliser": (kernel(), {"dtype": torch.float32, "probes": ["normaliser-up"]}, "need a 16-bit dtype"),
    "cuda": (kernel(), {"device": "tpu"}, "device must be auto, cpu or cuda"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_probed_is_said(case: str) -> None:
    fn, options, message = BAD[case]
    with pytest.raises(attn_diag.InputError, match=message):
        run(fn, **options)


@pytest.mark.parametrize("name", [n for n in PROBES if n not in ("repeat", "batch", "sign", "power-of-two")])
def test_inputs_beyond_the_dtype_name_the_scale_and_are_never_passed_on(name: str) -> None:
    """Not the kernel but the probe's own q and k would be infinite."""

    def attempt(scale: float) -> attn_diag.ProbeReport:
        fn = kernel(scale=scale * SHAPE[3] ** 0.5, cast=lambda o: nearest(o, torch.float16))
        return run(fn, dtype=torch.float16, scale=scale, probes=[name])

    # One that does not use the scale runs with any.
    if name in ("normal", "ones", "unit-vectors", "ramp", "constant-rows", "outliers"):
        assert "nonfinite" not in attempt(1e-6).labels
        return
    message = rf"probe '{name}': .* within 65504, the largest float16, got .* scale 1e-06; pass a larger scale"
    with pytest.raises(attn_diag.InputError, match=message):
        attempt(1e-6)
    assert "nonfinite" not in attempt(1e-2).labels


@pytest.mark.parametrize("always", [True, False], ids=["always NaN", "NaN in every second call"])
def test_nan_in_some_rows_is_broken_and_not_invariant_only_if_it_changes(always: bool) -> None:
    calls = iter(range(10**9))

    def some(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = kernel()(q, k, v)
        if always or next(calls) % 2 == 0:
            o[0, 0, 3] = torch.nan
        return o

    found = run(some, probes=["normal", "repeat", "sign"])
    assert found["repeat"].labels == ("nonfinite", "broken", *([] if always else ["not-invariant"]))
    assert ("The same call gives different results" in " ".join(found.summary)) == (not always)
    assert found["repeat"].differing == (0 if always else SHAPE[3])
    if always:
        assert found["normal"].labels == ("nonfinite", "broken")
        assert found["normal"].nonfinite == SHAPE[3]
        assert found["sign"].labels == ("nonfinite", "broken")
        assert found["sign"].words.endswith("the same in both calls")
        assert len(found.summary) == 1
        assert found.summary[0].startswith("NaN or Inf: normal, repeat, sign. Mend that first")
        old = found.to_json().replace('"nonfinite",', "")
        assert attn_diag.ProbeReport.from_json(old).labels == {"broken"}, "documents from before the label still read"


def test_sdpa_is_a_callable_like_any() -> None:
    found = run(lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v), probes=["normal", "sign"])
    assert found.source == "fn"
    assert found.labels <= QUIET


@pytest.fixture
def cli(run: Run) -> Run:
    """``attn-diag probe ...`` on small inputs."""
    return lambda *arguments, **_: run("probe", *arguments, "--shape", "2,8,48,16", "--device", "cpu")


def test_cli_exit_codes(cli: Run) -> None:
    code, out, _ = cli("fa2", "--probes", "ones,normaliser-down,normaliser-up")
    assert code == 0
    assert "does not match the weights" in out
    assert cli("fa2", "--probes", "ones,normaliser-up", "--fail-on", "biased")[0] == 1
    assert cli("lowp-row-sum", "--probes", "normaliser-up", "--fail-on", "biased,too-large")[0] == 0
    assert cli("lowp-row-sum", "--probes", "normaliser-up", "--fail-on", "lse-biased")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fa9"], "no recipe 'fa9'"),
        (["fa2", "--dtype", "fp8"], "--dtype must be one of bf16, fp16, fp32"),
        (["fa2", "--probes", "one"], "no probe 'one'"),
        (["fa2", "--fail-on", "bad"], "--fail-on: no label bad"),
        (["no_such_module:f"], "cannot import no_such_module:f"),
        (["math:f"], "cannot import math:f"),
        (["math.py:sqrt"], "name the module, not its file: math:sqrt"),
        (["torch:__version__"], "no recipe"),
        (["torch.nn.functional:scaled_dot_product_attention", "--scale", "1", "--probes", "sign"], "no verdict: On N"),
    ],
)
def test_cli_refuses(cli: Run, arguments: list[str], message: str) -> None:
    code, _, err = cli(*arguments)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("source", "why"), [("def f(:", "SyntaxError: invalid"), ("raise RuntimeError('no GPU')", "RuntimeError: no GPU")]
)
def test_a_module_that_cannot_be_imported_is_no_internal_error(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, why: str
) -> None:
    (tmp_path / "my_broken_kernel.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    code, _, err = cli("my_broken_kernel:f")
    assert code == 2
    assert f"cannot import my_broken_kernel:f: {why}" in err


def test_cli_probes_a_function_of_the_working_directory(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from torch.nn.functional import scaled_dot_product_attention as attend\n"
    (tmp_path / "my_own_kernel.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    code, out, _ = cli("my_own_kernel:attend", "--probes", "sign", "--json", "-")
    assert code == 0
    assert json.loads(out)["source"] == "my_own_kernel:attend"
    assert "" not in sys.path


@pytest.mark.gpu
@pytest.mark.parametrize("causal", ["none", "top-left"])
def test_sdpa_on_a_gpu_shows_the_mismatch(causal: str) -> None:
    """cuDNN and FlashAttention-2 both sum P_bar in fp32 and cast it for P_bar V."""
    found = attn_diag.probe(
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal != "none"),
        device="cuda", causal=causal,
    )  # fmt: skip
    assert found.assumptions.ok
    assert all(matches_prediction(found[name]) for name in ("normaliser-down", "normaliser-up")), found.summary
    assert not {"too-large", "nonfinite"} & found.labels, found.report()


def test_a_bias_of_constant_rows_alone_says_so_of_ordinary_ones() -> None:
    """P normalised before its cast: equal scores give every key the same error, N(0,1) rows a mean of none."""

    def normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        probs = (q.float() @ k.float().mT * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
        o: Tensor = (probs.float() @ v.float()).to(q.dtype)
        return o

    report = " ".join(run(normalised, probes=["normal", "constant-rows"]).report().split())
    assert report.startswith("FAIL")
    assert "In constant-rows by" in report
    assert "Ordinary rows (normal) show nothing." in report
