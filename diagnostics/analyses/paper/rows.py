"""The rows of one head: P K and the errors of delta and O in float64; figures 5b-c: which features make delta's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.head.projection import Projection
from attn_diag.head.read import read_float64, read_head
from attn_diag.head.truth import head_truth
from attn_diag.reference import BoundCollector
from attn_diag.results.paper import FeatureProducts


@dataclass(frozen=True)
class HeadRows:
    """The rows of one sequence that are finite and see a key: ``rows`` [n] int64; all else float64, row by row.

    ``probs_k`` [n, D]: (P K)_t, with softcap P o (1 - (S/c)^2) K; ``delta_error`` [n] = observed - reference; ``do``,
    ``o_error`` [n, Dv], None where O was not captured; ``x`` [n, C]; ``left`` [n, D]: delta's error of dQ,
    -alpha Delta_delta_t (P K)_t, pulled back to the projection's output, so that its outer products with x add up to
    the error of dW_Q; None where that does not follow.
    """

    batch: int
    rows: Tensor
    probs_k: Tensor
    delta_error: Tensor
    do: Tensor
    o_error: Tensor | None
    x: Tensor | None
    left: Tensor | None


def head_rows(
    capture: Capture, observation: str, head: int, projection: Projection, device: torch.device
) -> Iterator[HeadRows]:
    """The rows of head ``head`` (counted within the capture) of every sequence, one sequence at a time."""
    for batch in range(capture.batch):
        inputs = read_head(capture, batch, head, device)
        inside = inputs.head
        assert inside.do is not None
        bounds = BoundCollector(inside)
        truth = head_truth(inputs, projection.head(batch, head), bounds.add, gradient_sums=True)
        reference, probs_k, of_head = truth.reference, truth.probs_k, truth.projection
        assert reference.delta is not None
        assert probs_k is not None
        keys = (capture.key(observation, output) for output in ("o", "delta"))
        out, delta = (read_float64(capture, key, batch, head, device) for key in keys)
        if delta is None:
            assert out is not None, "delta's error was measured, so delta or O is there"
            delta = (inside.do * out).sum(1)
        usable = ~inputs.unusable & delta.isfinite() & ~reference.fully_masked & bounds.bounds(reference).known_rows
        if out is not None:
            usable &= out.isfinite().all(1)
        rows = usable.nonzero()[:, 0]
        delta_error = (delta - reference.delta)[rows]
        x = left = None
        if of_head is not None:
            x, left = of_head.x, of_head.pull(probs_k[rows] * (-inside.scale * delta_error)[:, None], rows)
        elif "x" in capture.tensors:
            x = capture.read_x(batch).to(device).double().nan_to_num(0.0, 0.0, 0.0)
        yield HeadRows(
            batch=batch,
            rows=rows,
            probs_k=probs_k[rows],
            delta_error=delta_error,
            do=inside.do[rows],
            o_error=None if out is None else (out - reference.out)[rows],
            x=None if x is None else x[rows],
            left=left,
        )


@dataclass
class FeatureProductSums:
    """Sums over the rows of a step, by feature [Dv], and its worst row so far."""

    rows: int = 0
    squares: float = 0.0
    sums: list[Tensor] | None = None
    """Positive products, those that are not 0, and the sum of all."""
    worst: tuple[float, int, int, Tensor, Tensor] | None = None

    def add(self, rows: HeadRows) -> None:
        """Take one sequence, with O's error."""
        if rows.o_error is None or not len(rows.rows):
            return
        products = rows.do * rows.o_error
        found = [of_rows.sum(0).cpu() for of_rows in (products > 0, products != 0, products)]
        self.sums = found if self.sums is None else [a + b for a, b in zip(self.sums, found, strict=True)]
        self.rows += len(rows.rows)
        self.squares += float(rows.delta_error.square().sum())
        at = int(rows.delta_error.abs().argmax())
        error = float(rows.delta_error[at])
        if self.worst is None or abs(error) > abs(self.worst[0]):
            do, o_error = rows.do[at].clone().cpu(), rows.o_error[at].clone().cpu()
            self.worst = error, rows.batch, int(rows.rows[at]), do, o_error

    def result(self, step: int | None) -> FeatureProducts | None:
        """The figure; None where no row was added."""
        if self.worst is None or self.sums is None:
            return None
        positive, nonzero, contribution = self.sums
        error, batch, row, do, o_error = self.worst
        product = do * o_error
        scale = float(product.norm())
        alignment = abs(float(product.sum())) / scale if scale else 0.0
        fractions = torch.where(nonzero > 0, positive / nonzero, torch.nan).tolist()
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
            contribution=tuple(contribution.tolist()),
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
