"""Bit agreement of an emulated O with a captured one: the rows to compare, the fraction, and whether two differ.

Elements of one row share their scores and P, so that all uncertainties are clustered by row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.head.read import HeadInputs
from attn_diag.reference import reference_rows
from attn_diag.work import map_in_order

# Rows among which those that attend to many keys are looked for, and how many are looked at together.
_POOL, _BLOCK = 512, 64
# Up to so many rows in dispute all signs are gone through, beyond it a sum of signs is normal enough.
_EXACT_ROWS = 64


@dataclass(frozen=True)
class Match:
    """Where an emulated O has the observed bits: ``equal`` [R, Dv] bool over the compared rows."""

    equal: Tensor

    @property
    def agreement(self) -> float:
        """Fraction of equal elements."""
        return float(self.equal.double().mean())

    @property
    def standard_error(self) -> float | None:
        """Of the agreement, over rows; None for a single one."""
        rows = self.equal.double().mean(1)
        return float(rows.std() / math.sqrt(len(rows))) if len(rows) > 1 else None

    def compare(self, other: Match) -> BitComparison:
        """Where the two differ, and how likely that is if ``other`` is in truth right as often."""
        difference = (self.equal.sum(1) - other.equal.sum(1))[(self.equal != other.equal).any(1)]
        return BitComparison(
            won=int((self.equal & ~other.equal).sum()),
            lost=int((other.equal & ~self.equal).sum()),
            rows=len(difference),
            p_value=_sign_flip(difference[difference != 0].tolist()),
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
    chance = torch.zeros(reach + 1, dtype=torch.float64)
    chance[0] = 1
    for d in map(abs, balances):
        chance = (chance + chance.roll(d)) / 2
    return float(chance[(reach + total) // 2 :].sum())


def usable_rows(inputs: HeadInputs, observed: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Those of ``rows`` that tell something (finite in and out, a visible key), and 1 / sum P^2 of each.

    The latter is the number of keys that a row effectively attends to: on a row with one key all recipes agree.
    """

    def look(block_rows: Tensor) -> tuple[Tensor, Tensor]:
        block = reference_rows(replace(inputs.head, do=None), block_rows)
        inputs.mark_rows(block)
        good = ~inputs.unusable[block_rows] & observed[block_rows].isfinite().all(1) & ~block.fully_masked
        return block_rows[good], 1 / block.probs.square().sum(1)[good]

    blocks = [rows[start : start + _BLOCK] for start in range(0, len(rows), _BLOCK)]
    found = list(map_in_order(look, blocks, parallel=rows.device.type == "cpu"))
    return torch.cat([kept for kept, _ in found]), torch.cat([attended for _, attended in found])


def spread_rows(length: int, count: int, device: torch.device) -> Tensor:
    """``count`` rows (or all) spread over the ``length``, int64."""
    return torch.linspace(0, length - 1, min(length, count), device=device).long()


def choose_rows(inputs: HeadInputs, observed: Tensor, few: int, many: int) -> tuple[Tensor, Tensor]:
    """Rows for a coarse search and for the final comparison, ascending; empty where none is usable.

    Half of the ``few`` are spread, half attend to the most keys. The ``many`` are spread (all rows, if there are no
    more) and hold the few.
    """
    length, device = len(observed), observed.device
    pool, attended = usable_rows(inputs, observed, spread_rows(length, _POOL, device))
    even = pool[spread_rows(len(pool), few // 2, device)] if len(pool) else pool
    wide = pool[attended.argsort(descending=True, stable=True)[: few - few // 2]]
    coarse = _union(even, wide)
    rest, _ = usable_rows(inputs, observed, spread_rows(length, many, device))
    return coarse, _union(coarse, rest)


def _union(one: Tensor, other: Tensor) -> Tensor:
    return torch.tensor(sorted({*one.tolist(), *other.tolist()}), dtype=torch.int64, device=one.device)
