"""Figures 5b-c: which features of O make delta's error in its worst row, and in all rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.paper.result import FeatureProducts
from attn_diag.paper.rows import HeadRows


@dataclass
class FeatureSums:
    """Sums over the rows of a step, by feature [Dv], and its worst row so far."""

    rows: int = 0
    squares: float = 0.0
    positive: Tensor | None = None
    nonzero: Tensor | None = None
    contribution: Tensor | None = None
    worst: tuple[float, int, int, Tensor, Tensor] | None = None

    def add(self, rows: HeadRows) -> None:
        """Take one sequence, with O's error."""
        if rows.o_error is None or not len(rows.rows):
            return
        products = rows.do * rows.o_error
        found = (products > 0).sum(0).cpu(), (products != 0).sum(0).cpu(), products.sum(0).cpu()
        if self.positive is None or self.nonzero is None or self.contribution is None:
            self.positive, self.nonzero, self.contribution = found
        else:
            self.positive, self.nonzero = self.positive + found[0], self.nonzero + found[1]
            self.contribution = self.contribution + found[2]
        self.rows += len(rows.rows)
        self.squares += float(rows.delta_error.square().sum())
        at = int(rows.delta_error.abs().argmax())
        error = float(rows.delta_error[at])
        if self.worst is None or abs(error) > abs(self.worst[0]):
            self.worst = (
                error,
                rows.batch,
                int(rows.rows[at]),
                rows.do[at].clone().cpu(),
                rows.o_error[at].clone().cpu(),
            )

    def result(self, step: int | None) -> FeatureProducts | None:
        """The figure; None where no row was added."""
        if self.worst is None or self.positive is None or self.nonzero is None or self.contribution is None:
            return None
        error, batch, row, do, o_error = self.worst
        product = do * o_error
        scale = float(product.norm())
        alignment = abs(float(product.sum())) / scale if scale else 0.0
        fractions = torch.where(self.nonzero > 0, self.positive / self.nonzero, torch.nan).tolist()
        return FeatureProducts(
            step=step,
            batch=batch,
            row=row,
            delta_error=error,
            share=error**2 / self.squares if self.squares else 0.0,
            do=tuple(do.tolist()),
            o_error=tuple(o_error.tolist()),
            product=tuple(product.tolist()),
            alignment=alignment,
            # P(|sum s_i p_i| >= r ||p||) <= 2 exp(-r^2 / 2) for random signs (Hoeffding 1963), in any of the rows.
            alignment_p=min(1.0, 2 * self.rows * math.exp(-(alignment**2) / 2)),
            rows=self.rows,
            aligned=tuple(None if math.isnan(f) else f for f in fractions),
            contribution=tuple(self.contribution.tolist()),
        )
