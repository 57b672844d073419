"""Signed errors of L, which the backward needs to make P again: exp(S - L)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from attn_diag.head.signed_errors import of_elements
from attn_diag.results.probe import LseTest
from attn_diag.statistics.means import SignedErrors, estimate_bias
from attn_diag.statistics.welch import confidence, p_beyond


@dataclass(frozen=True)
class LseErrors:
    """One head's, over the rows where L is finite. ``allowed``: sum of what fp32 arithmetic can make of each error.

    ``base_2``: L ln 2 lies within the bounds everywhere.
    """

    signed: SignedErrors
    max_error: float
    of_budget: float
    allowed: float
    nonfinite: int
    base_2: bool

    @classmethod
    def of(cls, observed: Tensor, truth: Tensor, budget: Tensor, arithmetic: Tensor) -> LseErrors:
        """All [T], float64; ``budget`` and ``arithmetic``: bounds of every rounding, and of fp32's alone."""
        finite = observed.isfinite()
        observed, truth, budget = observed[finite], truth[finite], budget[finite]
        error = observed - truth
        return cls(
            signed=of_elements(error[:, None], 0.0),
            max_error=float(error.abs().max()) if len(error) else 0.0,
            of_budget=float((error.abs() / budget).max()) if len(error) else 0.0,
            allowed=float(arithmetic[finite].sum()),
            nonfinite=int((~finite).sum()),
            base_2=bool(((observed * math.log(2) - truth).abs() <= budget).all()),
        )

    @classmethod
    def join(cls, parts: Sequence[LseErrors]) -> LseErrors:
        """Of one head's several V."""
        return cls(
            signed=SignedErrors.join([p.signed for p in parts]),
            max_error=max(p.max_error for p in parts),
            of_budget=max(p.of_budget for p in parts),
            allowed=sum(p.allowed for p in parts),
            nonfinite=sum(p.nonfinite for p in parts),
            base_2=all(p.base_2 for p in parts),
        )


def lse_test(heads: Sequence[LseErrors], level: float) -> LseTest:
    """Is L's mean error more than fp32 arithmetic can make? Heads are the clusters."""
    of_rows = np.concatenate([np.full(len(h.signed.total), i, dtype=np.int64) for i, h in enumerate(heads)])
    clusters = np.unique(of_rows, return_inverse=True)[1]
    joined = LseErrors.join(heads)
    error = estimate_bias(joined.signed, clusters, level, with_drift=False)
    allowed = joined.allowed / error.n if error.n else 0.0
    return LseTest(
        error=error,
        ci=confidence(error, level),
        allowed=allowed,
        max_error=joined.max_error,
        of_budget=joined.of_budget,
        nonfinite=joined.nonfinite,
        fits_base_2=joined.base_2 and joined.of_budget > 1,
        p_value=p_beyond(error, allowed),
    )
