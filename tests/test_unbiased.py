"""``assert_unbiased``: false alarms on tensors that share errors in every way, power, texts, refusals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from builders import some
from scipy import stats
from torch import Tensor

from attn_diag import InputError, assert_unbiased, round_to
from attn_diag.reference.rounding import BF16, round_nearest_even, ulp
from attn_diag.testing.unbiased import TensorBias, tensor_bias

REDRAWS = 500
LEVEL = 0.05

Draw = Callable[[torch.Generator], tuple[Tensor, Tensor]]


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def bf16(x: Tensor) -> Tensor:
    """Exact: rounded once, so that the conversion changes nothing."""
    return round_nearest_even(x, BF16).to(torch.bfloat16)


def truncated(x: Tensor) -> Tensor:
    return round_to(x, "bf16:toward-zero").to(torch.bfloat16)


def independent(g: torch.Generator) -> tuple[Tensor, Tensor]:
    reference = normal((2, 48, 16), g)
    return bf16(reference + 2**-9 * normal((2, 48, 16), g)), reference


def rows_share(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """An error of the row sum: one factor a row."""
    reference = normal((2, 48, 16), g)
    return bf16(reference * (1 + 2**-8 * normal((2, 48, 1), g))), reference


def features_share(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """A weight's rounding: one error a feature, in every row."""
    reference = normal((2, 48, 16), g)
    return bf16(reference + 2**-8 * normal((1, 1, 16), g)), reference


def heads_share(g: torch.Generator) -> tuple[Tensor, Tensor]:
    reference = normal((3, 4, 12, 4), g)
    return bf16(reference * (1 + 2**-8 * normal((3, 4, 1, 1), g))), reference


def stochastic(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Unbiased without being rounded to nearest."""
    reference = normal((2, 48, 16), g)
    seed = int(torch.randint(2**31, (1,), generator=g))
    return round_to(reference, "bf16:stochastic", seed).to(torch.bfloat16), reference


def alarms(draw: Draw, seen: Callable[[Tensor], Tensor] = lambda x: x) -> int:
    generator = torch.Generator().manual_seed(1)
    return sum(bool(tensor_bias(*map(seen, draw(generator)), level=LEVEL).biased) for _ in range(REDRAWS))


MOST = int(stats.binom.ppf(0.999, REDRAWS, LEVEL))


@pytest.mark.parametrize("draw", [independent, rows_share, features_share, heads_share, stochastic])
def test_unbiased_tensors_alarm_at_most_at_the_level(draw: Draw) -> None:
    assert alarms(draw) <= MOST


@pytest.mark.parametrize("draw", [rows_share, features_share, heads_share])
def test_elements_as_clusters_would_alarm(draw: Draw) -> None:
    """The same draws, seen as [n] independent elements."""
    assert alarms(draw, torch.flatten) > 2 * MOST


def test_rows_alone_would_alarm_where_features_share() -> None:
    """Seven features at a time: too few to be clusters."""
    assert alarms(features_share, lambda x: x[..., :7]) > 2 * MOST


def shifted(g: torch.Generator, bias_ulp: float) -> TensorBias:
    """[160, 40] with inner noise; a bias planted before the only rounding, in ulp of the reference."""
    reference = normal((160, 40), g)
    noisy = reference + 2**-8 * normal((160, 40), g) + bias_ulp * ulp(reference, BF16)
    return tensor_bias(bf16(noisy), reference)


def test_a_planted_bias_is_found_with_the_power_that_is_stated() -> None:
    generator, planted = torch.Generator().manual_seed(2), 0.05
    found = [shifted(generator, planted) for _ in range(REDRAWS)]
    power = sum("upward" in f.biased for f in found) / REDRAWS
    assert np.mean([f.mean_ulp or 0.0 for f in found]) == pytest.approx(planted, rel=0.02)
    stated = float(np.mean([(f.minimum_detectable or np.nan) / f.spacing for f in found]))
    # A statistic that the bias ``stated`` moves so far that 80 % of it lies beyond its critical value, of Holm's first
    # of two tests with 40 features' degrees of freedom.
    critical = stats.t.ppf(1 - 0.01 / 2 / 2, 39)
    expected = float(stats.norm.cdf((critical + stats.norm.ppf(0.8)) * planted / stated - critical))
    assert 0.7 < expected < 0.9, "the tensor's size no longer suits the planted bias"
    low, high = stats.binom.interval(0.999, REDRAWS, expected)
    assert low <= power * REDRAWS <= high, (power, expected, stated)


def test_that_power_is_not_there_without_a_bias() -> None:
    generator = torch.Generator().manual_seed(3)
    assert sum(bool(shifted(generator, 0.0).biased) for _ in range(REDRAWS)) <= stats.binom.ppf(0.999, REDRAWS, 0.01)


def test_elements_are_students_t() -> None:
    g = torch.Generator().manual_seed(0)
    reference = normal((300,), g).abs() + 1
    observed = bf16(reference + 2**-8 * normal((300,), g))
    found = tensor_bias(observed, reference)
    excess = (observed.double() - bf16(reference).double()).numpy()
    expected = stats.ttest_1samp(excess, 0.0)
    assert found.away is None, "one sign only"
    assert found.p_adjusted == found.p_value == pytest.approx(expected.pvalue, rel=1e-9)
    assert found.ci95 == pytest.approx(tuple(expected.confidence_interval(0.95)), rel=1e-9)
    assert found.clustered_by == "300 elements"


@pytest.mark.parametrize("given", [None, torch.arange(12).reshape(3, 4)])
def test_eight_heads_and_more_are_the_clusters(given: Tensor | None) -> None:
    observed, reference = heads_share(torch.Generator().manual_seed(0))
    found = tensor_bias(observed, reference, clusters=given)
    excess = observed.double() - bf16(reference).double()
    away = stats.ttest_1samp((excess * reference.sign()).mean((2, 3)).flatten().numpy(), 0.0)
    assert found.n_clusters == 12
    assert found.t == pytest.approx(stats.ttest_1samp(excess.mean((2, 3)).flatten().numpy(), 0.0).statistic, rel=1e-9)
    assert some(found.away).p_value == pytest.approx(away.pvalue, rel=1e-9)


def test_a_single_row_has_its_features_for_clusters() -> None:
    reference = normal((1, 200), torch.Generator().manual_seed(0)).abs()
    found = tensor_bias(truncated(reference), reference)
    excess = (truncated(reference).double() - bf16(reference).double()).flatten().numpy()
    assert found.p_value == pytest.approx(stats.ttest_1samp(excess, 0.0).pvalue, rel=1e-9)


def test_given_clusters_hold_for_all_that_lies_below_them() -> None:
    observed, reference = independent(torch.Generator().manual_seed(0))
    labels = np.array([[7] * 24 + [9] * 24, [4] * 48])
    found = tensor_bias(observed[..., :4], reference[..., :4], clusters=labels)
    assert (found.n_clusters, found.clustered_by) == (3, "3 given clusters")
    assert tensor_bias(observed, reference, clusters=[0, 1]).clustered_by == "2 given clusters and 16 features"


def test_a_truncating_cast_is_biased_toward_zero_only() -> None:
    reference = normal((2, 2, 64, 16), torch.Generator().manual_seed(0))
    found = tensor_bias(truncated(reference), reference)
    assert found.biased == ("away from zero",)
    assert some(found.away).mean_ulp == pytest.approx(-0.5, abs=0.03)
    text = failure(truncated(reference), reference, name="o of my kernel")
    assert text.startswith("o of my kernel is biased")
    assert "away from zero  -0.5" in text


def test_correct_rounding_passes_bit_for_bit() -> None:
    reference = normal((2, 64, 16), torch.Generator().manual_seed(0))
    found = assert_unbiased(bf16(reference), reference)
    assert (found.t, found.p_value, found.mean, found.minimum_detectable_ulp) == (None, None, 0.0, None)
    # A reference in fp32 is rounded once, too.
    assert assert_unbiased(reference.float().bfloat16(), reference.float()).mean == 0.0


def failure(observed: Tensor, reference: Tensor, **options: object) -> str:
    with pytest.raises(AssertionError) as raised:
        assert_unbiased(observed, reference, **options)  # type: ignore[arg-type]
    return str(raised.value)


def test_the_text_says_where_and_how_much() -> None:
    reference = normal((2, 3, 40, 16), torch.Generator().manual_seed(0)).abs() + 0.5
    wrong = reference.clone()
    wrong[1, 2] += 3 * ulp(reference[1, 2], BF16)
    wrong[1, 2, 17] += 5 * ulp(reference[1, 2, 17], BF16)
    text = failure(bf16(wrong), reference, name="dq")
    lines = text.splitlines()
    assert len(lines) <= 8
    assert max(map(len, lines)) <= 88, text
    assert "upward          +0.5" in lines[1]
    assert lines[1].endswith("<- biased")
    assert "heads, largest first: [1, 2] +3." in text
    assert "rows, largest first: [1, 2, 17] +7.9" in text
    assert "240 rows and 16 features" in text
    assert "n_eff" in text


def test_few_data_pass_but_say_what_they_would_have_found() -> None:
    reference = normal((3, 4), torch.Generator().manual_seed(0))
    found = assert_unbiased(truncated(reference), reference)
    assert some(found.minimum_detectable_ulp) > 0.5, "half an ulp is not found in twelve elements"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_fails_with_its_place(value: float) -> None:
    reference = normal((2, 8, 16), torch.Generator().manual_seed(0))
    observed = bf16(reference)
    observed[1, 3, 5] = value
    assert "in 1 of 256 elements; the first is [1, 3, 5]" in failure(observed, reference)


def test_equal_infinities_are_no_error() -> None:
    """Such as L of rows without a visible key, and what overflows in correct rounding, too."""
    reference = normal((40,), torch.Generator().manual_seed(0))
    reference[3], reference[5] = -float("inf"), 1e39
    found = assert_unbiased(bf16(reference), reference)
    assert found.mean == 0.0
    assert np.isfinite(found.spacing)


@pytest.mark.parametrize(
    ("observed", "reference", "options", "message"),
    [
        (torch.zeros(4, 3), torch.zeros(4), {}, r"one shape, got \[4, 3\] and \[4\]"),
        (torch.zeros(4), torch.zeros(4), {}, "observed float32 and reference float32; compute the reference in"),
        (torch.zeros(4).bfloat16(), torch.zeros(4).half(), {}, "reference float16"),
        (torch.zeros(4).long(), torch.zeros(4).double(), {}, "observed int64"),
        (np.zeros(4), torch.zeros(4).double(), {}, "observed must be a torch tensor, got ndarray"),
        (torch.zeros(0, 3), torch.zeros(0, 3).double(), {}, "with elements"),
        (torch.tensor(1.0), torch.tensor(1.0).double(), {}, r"got shape \[\]"),
        (
            torch.zeros(4),
            torch.tensor([1, 2, float("nan"), 3]).double(),
            {},
            r"reference has 1 NaN, the first at \[2\]",
        ),
        (torch.zeros(4), torch.zeros(4).double(), {"level": 0.0}, "level must lie between 0 and 1"),
        (torch.zeros(1), torch.zeros(1).double(), {}, "from two clusters on, got 1"),
        (torch.zeros(4, 9), torch.zeros(4, 9).double(), {"clusters": [1, 1, 1, 1]}, "from two clusters on, got 1"),
        (torch.zeros(4, 2), torch.zeros(4, 2).double(), {"clusters": [1, 2]}, r"one of \[4\], got int64 \[2\]"),
        (torch.zeros(4), torch.zeros(4).double(), {"clusters": torch.zeros(4)}, r"integers .* got float32 \[4\]"),
    ],
)
def test_refusals_say_what_came(observed: Tensor, reference: Tensor, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        assert_unbiased(observed, reference, name="x", **options)  # type: ignore[arg-type]
