"""A small version of benchmarks/study_calibration.py: the tests alarm at their level and find what is planted.

Each check is also given an inference that is wrong, and must reject it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from builders import some
from calibration import candidates, draws, engine, markdown, summary
from scipy import stats

from attn_diag import inspect
from attn_diag.reference import round_nearest_even
from attn_diag.results.diagnosis import HeadDiagnosis
from attn_diag.statistics.mean_tests import MeanTest, effective, mean_test, two_way
from attn_diag.statistics.means import PRIMARY, SignedErrors, adjust, estimate_bias

Array = npt.NDArray[np.float64]
Inference = Callable[["Sums"], Array]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sums:
    """Errors of many redraws: sums and sizes of clusters [R, G] and, where the product needs them, of features, and
    the sums over cells [R, 3]."""

    clusters: tuple[Array, Array]
    features: tuple[Array, Array, Array] | None = None

    def test(self, level: float = 0.05) -> MeanTest:
        """What the product says."""
        first = mean_test(*self.clusters, level)
        if self.features is None:
            return first
        sums, sizes, cells = self.features
        return two_way(first, mean_test(sums, sizes, level), cells, sizes.sum(-1), level)


def shipped(sums: Sums) -> Array:
    return sums.test().p_value


def halved_error(sums: Sums) -> Array:
    test = sums.test()
    return np.asarray(2 * stats.t.sf(2 * np.abs(test.t), test.df))


def never_rejects(sums: Sums) -> Array:
    return np.ones_like(sums.test().mean)


def is_calibrated(p: Array) -> bool:
    """Whether as many are below 1 % and 5 % as a test may have: at most the level, at least a third of it.

    Bounds: a test at these limits leaves either once in a thousand times.
    """
    counts = {level: int((p <= level).sum()) for level in engine.LEVELS}
    return all(
        stats.binom.ppf(0.001, len(p), level / 3) <= k <= stats.binom.ppf(0.999, len(p), level)
        for level, k in counts.items()
    )


def sums_of(test: str, out: torch.Tensor, sample: draws.Sample, keys: npt.NDArray[np.int64]) -> Sums:
    """Of one test's errors in redraws of O [R, T, D], as the product forms them; ``keys`` [T] of all redraws."""
    rows, features = engine.totals_of(out, sample, [test])
    elements = out.shape[-1]
    count = 1 if test.startswith("delta") else elements
    labels = engine.clusters_of(test, keys)
    clusters = engine.cluster_sums(rows[test], None if labels is None else np.repeat(labels[None], len(out), 0), count)
    if test not in features:
        return Sums(clusters)
    sums, cells = features[test]
    return Sums(clusters, (sums, np.full_like(sums, rows[test].shape[1] * count / elements), cells))


@cache
def on_captured_inputs(kernel: str, test: str) -> list[Sums]:
    """250 redraws of each head of the Gaussian capture."""
    found = []
    for h, (_, head) in enumerate(draws.read_heads(draws.GAUSSIAN, CPU)):
        sample = draws.original(head)
        out = draws.kernels_on_real(sample, 250, 11 + h)[kernel]
        found.append(sums_of(test, out, sample, sample.top_key[0].numpy()))
    return found


NULLS = [
    ("o_stochastic", "delta"),
    ("o_stochastic", "o"),
    ("o_flips", "delta_excess"),
    ("o_flips", "o_excess"),
    ("o_flips", "o_away_excess"),
]


@pytest.mark.parametrize("inference", [shipped, halved_error, never_rejects])
@pytest.mark.parametrize(("kernel", "test"), NULLS)
def test_the_shipped_inference_alone_alarms_at_the_level(kernel: str, test: str, inference: Inference) -> None:
    p = np.concatenate([inference(head) for head in on_captured_inputs(kernel, test)])
    assert is_calibrated(p) is (inference is shipped)


@cache
def correctly_rounded(name: str, redraws: int) -> dict[str, Array]:
    """p-values [R] of O's errors of a correctly rounding kernel on fresh redraws of a capture, by what are clusters."""
    heads, generator = draws.read_heads(name, CPU), torch.Generator().manual_seed(3)
    found: dict[str, list[Array]] = {"rows": [], "keys": [], "shipped": [], "elements": []}
    for _ in range(redraws):
        for sample in draws.fresh(heads, 1, generator):
            sums = sums_of("o", sample.rounded, sample, sample.top_key[0].numpy())
            error = sample.rounded - sample.out
            rows = error.sum(-1).numpy()
            found["rows"].append(shipped(Sums((rows, np.full_like(rows, error.shape[-1])))))
            found["keys"].append(shipped(Sums(sums.clusters)))
            found["shipped"].append(shipped(sums))
            found["elements"].append(candidates.elementwise_t(error))
    return {clusters: np.concatenate(p) for clusters, p in found.items()}


# gpt2: many rows nearly copy one row of V. pair: all rows of V are nearly parallel.
@pytest.mark.parametrize(("name", "redraws"), [("gpt2_step731_L2H4", 60), ("kernels_pair_T512", 100)])
def test_rows_share_the_rounding_of_keys_and_of_features(name: str, redraws: int) -> None:
    p = correctly_rounded(name, redraws)
    limit = stats.binom.ppf(0.999, len(p["rows"]), 0.05)
    alarms = {clusters: int((values <= 0.05).sum()) for clusters, values in p.items()}
    assert alarms["shipped"] <= limit, alarms
    assert alarms["rows"] > limit, "rows as clusters must alarm here"
    assert alarms["keys"] > limit or name != "kernels_pair_T512", "so must argmax keys"
    assert alarms["elements"] > limit or name != "gpt2_step731_L2H4", "so must an elementwise t"


def test_percentile_bootstrap_alarms_on_few_blocks() -> None:
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((600, 256))
    alarms = candidates.alarms(noise, torch.from_numpy(noise)[..., None], engine.LEVELS, 1)
    name = "percentile block bootstrap on delta/0.01"
    assert alarms[name].sum() > stats.binom.ppf(0.999, 600, 0.01)
    assert is_calibrated(shipped(Sums((noise, np.ones_like(noise)))))


@pytest.mark.parametrize(("direction", "test"), [("away", "o_away_excess"), ("along_do", "delta_excess")])
def test_planted_biases_are_found_with_their_sign(direction: str, test: str) -> None:
    """0.005 ulp on a correctly rounding kernel; each of 100 redraws of two heads and captures."""
    found, signs = [], []
    for name in (draws.GAUSSIAN, "pair_T256"):
        for h, (_, head) in enumerate(draws.read_heads(name, CPU)):
            sample = draws.original(head)
            out = draws.planted(sample.rounded.expand(100, -1, -1), sample, direction, 0.005, 29 + h)
            sums = sums_of(test, out, sample, sample.top_key[0].numpy())
            said = sums.test(0.01)
            found.append(said.p_value <= 0.01)
            signs.append(said.mean > 0)
    assert np.mean(found) >= 0.99
    assert all(s.all() for s in signs), "observed - reference: a push away from zero or along dO is positive"


def detected(stated: Array, mean: Array, se: Array, df: Array, level: float) -> float:
    """Share of redraws that find the mean that the redraw before them states as detectable."""
    t = (mean + np.roll(stated, 1)) / se
    return float(np.mean(2 * stats.t.sf(np.abs(t), df) <= level))


@pytest.mark.parametrize("clusters", [8, 16, 60])
@pytest.mark.parametrize("level", engine.LEVELS)
def test_stated_detectable_mean_has_80_percent_power(clusters: int, level: float) -> None:
    sums = np.random.default_rng(clusters).standard_normal((8000, clusters))
    test = mean_test(sums, np.ones_like(sums), level)
    known = test.mean, test.standard_error, test.df, level
    assert detected(test.minimum_detectable, *known) == pytest.approx(0.8, abs=0.025)
    if (clusters, level) == (8, 0.01):
        t_plus_z = (stats.t.ppf(0.995, test.df) + stats.t.ppf(0.8, test.df)) * test.standard_error
        assert detected(t_plus_z, *known) < 0.72, "it would promise too much"


@pytest.mark.parametrize(("kernel", "test"), NULLS)
def test_power_at_the_stated_detectable_bias(kernel: str, test: str) -> None:
    for level in engine.LEVELS:
        powers, halved = [], []
        for head in on_captured_inputs(kernel, test):  # each states it for itself
            said = head.test(level)
            known = said.mean, said.standard_error, said.df, level
            powers.append(detected(said.minimum_detectable, *known))
            halved.append(detected(said.minimum_detectable / 2, *known))
        assert 0.72 <= np.mean(powers) <= 0.88
        assert np.mean(halved) < 0.72


def reported(sample: draws.Sample, out: torch.Tensor) -> HeadDiagnosis:
    """What ``inspect`` says of one redraw of one head."""
    tensors = {"q": sample.q, "k": sample.k, "v": sample.v, "do": sample.do, "o": out}
    q, k, v, do, o = (t[None].bfloat16() for t in tensors.values())
    for name, stored in zip(tensors, (q, k, v, do, o), strict=True):
        assert torch.equal(stored[0].double(), tensors[name]), f"a redraw's {name} must be BF16"
    return inspect(q, k, v, o=o, do=do, causal=True).captures[0].observations[0].heads[0]


@cache
def redrawn() -> tuple[draws.Sample, torch.Tensor, HeadDiagnosis]:
    """One redraw of one head, a kernel's O, and what ``inspect`` says of it."""
    heads = draws.read_heads(draws.GAUSSIAN, CPU)[:1]
    sample = next(draws.fresh(heads, 1, torch.Generator().manual_seed(2)))
    out = draws.kernels_on_fresh(sample, 5)["probs_stochastic"]
    return sample, out, reported(sample, out)


@pytest.mark.parametrize("test", PRIMARY)
def test_the_study_tests_what_inspect_reports(test: str) -> None:
    sample, out, head = redrawn()
    shown, sums = getattr(head.bias, test), sums_of(test, out, sample, sample.top_key[0].numpy())
    own, n_eff = sums.test(0.01), effective(sums.clusters[0])
    assert (sums.clusters[1].sum(), np.count_nonzero(sums.clusters[1])) == (shown.n, shown.n_clusters)
    assert (own.mean[0], own.standard_error[0], own.p_value[0], n_eff[0]) == pytest.approx(
        (shown.mean, shown.standard_error, shown.p_value, shown.n_eff), rel=1e-6
    )


@pytest.mark.parametrize("test", ["o", "delta"])
def test_the_roundings_own_mean_is_tested_alike(test: str) -> None:
    """Verdicts compare a kernel's mean with it."""
    sample, _, head = redrawn()
    shown = getattr(head.rounding_bias, test)
    sums = sums_of(test, sample.rounded, sample, sample.top_key[0].numpy())
    assert shown.standard_error == pytest.approx(float(sums.test().standard_error[0]), rel=1e-6)
    assert shown.standard_error != pytest.approx(float(Sums(sums.clusters).test().standard_error[0]), rel=1e-6)


def test_batches_agree_with_single_data_sets() -> None:
    rng = np.random.default_rng(1)
    labels = np.stack([np.unique(rng.integers(0, k, 40), return_inverse=True)[1] for k in (5, 12, 30)])
    totals = rng.standard_normal((3, 40))
    said = engine.judge(totals, labels, 64)
    for i in range(3):
        errors = SignedErrors(totals[i], 1.0, 1, 1, 0.0, 1.0, 64)
        single = estimate_bias(errors, labels[i], 0.01)
        assert said["p"][i] == pytest.approx(single.p_value, rel=1e-12)
        assert said["n_eff"][i] == pytest.approx(single.n_eff, rel=1e-12)
        assert said["detectable/0.01"][i] == pytest.approx(single.minimum_detectable, rel=1e-12)


def test_a_bias_of_a_head_that_copies_one_key_gets_its_label() -> None:
    """Most rows of this head share an argmax key: a bias of all rows has few effective terms, however certain it is."""
    ((_, head),) = draws.read_heads("gpt2_step637_L2H6", CPU)
    sample = draws.original(head)
    labels = []
    for size in (0.0, 0.1):
        # One spacing of O_ref is half a spacing of RN(O_ref) where the rounding passed a power of two.
        out = round_nearest_even(draws.planted(sample.rounded, sample, "away", size, 1), draws.BF16)
        found = reported(sample, out)
        labels.append(some(found.verdict).labels)
        if size:
            assert some(some(found.bias.o_away_excess).n_eff) < summary.FORMER_RULE
    assert "biased" not in labels[0]
    assert "biased" in labels[1]


def test_summary_and_tables_of_a_tiny_run() -> None:
    found = engine.run(draws.GAUSSIAN, 8, 1, CPU)
    captures = {draws.GAUSSIAN: summary.summarise(found)}
    result = {
        "redraws": 8, "seed": 1, "date": "today", "tool": {"torch": "0", "device": "cpu"}, "captures": captures,
        "gaussian": [draws.GAUSSIAN],
    }  # fmt: skip
    text = markdown.section(result)
    assert "nan" not in text
    assert len(markdown.trust(result).splitlines()) <= 25
    family = captures[draws.GAUSSIAN]["families"]["probs_stochastic"]
    assert family["size"] == 8
    p = np.stack([found.tests["probs_stochastic", t]["p"] for t in PRIMARY])
    lowest = np.array([min(adjust(p[..., i].ravel().tolist())) for i in range(8)])
    assert family["any"]["0.05"][0] == pytest.approx(np.mean(lowest <= 0.05), abs=1e-4)


def test_candidate_cr2_is_the_shipped_test() -> None:
    rng = np.random.default_rng(4)
    sizes = rng.integers(1, 20, (50, 12)).astype(float)
    sums = rng.standard_normal((50, 12)) * sizes
    assert candidates.reduced(sums, sizes) == pytest.approx(shipped(Sums((sums, sizes))), rel=1e-9)
