"""Running sums of signed errors in the order of their rows, with a flat band that unbiased noise stays inside."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from attn_diag.results.diagnosis import Drift

# sup of |Brownian motion| over [0, 1] exceeds this with probability 1 %: 4 (1 - Phi(2.807)) = 0.01.
FLAT_BAND_99 = 2.807
_POINTS = 256


def drift_of(row_totals: npt.NDArray[np.float64]) -> dict[str, Any]:
    """The running sum in row order, thinned, with the flat 99 % band that unbiased noise stays inside."""
    path = np.cumsum(row_totals)
    band = FLAT_BAND_99 * math.sqrt(float(np.square(row_totals).sum()))
    picked = _thinned(len(path))
    return {
        "drift": Drift(picked, path[picked]),
        "drift_band99": band,
        "drift_outside": bool(np.abs(path).max() > band),
    }


@cache
def _thinned(n: int) -> npt.NDArray[np.int64]:
    """At most ``_POINTS`` of n rows, evenly spread, the first and the last among them."""
    return np.linspace(0, n - 1, min(n, _POINTS)).round().astype(np.int64)
