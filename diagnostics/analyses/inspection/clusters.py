"""Which rows of pooled heads and sequences count as one when a mean is tested."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attn_diag.head.measurement import HeadMeasurement
from attn_diag.statistics.arrays import dense

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
        self._keys, self._with_gradient = np.concatenate(top_keys), with_gradient
        most = max(int(rows.max(initial=0)) for rows in alike) + 1
        self._rows = np.concatenate([number * most + rows for number, rows in enumerate(alike)])
        self._sequences: npt.NDArray[np.int64] | None = None
        if sequences is not None:
            self._sequences = np.repeat(sequences, [len(keys) for keys in top_keys])
        self._found: dict[tuple[str, bool], npt.NDArray[np.int64]] = {}

    def of(self, quantity: str, *, shared: bool = False) -> npt.NDArray[np.int64] | None:
        """The clusters of the rows for one of ``Bias``'s quantities; None: every row its own.

        ``shared``: its errors are clustered by feature, too, which takes keys beside.
        """
        return self.within(quantity, shared=shared) if self._sequences is None else self._dense("sequences", quantity)

    def within(self, quantity: str, *, shared: bool = False) -> npt.NDArray[np.int64] | None:
        """The same within sequences."""
        found = self._dense("keys", quantity)
        if shared:
            return found
        if quantity in ("delta_excess", "dq", "lse") or ("excess" in quantity and not found.any()):
            rows = self._dense("rows", quantity)
            return None if int(rows.max(initial=-1)) + 1 == len(rows) else rows
        return found

    def _dense(self, what: str, quantity: str) -> npt.NDArray[np.int64]:
        """The labels of the rows that the quantity has, renumbered from 0, in their order, without gaps."""
        some = self._with_gradient is not None and quantity in NEED_GRADIENT
        if (what, some) not in self._found:
            labels = {"keys": self._keys, "rows": self._rows, "sequences": self._sequences}[what]
            assert labels is not None
            if some and self._with_gradient is not None:
                labels = labels[np.concatenate(self._with_gradient)]
            self._found[what, some] = dense(labels)
        return self._found[what, some]
