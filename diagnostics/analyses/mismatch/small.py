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
from attn_diag.analyses.mismatch.small_words import FEW, Seen, SmallError
from attn_diag.analyses.mismatch.split import HeadSemantics, blocks_of
from attn_diag.head.counterfactual import covers
from attn_diag.head.scale_fit import scale_derivative
from attn_diag.reference import FloatFormat, round_nearest_even
from attn_diag.statistics.ratios import paired_ratio

# What healthy kernels share: the exponential of FlashAttention-4, a polynomial of degree 3, is up to 8.8e-5 off.
_SHARED = 2.0**-13
# And sums of a tensor core are cut after each 16 keys, by up to one unit of fp32.
_CUT, _KEYS = 2.0**-23, 16
# One of so many tests may err by chance: some 10^4 groups a layer and 100 layers are looked at.
_CHANCE = 1e-9
# Standard errors beyond the limit from which nine in ten are seen; what emulations leave counts as two besides.
_SEEN = 1.3 + 2.0
# So many rows of a group are emulated.
_MOST = 256
# Places of P̄ between two powers of two that are tried.
_PLACES = 8
# Rows' factors are so many times those of well-rounded kernels, at least, where few of them are off: healthy ones
# measure 0.5 to 1.3.
_SCATTERED = 2.0


BothRows = tuple[RunRows, RunRows]
BothSemantics = tuple[HeadSemantics, HeadSemantics]


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

    @property
    def seen(self) -> float:
        """From where on nine in ten are seen where the other run is as uncertain, without what emulations share."""
        return math.sqrt(2) * self.limit + _SEEN * self.error

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
    while size >= FEW:
        for start in range(0, len(usable) - size + 1, size):
            part = usable[start : start + size]
            yield _Group(f" in tokens {int(tokens[part[0]])} to {int(tokens[part[-1]])}", part)
        size //= 2
    if len(usable) >= 2 * FEW:
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
            moved = 2.0 ** (place or 0.0)
            cast = bar if place is None else round_nearest_even(bar * moved, fmt) / moved
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
        asked: Which of them are looked at: those whose error as a whole has no name.
    """
    found: list[SmallError] = []
    seen: Seen | None = None
    for side, (fmt, out) in enumerate(formats):
        if not asked[side] or not covers(fmt) or out.name == "fp32":
            continue
        for (sequence, head, rows, stated), of_both in zip(heads, errors, strict=True):
            one = _Head(side, sequence, head, rows[side], stated[side], of_both, (fmt, out))
            if len(one.usable) >= FEW:
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
            if kind != 1 or len(group.rows) < 2 * FEW:
                smallest[kind] = max(smallest[kind], self.floor + mean.seen)
            if abs(mean.value) > self.floor + mean.limit and mean.differs(group.mean(other, self.truth)):
                best.append((abs(mean.value) / max(mean.error, 1e-300), group, mean))
        at = _some(self.usable)
        by_scale = _Slopes.of(self, at)
        seen = Seen(*smallest, self.floor + by_scale.scale.seen)
        best.sort(key=lambda one: -one[0])
        for _, group, mean in best:
            shared = self._shared(group)
            if abs(mean.value) > self.floor + shared + mean.limit:
                if group.feature is None:
                    whole = self._by_scale(by_scale, "")
                    part = self._by_scale(_Slopes.of(self, _some(group.rows)), group.what)
                    if part is not None:
                        return [whole if whole is not None and whole.kind == part.kind else part], seen
                return [self._small(group.what, mean, "factor", shared)], seen
        if (cause := self._by_scale(by_scale, "")) is not None:
            return [cause], seen
        made = list(self.emulated(at, _EVERY))
        shared = self._all_shared(at, made)
        return self._scattered(at, made[1::2]), Seen(*(a + b for a, b in zip(astuple(seen), shared, strict=True)))

    def _small(
        self, what: str, mean: _Mean, kind: Literal["factor", "scale", "either", "rows"], shared: float = 0.0
    ) -> SmallError:
        error = math.hypot(mean.error, shared)
        return SmallError(self.side, self.sequence, self.head, what, mean.value, error, kind, self.stated.scale)

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
        return self._small(what, found.scale, "either" if both else "scale", shared[0])

    def _all_shared(self, at: Tensor, made: Sequence[Tensor]) -> tuple[float, float, float, float]:
        """The largest errors that roundings share in these rows: of all, of 16 of them, of a feature, of a scale."""
        right = self.truth[at]
        size = right.square().sum(1).clamp(min=1e-300)
        by_row = [((o - right) * right).sum(1) / size for o in made]
        in_few = [x.unfold(0, min(FEW, len(x)), 1).mean(1).abs().max() for x in by_row]
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
