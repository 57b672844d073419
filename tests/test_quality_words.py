"""Words of factors that few rows carry."""

from __future__ import annotations

from attn_diag.analyses.quality_words import factor_words, few_carry
from attn_diag.statistics.ratios import RatioEstimate


def test_an_interval_that_tells_nothing_is_not_printed() -> None:
    assert factor_words(RatioEstimate(1.2, 1.1, 1.3, 40.0)) == "1.20 (1.10 to 1.30)"
    assert factor_words(RatioEstimate(1.2, 7e-56, 4e56, 1.2)) == "1.20 (no useful interval)"


def test_one_row_is_one_row() -> None:
    assert few_carry(1.0, "rows") == "one of the rows carries"
    assert few_carry(2.41, "keys") == "about 2.4 keys carry"
