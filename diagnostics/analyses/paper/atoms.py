"""Figure 4: are the rank-1 atoms of delta's error alike, within a step and over steps? And do they add up?

The atom of row t is a_t = -alpha Delta_delta_t (P K)_t (x) x_t; the error of dW_Q through delta is their sum M (Qiu &
Yao, arXiv 2510.04212, sections 3.2 and 4). Similar directions are only half of the mechanism: the signs of
Delta_delta_t decide whether the atoms add up, which is what coherence measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from attn_diag.analyses.paper.rows import HeadRows
from attn_diag.results.diagnosis import GradientError
from attn_diag.results.paper import AtomRow, Atoms, Matrix, OverSteps, Similarity, StepAtoms
from attn_diag.statistics.sums import SIGN_DRAWS, sign_coherence


def unit_rows(rows: Tensor) -> Tensor:
    """``rows`` [n, D] divided by their norms; a row of zeros stays one."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return torch.div(rows, norms.where(norms > 0, 1.0))


@dataclass(frozen=True)
class Directions:
    """Cosines of all pairs, [n, n]; ``dimension`` of the space, None for outer products."""

    cosines: Tensor
    dimension: int | None
    size: int

    @classmethod
    def of(cls, rows: Tensor) -> Directions:
        """Of ``rows`` [n, D] that are not zero."""
        return cls(cosines(rows[rows.any(1)]), rows.shape[1], rows.shape[1])

    @classmethod
    def of_products(cls, left: Tensor, right: Tensor) -> Directions:
        """Of left_t (x) right_t, [n, D] and [n, C]: the cosines multiply."""
        kept = left.any(1) & right.any(1)
        return cls(cosines(left[kept]) * cosines(right[kept]), None, left.shape[1] * right.shape[1])

    def similarity(self, shown: Tensor) -> Similarity:
        """With ``shown`` [m, m], the cosines of the rows to be drawn."""
        n = len(self.cosines)
        squares, first = None, None
        if n > 1:
            squares = (float(self.cosines.square().sum()) - n) / (n * (n - 1))
            first = float(torch.linalg.eigvalsh(self.cosines)[-1]) / n
        return Similarity(matrix(shown.abs()), n, squares, 1 / self.size, self._random99(), first)

    def _random99(self) -> float | None:
        """The 99 % quantile of the mean squared cosine of n uniform directions.

        D(D + 2) / (2n) (sum of all n^2 squared cosines - n^2 / D) is chi^2 with (D - 1)(D + 2) / 2 degrees of freedom
        for large n (Bingham 1974); its mean is exact and its variance off by 1 / n for any n, as pairs are independent.
        """
        from scipy.special import chdtri

        n, d = len(self.cosines), self.dimension
        if n < 2 or d is None or d < 2:
            return None
        point = float(chdtri((d - 1) * (d + 2) / 2, 0.01))
        total = n * n / d + point * 2 * n / (d * (d + 2))
        return (total - n) / (n * (n - 1))


def cosines(rows: Tensor) -> Tensor:
    """Of all pairs of ``rows`` [n, D]; [n, n]. A row of zeros has cosine 0 with all."""
    unit = unit_rows(rows)
    return unit @ unit.T


def matrix(values: Tensor) -> Matrix:
    """As plain numbers; six digits are more than a colour shows."""
    return tuple(tuple(round(x, 6) for x in row) for row in values.tolist())


def random_cosine95(dimension: int) -> float:
    """The 95 % quantile of |cosine| of a random direction with a fixed one: its square is Beta(1/2, (D - 1)/2)."""
    from scipy.special import betaincinv

    return 1.0 if dimension < 2 else math.sqrt(float(betaincinv(0.5, (dimension - 1) / 2, 0.95)))


# Rows shown in all, of at most so many steps; evenly spread rows for the means; steps in a matrix.
_SHOWN_ROWS, _SHOWN_STEPS, _SAMPLED_ROWS, _MATRIX_STEPS = 48, 16, 512, 100


@dataclass
class StepRecord:
    """What is kept of one step: the rows with its largest atoms, evenly spread rows, and M, [D, C] on the CPU.

    ``total`` [D, C] is the only thing that grows with the number of steps; it is as large as D rows of x.
    """

    step: int | None
    shown: list[tuple[AtomRow, Tensor, Tensor | None]] = field(default_factory=list)
    probs_k: list[Tensor] = field(default_factory=list)
    x: list[Tensor] = field(default_factory=list)
    total: Tensor | None = None
    squares: float = 0.0

    def add(self, rows: HeadRows, *, show: int, sample: int) -> None:
        """Take one sequence: keep the ``show`` largest atoms so far, and ``sample`` of its rows, evenly spread.

        Rows are copied: a view would keep the sequence in memory.
        """
        weight = rows.delta_error.square() * rows.probs_k.square().sum(1)
        if rows.x is not None:
            weight = weight * rows.x.square().sum(1)
        self.squares += float(weight.sum())
        for i in weight.topk(min(show, len(weight))).indices.tolist():
            at = AtomRow(self.step, rows.batch, int(rows.rows[i]), float(weight[i]))
            self.shown.append((at, _kept(rows.probs_k[i]), None if rows.x is None else _kept(rows.x[i])))
        self.shown = sorted(self.shown, key=lambda item: -item[0].weight)[:show]
        if sample and len(rows.rows):
            picked = thinned(len(rows.rows), sample)
            self.probs_k.append(_kept(rows.probs_k[picked]))
            if rows.x is not None:
                self.x.append(_kept(rows.x[picked]))
        if rows.left is not None and rows.x is not None:
            part = (rows.left.T @ rows.x).cpu()
            self.total = part if self.total is None else self.total + part

    def rows(self) -> list[tuple[AtomRow, Tensor, Tensor | None]]:
        """The rows shown, in order, with their shares of sum ||a||^2."""
        found = sorted(self.shown, key=lambda item: (item[0].batch, item[0].row))
        whole = self.squares or 1.0
        return [(AtomRow(a.step, a.batch, a.row, a.weight / whole), p, x) for a, p, x in found]


def shares(steps: int, batch: int) -> tuple[int, int]:
    """How many rows to show of a step, and to sample of a sequence."""
    return max(1, _SHOWN_ROWS // min(max(steps, 1), _SHOWN_STEPS)), max(1, _SAMPLED_ROWS // batch)


def figure_4(
    records: Sequence[StepRecord], of_step: StepRecord, errors: Sequence[GradientError | None], note: str | None
) -> Atoms:
    """``records`` in order of their steps, ``of_step`` the one whose rows are sampled, ``errors`` of dW_Q by record."""
    shown = [row for i in thinned(len(records), _SHOWN_STEPS) for row in records[i].rows()]
    probs_k = torch.stack([p for _, p, _ in shown])
    with_x = [x for _, _, x in shown if x is not None]
    sampled = torch.cat(of_step.probs_k)
    x_similarity = atoms = None
    of_rows = cosines(probs_k)
    if len(with_x) == len(shown):
        x, sampled_x = torch.stack(with_x), torch.cat(of_step.x)
        of_x = cosines(x)
        x_similarity = Directions.of(sampled_x).similarity(of_x)
        atoms = Directions.of_products(sampled, sampled_x).similarity(of_rows * of_x)
    with_step = [(r, e) for r, e in zip(records, errors, strict=True) if r.step is not None and r.total is not None]
    return Atoms(
        rows=tuple(a for a, _, _ in shown),
        probs_k=Directions.of(sampled).similarity(of_rows),
        x=x_similarity,
        atoms=atoms,
        steps=tuple(_step(r, e) for r, e in with_step),
        over_steps=_over_steps([r for r, _ in with_step]),
        note=note,
    )


def thinned(count: int, most: int) -> list[int]:
    """At most ``most`` of ``count`` indices, evenly spread, the first and the last among them."""
    return sorted(set(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()))


def _kept(rows: Tensor) -> Tensor:
    return rows.to("cpu", copy=True)


def _step(record: StepRecord, error: GradientError | None) -> StepAtoms:
    assert record.step is not None
    assert record.total is not None
    values = torch.linalg.svdvals(record.total).square()
    whole = float(values.sum())
    return StepAtoms(
        step=record.step,
        norm=whole**0.5,
        first_share=float(values[0]) / whole if whole else None,
        coherence=None if error is None else error.coherence,
        coherence_null95=None if error is None else error.coherence_null95,
    )


def _over_steps(records: list[StepRecord]) -> OverSteps | None:
    """None for fewer than two steps, or where a step has no error at all."""
    totals = [r.total for r in records if r.total is not None]
    if len(totals) < 2 or not all(bool(t.any()) for t in totals):
        return None
    flat = torch.stack([t.reshape(-1) for t in totals])
    gram = flat @ flat.T
    observed, null95, p = sign_coherence(gram.numpy())
    kept = thinned(len(totals), _MATRIX_STEPS)
    norms = gram.diag().sqrt()
    of_kept = [torch.linalg.svd(totals[i], full_matrices=False) for i in kept]
    return OverSteps(
        count=len(totals),
        steps=tuple(step for i in kept if (step := records[i].step) is not None),
        cosines=matrix((gram / torch.outer(norms, norms))[kept][:, kept]),
        left=matrix(cosines(torch.stack([u[:, 0] for u, _, _ in of_kept])).abs()),
        right=matrix(cosines(torch.stack([v[0] for _, _, v in of_kept])).abs()),
        left_random95=random_cosine95(totals[0].shape[0]),
        right_random95=random_cosine95(totals[0].shape[1]),
        coherence=observed,
        null95=null95,
        p_value=p,
        draws=SIGN_DRAWS,
    )
