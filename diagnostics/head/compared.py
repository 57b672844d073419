"""One quantity of a head, and what kernels that round in known ways return for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.head import cut_off
from attn_diag.head.counterfactual import BACKWARD, FROM_CAST_P, RECIPE, Counterfactuals
from attn_diag.head.fp32_in_bf16 import EXPLAINED
from attn_diag.head.from_lse import unpublished
from attn_diag.head.low_sums import low_sum_ways
from attn_diag.head.quality import AS_GOOD, Directions, QuantitySample, sample
from attn_diag.reference import FloatFormat, round_nearest_even, ulp
from attn_diag.statistics.ratios import Carriers

# Heads with more scores are not run again for that.
MOST_SCORES = 2**24
# Of a recipe that is at work rows weighted alike leave less, too: 0.78 at most, in 67 gradients made so; where a coarse
# LSE's few heavy rows looked like a rounded delta, they left 0.99.
_MOST_LEFT = 0.9
# A backward casts nothing of its own that leaves so little of the noise: where dP and delta cancel all of it is O's.
_NO_CAST = 1 / 16


@dataclass(frozen=True)
class Compared:
    """A quantity that a kernel returned, and the kernels that it is held against."""

    quantity: str
    """o, dq, dk, dv or dkv."""
    observed: Tensor
    """[T, D] float64."""
    reference: Tensor
    """What is true."""
    total: Callable[[Sequence[dict[str, Tensor]]], Tensor]
    """The quantity from the outputs of the query heads that make it."""
    kernels: Sequence[Counterfactuals]
    """Of these heads."""
    variance: Tensor
    """As in ``sample``; likewise the next six."""
    fmt: FloatFormat
    rows: Tensor
    fed: Tensor | None
    clusters: npt.NDArray[np.int64] | None
    carriers: Carriers | None
    directions: Directions | None
    outs: Sequence[Tensor | None]
    """Of a gradient, the captured O of these heads; None where it is not known."""

    @cached_property
    def ways(self) -> tuple[str, ...]:
        """Ways of kernels that are not published, see ``unpublished``."""
        return unpublished(self.kernels[0].head, self.kernels[0].fmt, self.quantity)

    @cached_property
    def late_ways(self) -> tuple[str, ...]:
        """Those that take long, asked where none of ``ways`` explains the error."""
        return low_sum_ways(self.kernels[0].head, self.kernels[0].fmt)

    @cached_property
    def few_scores(self) -> bool:
        """Whether there are so few scores that heads are run again for what stands out."""
        return max(kernel.scores for kernel in self.kernels) <= MOST_SCORES

    @cached_property
    def expected(self) -> Tensor:
        """The squared error that a well-rounded kernel is expected to leave, [n, D]."""
        return torch.maximum(self.variance, ulp(self.reference, self.fmt).square() / 12)[self.rows]

    @cached_property
    def _units(self) -> npt.NDArray[np.float64]:
        """The same of every row, [n]."""
        found: npt.NDArray[np.float64] = self.expected.sum(1).cpu().numpy()
        return np.maximum(found, 1e-300)

    @cached_property
    def _left(self) -> dict[str, tuple[float, float]]:
        return {}

    def of(self, recipe: str, *, tensor_core: bool = False) -> Tensor:
        """What kernels return that round so, [T, D]; see ``run_counterfactual``."""
        found = self.total([kernel.outputs(recipe, tensor_core=tensor_core) for kernel in self.kernels])
        # Plain torch casts the sum over the query heads of a key head.
        shared = len(self.kernels) > 1 and recipe in (*self.ways, *self.late_ways)
        return round_nearest_even(found, self.fmt) if shared else found

    def against(self, made: Tensor) -> QuantitySample:
        """The quantity beside a tensor that a kernel returned."""
        return sample(
            self.observed, self.reference, made, self.variance, self.fmt, self.rows, fed=self.fed,
            clusters=self.clusters, carriers=self.carriers, directions=self.directions,
        )  # fmt: skip

    def beside(self, recipe: str, *, tensor_core: bool = False) -> QuantitySample:
        """The same beside what kernels return that round so."""
        return self.against(self.of(recipe, tensor_core=tensor_core))

    def apart(self, made: Tensor) -> npt.NDArray[np.float64]:
        """What of the observed tensor differs from another: squares by row, [n]."""
        found: npt.NDArray[np.float64] = (self.observed - made)[self.rows].square().sum(1).cpu().numpy()
        return found

    def left_of(self, made: Tensor, kept: npt.NDArray[np.bool_] | None = None) -> tuple[float, float]:
        """The same of all rows, or of some, and in units of every row's noise."""
        part = slice(None) if kept is None else kept
        by_row = self.apart(made)[part]
        return float(by_row.sum()), float((by_row / self._units[part]).sum())

    def left(self, recipe: str, kept: npt.NDArray[np.bool_] | None = None) -> tuple[float, float]:
        """``left_of`` what kernels return that round so."""
        if kept is not None:
            return self.left_of(self.of(recipe), kept)
        if recipe not in self._left:
            self._left[recipe] = self.left_of(self.of(recipe))
        return self._left[recipe]

    def part_left(self, way: str, beside: str = RECIPE) -> float:
        """What a way leaves of what a recipe does, the larger one of both kinds."""
        pairs = zip(self.left(way), self.left(beside), strict=True)
        return max(one / other if other else math.inf for one, other in pairs)

    def made_by_forward(self, recipe: str, kept: npt.NDArray[np.bool_] | None = None) -> bool:
        """Whether a right backward of the captured O and LSE is as near, or leaves too little for a cast of its own."""
        if self.fed is None:
            return False
        fed = self.left_of(self.fed, kept)
        pairs = zip(self.left(recipe, kept), fed, strict=True)
        return fed[1] <= _NO_CAST * len(self._units) or any(one >= _MOST_LEFT * other for one, other in pairs)

    def forward_is(self, way: str) -> bool:
        """Whether the captured O is no further from a way's than from the published recipe's, where it is known."""
        known = [(kernel, o) for kernel, o in zip(self.kernels, self.outs, strict=False) if o is not None]
        apart = ([float((k.outputs(r)["o"] - o).square().nansum()) for r in (way, RECIPE)] for k, o in known)
        return all(one <= other for one, other in apart)

    def as_good(
        self, recipe: str, chosen: QuantitySample, kept: npt.NDArray[np.bool_] | None = None
    ) -> QuantitySample | None:
        """With a recipe's rounding as its site, where that makes most of the bits and nothing stands out beside it.

        Args:
            recipe: Which.
            chosen: Beside a well-rounded kernel.
            kept: Of which rows it is asked, [n]; None: of all.
        """
        casting = self.beside(recipe)
        same = casting.ratio()
        pairs = list(zip(self.left(recipe, kept), self.left(RECIPE, kept), strict=True))
        # A few heavy rows may be nearer to it by chance.
        nearer = any(one < EXPLAINED * other for one, other in pairs)
        nearer = nearer and all(one < _MOST_LEFT * other for one, other in pairs)
        nearer = nearer and not self.made_by_forward(recipe, kept)
        if not nearer or same is None or same.factor > AS_GOOD or casting.outlying.any():
            return None
        site = "dscores_from" if recipe in FROM_CAST_P else recipe
        if recipe in cut_off.CUT_OFF:
            made, observed, reference = (t[self.rows] for t in (self.of(recipe), self.observed, self.reference))
            if not cut_off.makes(made, observed, reference, self.fmt):
                return None
            site = cut_off.site(self.quantity)
        not_zero = chosen.not_zero if recipe in BACKWARD else casting.not_zero
        return replace(casting, site=site, counterfactual=chosen.counterfactual, not_zero=not_zero)
