"""Arrays of several data sets, and the largest of many numbers."""

from __future__ import annotations

import numpy as np
import pytest

from attn_diag.analyses.inspection.pooling import largest_places
from attn_diag.statistics.arrays import dense, side_by_side


@pytest.mark.parametrize("reach", [1, 5, 10**9])
def test_labels_are_renumbered_as_unique_does(reach: int) -> None:
    labels = np.random.default_rng(0).integers(-reach, reach, 200)
    for some in (labels, labels[:1], labels[:0]):
        assert np.array_equal(dense(some), np.unique(some, return_inverse=True)[1])


def test_arrays_of_one_length_lie_side_by_side() -> None:
    arrays = [np.arange(n, dtype=float) + i for i, n in enumerate((3, 5, 3, 0, 2**17, 2**17))]
    found = {place: row for places, stack in side_by_side(arrays) for place, row in zip(places, stack, strict=True)}
    assert all(np.array_equal(found[i], array) for i, array in enumerate(arrays))


@pytest.mark.parametrize("sizes", [[], [1.0], [2, 2, 1, 2, 0, 2, 2, 2], [0.0] * 9, list(range(20))])
def test_the_largest_come_first_and_of_equal_ones_the_first(sizes: list[float]) -> None:
    given = np.array(sizes, dtype=float)
    assert largest_places(given, 5).tolist() == np.argsort(-given, kind="stable")[:5].tolist()
