"""The bias tests: formulas, clusters, calibration on unbiased noise, and planted biases."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from builders import some
from scipy import stats

from attn_diag.head.signed_errors import by_feature, of_elements, of_rows
from attn_diag.statistics.drift import FLAT_BAND_99
from attn_diag.statistics.mean_tests import Moments, Shares, mean_test
from attn_diag.statistics.means import BiasCase, SignedErrors, adjust, estimate_bias, estimate_biases


def rows_of(values: np.ndarray) -> SignedErrors:
    errors = torch.from_numpy(values)
    return of_rows(errors, torch.ones_like(errors))


def test_single_rows_are_students_t() -> None:
    values = np.random.default_rng(0).normal(0.3, 1.0, 200)
    found, expected = estimate_bias(rows_of(values), None, 0.01), stats.ttest_1samp(values, 0.0)
    assert found.t == pytest.approx(expected.statistic, rel=1e-12)
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-9)
    assert found.ci95 == pytest.approx(tuple(expected.confidence_interval(0.95)), rel=1e-12)
    assert found.rms == pytest.approx(math.sqrt(np.mean(values**2)))
    assert found.n_eff == pytest.approx(np.sum(values**2) ** 2 / np.sum(values**4))


def test_clusters_of_equal_size_are_a_test_of_their_means() -> None:
    values = np.random.default_rng(1).normal(0.1, 1.0, (30, 7)) + np.random.default_rng(2).normal(0, 1, (30, 1))
    clusters = np.repeat(np.arange(30), 7)
    found = estimate_bias(rows_of(values.ravel()), clusters, 0.01)
    expected = stats.ttest_1samp(values.mean(1), 0.0)
    assert found.n_clusters == 30
    assert found.t == pytest.approx(expected.statistic, rel=1e-12)
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-9)


def test_unequal_clusters_are_cr2_with_bell_and_mccaffreys_df() -> None:
    """Against the definition in matrices: A_c = (I - H_cc)^(-1/2), H = 11'/N, and the eigenvalues of G'G."""
    rng = np.random.default_rng(3)
    clusters = np.repeat(np.arange(6), [1, 2, 3, 5, 8, 30])
    values = rng.normal(0.2, 1.0, len(clusters))
    n = len(clusters)
    residuals, columns, variance = values - values.mean(), [], 0.0
    for c in range(6):
        inside = clusters == c
        size = int(inside.sum())
        roots, vectors = np.linalg.eigh(np.eye(size) - np.full((size, size), 1 / n))
        adjusted = vectors @ np.diag(roots**-0.5) @ vectors.T @ np.full(size, 1 / n)
        variance += float(adjusted @ residuals[inside]) ** 2
        columns.append((np.eye(n) - 1 / n)[:, inside] @ adjusted)
    eigenvalues = np.linalg.eigvalsh(np.array(columns) @ np.array(columns).T)
    df = eigenvalues.sum() ** 2 / np.square(eigenvalues).sum()
    found = estimate_bias(rows_of(values), clusters, 0.01)
    assert found.standard_error == pytest.approx(math.sqrt(variance), rel=1e-12)
    assert found.t is not None
    assert found.p_value == pytest.approx(2 * stats.t.sf(abs(found.t), df), rel=1e-9)
    # CR1 with G - 1 degrees of freedom is another test.
    assert found.p_value != pytest.approx(2 * stats.t.sf(abs(found.t), 5), rel=1e-2)


def test_absent_clusters_change_nothing() -> None:
    rng = np.random.default_rng(4)
    sums, sizes = rng.normal(size=7), rng.integers(1, 9, 7).astype(float)
    found, padded = mean_test(sums, sizes, 0.01), mean_test(np.insert(sums, 3, 0.0), np.insert(sizes, 3, 0.0), 0.01)
    assert padded.p_value == pytest.approx(found.p_value, rel=1e-12)
    assert padded.minimum_detectable == pytest.approx(found.minimum_detectable, rel=1e-12)


def test_elements_are_summed_by_row() -> None:
    errors = torch.randn(50, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ulps = torch.full_like(errors, 0.25)
    found = estimate_bias(of_elements(errors, float(ulps.sum())), np.arange(50), 0.01)
    assert found.n == 400
    assert found.mean == pytest.approx(float(errors.mean()))
    assert found.mean_ulp == pytest.approx(float(errors.mean()) / 0.25)
    assert found.p_value == pytest.approx(stats.ttest_1samp(errors.sum(1).numpy(), 0.0).pvalue, rel=1e-9)
    assert found.positive_fraction == pytest.approx(float((errors > 0).double().mean()))


def rejections(clustered: bool, mean: float, level: float, trials: int = 2000) -> float:
    """Rejection rate on heavy-tailed noise of unequal scale; clusters of unequal size share half their noise."""
    rng = np.random.default_rng(7)
    sizes = rng.integers(1, 12, 60)
    clusters = np.repeat(np.arange(60), sizes)
    scale = rng.uniform(0.5, 2.0, len(clusters))
    count = 0
    for _ in range(trials):
        noise = rng.standard_t(6, len(clusters)) * scale + rng.standard_t(6, 60)[clusters]
        found = estimate_bias(rows_of(noise + mean), clusters if clustered else None, level)
        count += some(found.p_value) < level
    return count / trials


@pytest.mark.parametrize("level", [0.01, 0.05])
def test_false_alarms_stay_at_the_level(level: float) -> None:
    rate = rejections(clustered=True, mean=0.0, level=level)
    upper = stats.binom.ppf(0.999, 2000, level) / 2000
    assert level / 3 <= rate <= upper, f"{rate:.4f} at level {level}, at most {upper:.4f} expected"


def test_ignoring_clusters_would_alarm() -> None:
    assert rejections(clustered=False, mean=0.0, level=0.01) > 0.05


def test_flat_band_is_left_by_one_percent_of_unbiased_walks() -> None:
    assert pytest.approx(stats.norm.ppf(1 - 0.01 / 4), abs=5e-4) == FLAT_BAND_99
    rng = np.random.default_rng(4)
    # Scale that changes along the rows: a constant-sigma z sqrt(n) band would fail here.
    scale = np.linspace(0.1, 3.0, 300)
    outside = sum(bool(estimate_bias(rows_of(rng.normal(0, scale)), None, 0.01).drift_outside) for _ in range(2000))
    assert outside <= stats.binom.ppf(0.999, 2000, 0.01)
    biased = estimate_bias(rows_of(rng.normal(0, scale) + 0.6), None, 0.01)
    assert biased.drift_outside


def test_drift_is_thinned_and_ends_at_the_sum() -> None:
    values = np.random.default_rng(5).normal(0, 1, 5000)
    found = estimate_bias(rows_of(values), None, 0.01)
    assert len(found.drift) <= 256
    assert found.drift[-1]["row"] == 4999
    assert found.drift[-1]["sum"] == pytest.approx(values.sum()) == found.cumulative_sum


def test_zero_errors_are_not_tested() -> None:
    found = estimate_bias(rows_of(np.zeros(100)), None, 0.01)
    assert found.mean == 0
    assert found.p_value is None
    assert found.n_eff is None


def test_one_cluster_is_not_tested() -> None:
    found = estimate_bias(rows_of(np.ones(100)), np.zeros(100, dtype=np.int64), 0.01)
    assert found.mean == 1
    assert found.p_value is None


def test_no_rows() -> None:
    assert estimate_bias(rows_of(np.zeros(0)), None, 0.01).mean is None


def test_benjamini_hochberg_by_hand() -> None:
    assert adjust([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 4 * 0.04 / 3, 4 * 0.04 / 3, 0.5])
    assert adjust([]) == []


def test_benjamini_hochberg_has_the_bits_of_scipy() -> None:
    generator = np.random.default_rng(0)
    for n in (1, 2, 7, 300):
        p_values = generator.random(n) ** 5
        p_values[: n // 3] = p_values[0]  # ties
        assert adjust(p_values.tolist()) == stats.false_discovery_control(p_values).tolist()


def effects(seed: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Errors [60, 12] without a mean, with parts that a key's rows share and others that a feature's elements share."""
    rng = np.random.default_rng(seed)
    keys = np.sort(rng.integers(0, 20, 60))
    errors = rng.standard_normal((60, 12)) + rng.standard_normal(20)[keys][:, None] + rng.standard_normal(12)
    return errors, keys


def signed(errors: npt.NDArray[np.float64], keys: npt.NDArray[np.int64]) -> SignedErrors:
    values = torch.from_numpy(errors)
    return by_feature(of_elements(values, 1.0), values, torch.from_numpy(keys))


def test_two_ways_of_clustering_at_once() -> None:
    """720 elements say no more than 20 keys and 12 features do, and neither alone says how little that is."""
    alarms = {"both": 0, "keys": 0, "features": 0, "none": 0}
    for seed in range(600):
        errors, keys = effects(seed)
        both, dense = signed(errors, keys), np.unique(keys, return_inverse=True)[1]
        feature = of_elements(torch.from_numpy(errors.T.copy()), 1.0)
        tests = {
            "both": estimate_bias(both, dense, 0.05),
            "keys": estimate_bias(replace(both, features=None), dense, 0.05),
            "features": estimate_bias(feature, None, 0.05),
            "none": estimate_bias(replace(both, features=None), None, 0.05),
        }
        for name, test in tests.items():
            alarms[name] += some(test.p_value) <= 0.05
    limit = stats.binom.ppf(0.999, 600, 0.05)
    assert stats.binom.ppf(0.001, 600, 0.05 / 3) <= alarms["both"] <= limit, alarms
    assert min(alarms["keys"], alarms["features"], alarms["none"]) > limit, alarms


def test_two_way_variance_is_keys_plus_features_less_cells() -> None:
    errors, keys = effects(1)
    dense = np.unique(keys, return_inverse=True)[1]
    found = estimate_bias(signed(errors, keys), dense, 0.05)
    mean, n = errors.mean(), errors.size
    assert found.mean == pytest.approx(mean)
    by_key = estimate_bias(replace(signed(errors, keys), features=None), dense, 0.05).standard_error
    by_feature = errors.mean(0).std(ddof=1) / 12**0.5
    cells = np.zeros((20, 12))
    np.add.at(cells, keys, errors - mean)
    variance = some(by_key) ** 2 + by_feature**2 - np.square(cells).sum() / n**2
    assert found.standard_error == pytest.approx(variance**0.5, rel=1e-9)


def test_features_of_several_heads_lie_side_by_side() -> None:
    """Joined heads: as if every head had keys and features of its own."""
    (first, keys), (second, others) = effects(2), effects(3)
    joined = some(SignedErrors.join([signed(first, keys), signed(second, others)]).features)
    blocks = np.zeros((120, 24))
    blocks[:60, :12], blocks[60:, 12:] = first, second
    whole = some(signed(blocks, np.concatenate([keys, others + 20])).features)
    assert joined.sums == pytest.approx(whole.sums)
    assert joined.cell_squares == pytest.approx(whole.cell_squares)
    assert SignedErrors.join([signed(first, keys), replace(signed(second, others), features=None)]).features is None


def test_features_that_do_not_make_up_the_errors_are_left_out() -> None:
    """As of a delta that a kernel took from its unrounded O."""
    errors, keys = effects(4)
    total, cells = of_elements(torch.from_numpy(errors), 1.0), torch.from_numpy(errors)
    by = torch.from_numpy(keys)
    assert by_feature(total, cells, by).features is not None
    assert by_feature(total, cells * 1.4, by).features is not None
    assert by_feature(total, cells * 1.6, by).features is None
    assert by_feature(total, -cells, by).features is None


def test_means_tested_together_are_those_of_each_alone() -> None:
    """With as many clusters or not, with features, without an error, and with clusters that agree."""
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 9, 40)
    dense = np.unique(keys, return_inverse=True)[1]
    noise = [rng.normal(0.1, 1, 40) for _ in range(3)]
    cases = [
        BiasCase(rows_of(noise[0]), None),
        BiasCase(rows_of(noise[1]), dense, with_drift=False),
        BiasCase(of_elements(torch.tensor(rng.normal(0, 1, (40, 4))), 1.0), None),
        BiasCase(signed(rng.normal(0.3, 1, (40, 4)), keys), dense),
        BiasCase(rows_of(np.zeros(40)), None),
        BiasCase(rows_of(np.zeros(0)), None),
        BiasCase(rows_of(np.ones(40)), None),
        BiasCase(signed(rng.normal(0, 1, (40, 4)), keys), dense),
        BiasCase(rows_of(noise[2]), None),
    ]
    together = estimate_biases(cases, 0.01)
    assert together == [estimate_bias(c.errors, c.clusters, 0.01, with_drift=c.with_drift) for c in cases]
    assert len({e.p_value for e in together if e.p_value is not None}) == 7


def test_means_with_nearly_as_many_clusters_are_tested_as_one_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is what it is alone, to the last bit, and ``mean_test`` of its own clusters to rounding."""
    rng, computed, of = np.random.default_rng(3), list[int](), Moments.of

    def counted(sums: npt.NDArray[np.float64], shares: Shares) -> Moments:
        computed.append(len(sums))
        return of(sums, shares)

    monkeypatch.setattr(Moments, "of", counted)
    clusters = [np.concatenate([np.arange(count), rng.integers(0, count, 90)]) for count in (33, 34, 35, 36)]
    cases = [BiasCase(rows_of(rng.normal(0.2, 1, len(keys))), keys) for keys in clusters]
    together = estimate_biases(cases, 0.01)
    assert computed[0] == len(cases)
    for keys, case, found in zip(clusters, cases, together, strict=True):
        assert [found] == estimate_biases([case], 0.01)
        sizes = np.bincount(keys).astype(np.float64)
        test = mean_test(np.bincount(keys, case.errors.total).astype(np.float64), sizes, 0.01)
        assert found.n_clusters == len(sizes)
        for name in ("standard_error", "t", "p_value", "minimum_detectable"):
            assert some(getattr(found, name)) == pytest.approx(float(getattr(test, name)), rel=1e-12)


def test_long_sets_are_computed_in_parts_and_are_what_they_are_whole() -> None:
    """Without arrays as long as they are, whose fresh pages would cost more than the arithmetic."""
    n = 2**17
    values = np.random.default_rng(2).normal(0.01, 1, n)
    case = BiasCase(rows_of(values), None)
    estimate_biases([case], 0.01)
    tracemalloc.start()
    (found,) = estimate_biases([case], 0.01)
    assert tracemalloc.get_traced_memory()[1] < values.nbytes / 2
    tracemalloc.stop()
    path = np.cumsum(values)
    assert [p["sum"] for p in found.drift] == path[[p["row"] for p in found.drift]].tolist()
    assert some(found.drift_outside) == (np.abs(path).max() > some(found.drift_band99))
    expected = stats.ttest_1samp(values, 0.0)
    assert some(found.t) == pytest.approx(expected.statistic, rel=1e-12)
    assert some(found.n_eff) == pytest.approx(np.square(values).sum() ** 2 / (values**4).sum(), rel=1e-12)


@pytest.mark.parametrize("exponent", [-900, -300, 200, 450])
def test_errors_may_be_of_any_size(exponent: int) -> None:
    """Beside them one of usual size: a power of two changes no bit of what has no unit."""
    rng = np.random.default_rng(3)
    sums, sizes = rng.normal(0.3, 1, (2, 50)), rng.integers(1, 9, (2, 50)).astype(float)
    usual, found = mean_test(sums, sizes, 0.01), mean_test(sums * 2.0 ** np.array([[exponent], [0]]), sizes, 0.01)
    for name in ("t", "p_value", "df", "error_df"):
        assert np.array_equal(getattr(usual, name), getattr(found, name)), name
    assert np.array_equal(found.standard_error, usual.standard_error * 2.0 ** np.array([exponent, 0]))
