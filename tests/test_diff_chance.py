"""``diff`` calls a change what is beyond chance: false alarms under the level, by tests that can fail."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from builders import some
from diffed_runs import HEADS, diagnosed, entries, moved
from scipy import stats

from attn_diag.analyses.comparison.diff import compare
from attn_diag.results.diagnosis import BiasEstimate, Diagnosis
from attn_diag.statistics import sizes
from attn_diag.statistics.welch import Estimated, Welch, degrees_of_freedom, welch

pytestmark = pytest.mark.slow


def most(level: float) -> int:
    """So many alarms in 300 runs, and more, have a chance below 0.1 % where their rate is the level."""
    return int(stats.binom.isf(1e-3, HEADS, level))


REDRAWS = {"same-inputs": (("bf16:stochastic", 1, 0), ("bf16:stochastic", 2, 0)),
           "stochastic-and-nearest": (("bf16:stochastic", 3, 0), ("bf16", 0, 0)),
           "other-inputs": (("bf16:stochastic", 1, 0), ("bf16:stochastic", 4, 1))}  # fmt: skip


def redraws(case: str) -> Iterator[Diagnosis]:
    return (diagnosed(rounding, draw, seed=seed) for rounding, draw, seed in REDRAWS[case])


@pytest.mark.parametrize("level", [0.01, 0.05])
@pytest.mark.parametrize("case", REDRAWS)
def test_false_alarms_stay_under_the_level(case: str, level: float) -> None:
    first, second = redraws(case)
    found = entries(first, second, level)
    assert sum(map(moved, found)) <= most(level)
    assert not any({"became-biased", "cured"} & set(e.outcomes) for e in found)
    whole = compare(first, second, level=level)
    assert "became-biased" not in whole.outcomes


def only_one_error(a: Estimated, b: Estimated) -> Welch:
    return welch(Estimated(a.mean, 0.0, math.inf), b)


def difference_of_errors(a: Estimated, b: Estimated) -> Welch:
    """As if the two were perfectly correlated."""
    return welch(Estimated(a.mean, abs(a.standard_error - b.standard_error), a.df), Estimated(b.mean, 0.0, math.inf))


@pytest.mark.parametrize("mutant", [only_one_error, difference_of_errors])
def test_the_check_of_false_alarms_can_fail(
    mutant: Callable[[Estimated, Estimated], Welch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attn_diag.analyses.comparison.diff.welch", mutant)
    first, second = redraws("same-inputs")
    assert sum(map(moved, entries(first, second, 0.05))) > most(0.05)


def test_sizes_are_called_changes_beyond_chance_only() -> None:
    """Unbiased redraws differ in size by chance alone; a coarser rounding is larger in all heads of 256 rows."""
    first, second = redraws("same-inputs")
    for level in (0.01, 0.05):
        assert sum(bool({"grew", "shrank"} & set(e.outcomes)) for e in entries(first, second, level)) <= most(level)
    fine, coarse = diagnosed("bf16", heads=8, rows=256), diagnosed("e8m4", heads=8, rows=256)
    assert all("grew" in e.outcomes for e in compare(fine, coarse).entries)
    assert all("shrank" in e.outcomes for e in compare(coarse, fine).entries)


def one_percent(a: float, b: float, tail: float) -> tuple[float, float]:  # noqa: ARG001
    return 0.99, 1.01


def ten_times_the_rows(a: float, b: float, tail: float) -> tuple[float, float]:
    return BOUNDS(10 * a, 10 * b, tail)


BOUNDS = sizes.bounds


@pytest.mark.parametrize("mutant", [one_percent, ten_times_the_rows])
def test_the_check_of_sizes_can_fail(
    mutant: Callable[[float, float, float], tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "bounds", mutant)
    first, second = redraws("same-inputs")
    assert sum(bool({"grew", "shrank"} & set(e.outcomes)) for e in entries(first, second, 0.05)) > most(0.05)


def test_bounds_are_quantiles_of_the_ratio() -> None:
    generator = np.random.default_rng(0)
    a, b = (np.sqrt(np.square(generator.standard_normal((20_000, n))).mean(1)) for n in (30, 50))
    low, high = sizes.bounds(30, 50, 0.01)
    for outside in (float((b / a < low).mean()), float((b / a > high).mean())):
        assert stats.binomtest(round(outside * 20_000), 20_000, 0.01).pvalue > 1e-4
    swapped = sizes.bounds(50, 30, 0.01)
    assert stats.binomtest(int((b / a > swapped[1]).sum()), 20_000, 0.01).pvalue < 1e-4, "the check cannot fail"


def test_freedom_of_normal_errors_is_their_number() -> None:
    errors = np.random.default_rng(1).standard_normal(4000)
    n_eff = float(np.square(errors).sum() ** 2 / (errors**4).sum())
    assert sizes.freedom(BiasEstimate(n_clusters=4000, n_eff=n_eff)) == pytest.approx(4000, rel=0.1)
    assert sizes.freedom(BiasEstimate(n_clusters=4000, n_eff=10)) == pytest.approx(20, rel=0.01)
    assert sizes.freedom(BiasEstimate(n_clusters=1, n_eff=1)) is None


@pytest.mark.parametrize("df", [1.0, 2.7, 7.0, 31.5, 400.0])
@pytest.mark.parametrize("t", [0.9, -3.0, 25.0])
def test_degrees_of_freedom_of_documents_that_do_not_state_them(t: float, df: float) -> None:
    found = degrees_of_freedom(estimate(t * 2e-7, 2e-7, df))
    assert found == pytest.approx(df, rel=1e-6)
    assert found != pytest.approx(df + 1, rel=1e-6)


def test_a_test_states_its_degrees_of_freedom() -> None:
    for _, _, head in diagnosed("bf16").entries():
        found = some(head.bias.delta)
        assert degrees_of_freedom(found) == some(found.degrees_of_freedom)
        unstated = dataclasses.replace(found, degrees_of_freedom=None)
        assert degrees_of_freedom(unstated) == pytest.approx(found.degrees_of_freedom, rel=1e-6)


def estimate(mean: float, se: float, df: float) -> BiasEstimate:
    half = float(stats.t.ppf(0.975, df)) * se
    p = 2 * float(stats.t.sf(abs(mean / se), df))
    return BiasEstimate(
        n=900, n_clusters=50, n_eff=30.0, mean=mean, rms=1.0, standard_error=se, t=mean / se, p_value=p, p_adjusted=p,
        ci95=(mean - half, mean + half),
    )  # fmt: skip


def test_degrees_of_freedom_survive_what_files_do_to_numbers() -> None:
    """HTML reports shorten numbers; means far beyond their errors swallow the interval."""
    exact = estimate(1.3e-5, 4e-6, 12.0)
    low, high = (float(f"{end:.5g}") for end in some(exact.ci95))
    short = dataclasses.replace(exact, ci95=(low, high))
    assert degrees_of_freedom(short) == pytest.approx(12, rel=0.01)
    far = estimate(1.0, 1e-17, 12.0)
    assert far.ci95 == (1.0, 1.0)
    assert degrees_of_freedom(far) == 49, "from the number of clusters"
    assert math.isinf(degrees_of_freedom(estimate(1e-7, 2e-7, 1e9)))


def test_welch_is_scipys() -> None:
    generator = np.random.default_rng(2)
    x, y = generator.standard_normal(12), 3 * generator.standard_normal(40) + 0.7
    ours = welch(*(Estimated(float(z.mean()), float(stats.sem(z)), len(z) - 1.0) for z in (x, y)))
    theirs = stats.ttest_ind(y, x, equal_var=False)
    assert (ours.t, ours.p_value, ours.df) == pytest.approx((theirs.statistic, theirs.pvalue, theirs.df))
    assert ours.ci95 == pytest.approx(tuple(theirs.confidence_interval(0.95)))
    assert ours.p_value != pytest.approx(stats.ttest_ind(y, x).pvalue), "the check cannot fail"


def test_welch_of_exact_means() -> None:
    zero, exact = Estimated(0.0, 0.0, math.inf), Estimated(2e-9, 0.0, math.inf)
    assert (welch(zero, zero).p_value, welch(zero, zero).t) == (1.0, 0.0)
    assert (welch(zero, exact).p_value, welch(exact, zero).t) == (0.0, -math.inf)
    tiny = welch(Estimated(1e-200, 1e-201, 9.0), Estimated(0.0, 1e-201, 9.0))
    assert tiny.df == pytest.approx(18)
