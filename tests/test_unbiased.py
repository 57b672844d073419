"""``assert_unbiased``: false alarms on tensors that share errors in every way, power, texts, refusals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from attn_diag import InputError, assert_unbiased, round_to
from attn_diag.reference.rounding import BF16, round_nearest_even, ulp
from attn_diag.regression.unbiased import TensorBias, tensor_bias
from scipy import stats
from torch import Tensor

REDRAWS = 600
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
    """[64, 40] with inner noise; a bias planted before the only rounding, in ulp of the reference."""
    reference = normal((64, 40), g)
    noisy = reference + 2**-8 * normal((64, 40), g) + bias_ulp * ulp(reference, BF16)
    return tensor_bias(bf16(noisy), reference)


def test_a_planted_bias_is_found_with_the_power_that_is_stated() -> None:
    generator, planted = torch.Generator().manual_seed(2), 0.05
    found = [shifted(generator, planted) for _ in range(REDRAWS)]
    power = sum("upward" in f.biased for f in found) / REDRAWS
    assert all(f.minimum_detectable is not None for f in found)
    stated = float(np.mean([(f.minimum_detectable or 0) / f.spacing for f in found]))
    # The mean of a test statistic that a bias of ``stated`` puts 80 % beyond its critical value.
    critical = stats.t.ppf(1 - 0.01 / 2 / 2, 39)
    expected = stats.norm.cdf((critical + stats.norm.ppf(0.8)) * planted / stated - critical)
    low, high = stats.binom.interval(0.999, REDRAWS, expected)
    assert 0.03 < stated < 0.1
    assert low / REDRAWS - 0.03 <= power <= high / REDRAWS + 0.03, (power, expected, stated)
    assert sum(bool(shifted(generator, 0.0).biased) for _ in range(REDRAWS)) <= stats.binom.ppf(0.999, REDRAWS, 0.01)
