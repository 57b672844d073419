"""Running sums of signed errors in the order of their rows, with a flat band that unbiased noise stays inside."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from attn_diag.results.diagnosis import Drift

# sup of |Brownian motion| over [0, 1] exceeds this with probability 1 %: 4 (1 - Phi(2.807)) = 0.01.
FLAT_BAND_99 = 2.807
_POINTS = 256


def each_drift(row_totals: npt.NDArray[np.float64]) -> Iterator[dict[str, Any]]:
    """Of m data sets [m, n] the running sums, thinned, with the flat 99 % bands that unbiased noise stays inside."""
    paths = np.cumsum(row_totals, 1)
    bands = FLAT_BAND_99 * np.sqrt(np.square(row_totals).sum(1))
    picked = _thinned(paths.shape[1])
    numbers = zip(paths[:, picked], bands.tolist(), (np.abs(paths).max(1) > bands).tolist(), strict=True)
    for points, band, outside in numbers:
        yield {"drift": Drift(picked, points), "drift_band99": band, "drift_outside": outside}


@cache
def _thinned(n: int) -> npt.NDArray[np.int64]:
    """At most ``_POINTS`` of n rows, evenly spread, the first and the last among them."""
    return np.linspace(0, n - 1, min(n, _POINTS)).round().astype(np.int64)
