"""Rows of a quantity that are further off than what all others show makes: a format below 16 bits, or such a kernel."""

from __future__ import annotations

from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence
from attn_diag.results.quality import BEYOND_FORMAT, Pattern
from attn_diag.results.wording import percent, ranges, runs


def beyond(evidence: Evidence, rows: Tensor, away: Tensor, more: str, others: str) -> Pattern:
    """The pattern.

    Args:
        evidence: The quantity.
        rows: Which, int64 [R].
        away: How far their numbers are off what the others show, [R, D].
        more: What is said behind how far that is.
        others: What the others show, a clause.
    """
    found, size = rows.tolist(), evidence.truth[rows].square().sum().clamp(min=1e-300)
    one = len(found) == 1
    how = f"{percent(float((away.square().sum() / size).sqrt()), '.2g')} off{more}"
    if not bool(evidence.observed[rows].any()):
        how = "zero, as if never written"
    unit, are = (evidence.unit[:-1], "is") if one else (evidence.unit, "are")
    return Pattern(BEYOND_FORMAT, f"{unit} {ranges(found)} {are} {how}; {others}", rows=tuple(runs(found)))
