"""Shapley values of a set function that is expensive to evaluate.

    phi_i = mean over all orders of the players of  v(those before i, and i) - v(those before i)

L. Shapley, "A value for n-person games" (1953). Small sets are evaluated in full; for larger ones the mean runs over
sampled orders, each with its reverse (antithetic, Mitchell et al., JMLR 23 (2022) 43). Either way the values add up to
v(all) - v(none), because every order's contributions do.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Subset = frozenset[str]

# Up to so many players all 2**n subsets are evaluated.
EXACT_PLAYERS = 5


@dataclass(frozen=True)
class SubsetPlan:
    """Which subsets must be evaluated; ``orders`` is None where all of them are.

    ``first``: players that join before all others, in this order; the others share what is won after them.
    """

    players: tuple[str, ...]
    first: tuple[str, ...]
    orders: tuple[tuple[str, ...], ...] | None
    subsets: tuple[Subset, ...]

    @classmethod
    def make(
        cls, players: Sequence[str], first: Sequence[str] = (), *, pairs: int = 2, exact_up_to: int = EXACT_PLAYERS,
        seed: int = 0,
    ) -> SubsetPlan:  # fmt: skip
        """For these players; beyond ``exact_up_to`` of them, ``pairs`` random orders and their reverses."""
        players, first = tuple(players), tuple(first)
        starts = [frozenset(first[:n]) for n in range(len(first))]
        base = frozenset(first)
        if len(players) <= exact_up_to:
            every = [base.union(c) for n in range(len(players) + 1) for c in combinations(players, n)]
            return cls(players, first, None, (*starts, *every))
        generator = random.Random(seed)
        orders: list[tuple[str, ...]] = []
        for _ in range(pairs):
            order = tuple(generator.sample(players, len(players)))
            orders += [order, order[::-1]]
        prefixes = (base.union(order[:n]) for order in orders for n in range(len(order) + 1))
        return cls(players, first, tuple(orders), (*starts, *dict.fromkeys(prefixes)))

    def values(self, v: Mapping[Subset, Array]) -> dict[str, tuple[Array, Array | None]]:
        """(phi, its standard error) of every player. ``v``: one array, of one shape, for every planned subset.

        The standard error comes from the spread over pairs of orders; None where nothing was sampled, NaN of one pair.
        """
        found: dict[str, tuple[Array, Array | None]] = {}
        for n, player in enumerate(self.first):
            found[player] = v[frozenset(self.first[: n + 1])] - v[frozenset(self.first[:n])], None
        for player in self.players:
            found[player] = (self._exact(player, v), None) if self.orders is None else self._sampled(player, v)
        return found

    def _exact(self, player: str, v: Mapping[Subset, Array]) -> Array:
        base, n = frozenset(self.first), len(self.players)
        total = np.zeros_like(v[base])
        for subset in self.subsets:
            if subset >= base and player not in subset:
                size = len(subset - base)
                weight = math.factorial(size) * math.factorial(n - 1 - size) / math.factorial(n)
                total += weight * (v[subset | {player}] - v[subset])
        return total

    def _sampled(self, player: str, v: Mapping[Subset, Array]) -> tuple[Array, Array]:
        assert self.orders is not None
        gains = []
        for order in self.orders:
            before = frozenset([*self.first, *order[: order.index(player)]])
            gains.append(v[before | {player}] - v[before])
        pairs = np.stack(gains).reshape(len(gains) // 2, 2, *gains[0].shape).mean(1)
        error = np.full(pairs.shape[1:], np.nan)
        if len(pairs) > 1:
            error = pairs.std(0, ddof=1) / math.sqrt(len(pairs))
        return pairs.mean(0), error
