"""Which outputs of a row of attention are rational numbers, and which: where Ziv's loop would never end.

For distinct rational S, numbers exp(S) are linearly independent over the rationals (Lindemann-Weierstrass). So

    O_d = r, rational                   iff V_.d has mean r within each group of keys of equal S; delta: likewise, of dP
    L rational                          iff one key is visible
    dQ_d = r                            iff for each value s of S_i + S_j the pairs with that sum satisfy
                                        sum (dP_i - dP_j)(K_id - K_jd) alpha/2 = r (number of pairs)

Under softcap S is not rational. Then keys with the same q.k and the same mask form the groups, the conditions are
sufficient only, and a midpoint that they miss ends at the oracle's cap on its precision, with an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from operator import mul
from typing import Any

from attn_diag.reference.exact import IntegerMatrix, scaled


@dataclass(frozen=True)
class RowRationals:
    """One row. Methods return the value where it is known to be rational, else None. Lists go by visible key."""

    scores: tuple[list[int], int] | None
    """S as integers times two to the second number; None under softcap."""
    products: list[int]
    """alpha q.k, as integers."""
    mask: list[Fraction]
    """What is added to the scores."""
    dprobs: list[int]
    """dP, as integers times 2**dprobs_exponent."""
    dprobs_exponent: int
    """Their exponent of two."""
    k: IntegerMatrix
    """The visible rows of K."""
    v: IntegerMatrix
    """The visible rows of V."""
    scale: tuple[int, int]
    """alpha as an integer and an exponent."""

    @cached_property
    def _groups(self) -> list[list[int]]:
        """Visible keys (by their place) of equal S, the largest first; under softcap, of equal q.k and mask."""
        keys = zip(self.products, self.mask, strict=True) if self.scores is None else self.scores[0]
        found: defaultdict[Any, list[int]] = defaultdict(list)
        for i, key in enumerate(keys):
            found[key].append(i)
        return [found[key] for key in sorted(found, reverse=True)]

    def _common_mean(self, values: Sequence[int]) -> Fraction | None:
        """The mean of ``values`` (by visible key) where it is the same in every group."""
        means = (Fraction(sum(values[i] for i in group), len(group)) for group in self._groups)
        first = next(means)
        return first if all(mean == first for mean in means) else None

    def out(self, d: int) -> Fraction | None:
        """O_d."""
        mean = self._common_mean([int(x) for x in self.v.array[:, d]])
        return None if mean is None else mean * scaled(1, self.v.exponent)

    def delta(self) -> Fraction | None:
        """Delta."""
        mean = self._common_mean(self.dprobs)
        return None if mean is None else mean * scaled(1, self.dprobs_exponent)

    def score(self, i: int) -> Fraction | None:
        """S_i where it is rational: without softcap, and where q.k = 0 (tanh of another rational number is not)."""
        if self.scores is not None:
            integers, exponent = self.scores
            return scaled(integers[i], exponent)
        return None if self.products[i] else self.mask[i]

    def lse(self) -> Fraction | None:
        """L."""
        return None if len(self.products) > 1 else self.score(0)

    def row_sum(self) -> Fraction | None:
        """l: rational where all S are equal."""
        return Fraction(len(self.products)) if len(self._groups) == 1 else None

    def prob(self) -> Fraction | None:
        """Every P_j: likewise."""
        return Fraction(1, len(self.products)) if len(self._groups) == 1 else None

    def dscore(self, i: int) -> Fraction | None:
        """dS_i = P_i (dP_i - delta): zero iff delta is rational and equals dP_i, else rational iff all S are equal.

        For r = dS_i other than zero, r l^2 holds both exp(2 max S) and exp(2 min S), and P_i l (dP_i l - A) lacks one.
        """
        if self._common_mean(self.dprobs) == self.dprobs[i]:
            return Fraction(0)
        if len(self._groups) > 1:
            return None
        n = len(self.products)
        value = (self.dprobs[i] - Fraction(sum(self.dprobs), n)) / n
        return self._unless_sloped(value * scaled(1, self.dprobs_exponent))

    def _unless_sloped(self, value: Fraction) -> Fraction | None:
        """A value of a row of equal S: under softcap it is multiplied by 1 - tanh^2, irrational unless q.k = 0."""
        rational = self.scores is not None or not value or not self.products[0]
        return value if rational else None

    def dq(self, d: int) -> Fraction | None:
        """dQ_d."""
        column = [int(x) for x in self.k.array[:, d]]
        capped = self.scores is None
        if len(set(self.dprobs)) == 1 or (len(set(column)) == 1 and not capped):
            return Fraction(0)
        sizes = [len(group) for group in self._groups]
        products = list(map(mul, self.dprobs, column))
        sums = [tuple(sum(x[i] for i in g) for x in (self.dprobs, column, products)) for g in self._groups]
        numerator, exponent = self.scale
        unit = numerator * scaled(1, exponent + self.dprobs_exponent + self.k.exponent)

        def pairs(g: int, h: int) -> int:
            """sum over i in g, j in h of (dP_i - dP_j)(K_i - K_j)."""
            (p, k, pk), (p2, k2, pk2) = sums[g], sums[h]
            return sizes[h] * pk + sizes[g] * pk2 - p * k2 - p2 * k

        mean = Fraction(pairs(0, 0), 2 * sizes[0] ** 2)
        if len(sizes) == 1:
            return self._unless_sloped(mean * unit)
        # The largest sum and the next one belong to one pair of groups each: most rows are refuted here.
        if capped or Fraction(pairs(0, 1), 2 * sizes[0] * sizes[1]) != mean:
            return None
        assert self.scores is not None
        level = [self.scores[0][g[0]] for g in self._groups]
        totals: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        for g in range(len(sizes)):
            for h in range(len(sizes)):
                total = totals[level[g] + level[h]]
                total[0] += pairs(g, h)
                total[1] += 2 * sizes[g] * sizes[h]
        return mean * unit if all(Fraction(*total) == mean for total in totals.values()) else None
