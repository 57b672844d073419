"""What a declared kernel does otherwise than its recipe: powers of two, a stale amax, wider blocks, other roundings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from attn_diag.head.declared_beside import EXACT, PART, BesideRecipe, Culprit, Off
from attn_diag.head.declared_clipped import ClippedSearch
from attn_diag.head.declared_factors import Factors
from attn_diag.head.declared_stale import StaleSearch
from attn_diag.head.declared_ways import Way, Ways
from attn_diag.kernels import Recipe
from attn_diag.results.wording import together

# What leaves this part of what another hypothesis leaves, or is proven beside it, is preferred to it; else both are
# named.
_BETTER = 0.5
# Where less than this is left, no way is looked for.
_NOTHING = 1e-6
# Rows that tell what few codes make.
_ROWS_OF_FEW = 128

# What explains more of what is left by less than this, and is not proven, is not there.
_LESS = 0.9

Others = list[Way]
"""Ways that O has together."""


@dataclass(frozen=True)
class ScaleSearch:
    """O of one head beside the recipe's with other scales."""

    beside: BesideRecipe

    def powers_of_two(self) -> Recipe | None:
        """The recipe with scales rounded up to powers of two, where O has those; else None."""
        changed = {f"quantize_{name}": f"{text} scale=e8m0:up" for name, text, _ in self.beside.from_amax()}
        if not changed or self.beside.left({}) <= EXACT or not self.beside.explains(self.beside.left(changed)):
            return None
        name = f"{self.beside.recipe.name} with scales of powers of two"
        return replace(self.beside.recipe, name=name, **changed)  # type: ignore[arg-type]

    def culprit(self, *, thorough: bool = True) -> Culprit | None:
        """What the kernel does otherwise; None where nothing that is tried explains O.

        Args:
            thorough: Also a stale amax, scales of single blocks, and those that few rows feel.
        """
        if not thorough:
            beside = replace(self.beside, most=_ROWS_OF_FEW)
            few = ScaleSearch(beside)._explaining(Ways(beside).all())
            return self._named(beside, [self._joined(few)] if few else [])
        beside, search, others = self.beside, StaleSearch(self.beside), self._others()
        stale = search.named()
        for other in search.others() if not stale and not others else ():
            if stale := other.named():
                search = other
                break
        if not stale and (others or beside.left({}) > EXACT):
            # A scale that reaches too far leaves codes unused, as a rounding toward zero does.
            search = StaleSearch(beside, wider=True)
            stale = search.named()
        if not stale and not others:
            # Of a scale that few rows feel the other rows show nothing.
            beside = replace(self.beside, worst=True)
            search, others = StaleSearch(beside), ScaleSearch(beside)._others()
            stale = search.named_blocks()
        if not stale and not others and (clipped := ClippedSearch(self.beside).named()) is not None:
            return clipped
        found = [(search.words(stale), search.changed(stale))] if stale else []
        return self._named(beside, found + ([self._joined(others)] if others else []))

    @staticmethod
    def _joined(others: Others) -> Way:
        """All of them, as one."""
        changed = {name: value for _, change in others for name, value in change.items()}
        return together([words for words, _ in others]), changed

    @staticmethod
    def _named(beside: BesideRecipe, found: list[Way]) -> Culprit | None:
        """The one that leaves least, and those that are not excluded beside it."""
        if not found:
            return None
        found.sort(key=lambda one: beside.left(one[1]))
        first = beside.off(found[0][1])
        alike = [words for words, changed in found if not _preferred(beside, first, beside.off(changed))]
        return Culprit(", or ".join(alike), beside.left(found[0][1]))

    def as_declared(self) -> bool:
        """Whether O has the recipe's scales and roundings of q, k and v, but for what few codes make."""
        return self.beside.left({}) <= EXACT * PART

    def with_factors(self, factors: Factors) -> float:
        """What the recipe leaves whose scores and O are multiplied by these."""
        return self.beside.left({}, factors)

    def explained_by(self, factors: Factors) -> bool:
        """Whether they leave no more than the recipe's codes do where all is right."""
        return self.beside.explains(self.with_factors(factors))

    def _others(self) -> Others:
        """Other blocks, scales, roundings and formats that explain O, one of each field, the most important first."""
        ways = Ways(self.beside)
        return self._explaining(ways.all()) or self._explaining(ways.of_blocks())

    def _explaining(self, ways: Iterable[Way]) -> Others:
        beside, changed, found = self.beside, dict[str, str](), list[Way]()
        here, every, proven = beside.off({}), list[Way](), True
        while (best := beside.size(here)) > (EXACT * PART if found else _NOTHING):
            every = every or list(ways)
            tried = [one for one in every if not set(one[1]) & set(changed)]
            off = beside.off_of_several([changed | change for _, change in tried])
            if not off:
                break
            there = min(off, key=beside.size)
            moved, much = beside.moved(here, there), beside.size(there) <= _LESS * best and best > EXACT * PART
            if not (moved or much):
                break
            proven &= moved
            alike = [words for (words, _), one in zip(tried, off, strict=True) if not _preferred(beside, there, one)]
            first, change = next(way for way, one in zip(tried, off, strict=True) if one is there)
            found.append((", or ".join(dict.fromkeys([first, *alike])), change))
            changed |= change
            here = there
        return found if found and (proven or beside.explains(beside.size(here))) else []


def _preferred(beside: BesideRecipe, first: Sequence[Off], other: Sequence[Off]) -> bool:
    """Whether what leaves ``first`` is O's cause, and what leaves ``other`` is not."""
    return beside.size(first) < _BETTER * beside.size(other) or beside.moved(other, first, neither=False)
