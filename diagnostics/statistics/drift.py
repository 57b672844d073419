"""Running sums of signed errors in the order of their rows, with a flat band that unbiased noise stays inside."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from attn_diag.results.diagnosis import Drift
from attn_diag.statistics.arrays import in_parts

# sup of |Brownian motion| over [0, 1] exceeds this with probability 1 %: 4 (1 - Phi(2.807)) = 0.01.
FLAT_BAND_99 = 2.807
_POINTS = 256


def each_drift(row_totals: npt.NDArray[np.float64]) -> Iterator[dict[str, Any]]:
    """Of m data sets [m, n] the running sums, thinned, with the flat 99 % bands that unbiased noise stays inside."""
    sets, n = row_totals.shape
    picked = _thinned(n)
    points, reach, squares = np.empty((sets, len(picked))), np.zeros(sets), np.zeros(sets)
    path = np.zeros((sets, 0))
    for part in in_parts(n, sets):
        totals = row_totals[:, part]
        squares += np.square(totals).sum(1)
        if part.start:  # goes on from where the last part ended
            totals = totals.copy()
            totals[:, 0] += path[:, -1]
        path = np.cumsum(totals, 1)
        reach = np.maximum(reach, np.maximum(path.max(1), -path.min(1)))
        own = slice(*np.searchsorted(picked, (part.start, part.stop)))
        points[:, own] = path[:, picked[own] - part.start]
    bands = FLAT_BAND_99 * np.sqrt(squares)
    for of_set, band, outside in zip(points, bands.tolist(), (reach > bands).tolist(), strict=True):
        yield {"drift": Drift(picked, of_set), "drift_band99": band, "drift_outside": outside}


@cache
def _thinned(n: int) -> npt.NDArray[np.int64]:
    """At most ``_POINTS`` of n rows, evenly spread, the first and the last among them."""
    return np.linspace(0, n - 1, min(n, _POINTS)).round().astype(np.int64)
