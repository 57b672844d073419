"""Whether mitigations that were predicted to leave less error trained longer: Kendall's tau-b, censored.

Forks that did not leave their trend are ties at the end: how long they would have lasted is not known. One that was cut
off before the last departure of the others is left out: it may have lasted longer than that, or not. The p-value is
the share of orders of the outcomes that agree as well or better (one-sided: all of them up to 8 forks, else 100,000
drawn ones).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt
from beside import Row, left_of
from forks import Fork
from scipy import stats

_ALL_ORDERS = 8
_DRAWN_ORDERS = 100_000
# Where the best order would have a larger p-value, forks are too few.
_LEVEL = 0.05


@dataclass(frozen=True)
class Agreement:
    """Kendall's tau-b; 1: the less error is left, the later a fork leaves its trend.

    ``forks``: how many, ``kept``: of them kept their trend, ``left_out``: cut off too early. ``p_value``: one-sided;
    ``smallest_p``: what the best order of these outcomes would have. ``by_sequence``: tau of each sequence's own
    prediction.
    """

    of: str
    forks: int
    kept: int
    left_out: tuple[str, ...]
    tau: float | None
    p_value: float | None
    smallest_p: float | None
    method: str
    by_sequence: tuple[float | None, ...]
    words: str


def survival(fork: Fork) -> float:
    """The step of the departure; infinite where there is none: all of these are ties."""
    return math.inf if fork.departure is None else float(fork.departure)


def agreement(
    of: str, pairs: Mapping[str, tuple[float, Fork]], by_sequence: Sequence[Mapping[str, float]]
) -> Agreement:
    """Between predicted errors and outcomes, by mitigation."""
    ends = [fork.departure for _, fork in pairs.values() if fork.departure is not None]
    last = max(ends, default=-1)
    early = tuple(name for name, (_, fork) in pairs.items() if not fork.failed and fork.until < last)
    kept = {name: pair for name, pair in pairs.items() if name not in early}
    left = np.array([value for value, _ in kept.values()], dtype=np.float64)
    lasted = np.array([survival(fork) for _, fork in kept.values()], dtype=np.float64)
    tau = _tau(left, lasted)
    p_value, smallest, method = (None, None, "none") if tau is None else permuted(left, lasted)
    survived = sum(not fork.failed for _, fork in kept.values())
    sequences = tuple(
        _tau(np.array([values[name] for name in kept]), lasted) if all(name in values for name in kept) else None
        for values in by_sequence
    )
    return Agreement(
        of=of,
        forks=len(kept),
        kept=survived,
        left_out=early,
        tau=tau,
        p_value=p_value,
        smallest_p=smallest,
        method=method,
        by_sequence=sequences,
        words=_agreement_words(len(kept), survived, tau, p_value, smallest),
    )


def _agreement_words(forks: int, kept: int, tau: float | None, p_value: float | None, smallest: float | None) -> str:
    if tau is None or p_value is None or smallest is None:
        return f"{forks} forks: too few, or all with the same outcome: nothing can be said of the order"
    said = f"tau-b {tau:+.2f} over {forks} forks, {kept} of which kept their trend; p = {p_value:.2g}"
    return said if smallest <= _LEVEL else f"{said}: too few to tell, the best order would have p = {smallest:.2g}"


def _signs(ranks: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """sign(x_i - x_j) over the pairs i < j, along the last axis."""
    i, j = np.triu_indices(ranks.shape[-1], 1)
    return np.asarray(np.sign(ranks[..., i] - ranks[..., j]))


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int8]:
    """0 for the smallest; what is equal, infinities too, has one rank."""
    return np.unique(values, return_inverse=True)[1].astype(np.int8)


def _tau(left: npt.NDArray[np.float64], lasted: npt.NDArray[np.float64]) -> float | None:
    """tau-b of "less is left" with "lasts longer"; None where one of them is all ties."""
    if len(left) < 2:
        return None
    found = float(stats.kendalltau(_ranks(-left), _ranks(lasted), variant="b").statistic)
    return None if math.isnan(found) else found


def permuted(left: npt.NDArray[np.float64], lasted: npt.NDArray[np.float64], seed: int = 0) -> tuple[float, float, str]:
    """One-sided p-value, the smallest one possible, and how: orders of ``lasted`` that agree as well or better.

    Ties stay ties in every order, so tau-b and its numerator order them alike.
    """
    n = len(left)
    if n <= _ALL_ORDERS:
        orders = np.array(list(permutations(range(n))))
        method = f"all {len(orders)} orders"
    else:
        draw = np.random.default_rng(seed)
        orders = draw.permuted(np.tile(np.arange(n), (_DRAWN_ORDERS, 1)), axis=1)
        method = f"{_DRAWN_ORDERS} drawn orders"
    less, later = _ranks(-left), _ranks(lasted)
    weights = _signs(less).astype(np.int64)
    observed = int(_signs(later) @ weights)
    scores = _signs(later[orders]) @ weights
    # Without all orders the observed one counts as one that was drawn.
    extra = 0 if n <= _ALL_ORDERS else 1
    sorted_both = int(_signs(np.sort(later)) @ _signs(np.sort(less)).astype(np.int64))
    best = max(sorted_both, int(scores.max()))

    def share(bound: int) -> float:
        return (int((scores >= bound).sum()) + extra) / (len(orders) + extra)

    return share(observed), share(best), method


def agreements(rows: Sequence[Row], chain: Mapping[str, Any]) -> list[Agreement]:
    """Of the mitigations that what-if ranks; and of everything that was run, non-finite predictions as the worst."""
    ran = {row.mitigation: (row.left, row.fork) for row in rows if row.fork is not None and row.left is not None}
    ranked = {row.mitigation for row in rows if row.rank is not None}
    sets = {
        "mitigations that what-if ranks": {n: (left, fork) for n, (left, fork) in ran.items() if n in ranked},
        "all forks and the control": ran,
    }
    by_name = {row.mitigation: row for row in rows}

    def each(names: Collection[str]) -> list[dict[str, float]]:
        found: list[dict[str, float]] = [{} for _ in range(chain["sequences"])]
        for name in names:
            row = by_name[name]
            candidates = chain["what_if"]["candidates"] | {"control": chain["what_if"]["baseline"]}
            values = left_of(name, candidates.get(name), row.sites, chain)[2] or []
            if len(values) == len(found):
                for sequence, value in zip(found, values, strict=True):
                    sequence[name] = value
        return found

    return [agreement(of, pairs, each(pairs)) for of, pairs in sets.items()]
