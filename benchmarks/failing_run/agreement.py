"""Whether mitigations that were predicted to leave less error trained longer: Somers' D, with runs that were ended.

A fork that kept its trend until it was ended would have failed later, or not at all: it is known to have lasted longer
than those that failed until then, and no more. D is, over the pairs of forks whose order in training is known, the
share of those that the prediction orders alike less that of those it orders otherwise; it is 2 C - 1, with C the
concordance index of Harrell et al. (JAMA 247, 2543, 1982). The p-value is the share of orders of the predictions that
agree as well or better (one-sided: all of them up to 8 forks, else 100,000 drawn ones); it takes forks for independent,
where several of them change the same site.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt
from beside import Row, left_of
from forks import Fork

_ALL_ORDERS = 8
_DRAWN_ORDERS = 100_000
# Where the best order would have a larger p-value, forks are too few.
_LEVEL = 0.05

Signs = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Agreement:
    """Somers' D; 1: of every two forks whose order is known, the one with less error left lasted longer.

    ``forks``: how many, ``kept``: of them kept their trend, ``pairs``: whose order is known. ``p_value``: one-sided;
    ``smallest_p``: what the best prediction of these outcomes would have. ``by_sequence``: D of each sequence's own
    prediction.
    """

    of: str
    forks: int
    kept: int
    pairs: int
    somers_d: float | None
    p_value: float | None
    smallest_p: float | None
    method: str
    by_sequence: tuple[float | None, ...]
    words: str


def agreement(
    of: str, pairs: Mapping[str, tuple[float, Fork]], by_sequence: Sequence[Mapping[str, float]]
) -> Agreement:
    """Between predicted errors and outcomes, by mitigation."""
    left = np.array([value for value, _ in pairs.values()], dtype=np.float64)
    forks = [fork for _, fork in pairs.values()]
    known = lasted_longer(forks)
    somers_d = _somers_d(left, known)
    p_value, smallest, method = (None, None, "none") if somers_d is None else permuted(left, forks)
    kept, count = sum(fork.failed is False for fork in forks), int(np.abs(known).sum())
    sequences = tuple(
        _somers_d(np.array([values[name] for name in pairs]), known) if all(name in values for name in pairs) else None
        for values in by_sequence
    )
    return Agreement(
        of=of,
        forks=len(forks),
        kept=kept,
        pairs=count,
        somers_d=somers_d,
        p_value=p_value,
        smallest_p=smallest,
        method=method,
        by_sequence=sequences,
        words=_words(len(forks), kept, count, somers_d, p_value, smallest),
    )


def _words(
    forks: int, kept: int, pairs: int, somers_d: float | None, p_value: float | None, smallest: float | None
) -> str:
    if somers_d is None or p_value is None or smallest is None:
        return f"{forks} forks: too few, or all with the same outcome: nothing can be said of the order"
    said = f"Somers' D {somers_d:+.2f} over {pairs} pairs of {forks} forks, {kept} of which kept their trend"
    said += f"; p = {p_value:.2g}"
    return said if smallest <= _LEVEL else f"{said}: too few to tell, the best order would have p = {smallest:.2g}"


def lasted_longer(forks: Sequence[Fork]) -> Signs:
    """Over the pairs i < j: 1 where i lasted longer than j, -1 where j did, 0 where that is not known or both the same.

    A fork that was ended lasted longer than one that failed no later than its last step.
    """
    n = len(forks)
    outlived = np.zeros((n, n), dtype=np.int8)
    for row, one in zip(outlived, forks, strict=True):
        until = one.until + 1 if one.departure is None else one.departure
        row[:] = [other.departure is not None and other.departure < until for other in forks]
    i, j = np.triu_indices(n, 1)
    return np.asarray(outlived[i, j] - outlived[j, i])


def _less(left: npt.NDArray[np.float64]) -> Signs:
    """Over the pairs i < j, along the last axis: 1 where i was predicted to leave less than j; infinities are equal."""
    i, j = np.triu_indices(left.shape[-1], 1)
    ranks = np.unique(left, return_inverse=True)[1].reshape(left.shape).astype(np.int8)
    return np.asarray(np.sign(ranks[..., j] - ranks[..., i]))


def _somers_d(left: npt.NDArray[np.float64], known: Signs) -> float | None:
    """None where no order is known, or nothing was predicted to leave less than another."""
    less = _less(left)
    if not known.any() or not less.any():
        return None
    return float(less @ known.astype(np.int64)) / int(np.abs(known).sum())


def permuted(left: npt.NDArray[np.float64], forks: Sequence[Fork], seed: int = 0) -> tuple[float, float, str]:
    """One-sided p-value, the smallest one possible, and how: orders of ``left`` that agree as well or better."""
    n = len(left)
    if n <= _ALL_ORDERS:
        orders = np.array(list(permutations(range(n))))
        method = f"all {len(orders)} orders"
    else:
        draw = np.random.default_rng(seed)
        orders = draw.permuted(np.tile(np.arange(n), (_DRAWN_ORDERS, 1)), axis=1)
        method = f"{_DRAWN_ORDERS} drawn orders"
    known = lasted_longer(forks).astype(np.int64)
    observed, scores = int(_less(left) @ known), _less(left[orders]) @ known
    # Without all orders the observed one counts as one that was drawn, and the best one may not have been drawn.
    extra = 0 if n <= _ALL_ORDERS else 1
    ideal = np.empty_like(left)
    # Of those that failed and were ended at one step the latter lasted longer.
    ends = [(fork.until, 1) if fork.departure is None else (fork.departure, 0) for fork in forks]
    ideal[sorted(range(n), key=ends.__getitem__, reverse=True)] = np.sort(left)
    best = max(int(_less(ideal) @ known), int(scores.max()))

    def share(bound: int) -> float:
        return (int((scores >= bound).sum()) + extra) / (len(orders) + extra)

    return share(observed), share(best), method


def agreements(rows: Sequence[Row], chain: Mapping[str, Any]) -> list[Agreement]:
    """Of the mitigations that what-if ranks, but for those that failed by a NaN, which the error of dQ does not make;
    of those of them that failed; of everything that was run, non-finite predictions as the worst; and of the first by
    the error of dW_Q, by which what-if does not rank."""
    ran = {row.mitigation: row for row in rows if row.fork is not None}
    ranked = [name for name, row in ran.items() if row.rank is not None and not _nan(row)]
    names = {
        "mitigations that what-if ranks, but for NaN": ranked,
        "those of them that failed": [name for name in ranked if _failed(ran[name])],
        "all forks and the control": list(ran),
    }
    candidates = chain["what_if"]["candidates"] | {"control": chain["what_if"]["baseline"]}

    def each(names: Collection[str]) -> list[dict[str, float]]:
        found: list[dict[str, float]] = [{} for _ in range(chain["sequences"])]
        for name in names:
            values = left_of(name, candidates.get(name), ran[name].sites, chain)[2] or []
            if len(values) == len(found):
                for sequence, value in zip(found, values, strict=True):
                    sequence[name] = value
        return found

    def pairs(names: Collection[str], error: str) -> dict[str, tuple[float, Fork]]:
        found = {}
        for name in names:
            value, fork = getattr(ran[name], error), ran[name].fork
            if value is not None and fork is not None:
                found[name] = value, fork
        return found

    said = [agreement(of, (found := pairs(which, "left")), each(found)) for of, which in names.items()]
    return [*said, agreement("the first by the error of dW_Q", pairs(ranked, "left_dw_q"), [])]


def _nan(row: Row) -> bool:
    return row.fork is not None and row.fork.reason == "non-finite"


def _failed(row: Row) -> bool:
    return row.fork is not None and row.fork.departure is not None
