"""Words of factors, and of what few rows carry."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_diag.analyses.verdicts.quality import judge_quantity
from attn_diag.analyses.verdicts.words import factor_words, few_carry
from attn_diag.head.quality import QuantitySample, sample
from attn_diag.reference import format_of
from attn_diag.results.quality import Quantity
from attn_diag.statistics.ratios import Carriers, RatioEstimate, paired_ratio

BF16 = format_of(torch.bfloat16)


def test_copies_of_one_row_are_one_sample() -> None:
    """The interval was of no width: 2.12 to 2.12 times a well-rounded kernel's error."""
    same = paired_ratio(np.full(160, 4.0) * (1 + 1e-14 * np.arange(160)), np.full(160, 1.0))
    assert same is not None
    assert (same.low, same.high, same.groups) == (0.0, math.inf, 1.0)
    assert same.factor == pytest.approx(2.0)
    alike = paired_ratio(np.full(160, 4.0), np.full(160, 4.0))  # the same bits as the well-rounded kernel
    assert alike is not None
    assert (alike.low, alike.high) == (1.0, 1.0)
    copies = torch.full((32,), 0.01, dtype=torch.float64)
    found = judge_quantity("dv", [compared(2 * copies, copies)], [0])
    assert found.answer == "undecided"
    assert "dV has 2.00 (no useful interval)" in found.words
    assert "copies of one key carry it, and it takes 8 to decide" in found.words


def test_of_a_wide_interval_the_end_that_tells_something_is_printed() -> None:
    assert factor_words(RatioEstimate(1.2, 1.1, 1.3, 40.0)) == "1.20 (1.10 to 1.30)"
    assert factor_words(RatioEstimate(1.2, 7e-56, 4e56, 1.2)) == "1.20 (no useful interval)"
    assert factor_words(RatioEstimate(3e9, 200.0, 4e16, 1.2)) == "3e+09 (at least 200)"
    assert factor_words(RatioEstimate(0.01, 1e-9, 0.5, 1.2)) == "0.01 (at most 0.50)"


def compared(errors: Tensor, others: Tensor, clusters: list[int] | None = None, rows: int = 32) -> QuantitySample:
    """32 rows of 16 numbers, or fewer that count, with these errors [32] beside a kernel with those."""
    truth = torch.ones(32, 16, dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(8)
    seen, other = (truth + e[:, None] * signs for e in (errors, others))
    groups = None if clusters is None else np.array(clusters)
    return sample(
        seen, truth, other, others[:, None].square().expand(-1, 16), BF16, torch.arange(rows), clusters=groups
    )


def test_a_factor_that_is_called_good_has_the_interval_that_says_so() -> None:
    """One row has all of the error; the others have less than a well-rounded kernel's."""
    others = torch.full((32,), 0.01, dtype=torch.float64)
    others[3] = 10.0
    errors = 0.7 * others
    errors[3] = 9.9
    found = judge_quantity("dq", [compared(errors, others)], [0])
    assert found.answer == "good"
    assert "0.99 (0.01 to 70.6) times its error, 0.71 (" in found.words


@pytest.mark.parametrize(("factor", "rows", "expected"), [(2.0, 32, "unfused"), (0.5, 32, None), (2.0, 1, None)])
def test_a_site_is_given_where_it_is_said(factor: float, rows: int, expected: str | None) -> None:
    others = torch.full((32,), 0.01, dtype=torch.float64)
    found = judge_quantity("dq", [replace(compared(factor * others, others, rows=rows), site="unfused")], [0])
    assert found.site == expected
    assert (expected is not None) == ("stored in the inputs' format" in found.words)


@pytest.mark.parametrize(
    ("quantity", "clusters", "expected"),
    [
        ("dq", None, "one of the rows carries"),
        ("dv", None, "one of the keys carries"),
        ("o", [*range(32)], "one of the rows carries"),
        ("o", [0] * 20 + [*range(1, 13)], "rows with one heaviest key carry"),
        ("o", [0] * 31 + [1], "one of the features carries"),
        ("dq", [*range(16)] * 2, "copies of one row carry"),
    ],
)
def test_what_carries_an_error(quantity: Quantity, clusters: list[int] | None, expected: str) -> None:
    errors = torch.full((32,), 1e-6, dtype=torch.float64)
    errors[[0, 16] if clusters is not None and clusters[0] == clusters[16] else [0]] = 1.0
    assert few_carry(compared(errors, errors, clusters), 1.0, quantity) == expected


def test_several_carry_an_error() -> None:
    errors = torch.full((32,), 1e-6, dtype=torch.float64)
    errors[:2] = 1.0
    found = compared(errors, errors)
    assert few_carry(found, 2.0, "o") == "about 2 rows carry"
    assert few_carry(compared(errors, errors, [0] * 20 + [*range(1, 13)]), 1.4, "o") == (
        "rows with about 1.4 heaviest keys carry"
    )
    shared = replace(found, carriers=Carriers(count=1.4, share=0.9, correlation=0.0))
    assert few_carry(shared, 1.4, "dk") == "about 1.4 query rows carry"
