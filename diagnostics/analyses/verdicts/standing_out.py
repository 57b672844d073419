"""Where in a head what stands out lies, and what is said of the place."""

from __future__ import annotations

import numpy as np

from attn_diag.head.outlying import GROUP_LIMIT
from attn_diag.head.quality import LOSSY, QuantitySample
from attn_diag.results.quality import Pattern
from attn_diag.results.wording import ranges, times
from attn_diag.statistics.ratios import RatioEstimate

# Outlying rows of a kernel that rounds coarsely everywhere are no pattern; few, or neighbours, are.
_FEW = 8
# Squares that are so much smaller are float64's own.
_EXACT = 1e-6


def localised(whole: QuantitySample, outlying: np.ndarray, *, healthy: bool) -> bool:
    """Whether what stands out is a place: few rows, neighbours or features, while all else is well rounded."""
    if not healthy:
        return False
    # Places, not numbers: every sequence has a row 7.
    rows = np.flatnonzero(outlying)
    runs = 1 + int((np.diff(rows) > 1).sum())
    return runs <= _FEW or runs <= len(rows) / 4 or bool((whole.bad_features > 0).any())


def is_place(whole: QuantitySample, outlying: np.ndarray, *, healthy: bool) -> bool:
    """Whether what stands out is a place by where it is, how far off it is, or of what size its error is."""
    if localised(whole, outlying, healthy=healthy) or whole.misplaced.any():
        return True
    return beyond_rounding(whole, outlying)


def as_usual(error: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """Which rows or features are hardly further off, in ulp, than others: a well-rounded kernel may be exact there."""
    in_ulp = error / np.maximum(floor, 1e-300)
    usual = np.median(in_ulp[floor > 0]) if (floor > 0).any() else 0.0
    found: np.ndarray = in_ulp <= GROUP_LIMIT**2 * usual
    return found


def next_to_exact(whole: QuantitySample) -> np.ndarray:
    """Which rows are an ulp off at most where a well-rounded kernel is exact: another rounding leaves no less."""
    exact = whole.counterfactual <= _EXACT * whole.floor
    found: np.ndarray = exact & (whole.error <= (1 + _EXACT) * 12 * whole.floor)
    return found


def others_right(whole: QuantitySample) -> bool:
    """Whether features that stand out are few, and the others are as good as a well-rounded kernel's."""
    bad = whole.bad_features > 0
    error, other, floor = whole.features.reshape(3, -1, len(bad)).sum(1)[:, ~bad]
    return bool(2 * bad.sum() <= len(bad) and error.sum() <= LOSSY**2 * max(other.sum(), floor.sum()))


def beyond_rounding(whole: QuantitySample, outlying: np.ndarray) -> bool:
    """Whether the error is of the size of the quantity itself where it stands out."""
    error, truth = float(whole.error[outlying].sum()), float(whole.reference[outlying].sum())
    return error > truth / 4


def where(whole: QuantitySample, outlying: np.ndarray, unit: str, rest: RatioEstimate | None) -> Pattern:
    """What stands out as a pattern; ``unit``: rows or keys, ``rest``: the ratio of the others."""
    rows = sorted(whole.rows[outlying].tolist())
    share = float(whole.error[outlying].sum() / whole.error.sum())
    one = len(rows) == 1
    subject, verb = (unit[:-1], "stands") if one else (unit, "stand")
    words = f"{subject} {ranges(rows)} ({len(rows)} of {len(outlying)}) {verb} out"
    if rest is not None:
        left = "it" if one else "them"
        words += f"; without {left} the error is {times(rest.factor)} times a well-rounded kernel's"
    return Pattern("keys" if unit == "keys" else "rows", words, share, None if rest is None else rest.factor)


def over_all(columns: np.ndarray, unit: str) -> Pattern:
    """Features that stand out as a pattern."""
    subject, verb = ("feature", "stands") if len(columns) == 1 else ("features", "stand")
    return Pattern("features", f"{subject} {ranges(columns.tolist())} {verb} out over all {unit}")
