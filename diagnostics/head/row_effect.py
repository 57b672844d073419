"""An error with one number a row, beside what it makes of dQ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RowEffect:
    """An error with one number a row (of LSE, or of a captured delta), and what it makes of dQ; n rows."""

    rows: npt.NDArray[np.int64]
    """[n], which rows."""
    made: Array
    """[n], the squared error that it makes in dQ; without dO in P, relative."""
    noise: Array
    """[n], the expected squared error of a well-rounded kernel there."""
    of_budget: Array
    """[n], the error over what rounding every intermediate to the inputs' format could make."""
    largest: float
    """The largest error, in the quantity's own unit."""
    exact: bool = True
    """Of LSE: whether it is as exact as fp32 sums make it, not merely harmless."""
    compared: bool = True
    """As of ``QuantitySample``."""
    declared: Array | None = None
    """[n], of LSE what the declared recipe's errors of it make there; None: none is declared."""
    in_bf16: bool = False
    """Of LSE without a recipe to compare with: whether a kernel that multiplies in BF16 is as far off."""
    way: str = ""  # as of ``QuantitySample``
    scales: str = ""  # likewise, of LSE
    sink: float | None = None
    """Of LSE: the logit of a sink that it holds beside what it should; None where it seems to hold none."""
