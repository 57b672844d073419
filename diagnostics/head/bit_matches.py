"""Where an emulated O has a captured one's bits, and which of two recipes has more of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

# Up to so many rows in dispute all signs are gone through, beyond it a sum of signs is normal enough.
_EXACT_ROWS = 64


@dataclass(frozen=True)
class Match:
    """Where an emulated O has the observed bits: ``equal`` [R, Dv] bool over the compared rows, on any device."""

    equal: Tensor

    @cached_property
    def by_row(self) -> Tensor:
        """How many elements of each row are equal, int64 [R]."""
        return self.equal.sum(1)

    @cached_property
    def agreement(self) -> float:
        """Fraction of equal elements."""
        return int(self.by_row.sum()) / self.equal.numel() if self.equal.numel() else math.nan

    @property
    def standard_error(self) -> float | None:
        """Of the agreement, over rows; None for a single one."""
        rows = self.equal.double().mean(1)
        return float(rows.std() / math.sqrt(len(rows))) if len(rows) > 1 else None

    def compare(self, other: Match) -> BitComparison:
        """Where the two differ, and how likely that is if ``other`` is in truth right as often."""
        disputed, ahead = (self.equal != other.equal).sum(1).tolist(), (self.by_row - other.by_row).tolist()
        every, balance = sum(disputed), sum(ahead)
        return BitComparison(
            won=(every + balance) // 2,
            lost=(every - balance) // 2,
            rows=sum(d > 0 for d in disputed),
            p_value=_sign_flip([d for d in ahead if d]),
        )


@dataclass(frozen=True)
class BitComparison:
    """Two recipes on the same elements: those that only one reproduces (``won``) or only the other (``lost``).

    ``rows``: rows in which there are such elements. ``p_value``: McNemar's test clustered by row, one-sided, of "the
    other is right at least as often": were it the true recipe, almost all elements in dispute would be its own, so that
    this null, under which each row's balance has either sign with the same probability, is its least favourable case.
    """

    won: int
    lost: int
    rows: int
    p_value: float


def _sign_flip(balances: list[int]) -> float:
    """P(sum of s_r |d_r| >= sum of d_r) for independent random signs s_r; exact for few rows, else normal."""
    total = sum(balances)
    if len(balances) > _EXACT_ROWS:
        return 0.5 * math.erfc(total / math.sqrt(2 * sum(d * d for d in balances)))
    # The distribution of the sum over half of its numbers: sum of |d_r| over the rows with a positive sign.
    reach = sum(map(abs, balances))
    ways = np.zeros(reach + 1)
    ways[0] = 1
    for d in map(abs, balances):
        ways[d:] += ways[: reach + 1 - d]  # none of the rest has any yet
    return math.ldexp(float(ways[(reach + total) // 2 :].sum()), -len(balances))
