"""Figures 5b-c: which features of O make delta's error in its worst row, and in all rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attn_diag.analyses.paper.rows import HeadRows
from attn_diag.results.paper import FeatureProducts


@dataclass
class FeatureProductSums:
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
            alignment_p=min(1.0, self.rows * sign_bound(product)),
            rows=self.rows,
            aligned=tuple(None if math.isnan(f) else f for f in fractions),
            contribution=tuple(self.contribution.tolist()),
        )


def sign_bound(products: Tensor) -> float:
    """No less than P(|sum s_i |p_i|| >= |sum p_i|) for random signs s_i: Chernoff's bound, both tails.

    2 min over t >= 0 of exp(-t |sum p|) prod cosh(t p_i) (Chernoff 1952): never above Hoeffding's
    2 exp(-alignment^2 / 2), and the truth, 2 / 2^n, where all n products agree in sign.
    """
    from scipy.optimize import minimize_scalar

    p = np.abs(products.double().numpy())
    if not p.any():
        return 1.0
    p /= p.max()
    p = p[p > 0]
    reached = abs(float(products.double().sum())) / float(products.double().abs().max())

    def exponent(log_t: float) -> float:
        x = math.exp(log_t) * p
        return float((x + np.log1p(np.exp(-2 * x)) - math.log(2)).sum()) - math.exp(log_t) * reached

    # Every t gives a bound, so the search need not be exact.
    best = minimize_scalar(exponent, bounds=(-12.0, 12.0), method="bounded")
    return min(1.0, 2 * math.exp(min(float(best.fun), 0.0)))
