"""What a declared kernel does otherwise than its recipe: powers of two, a stale amax, wider blocks, other roundings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from attn_diag.head.declared_beside import EXACT, PART, BesideRecipe
from attn_diag.head.declared_factors import Factors
from attn_diag.head.declared_stale import StaleSearch
from attn_diag.kernels import Recipe
from attn_diag.kernels.formats import Mode, base, parse
from attn_diag.kernels.quantizers import Quantizer
from attn_diag.results.wording import together

# What leaves this part of what another hypothesis leaves is preferred to it; else both are named.
_BETTER = 0.5
# So many blocks, each of which may have the scale of the head, are looked through.
_BLOCKS = 32


@dataclass(frozen=True)
class Culprit:
    """What a kernel does otherwise than its recipe."""

    words: str
    """In words, "the largest number of k is …"."""
    left: float
    """The mean square of what O is off then, in units of the noise's."""


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

    def culprit(self) -> Culprit | None:
        """What the kernel does otherwise; None where nothing that is tried explains O."""
        beside, search, others = self.beside, StaleSearch(self.beside), self._others()
        stale = search.named()
        if not stale and not others:
            # Of a scale that few rows feel the other rows show nothing.
            beside = replace(self.beside, worst=True)
            search, others = StaleSearch(beside), ScaleSearch(beside)._others()
            stale = search.named_blocks()
        found = [(search.words(stale), search.changed(stale))] if stale else []
        if others:
            changed = {name: value for _, change in others for name, value in change.items()}
            found.append((together([words for words, _ in others]), changed))
        if not found:
            return None
        found.sort(key=lambda one: beside.left(one[1]))
        alike = [words for words, changed in found if beside.left(changed) * _BETTER <= beside.left(found[0][1])]
        return Culprit(", or ".join(alike), self.beside.left(found[0][1]))

    def as_declared(self) -> bool:
        """Whether O has the recipe's scales and roundings of q, k and v."""
        return self.beside.left({}) <= EXACT * PART

    def with_factors(self, factors: Factors) -> float:
        """What the recipe leaves whose scores and O are multiplied by these."""
        return self.beside.left({}, factors)

    def explained_by(self, factors: Factors) -> bool:
        """Whether they leave no more than the recipe's codes do where all is right."""
        return self.beside.explains(self.with_factors(factors))

    def _others(self) -> list[tuple[str, dict[str, str]]]:
        """Other blocks, roundings and formats that explain O, one of each field, the most important first."""
        best = self.beside.left({})
        changed, found = dict[str, str](), list[tuple[str, dict[str, str]]]()
        # What is left then is what casts and sums make.
        while best > EXACT * PART:
            tried = [one for one in self._variants if not set(one[1]) & set(changed)]
            left = self.beside.left_of_several([changed | change for _, change in tried])
            if not left or min(left) > 0.9 * best:
                break
            best = min(left)
            found.append(tried[left.index(best)])
            changed |= found[-1][1]
        return found if found and self.beside.explains(best) else []

    @cached_property
    def _variants(self) -> list[tuple[str, dict[str, str]]]:
        return list(self._ways())

    def _ways(self) -> Iterator[tuple[str, dict[str, str]]]:
        """In words, and the fields that make it, every other way to quantise that is tried."""
        recipe = self.beside.recipe
        for name, text, by in self.beside.quantizers():
            field = f"quantize_{name}"
            for block in _wider(by.block):
                yield (
                    f"{name} has a scale for {_block(block)}, not for {_block(by.block)}",
                    {field: f"{text} block={block}"},
                )
            elements = base(by.elements)
            for mode in (Mode.TOWARD_ZERO, Mode.DOWN):
                said = f"{name} is rounded {_MODES[mode]}, not to the nearest"
                yield said, {field: f"{text} elements={elements}:{mode} ties=even"}
            for other in _OTHER_ELEMENTS.get(elements, ()) if by.target is None else ():
                yield f"{name} is in {other}, not in {elements}", {field: f"{text} elements={other}"}
            if by.symmetric and not by.search:
                yield from self._reaching(name, text, by)
        if recipe.smooth_k != "none":
            yield "k's mean is not taken off before it is quantised", {"smooth_k": "none"}
        if (probs := parse(recipe.probs)) is not None and probs.mode is Mode.NEAREST_EVEN:
            said = f"P_bar is rounded {_MODES[Mode.TOWARD_ZERO]}, not to the nearest"
            yield said, {"probs": f"{base(recipe.probs)}:{Mode.TOWARD_ZERO}"}

    def _reaching(self, name: str, text: str, by: Quantizer) -> Iterator[tuple[str, dict[str, str]]]:
        """Scales of blocks of whole rows that other blocks' numbers make, as a quantiser's ``stale``."""
        rounded = name == "k" and self.beside.recipe.smooth_k == "rounded-mean"
        for smooth in ({}, {"smooth_k": "mean"}) if rounded else ({},):
            amax, apart = self.beside.amax(name, by, smooth), by.row_groups
            if not apart < len(amax) <= _BLOCKS or not by.whole_rows:
                return
            # A block of zeros has any scale.
            own = torch.where(amax > 0, amax, torch.inf)
            after = torch.maximum(amax, torch.cat([amax[apart:], amax[-apart:]])) / own
            several = ",".join(f"{block}:{part!r}" for block, part in enumerate(after.tolist()) if part > 1)
            whole = {f"{block}:{part!r}": block for block, part in enumerate((amax.max() / own).tolist()) if part > 1}
            words = dict[str, str]()
            if several and several not in whole:
                words[several] = f"{name} has scales of {_block(by.block)} and the block after it (later ones)"
            for stale, block in whole.items():
                of = "block after it, which is the head's" if stale == several else "head"
                words[stale] = f"{name} in {self.beside.place(name, by, block)} has the scale of the {of}"
            for stale, said in words.items():
                yield said, {f"quantize_{name}": f"{text} stale={stale}"} | smooth


_MODES = {Mode.TOWARD_ZERO: "toward zero", Mode.DOWN: "down"}
# Formats that are taken for another.
_OTHER_ELEMENTS = {"e4m3": ("e5m2",), "int8": ("int4",)}


def _wider(block: str) -> list[str]:
    """The blocks that are tried instead of one: all in one, twice and four times as large."""
    found = re.fullmatch(r"(\d+)(rows(?:/\d)?|x1)?", block)
    if found is None:
        return {"column": ["tensor"], "row": ["tensor"]}.get(block, [])
    size, kind = int(found[1]), found[2] or ""
    whole = {"": ["row"], "x1": ["column"]}.get(kind, ["tensor"])
    return whole + [f"{n * size}{kind}" for n in (2, 4)]


def _block(block: str) -> str:
    """What shares a scale, in words."""
    words = {"tensor": "the head", "row": "a row", "column": "a feature"}
    if block in words:
        return words[block]
    return re.sub(r"^(\d+)(rows.*|x1)?$", lambda m: f"{m[1]} {'rows' if m[2] else 'of a row'}", block)
