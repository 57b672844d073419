"""Which rows of pooled heads and sequences count as one when a mean is tested."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attn_diag.head.measurement import HeadMeasurement
from attn_diag.statistics.arrays import dense, end_to_end

# What needs dO: tested over the rows that have a gradient.
NEED_GRADIENT = ("delta", "delta_excess", "rounding_delta", "dq")
# Sequences are one cluster from this part of rows on that look most at a key that both have.
_SHARED_FROM = 1 / 20


def joined_sequences(parts: Sequence[HeadMeasurement], k_length: int) -> dict[int, int]:
    """The number of each sequence's cluster, by batch item: those that look at the same keys are one.

    Their rows share the rounding of these keys' V, though no row is in both.
    """
    order = list(dict.fromkeys(p.batch for p in parts))
    cluster = {batch: i for i, batch in enumerate(order)}
    if len(order) < 2:
        return cluster
    for p in parts:
        owners = np.bincount(p.top_key // k_length, minlength=len(order))
        same = [order[i] for i in np.flatnonzero(owners > _SHARED_FROM * len(p.tested))]
        if not len(p.tested) and p.source is not None:
            same.append(p.source)
        for other in same:
            old, new = cluster[p.batch], cluster[other]
            cluster = {batch: new if c == old else c for batch, c in cluster.items()}
    return cluster


class Clusters:
    """Cluster numbers of pooled rows: by sequence, by argmax key, or rows that are alike; see ``statistics.means``.

    Args:
        top_keys: Of every sequence and head the number of its rows' argmax key; heads have no number in common.
        alike: Of every sequence and head the numbers of its rows, the same for rows that are alike.
        sequences: The number of each one's sequence, where sequences are the clusters.
        with_gradient: Which of each one's rows have a gradient (bool); None: all of them.
    """

    def __init__(
        self,
        top_keys: Sequence[npt.NDArray[np.int64]],
        alike: Sequence[npt.NDArray[np.int64]],
        sequences: Sequence[int] | None = None,
        with_gradient: Sequence[npt.NDArray[np.bool_]] | None = None,
    ) -> None:
        chosen = None if with_gradient is None else end_to_end(with_gradient)
        self._with_gradient = None if chosen is None or chosen.all() else chosen
        most = max(int(rows.max(initial=0)) for rows in alike) + 1
        self._labels = {
            "keys": end_to_end(top_keys),
            "rows": end_to_end([rows + number * most if number else rows for number, rows in enumerate(alike)]),
        }
        if sequences is not None:
            self._labels["sequences"] = np.repeat(sequences, [len(keys) for keys in top_keys])
        self._found: dict[tuple[str, bool], npt.NDArray[np.int64] | None] = {}

    def of(self, quantity: str, *, shared: bool = False) -> npt.NDArray[np.int64] | None:
        """The clusters of the rows for one of ``Bias``'s quantities; None: every row its own.

        ``shared``: its errors are clustered by feature, too, which takes keys beside.
        """
        by_sequence = "sequences" in self._labels
        return self._dense("sequences", quantity) if by_sequence else self.within(quantity, shared=shared)

    def within(self, quantity: str, *, shared: bool = False) -> npt.NDArray[np.int64] | None:
        """The same within sequences."""
        by_row = quantity in ("delta_excess", "dq", "lse") or ("excess" in quantity and self._one_key(quantity))
        return self._dense("rows" if by_row and not shared else "keys", quantity)

    def _one_key(self, quantity: str) -> bool:
        """Whether all rows that the quantity has have the same argmax key."""
        labels = self._dense("keys", quantity)
        return labels is not None and (not len(labels) or (labels[-1] == 0 and not labels.any()))

    def _dense(self, what: str, quantity: str) -> npt.NDArray[np.int64] | None:
        """The labels of the rows that the quantity has, renumbered from 0 without gaps; None: no two rows are alike."""
        chosen = self._with_gradient if quantity in NEED_GRADIENT else None
        if (what, chosen is None) not in self._found:
            labels = self._labels[what] if chosen is None else self._labels[what][chosen]
            found = None
            if what != "rows" or not (labels[1:] > labels[:-1]).all():
                found = dense(labels)
                if what == "rows" and int(found.max()) + 1 == len(found):
                    found = None
            self._found[what, chosen is None] = found
        return self._found[what, chosen is None]
