"""Bit agreement of an emulated O with a captured one: the rows to compare, the fraction, and whether two differ.

Elements of one row share their scores and P, so that all uncertainties are clustered by row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.heads import HeadInputs
from attn_diag.reference import reference_rows

# Rows among which those that attend to many keys are looked for, and how many are looked at together.
_POOL, _BLOCK = 512, 64


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

    def p_value(self, other: Match) -> float:
        """Two-sided p-value of "neither is right more often than the other", from the rows where they differ.

        McNemar's comparison, clustered: under the null the difference d_r of the two numbers of equal elements in row r
        has either sign with the same probability, so that z = sum d_r / sqrt(sum d_r^2) is about normal. Two that
        differ in n rows have |z| <= sqrt(n): a few rows never decide.
        """
        difference = (self.equal.sum(1) - other.equal.sum(1)).double()
        spread = float(difference.square().sum())
        if not spread:
            return 1.0
        return math.erfc(abs(float(difference.sum())) / math.sqrt(2 * spread))


def usable_rows(inputs: HeadInputs, observed: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Those of ``rows`` that tell something (finite in and out, a visible key), and 1 / sum P^2 of each.

    The latter is the number of keys that a row effectively attends to: on a row with one key all recipes agree.
    """
    kept, attended = [], []
    for block_rows in rows.split(_BLOCK):
        block = reference_rows(replace(inputs.head, do=None), block_rows)
        inputs.mark_rows(block)
        good = ~inputs.unusable[block_rows] & observed[block_rows].isfinite().all(1) & ~block.fully_masked
        kept.append(block_rows[good])
        attended.append(1 / block.probs.square().sum(1)[good])
    return torch.cat(kept), torch.cat(attended)


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
    coarse = torch.cat([even, wide]).unique()
    rest, _ = usable_rows(inputs, observed, spread_rows(length, many, device))
    return coarse, torch.cat([coarse, rest]).unique()
