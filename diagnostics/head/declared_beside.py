"""What is left of a declared kernel's O beside its recipe with some fields changed.

Kernels that quantise q, k and v at the same scales differ in the casts of P_bar and in sums alone. Of O that leaves a
part of what the format's roundings make (``benchmarks/study_declared.py``: up to 0.13 of its mean square in FP8, 0.3
in INT8 on most inputs); with scales of their own they differ by about 2, as two independent noises do. So a hypothesis
that leaves at most ``EXACT``, or what these casts and sums make (drawn: all but q, k and v rounding stochastically),
and a small part of what the recipe itself leaves, is what the kernel does.

Less than that proves a hypothesis that changes few codes: O moves by d if it is true, by nothing if it is not, and by
d / 2 on average if O's codes are neither the recipe's nor its, as all three then round alike. So what O is off the
recipe is projected on d, and the projection compared with 1 / 2 over the rows (``BesideRecipe.moved``).

Each element counts in units of its own noise (``smoothed_variance``, and the last cast's), so that a few rows or
features that are much noisier than the rest, as of outliers, do not hide what the others show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attn_diag.head.declared_factors import Factors
from attn_diag.head.declared_noise import dithered, drawn_noise, smoothed_variance
from attn_diag.head.quality import LOSSY
from attn_diag.kernels import Recipe, emulate_forwards, emulate_rows
from attn_diag.kernels.emulation_operands import Operands
from attn_diag.kernels.formats import STORED, base
from attn_diag.kernels.quantize import quantize, spread
from attn_diag.kernels.quantizers import Quantizer, parse_quantizer
from attn_diag.reference import AttentionHead, format_of, ulp
from attn_diag.results.quality import OPERANDS
from attn_diag.results.wording import runs_of

# In units of the noise's mean square: what is left of O where the scales are right, and over what is left without.
EXACT, PART = 0.5, 0.25
# Of the way from one recipe to another O has gone all but a quarter, or a tenth where more than half as much as the way
# is left; and is so many standard errors beyond half of it.
_GONE, _ALL, _NEAR, _SURE = 0.75, 0.9, 0.5, 4.0
# Where two recipes differ, O is the one's or the other's by chance; in so many numbers, 2^-15 = 3e-5, as rarely as 4
# standard errors are passed.
_COINS = 15
# So many rows tell scales apart.
_ROWS = 64
# Keys that kernels take at a time.
_TILES = (32, 64, 128, 256)
_ORDERS: tuple[Literal["ascending", "descending"], ...] = ("ascending", "descending")
# Draws of the casts of P_bar and the sums.
_DRAWS = 8

Changes = Mapping[str, str]
"""Fields of a recipe, and what they are instead."""


class Off(NamedTuple):
    """What O and L are off some recipe's in R rows."""

    out: Tensor
    """[R, Dv]."""
    lse: Tensor | None
    """[R]; None where L was not captured."""


@dataclass(frozen=True)
class Culprit:
    """What a kernel does otherwise than its recipe."""

    words: str
    """In words, "the largest number of k is …"."""
    left: float
    """The mean square of what O is off then, in units of the noise's."""


@dataclass(frozen=True)
class BesideRecipe:
    """O of one head beside the recipe's, in some of its rows.

    Args:
        recipe: What it is declared to be.
        head: Its inputs.
        out: What was observed, [Tq, Dv].
        made: The recipe's O, [Tq, Dv].
        noise: ``drawn_noise`` of that, [N, Tq, Dv].
        lse: L, [Tq]; None where it was not captured.
        worst: Half of the rows are those that are furthest off, not all of them evenly spread.
        most: So many rows at most.
    """

    recipe: Recipe
    head: AttentionHead
    out: Tensor
    made: Tensor
    noise: Tensor
    lse: Tensor | None = None
    worst: bool = False
    most: int = _ROWS

    def in_own_tiles(self) -> BesideRecipe:
        """The same beside the recipe that walks the keys as leaves least of O: casts of P_bar depend on that.

        A cache's k and v may be in 16 bits when they are multiplied.
        """
        recipe, schedule = self.recipe, self.recipe.schedule
        in_16_bits = {f"quantize_{name}": f"{text} values={base(recipe.input)}" for name, text, _ in self.quantizers()}
        ways: list[dict[str, str]] = [{}] if "quantize_q" in in_16_bits else [{}, in_16_bits]
        walks = [schedule, *(replace(schedule, key_tile=n, order=o) for n in _TILES for o in _ORDERS)]
        beside = [
            replace(self, recipe=replace(recipe, schedule=walk, **way))  # type: ignore[arg-type]
            for walk in walks for way in ways
        ]  # fmt: skip
        return min(beside, key=lambda one: one.left({}))

    def left(self, changed: Changes, factors: Factors | None = None) -> float:
        """The mean square of what O is off the recipe with these fields, in units of the noise's."""
        key = tuple(sorted(changed.items())), factors
        if key not in self._known:
            self._known[key] = self.size(self.off(changed, factors))
        return self._known[key]

    def moved(self, here: Sequence[Off], there: Sequence[Off], *, neither: bool = True) -> bool:
        """Whether O is a kernel's that leaves ``there``, not ``here`` nor, where it may be, ``neither``; of ``off``."""
        if not len(self.rows) or self.size(there) > self._limit:
            return False
        which = min(range(len(there)), key=lambda i: self.size(there[i : i + 1]))
        units, (x, of_x), (y, of_y) = self.units[self.rows].sqrt(), here[which], there[which]
        x, y = x / units, y / units
        # Of a kernel of neither as much is left as the way is long; where few codes differ, half of it may look more.
        near = not neither or float(y.square().sum()) <= _NEAR * float((x - y).square().sum())
        if _gone(x, y, _GONE if near else _ALL):
            return True
        # L has neither casts of P_bar nor of O: what is left of it is next to nothing.
        if of_x is None or of_y is None or float(of_y.square().sum()) > PART * float(of_x.square().sum()):
            return False
        return _gone(of_x[:, None], of_y[:, None], _GONE)

    def left_of_several(self, every: Sequence[Changes]) -> list[float]:
        """``left`` of each, side by side."""
        missing = [changed for changed in every if (tuple(sorted(changed.items())), None) not in self._known]
        for changed, off in zip(missing, self.off_of_several(missing), strict=True):
            self._known[tuple(sorted(changed.items())), None] = self.size(off)
        return [self.left(changed) for changed in every]

    def size(self, off: Sequence[Off]) -> float:
        """The mean square of what is least off, of ``off``, in units of the noise's."""
        return min(float((x.square() / self.units[self.rows]).mean()) for x, _ in off) if len(self.rows) else 0.0

    def off(self, changed: Changes, factors: Factors | None = None) -> list[Off]:
        """What O and L are off in ``rows``: with the recipe's sums, and with fp32's where these are others."""
        by = Factors("") if factors is None else factors
        return self._off(self._recipes(changed), by)

    def off_of_several(self, every: Sequence[Changes]) -> list[list[Off]]:
        """``off`` of each, side by side."""
        recipes = [self._recipes(changed) for changed in every]
        off = iter(self._off([one for some in recipes for one in some], Factors("")))
        return [[next(off) for _ in some] for some in recipes]

    def _off(self, recipes: Sequence[Recipe], by: Factors) -> list[Off]:
        head, lse = replace(self.head, do=None, scale=self.head.scale * by.scores), self.lse
        return [
            Off(self.out[self.rows] - by.out * o.double(), None if lse is None else lse[self.rows] - each.double())
            for o, each in emulate_forwards(recipes, head, self.rows)
        ]

    def explains(self, left: float) -> bool:
        """Whether so little is left that O is a kernel's with these fields."""
        return left <= PART * self.left({}) and left <= self._limit

    def quantizers(self) -> Iterator[tuple[str, str, Quantizer]]:
        """Of q, k and v: its letter, what its field holds, and that read, where it is quantised."""
        for name in OPERANDS:
            text = getattr(self.recipe, f"quantize_{name}")
            by = parse_quantizer(text)
            if by is not None:
                yield name, text, by

    def symmetric(self) -> Iterator[tuple[str, str, Quantizer]]:
        """Those whose scales are of an amax alone."""
        yield from (one for one in self.quantizers() if one[2].symmetric and not one[2].search)

    def from_amax(self) -> Iterator[tuple[str, str, Quantizer]]:
        """Those that have scales in fp32 from an amax."""
        for name, text, by in self.quantizers():
            if by.scale == "fp32" and by.symmetric and not by.tensor_scale:
                yield name, text, by

    def blocks(self, name: str, by: Quantizer) -> Tensor:
        """The number of the block of every element, [T, D]."""
        x = getattr(self.head, name)
        shape = len(x), x.shape[1]
        rows, columns = by.block_shape(shape)
        down, across = -(-shape[0] // rows) * by.row_groups, -(-shape[1] // columns)
        return spread(torch.arange(down * across, device=x.device).view(down, across), shape, by)

    def place(self, name: str, by: Quantizer, block: int) -> str:
        """Where a block is: "keys 64-127"."""
        inside = self.blocks(name, by) == block
        rows, columns = (inside.any(dim).nonzero()[:, 0].tolist() for dim in (1, 0))
        places = [runs_of("row" if name == "q" else "key", rows)] if len(rows) < len(inside) else []
        places += [runs_of("feature", columns)] if len(columns) < inside.shape[1] else []
        return ", ".join(places)

    def scales(self, name: str, by: Quantizer, changed: Changes) -> Tensor:
        """Of each block, with these fields, [R, C]; in the order of a quantiser's ``stale`` once it is flat."""
        recipe = replace(self.recipe, **changed)  # type: ignore[arg-type]
        return quantize(Operands(self.head).prepared(recipe).unquantized(recipe, name), by).scale

    def amax(self, name: str, by: Quantizer, changed: Changes) -> Tensor:
        """Of each block before it is quantised, with these fields, [N]."""
        recipe = replace(self.recipe, **changed)  # type: ignore[arg-type]
        x = Operands(self.head).prepared(recipe).unquantized(recipe, name).abs()
        each = self.blocks(name, by).flatten()
        return x.new_zeros(int(each.max()) + 1).scatter_reduce(0, each, x.flatten(), "amax")

    @cached_property
    def rows(self) -> Tensor:
        """The rows that are looked at."""
        rows = self.out.isfinite().all(1).nonzero()[:, 0]
        count = min(self.most, len(rows))
        spread = rows[torch.linspace(0, len(rows) - 1, count, device=rows.device).long()]
        if not self.worst or count == len(rows):
            return spread
        off = ((self.out - self.made).square() / self.units)[rows].mean(1)
        first = rows[off.argsort(descending=True)[: count // 2]]
        chosen = torch.zeros(len(self.out), dtype=torch.bool, device=rows.device)
        chosen[torch.cat([first, spread[::2]])] = True
        return chosen.nonzero()[:, 0]

    def _recipes(self, changed: Changes) -> list[Recipe]:
        # A kernel may keep in fp32 what the recipe adds in less, or k without its mean.
        exact = {"pv_sums": "fp32"} | ({"smooth_k": "mean"} if self.recipe.smooth_k == "rounded-mean" else {})
        stated = {name: str(getattr(self.recipe, name)) for name in exact}
        ways = [stated] if stated == exact else [stated, exact]
        return [replace(self.recipe, accumulation="fp32-nearest", **way | dict(changed)) for way in ways]  # type: ignore[arg-type]

    @cached_property
    def _known(self) -> dict[tuple[tuple[tuple[str, str], ...], Factors | None], float]:
        return {}

    @cached_property
    def units(self) -> Tensor:
        """The noise's mean square of each element, [Tq, Dv]; no less than the last cast's, which is not drawn."""
        cast = ulp(self.made.double(), format_of(STORED[base(self.recipe.out)])).square() / 12
        return smoothed_variance(self.noise) + cast

    @cached_property
    def _limit(self) -> float:
        """What is left where all is right."""
        kept = [f"quantize_{name}" for name in OPERANDS]
        head = replace(self.head, do=None)
        draws = [emulate_rows(dithered(self.recipe, n, kept), head, self.rows).double() for n in range(_DRAWS)]
        # The difference of two kernels has twice the variance of one.
        return max(EXACT, 2 * LOSSY**2 * float((drawn_noise(draws).double().square() / self.units[self.rows]).mean()))


def _gone(x: Tensor, y: Tensor, much: float) -> bool:
    """Whether what is off, [R, N], is so ``much`` of the way from x to y, and surely more than half, over the rows."""
    way = x - y
    size = float(way.square().sum())
    if int(way.count_nonzero()) < _COINS or abs(float((x * way).sum()) / size - 1) > 1 - much:
        return False
    # Of rows that lie there, what is left is the chance; of rows half way it holds half of the way itself.
    left = (y * way).sum(1)
    return size / 2 + float(left.sum()) > _SURE * math.sqrt(float(left.square().sum()))
