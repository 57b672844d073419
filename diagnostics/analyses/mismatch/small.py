"""What moves O by less than its rounding, but many elements alike: a factor of rows or features, another scale.

Rounding moves elements this way and that. What a group of n rows shares stands out of it: the mean of <e, d> / <d, d>
is as uncertain as its spread over sqrt(n); e is a row's error, d the direction that is asked for, O or that in which
another scale moves O. Roundings of a healthy kernel share something too: where all scores are nearly equal, P̄ of all
keys is rounded alike, and where V has a feature of one value, so is O. How much, emulations of well-rounded kernels on
the same rows tell, for any place of P̄ between two powers of two: kernels subtract other maxima. What is left beside
both, and beside what sums and exponentials of healthy kernels may share, no rounding of P̄ and O to nearest makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.analyses.mismatch.rows import RunRows
from attn_diag.analyses.mismatch.small_words import FEW, Kind, Seen, SmallError
from attn_diag.analyses.mismatch.split import HeadSemantics, blocks_of
from attn_diag.head.counterfactual import covers
from attn_diag.head.scale_fit import scale_derivative
from attn_diag.reference import FloatFormat, round_nearest_even

# What healthy kernels share: the exponential of FlashAttention-4, a polynomial of degree 3, is up to 8.8e-5 off.
_SHARED = 2.0**-13
# And sums of a tensor core are cut after each 16 keys, by up to one unit of fp32.
_CUT, _KEYS = 2.0**-23, 16
# One of so many tests may err by chance: some 10^4 groups a layer and 100 layers are looked at, so one report in 1000.
_CHANCE = 1e-9
# Standard errors beyond the limit from which nine in ten are seen: the normal distribution's quantile.
_SEEN = 1.28
# Of a group so many rows are emulated, and of a head whose limits are told.
_MOST, _TOLD = 256, 64
# Places of P̄ between two powers of two that are tried.
_PLACES = 8
# And a little below and above the tie where all of a row's P̄ that are equal are rounded furthest, in half spacings.
_TIES = (15 / 16, 17 / 16)
# Of a head so many groups at most are held against emulations, the clearest first.
_TRIED = 16


Array = npt.NDArray[np.float64]
BothRows = tuple[RunRows, RunRows]
BothSemantics = tuple[HeadSemantics, HeadSemantics]


@dataclass(frozen=True)
class _Means:
    """Of c groups of n rows each the mean error along a direction, and how far off it may be, [c] each."""

    value: Array
    error: Array
    limit: Array
    """Beyond chance, without what emulations share."""

    @classmethod
    def of(cls, along: Array, size: Array) -> _Means:
        """sum(along) / sum(size), [n, c] each: <e, d> and <d, d> of every row."""
        from scipy.special import stdtrit

        total, squares = size.sum(0), np.square(size).sum(0)
        with np.errstate(all="ignore"):
            freedom = np.square(total) / squares - 1  # of as many rows as carry the direction
            value = along.sum(0) / total
            spread = np.square(along - value * size).sum(0) * (freedom + 1) / freedom
            error = np.sqrt(spread) / total
            known = (freedom >= 1) & np.isfinite(error)
            times = stdtrit(np.where(known, freedom, 1.0), 1 - _CHANCE / 2)
        error = np.where(known, error, np.inf)
        return cls(np.where(known, value, 0.0), error, error * times)


@dataclass(frozen=True)
class _Groups:
    """Groups of a kind that are as large: of each its rows, [n, c] or [n, 1] for all the same, and its direction."""

    kind: Kind
    rows: Tensor
    names: Sequence[str]

    def means(self, error: Tensor, out: Tensor, slope: Tensor) -> _Means:
        """Of an error; all three [n, Dv], over the norm of each row of O."""
        if self.kind == "scale":
            # What a factor of O does is taken out of the direction.
            direction = slope - out * (slope * out).sum() / out.square().sum().clamp(min=1e-300)
        else:
            direction = out
        along, size = error * direction, direction.square()
        if self.kind == "feature":
            return _Means.of(*(x[self.rows[:, 0]].cpu().numpy() for x in (along, size)))
        return _Means.of(*(x.sum(1)[self.rows].cpu().numpy() for x in (along, size)))


def _groups(tokens: Tensor, features: int, sloped: Tensor) -> Iterator[_Groups]:
    """What is looked at of a head's rows: all, parts of them, its features, and another scale."""
    every = torch.arange(len(tokens), device=tokens.device)
    yield _Groups("head", every[:, None], [""])
    size = len(every) // 2
    while size >= FEW:
        rows = every[: len(every) // size * size].view(-1, size).T
        yield _Groups("rows", rows, [f" in tokens {int(tokens[a])} to {int(tokens[b])}" for a, b in rows[[0, -1]].T])
        size //= 2
    if len(every) >= 2 * FEW:
        rows = every[: len(every) // 2 * 2].view(-1, 2)
        yield _Groups("rows", rows, [f" in every other token, from {int(tokens[a])} on" for a in rows[0]])
    yield _Groups("feature", every[:, None], [f" in feature {feature}" for feature in range(features)])
    yield _Groups("scale", sloped[:, None], [""])


def small_errors(
    heads: Sequence[tuple[int, int, BothRows, BothSemantics]],
    errors: Sequence[tuple[Tensor, Tensor]],
    formats: Sequence[tuple[FloatFormat, FloatFormat]],
    asked: Sequence[bool],
) -> tuple[tuple[SmallError, ...], Seen | None]:
    """What elements of a run share that the other's do not, and what of it would have been seen; None: not known.

    Args:
        heads: Of each the number of its sequences, its index, its rows in train and in rollout, and what either states.
        errors: Of each, O less float64, [n, Dv], in train and in rollout.
        formats: Of train and rollout, the inputs' and O's.
        asked: Which of them are looked at: those whose error as a whole has no name.
    """
    found: list[SmallError] = []
    seen: Seen | None = Seen()
    sides = [at for at, (fmt, out) in enumerate(formats) if asked[at] and covers(fmt) and out.name != "fp32"]
    for (sequence, index, rows, stated), of_both in zip(heads, errors, strict=True):
        usable = (of_both[0].isfinite() & of_both[1].isfinite()).all(1).nonzero()[:, 0]
        shared: dict[Kind, float] | None = None
        if len(sides) < len(formats) or len(usable) < FEW:
            seen = None
        for side in sides if len(usable) >= FEW else ():
            own, semantics = rows[side], stated[side]
            if len(usable) < len(own.tokens):
                own, semantics = own.select(usable), semantics.of_rows(usable)
            head = _Head(own, semantics, formats[side], of_both[side][usable], of_both[1 - side][usable])
            if (one := head.largest()) is not None:
                kind, what, off, error = one
                found.append(SmallError(side, sequence, index, what, off, error, kind, semantics.scale))
            elif seen is not None:
                # Runs of which nothing is found have nearly the same inputs, and share as much. It counts twice: the
                # kernel's own may be of the other sign.
                shared = head.shared() if shared is None or formats[0] != formats[1] else shared
                least = {kind: size + 2 * shared.get(kind, 0.0) for kind, size in head.least().items()}
                seen = seen.beside(Seen(**least))
    return tuple(found), seen


@dataclass(frozen=True)
class _Head:
    """One head of one run, in rows that can be compared."""

    rows: RunRows
    stated: HeadSemantics
    formats: tuple[FloatFormat, FloatFormat]
    error: Tensor
    """O less float64's, [n, Dv]."""
    other: Tensor
    """The same of the other run."""

    @cached_property
    def floor(self) -> float:
        """What sums and exponentials of healthy kernels share."""
        return _SHARED + _CUT * float(self.stated.visible.sum(1).max()) / _KEYS

    @cached_property
    def norm(self) -> Tensor:
        """Of each row of O, [n, 1]."""
        norm: Tensor = (self.rows.o - self.error).norm(dim=1, keepdim=True)
        return norm.clamp(min=1e-300)

    @cached_property
    def out(self) -> Tensor:
        """O in float64, over its norm."""
        return (self.rows.o - self.error) / self.norm

    @cached_property
    def sloped(self) -> Tensor:
        """Rows of which the slope is known."""
        return _some(torch.arange(len(self.error), device=self.error.device), _MOST)

    @cached_property
    def slope(self) -> Tensor:
        """What O changes by with the logarithm of the scale, over the norm."""
        found, rows = torch.zeros_like(self.out), self.rows.select(self.sloped)
        for part, inputs, block in blocks_of(self.stated.of_rows(self.sloped), rows):
            found[self.sloped[part]] = scale_derivative(inputs, block)
        return found / self.norm

    @cached_property
    def groups(self) -> list[tuple[_Groups, _Means]]:
        """What is looked at, and its mean errors."""
        every = _groups(self.rows.tokens, self.out.shape[1], self.sloped)
        return [(groups, groups.means(self.error / self.norm, self.out, self.slope)) for groups in every]

    def largest(self) -> tuple[Kind, str, float, float] | None:
        """The clearest error that is shared and not the other run's: its kind, place, size and standard error."""
        found = []
        for groups, own in self.groups:
            beyond = np.abs(own.value) > self.floor + own.limit
            if beyond.any():
                its = groups.means(self.other / self.norm, self.out, self.slope)
                beyond &= np.abs(own.value - its.value) > _SHARED + np.hypot(own.limit, its.limit)
            clear = np.abs(own.value) / np.maximum(own.error, 1e-300)
            found += [(clear[i], own, groups, i) for i in beyond.nonzero()[0].tolist()]
        found.sort(key=lambda one: -one[0])
        for _, own, groups, i in found[:_TRIED]:
            rows = _some(groups.rows[:, min(i, groups.rows.shape[1] - 1)], _MOST)
            alone = _Groups(groups.kind, torch.arange(len(rows), device=rows.device)[:, None], groups.names)
            shared = self._shared([alone], rows)[0]
            beside = float(shared[i if groups.kind == "feature" else 0])
            if abs(own.value[i]) > self.floor + beside + own.limit[i]:
                return groups.kind, groups.names[i], float(own.value[i]), math.hypot(own.error[i], beside)
        return None

    def least(self) -> dict[Kind, float]:
        """From where on nine in ten are found where roundings share nothing; the other run is as uncertain."""
        found: dict[Kind, float] = {"rows": math.inf if len(self.error) < 2 * FEW else 0.0}
        for groups, means in self.groups:
            if groups.kind != "rows" or len(groups.rows) < 2 * FEW:
                size = self.floor + math.sqrt(2) * float((means.limit + _SEEN * means.error).max())
                found[groups.kind] = max(found.get(groups.kind, 0.0), size)
        return found

    def shared(self) -> dict[Kind, float]:
        """What roundings share, by kind of group."""
        at = _some(self.sloped, _TOLD)
        every = torch.arange(len(at), device=at.device)
        some, found = list(_groups(self.rows.tokens[at], self.out.shape[1], every)), dict[Kind, float]()
        for groups, most in zip(some, self._shared(some, at), strict=True):
            found[groups.kind] = max(found.get(groups.kind, 0.0), float(most.max()))
        return found

    def _shared(self, groups: Sequence[_Groups], at: Tensor) -> list[Array]:
        """The largest errors that roundings of a well-rounded kernel share in groups of these rows."""
        most = [np.zeros(1)] * len(groups)
        for made in emulated(self.stated.of_rows(at), self.rows.select(at), *self.formats):
            error = made / self.norm[at] - self.out[at]
            for i, one in enumerate(groups):
                most[i] = np.maximum(most[i], np.abs(one.means(error, self.out[at], self.slope[at]).value))
        return most


def emulated(semantics: HeadSemantics, rows: RunRows, fmt: FloatFormat, stored: FloatFormat) -> Iterator[Tensor]:
    """O of well-rounded kernels, [n, Dv] each: P̄ not cast, or at places between two powers of two."""
    blocks = blocks_of(semantics, rows)
    half = 2.0 ** -(fmt.precision + 1)  # of the spacing at 1
    for place in (None, *range(_PLACES), *_TIES):
        own, of_cast = torch.zeros_like(rows.o), torch.zeros_like(rows.o)
        for part, head, block in blocks:
            bar, row_sum = block.unnormalised_probs, 1 / block.inverse_row_sum[:, None]
            usual = bar.square().sum(1, keepdim=True) / bar.sum(1, keepdim=True)
            tie = torch.nan_to_num((1 + (place or 0) * half) / usual, 1.0, 1.0)
            moved = tie if isinstance(place, float) else 2.0 ** ((place or 0) / _PLACES)
            cast = bar if place is None else round_nearest_even(bar * moved, fmt) / moved
            product = cast @ head.v[block.keys]
            own[part] = product / row_sum
            of_cast[part] = product / (row_sum + (cast - bar).sum(1, keepdim=True))
        yield round_nearest_even(own, stored)
        if place is not None:
            yield round_nearest_even(of_cast, stored)


def _some(rows: Tensor, most: int) -> Tensor:
    """At most so many of some rows."""
    return rows[torch.linspace(0, len(rows) - 1, min(len(rows), most), device=rows.device).long()]
