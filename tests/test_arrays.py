"""Arrays of several data sets, and the largest of many numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from builders import some

from attn_diag.analyses.inspection.clusters import Clusters
from attn_diag.analyses.inspection.pooling import largest_places
from attn_diag.statistics import ratios
from attn_diag.statistics.arrays import dense, side_by_side
from attn_diag.statistics.ratios import RatioCase, paired_ratios


@pytest.mark.parametrize("reach", [1, 5, 10**9])
def test_labels_are_renumbered_as_unique_does(reach: int) -> None:
    labels = np.random.default_rng(0).integers(-reach, reach, 200)
    for part in (labels, labels[:1], labels[:0]):
        assert np.array_equal(dense(part), np.unique(part, return_inverse=True)[1])


def test_arrays_of_one_length_lie_side_by_side() -> None:
    arrays = [np.arange(n, dtype=float) + i for i, n in enumerate((3, 5, 3, 0, 2**17, 2**17))]
    found = {place: row for places, stack in side_by_side(arrays) for place, row in zip(places, stack, strict=True)}
    assert all(np.array_equal(found[i], array) for i, array in enumerate(arrays))


@pytest.mark.parametrize("sizes", [[], [1.0], [2, 2, 1, 2, 0, 2, 2, 2], [0.0] * 9, list(range(20))])
def test_the_largest_come_first_and_of_equal_ones_the_first(sizes: list[float]) -> None:
    given = np.array(sizes, dtype=float)
    assert largest_places(given, 5).tolist() == np.argsort(-given, kind="stable")[:5].tolist()


def test_ratios_of_nearly_as_many_groups_are_computed_together_and_alone_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside others a case is padded as it is alone: not a bit differs."""
    rng, calls = np.random.default_rng(1), list[int]()
    real = ratios._side_by_side

    def counted(observed: Any, *others: Any) -> Any:
        calls.append(len(observed))
        return real(observed, *others)

    monkeypatch.setattr(ratios, "_side_by_side", counted)
    cases = [RatioCase(rng.chisquare(1, n), rng.chisquare(1, n)) for n in (450, 462, 449, 471, 2**14 + 3, 455)]
    together = paired_ratios(cases)
    assert calls == [5, 1]
    assert together == [paired_ratios([case])[0] for case in cases]


def test_clusters_of_several_quantities_are_numbered_once() -> None:
    """Those of all rows and those of the rows with a gradient are one where all have one."""
    keys, everywhere = np.array([7, 3, 7, 9]), np.ones(4, dtype=np.bool_)
    whole = Clusters([keys], [np.arange(4)], None, [everywhere])
    assert whole.of("o") is whole.of("delta")
    assert some(whole.of("o")).tolist() == [1, 0, 1, 2]
    assert whole.of("dq") is None
    part = Clusters([keys], [np.array([2, 1, 2, 3])], None, [everywhere & (keys != 3)])
    assert some(part.of("delta")).tolist() == [0, 0, 1]
    assert some(part.of("dq")).tolist() == [0, 0, 1]
    assert some(part.of("lse")).tolist() == [1, 0, 1, 2]
    # Their first equals lie in other rows than those tested: the order is another, and no two are alike.
    assert Clusters([keys], [np.array([2, 1, 4, 3])]).of("dq") is None
