"""What moves O by less than its rounding, but many elements alike: a factor of rows or features, another scale.

Rounding moves elements this way and that. What all elements of a group share stands out of it, as the mean over n rows
of a row's factor <O - R, R> / <R, R> is as uncertain as their spread over sqrt(n). Roundings of a healthy kernel share
something too: where all scores are nearly equal, P̄ of all keys is rounded alike, and where V has a feature of one
value, so is O. How much, emulations of well-rounded kernels on the same rows tell, for any place of P̄ between two
powers of two: kernels subtract other maxima. What is left beside both, and beside what sums and exponentials of healthy
kernels may share, no rounding to nearest makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.analyses.mismatch.rows import RunRows
from attn_diag.analyses.mismatch.split import HeadSemantics, blocks_of
from attn_diag.head.counterfactual import covers
from attn_diag.head.scale_fit import scale_derivative
from attn_diag.reference import FloatFormat, round_nearest_even
from attn_diag.results.wording import number, percent, plural, together
from attn_diag.statistics.ratios import paired_ratio

# What healthy kernels share: the exponential of FlashAttention-4, a polynomial of degree 3, is up to 8.8e-5 off.
_SHARED = 2.0**-13
# And sums of a tensor core are cut after each 16 keys, by up to one unit of fp32.
_CUT, _KEYS = 2.0**-23, 16
# One of so many tests may err by chance: some 10^4 groups a layer and 100 layers are looked at.
_CHANCE = 1e-9
# Standard errors beyond the limit from which nine in ten are seen; what emulations leave counts as two besides.
_SEEN = 1.3 + 2.0
# Rows of the smallest group; so many of a group are emulated.
_FEW, _MOST = 16, 256
# Places of P̄ between two powers of two that are tried.
_PLACES = 8
# Rows' factors are so many times those of well-rounded kernels, at least, where few of them are off: healthy ones
# measure 0.5 to 1.3.
_SCATTERED = 2.0


BothRows = tuple[RunRows, RunRows]
BothSemantics = tuple[HeadSemantics, HeadSemantics]


@dataclass(frozen=True)
class SmallError:
    """An error that a group of a head's elements shares."""

    side: int
    """0 train, 1 rollout."""
    sequence: int
    """Number of the pair of sequences."""
    head: int
    """Index of the query head."""
    what: str
    """Which elements of its O, in words; empty: all."""
    off: float
    """The relative error of their values, or of the scale; signed."""
    error: float
    """Its standard error."""
    kind: Literal["factor", "scale", "either", "rows"]
    """What it is a factor of: O, the softmax scale, not told which; or each row has its own."""
    scale: float
    """The stated softmax scale."""

    @property
    def clear(self) -> float:
        """In standard errors."""
        return abs(self.off) / self.error if self.error else math.inf


@dataclass(frozen=True)
class Seen:
    """The smallest errors of a kind that would have been told in whichever head, relative."""

    head: float = 0.0
    """A factor of all of a head's O."""
    rows: float = 0.0
    """Of the smallest group of its rows."""
    feature: float = 0.0
    """Of a feature."""
    scale: float = 0.0
    """Another softmax scale."""

    def beside(self, other: Seen) -> Seen:
        """The larger of each."""
        return Seen(*(max(a, b) for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def words(self) -> str:
        """What follows "not seen are"."""
        named = (
            (self.scale, "softmax scales", ""), (self.head, "factors of a head's O", ""),
            (self.rows, "", f"in {_FEW} rows of it"), (self.feature, "", "in one feature"),
        )  # fmt: skip
        told = []
        for least, of, where in named:
            if 0 < least < 1:
                size = f"less than {percent(least, '.2g')} off" if of else percent(least, ".2g")
                told.append(" ".join(filter(None, (of, size, where))))
        return together(told) if told else ""


@dataclass(frozen=True)
class _Mean:
    """The mean factor of a group, and how far off it may be."""

    value: float
    error: float
    limit: float
    """Beyond chance, without what emulations share."""

    @classmethod
    def of(cls, along: Tensor, size: Tensor) -> _Mean:
        """sum(along) / sum(size) over rows, [n] each."""
        total = float(size.sum())
        freedom = int(total**2 / max(float(size.square().sum()), 1e-300)) - 1
        if freedom < 1:
            return cls(0.0, math.inf, math.inf)
        value = float(along.sum()) / total
        error = math.sqrt(float((along - value * size).square().sum()) * (freedom + 1) / freedom) / total
        return cls(value, error, error * _quantile(freedom))

    def differs(self, other: _Mean) -> bool:
        """Whether the other run's differs, beyond chance."""
        return abs(self.value - other.value) > _SHARED + math.hypot(self.limit, other.limit)


@cache
def _quantile(freedom: int) -> float:
    """Of Student's t, two-sided."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - _CHANCE / 2))


@dataclass(frozen=True)
class _Group:
    """Rows, or one feature, of a head."""

    what: str
    rows: Tensor
    feature: int | None = None

    def mean(self, error: Tensor, truth: Tensor) -> _Mean:
        """Of the factor of some values, [n, Dv]."""
        e, r = error[self.rows], truth[self.rows]
        if self.feature is not None:
            e, r = e[:, self.feature, None], r[:, self.feature, None]
            return _Mean.of((e * r).sum(1), r.square().sum(1))
        size = r.square().sum(1)
        counted = (size > 0).to(size)
        return _Mean.of(counted * (e * r).sum(1) / size.clamp(min=1e-300), counted)


def _groups(tokens: Tensor, usable: Tensor, features: int) -> Iterator[_Group]:
    """What is looked at of a head: all its rows, parts of them, and its features."""
    yield _Group("", usable)
    size = len(usable) // 2
    while size >= _FEW:
        for start in range(0, len(usable) - size + 1, size):
            part = usable[start : start + size]
            yield _Group(f" in tokens {int(tokens[part[0]])} to {int(tokens[part[-1]])}", part)
        size //= 2
    if len(usable) >= 2 * _FEW:
        for start in (0, 1):
            yield _Group(f" in every other token, from {int(tokens[usable[start]])} on", usable[start::2])
    for feature in range(features):
        yield _Group(f" in feature {feature}", usable, feature)


def _emulated(
    semantics: HeadSemantics, rows: RunRows, fmt: FloatFormat, out: FloatFormat, places: Sequence[float | None]
) -> Iterator[Tensor]:
    """O of well-rounded kernels, [n, Dv] each: P̄ cast at places between two powers of two, or not cast (None)."""
    blocks = blocks_of(semantics, rows)
    for place in places:
        own, of_cast = torch.zeros_like(rows.o), torch.zeros_like(rows.o)
        for at, head, block in blocks:
            bar, row_sum = block.unnormalised_probs, 1 / block.inverse_row_sum[:, None]
            times = 2.0 ** (place or 0.0)
            cast = bar if place is None else round_nearest_even(bar * times, fmt) / times
            product = cast @ head.v[block.keys]
            own[at] = product / row_sum
            of_cast[at] = product / (row_sum + (cast - bar).sum(1, keepdim=True))
        yield round_nearest_even(own, out)
        if place is not None:
            yield round_nearest_even(of_cast, out)


def small_errors(
    heads: Sequence[tuple[int, int, BothRows, BothSemantics]],
    errors: Sequence[tuple[Tensor, Tensor]],
    formats: Sequence[tuple[FloatFormat, FloatFormat]],
    asked: Sequence[bool],
) -> tuple[tuple[SmallError, ...], Seen | None]:
    """What elements of a run share that the other's do not, and what of it would have been seen; None: not looked at.

    Args:
        heads: Of each the number of its sequences, its index, its rows in train and in rollout, and what either states.
        errors: Of each, O less float64, [n, Dv], in train and in rollout.
        formats: Of train and rollout, the inputs' and O's.
        asked: Which of them are looked at: those whose error as a whole is a well-rounded kernel's.
    """
    found: list[SmallError] = []
    seen: Seen | None = None
    for side, (fmt, out) in enumerate(formats):
        if not asked[side] or not covers(fmt) or out.name == "fp32":
            continue
        for (sequence, head, rows, stated), of_both in zip(heads, errors, strict=True):
            one = _Head(side, sequence, head, rows[side], stated[side], of_both, (fmt, out))
            if len(one.usable) >= _FEW:
                largest, smallest = one.looked_at()
                found += largest
                seen = smallest if seen is None else seen.beside(smallest)
    return tuple(found), seen


@dataclass(frozen=True)
class _Head:
    """One head of one run."""

    side: int
    sequence: int
    head: int
    rows: RunRows
    stated: HeadSemantics
    errors: tuple[Tensor, Tensor]
    formats: tuple[FloatFormat, FloatFormat]

    @cached_property
    def truth(self) -> Tensor:
        """Float64's O."""
        return self.rows.o - self.errors[self.side]

    @cached_property
    def usable(self) -> Tensor:
        """Rows that are looked at."""
        return (self.errors[0].isfinite() & self.errors[1].isfinite()).all(1).nonzero()[:, 0]

    @cached_property
    def floor(self) -> float:
        """What sums and exponentials of healthy kernels share."""
        return _SHARED + _CUT * float(self.stated.visible.sum(1).max()) / _KEYS

    def looked_at(self) -> tuple[list[SmallError], Seen]:
        """What is found, if anything, and what would have been seen."""
        error, other = self.errors[self.side], self.errors[1 - self.side]
        smallest, best = [0.0, 0.0, 0.0], list[tuple[float, _Group, _Mean]]()
        for group in _groups(self.rows.tokens, self.usable, error.shape[1]):
            mean = group.mean(error, self.truth)
            kind = 2 if group.feature is not None else 1 if group.what else 0
            if kind != 1 or len(group.rows) < 2 * _FEW:
                smallest[kind] = max(smallest[kind], self.floor + mean.limit + _SEEN * mean.error)
            if abs(mean.value) > self.floor + mean.limit and mean.differs(group.mean(other, self.truth)):
                best.append((abs(mean.value) / max(mean.error, 1e-300), group, mean))
        at = _some(self.usable)
        by_scale = _Slopes.of(self, at)
        seen = Seen(*smallest, self.floor + by_scale.scale.limit + _SEEN * by_scale.scale.error)
        best.sort(key=lambda one: -one[0])
        for _, group, mean in best:
            if abs(mean.value) > self.floor + self._shared(group) + mean.limit:
                if group.feature is None:
                    whole = self._by_scale(by_scale, "")
                    part = self._by_scale(_Slopes.of(self, _some(group.rows)), group.what)
                    if part is not None:
                        return [whole if whole is not None and whole.kind == part.kind else part], seen
                return [self._small(group.what, mean, "factor")], seen
        if (cause := self._by_scale(by_scale, "")) is not None:
            return [cause], seen
        made = list(self.emulated(at, _SOME))
        shared = self._all_shared(at, made)
        return self._scattered(at, made[::2]), Seen(*(a + b for a, b in zip(astuple(seen), shared, strict=True)))

    def _small(self, what: str, mean: _Mean, kind: Literal["factor", "scale", "either", "rows"]) -> SmallError:
        return SmallError(self.side, self.sequence, self.head, what, mean.value, mean.error, kind, self.stated.scale)

    def emulated(self, at: Tensor, places: Sequence[float | None]) -> Iterator[Tensor]:
        """O of well-rounded kernels in some rows."""
        return _emulated(self.stated.of_rows(at), self.rows.select(at), *self.formats, places)

    def _shared(self, group: _Group) -> float:
        """The largest factor that roundings of a well-rounded kernel share there."""
        at = _some(group.rows)
        some, right = replace(group, rows=torch.arange(len(at), device=at.device)), self.truth[at]
        return max(abs(some.mean(made - right, right).value) for made in self.emulated(at, _EVERY))

    def _by_scale(self, found: _Slopes, what: str) -> SmallError | None:
        """Another scale, or either, where that stands out beside a factor."""
        if abs(found.scale.value) <= self.floor + found.scale.limit:
            return None
        every = [_Slopes.of(self, found.rows, made) for made in self.emulated(found.rows, _EVERY)]
        shared = [max(abs(one.value) for one in each) for each in ([s.scale for s in every], [s.factor for s in every])]
        if abs(found.scale.value) <= self.floor + shared[0] + found.scale.limit:
            return None
        other = _Slopes.of(self, found.rows, self.truth[found.rows] + self.errors[1 - self.side][found.rows])
        if not found.scale.differs(other.scale):
            return None
        both = abs(found.factor.value) > self.floor + shared[1] + found.factor.limit
        return self._small(what, found.scale, "either" if both else "scale")

    def _all_shared(self, at: Tensor, made: Sequence[Tensor]) -> tuple[float, float, float, float]:
        """The largest errors that roundings share in these rows: of all, of 16 of them, of a feature, of a scale."""
        right = self.truth[at]
        size = right.square().sum(1).clamp(min=1e-300)
        by_row = [((o - right) * right).sum(1) / size for o in made]
        in_few = [x.unfold(0, min(_FEW, len(x)), 1).mean(1).abs().max() for x in by_row]
        by_feature = right.square().sum(0).clamp(min=1e-300)
        features = [(((o - right) * right).sum(0) / by_feature).abs().max() for o in made]
        scales = [abs(_Slopes.of(self, at, o).scale.value) for o in made]
        return (
            max(float(x.mean().abs()) for x in by_row), float(max(in_few)), float(max(features)), max(scales)
        )  # fmt: skip

    def _scattered(self, at: Tensor, made: Sequence[Tensor]) -> list[SmallError]:
        """That rows here and there are off by factors of their own; ``made``: what well-rounded kernels return."""
        right = self.truth[at]

        def squares(values: Tensor) -> Array:
            size = right.square().sum(1).clamp(min=1e-300)
            return ((values * right).sum(1) / size).square().cpu().numpy()

        own, other = (squares(self.errors[side][at]) for side in (self.side, 1 - self.side))
        usual = [squares(o - right) for o in made]
        beyond, beside = paired_ratio(own, np.mean(usual, axis=0)), paired_ratio(own, other)
        if beyond is None or beside is None or min(beyond.low, beside.low) < _SCATTERED:
            return []
        rms = math.sqrt(float(own.mean()))
        what = f"{rms} {beyond.factor}"
        return [self._small(what, _Mean(rms, rms / 2, 0.0), "rows")]


Array = npt.NDArray[np.float64]
# Few of them: they only say what is usual.
_SOME = (0.0, 1 / 3, 2 / 3)
_EVERY = (None, *(place / _PLACES for place in range(_PLACES)))


def _some(rows: Tensor) -> Tensor:
    """At most ``_MOST`` of some rows."""
    return rows[torch.linspace(0, len(rows) - 1, min(len(rows), _MOST), device=rows.device).long()]


@dataclass(frozen=True)
class _Slopes:
    """What an O's error is in the directions of O and of a softmax scale, by least squares of both together."""

    rows: Tensor
    factor: _Mean
    scale: _Mean

    @classmethod
    def of(cls, head: _Head, at: Tensor, out: Tensor | None = None) -> _Slopes:
        """In some rows, of what the run returned, or of another O."""
        rows = head.rows.select(at)
        slopes, right = torch.zeros_like(rows.o), head.truth[at]
        for part, inputs, block in blocks_of(head.stated.of_rows(at), rows):
            slopes[part] = scale_derivative(inputs, block)
        error = (rows.o if out is None else out) - right
        both = torch.stack([right, slopes], 1)  # [n, 2, Dv]
        size = right.square().sum(1).clamp(min=1e-300)
        products = both @ both.mT / size[:, None, None]
        along = (both @ error[:, :, None])[:, :, 0] / size[:, None]
        whole = products.sum(0)
        nothing = _Mean(0.0, math.inf, math.inf)
        if not float(torch.linalg.det(whole)) > _ALIKE * float(whole[0, 0] * whole[1, 1]):
            return cls(at, nothing, nothing)
        inverse = torch.linalg.inv(whole)
        found = inverse @ along.sum(0)
        left = (along - products @ found) @ inverse  # each row's part of the error
        # As many rows as carry the scale's slope.
        carried = products[:, 1, 1]
        freedom = int(float(carried.sum()) ** 2 / max(float(carried.square().sum()), 1e-300)) - 2
        if freedom < 1:
            return cls(at, nothing, nothing)
        errors = (left.square().sum(0).sqrt() * math.sqrt((freedom + 2) / freedom)).tolist()
        values, times = found.tolist(), _quantile(freedom)
        return cls(at, *(_Mean(v, e, e * times) for v, e in zip(values, errors, strict=True)))


# Directions of which one is the other's by more than this cannot be told apart.
_ALIKE = 1e-4


def words_of(found: Sequence[SmallError], run: str, heads: int) -> str:
    """One run's in a sentence.

    Args:
        found: Those of one run, one at least.
        run: Its name.
        heads: How many heads were looked at.
    """
    first = max(found, key=lambda one: one.clear)
    where = f"head {first.head}{first.what}"
    size = f"{percent(abs(first.off), '.2g')} (± {percent(first.error, '.1g')})"
    more = "" if heads == 1 else f"; {len(found)} of {plural(heads, 'head')} show such"
    way = "small" if first.off < 0 else "large"
    if first.kind == "scale":
        scale = f"{number(first.scale * (1 + first.off), 6)} where {number(first.scale, 6)} is stated"
        return (
            f"{run}'s O is in {where} as a softmax scale {size} too {way} makes it, {scale}, or scores that are so "
            f"much too {way}{more}"
        )
    if first.kind == "rows":
        rms, times = map(float, first.what.split())
        return (
            f"{run}'s O is in rows of head {first.head} off by factors of their own, {percent(rms, '.2g')} (rms), "
            f"{times:.3g} times what rounding leaves of that{more}; a fault, or a coarser rounding than "
            "a well-rounded kernel's"
        )
    made = (
        "a factor of O, or a cast that truncates"
        if first.kind == "factor"
        else "a factor of O, or another softmax scale besides"
    )
    return f"{run}'s O is {size} too {way} in {where}{more}: no rounding to nearest makes that ({made})"
