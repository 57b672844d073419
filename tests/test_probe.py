"""Probes: every one finds a defect planted for it, none alarms on a kernel that only rounds correctly."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from builders import some
from probed_kernels import (
    CAST_PROBS,
    EPSILON,
    QUIET,
    SHAPE,
    TRUNCATING,
    Fn,
    batch_dependent,
    changed_columns,
    consistently,
    in_length_dependent_tiles,
    kernel,
    mathematics,
    nearest,
    once_each,
    pivoting_on_lse,
    rounding,
    run,
)
from rich.cells import cell_len
from scipy import stats
from torch import Tensor

import attn_diag
from attn_diag.head.signed_errors import of_elements
from attn_diag.statistics.means import estimate_bias
from attn_diag.statistics.welch import p_beyond
from attn_diag.testing.probing import head_errors
from attn_diag.testing.probing.catalogue import PROBES
from attn_diag.testing.probing.inputs import Draw, cast_gap
from attn_diag.testing.probing.pointers import matches_prediction
from attn_diag.testing.probing.probe import MIN_HEADS
from attn_diag.testing.stated import Stated

pytestmark = pytest.mark.slow

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


def test_wrong_assumptions_are_named() -> None:
    unscaled = kernel(scale=SHAPE[3] ** 0.5)
    found = run(unscaled, probes=["normal"])
    assert not found.assumptions.ok
    assert found.assumptions.fits == "causal none, scale 1"
    assert "probe it so" in found.summary[0]
    assert run(unscaled, probes=["normal"], scale=1.0).labels == {"exact"}


def test_same_seed_same_report_and_probes_do_not_disturb_each_other() -> None:
    alone, among = run("fa2", probes=["tails"]), run("fa2", probes=["normal", "tails"])
    # The adjusted p-value alone depends on the family.
    assert alone["tails"].tests[0].error == among["tails"].tests[0].error
    assert run("fa2", probes=["tails"]).findings == alone.findings
    assert run("fa2", probes=["tails"], seed=1).findings != alone.findings


def test_the_builders_see_no_future_key() -> None:
    draw = Draw(1, 2, 33, 16, torch.bfloat16, Stated("top-left", 0.25), torch.Generator().manual_seed(0))
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


def test_sdpa_is_a_callable_like_any() -> None:
    found = run(lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v), probes=["normal", "sign"])
    assert found.source == "fn"
    assert found.labels <= QUIET


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
