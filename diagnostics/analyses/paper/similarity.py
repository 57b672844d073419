"""How parallel rows are: cosines, their mean square with its null, and what the first direction holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.results.paper import Matrix, Similarity


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
        unit = unit_rows(rows[rows.any(1)])
        return cls(unit @ unit.T, rows.shape[1], rows.shape[1])

    @classmethod
    def of_products(cls, left: Tensor, right: Tensor) -> Directions:
        """Of left_t (x) right_t, [n, D] and [n, C]: the cosines multiply."""
        kept = left.any(1) & right.any(1)
        one, two = unit_rows(left[kept]), unit_rows(right[kept])
        return cls((one @ one.T) * (two @ two.T), None, left.shape[1] * right.shape[1])

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
