"""What each wrong row (or feature) holds instead: zeros, NaN, a multiple, another row, something unrelated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import CLEAR, row_limit
from attn_diag.analyses.patterns.numbers import intervals, spread
from attn_diag.results.wording import number, percent

# Below it two rows have hardly anything in common.
UNRELATED = 0.5
# A chain of roundings to BF16 shifts a row by less; a factor nearer to 1 is no pattern.
FACTOR_FROM = 0.01
# Down to this one is, which explains nine tenths of the error: truncation explains three quarters.
_FACTOR_LEAST = 0.004
_SEVERAL, _ALONE_FROM, _COARSE_FROM = 3, 0.05, 0.2
# A small factor is one of nearly all lines in question.
_SMALL, _MOST = 0.1, 0.8
_SAMPLE = 512
# Of so many lines a copy by chance is seldom.
_BY_CHANCE = 0.05
_FEW_FEATURES = 4
# A part of the wrong lines that is one way's: this much of them, or neighbours in so many runs.
_HALF, _RUNS = 0.5, 3
_RARE = 0.01


@dataclass(frozen=True)
class Group:
    """Lines that are wrong in one way."""

    lines: Tensor
    """Which, ascending."""
    kind: str
    """zeros, NaN, factor, sign, copy, factors, unrelated, off."""
    predicate: str
    """What follows "rows 0-63 …"."""
    prediction: Tensor | None = None
    """[n, D], where the way tells what they hold."""
    factor: float | None = None
    """The constant factor, of kind "factor"."""


@dataclass(frozen=True)
class Lines:
    """n lines of a quantity: its rows, or its features."""

    observed: Tensor
    """[n, D]."""
    truth: Tensor
    """[n, D]."""
    noise: Tensor
    """[n], the expected squared error of each."""
    bad: Tensor
    """Indices of the lines that are wrong, ascending."""
    unit: str
    """rows, keys or features."""
    coarse: bool = False
    """Whether the lines may be the tail of a kernel that is coarse everywhere."""
    spacing: float = 0.0
    """The format's largest relative spacing: a directed rounding moves all numbers by up to it."""
    single: Tensor | None = None
    """bool [n], lines of O that are one row of V: another may hold the same because it attends to that key."""

    @property
    def _limit(self) -> float:
        return row_limit(self.truth.shape[1])

    def groups(self) -> list[Group]:
        """The bad lines by the way in which they are wrong."""
        left, found = self.bad, []
        for take in (self._not_finite, self._zeros, self._multiples, self._copies, self._own_multiples):
            for group in take(left):
                found.append(group)
                left = left[~torch.isin(left, group.lines)]
                if not len(left):
                    return found
        found.append(self._rest(left))
        return found

    def _not_finite(self, left: Tensor) -> Iterator[Group]:
        lines = left[~self.observed[left].isfinite().all(1)]
        if len(lines):
            yield Group(lines, "NaN", "hold NaN or Inf")

    def _zeros(self, left: Tensor) -> Iterator[Group]:
        zero = (self.observed == 0).all(1) & (self.truth != 0).any(1)
        if not bool(zero[left].any()):
            return
        # Small ones do not stand out, but were not written either; the smallest are zero once rounded.
        small = self.truth.square().sum(1) <= 4 * self.noise
        small[left] = False
        lines = (zero & ~small).nonzero()[:, 0]
        if len(lines) < _HALF * len(left) and not self._together(lines):
            yield Group(lines, "off", "are zero")
            return
        yield Group(lines, "zeros", "are zero, as if never written", torch.zeros_like(self.truth[lines]))

    def _multiples(self, left: Tensor) -> Iterator[Group]:
        """Lines that one factor turns into the true ones."""
        observed, truth = self.observed[left], self.truth[left]
        clear = truth.square().sum(1) > CLEAR * self.noise[left]
        if not bool(clear.any()):
            return
        own = (observed * truth).sum(1) / truth.square().sum(1).clamp(min=1e-300)
        factor = float(own[clear].median())
        for _ in range(2):
            fits = self._within(left, factor * truth, factor)
            if not bool(fits.any()):
                return
            factor = float((observed * truth)[fits].sum() / truth[fits].square().sum())
        fits = self._within(left, factor * truth, factor)
        lines = left[fits]
        if (
            not bool((clear & fits).any())
            or abs(factor - 1) < max(_FACTOR_LEAST, 1.1 * self.spacing)
            or abs(factor) < FACTOR_FROM
        ):
            return
        right = int((clear & fits).sum())
        if abs(factor - 1) < _SMALL:
            if right < _SEVERAL or right < _MOST * int(clear.sum()):
                return  # much else looks like it in a row or two, and coarse scores in some of many
            shown = clear & fits
            error, rest = ((observed - scale * truth)[shown].square().sum() for scale in (1.0, factor))
            if rest > error * (0.5 if abs(factor - 1) >= FACTOR_FROM else 0.1):
                return  # noise that is larger than what the factor makes
        if self.coarse and abs(factor - 1) < _COARSE_FROM and right < _MOST * int(clear.sum()):
            return
        if right < _HALF * int(clear.sum()) and not self._together(lines):
            return  # a chance among many factors
        if self.truth.shape[1] < _FEW_FEATURES and right < _SEVERAL:
            return  # any number is some multiple of another
        words = f"are {number(factor)} times the true ones"
        if abs(factor + 1) < FACTOR_FROM / 5:
            words = "have the wrong sign"
        yield Group(lines, "factor", words, factor * self.truth[lines], factor)

    def _copies(self, left: Tensor) -> Iterator[Group]:
        """Lines that hold the true lines so much further on, or all the same one."""
        n = len(self.truth)
        while len(left):
            sample = left[:: -(-len(left) // _SAMPLE)]
            distance = torch.cdist(self.observed[sample], self.truth).square()
            same = distance <= self._limit * self.noise
            same[torch.arange(len(sample), device=sample.device), sample] = False
            same &= self.truth.square().sum(1) > CLEAR * self.noise
            if not bool(same.any()) or float(same.double().mean()) > _BY_CHANCE:
                return
            line, source = same.nonzero().unbind(1)
            found = []
            for values, constant in ((source - sample[line], False), (source, True)):
                value, count = torch.unique(values, return_counts=True)
                order = count.argsort(descending=True)
                best = int(order[0])
                second = int(count[order[1]]) if len(order) > 1 else 0
                found.append((int(count[best]), second, int(value[best]), constant))
            count, second, value, constant = max(found, key=lambda f: f[0])
            if 2 * second > count or (count == 1 and len(sample) > 1):
                return
            if self.truth.shape[1] < _FEW_FEATURES and 2 * count < len(sample):
                return  # single numbers agree by chance
            origin = torch.full_like(left, value) if constant else left + value
            inside = (origin >= 0) & (origin < n)
            origin = origin.clamp(0, n - 1)
            fits = inside & (
                (self.observed[left] - self.truth[origin]).square().sum(1) <= self._limit * self.noise[origin]
            )
            lines = left[fits]
            if not len(lines) or (self.single is not None and bool(self.single[origin[fits]].all())):
                return
            if len(lines) < _HALF * len(left) and not self._together(lines):
                return
            if self._chance_of_copies(len(lines)) > _RARE:
                return
            one = self.unit[:-1]
            if constant:
                words = f"hold what belongs in {one} {value}"
            else:
                way = "further on" if value > 0 else "before"
                words = f"hold what belongs {abs(value)} {one if abs(value) == 1 else self.unit} {way}"
            yield Group(lines, "copy", words, self.truth[origin[fits]])
            left = left[~fits]

    def _together(self, lines: Tensor) -> bool:
        """Whether several lines lie in few runs, with none that is wrong in another way between them."""
        index = torch.searchsorted(self.bad, lines[torch.isin(lines, self.bad)])
        return len(lines) >= _SEVERAL and len(intervals(index.tolist())) <= _RUNS

    def _chance_of_copies(self, count: int) -> float:
        """How many times so many of n lines would hold another true line, at one distance, by chance."""
        n = len(self.truth)
        sample = torch.arange(0, n, -(-n // _SAMPLE), device=self.truth.device)
        alike = torch.cdist(self.truth[sample], self.truth).square() <= self._limit * self.noise
        alike[torch.arange(len(sample), device=sample.device), sample] = False
        return n * float(alike.double().mean()) ** min(count, _SEVERAL)

    def _own_multiples(self, left: Tensor) -> Iterator[Group]:
        """Lines that a factor of their own turns into the true ones."""
        if self.truth.shape[1] < _FEW_FEATURES:
            return
        observed, truth = self.observed[left], self.truth[left]
        squares = truth.square().sum(1).clamp(min=1e-300)
        own = ((observed * truth).sum(1) / squares)[:, None]
        clear = (squares > CLEAR * self.noise[left]) & ((own[:, 0] - 1).abs() > FACTOR_FROM)
        fits = clear & self._within(left, own * truth, own[:, 0])
        # Where all true lines point one way, each is a multiple of any other.
        other = self.truth.roll(len(self.truth) // 3 + 1, 0)[left]
        share = (observed * other).sum(1, keepdim=True) / other.square().sum(1, keepdim=True).clamp(min=1e-300)
        vacuous = self._within(left, share * other, own[:, 0])
        if int(fits.sum()) < 0.8 * len(left) or int((vacuous & fits).sum()) > 0.2 * int(fits.sum()):
            return
        kept = own[fits]
        if len(kept) < _SEVERAL or float((kept - 1).abs().median()) < _ALONE_FROM:
            return
        words = f"are the true ones times a factor of their own ({spread(kept[:, 0].cpu().numpy())})"
        yield Group(left[fits], "factors", words, kept * truth[fits])

    def _rest(self, left: Tensor) -> Group:
        observed, truth = self.observed[left], self.truth[left]
        sizes = float(observed.square().sum() * truth.square().sum()) ** 0.5
        cosine = float((observed * truth).sum()) / sizes if sizes else 0.0
        if float(truth.square().sum()) <= 1e-6 * float(self.noise[left].sum()):
            return Group(left, "off", "should be zero")
        off = _relative(observed, truth)
        if abs(cosine) < UNRELATED and off > UNRELATED and self.truth.shape[1] > 1:
            return Group(left, "unrelated", "are unrelated to the true ones")
        if self.truth.shape[1] == 1:
            return Group(left, "off", f"are off by up to {number(float((observed - truth).abs().max()))}")
        return Group(left, "off", off_by(observed, truth))

    def _within(self, lines: Tensor, prediction: Tensor, factor: Tensor | float) -> Tensor:
        """bool [n], whether a guess of these lines leaves their noise, which grows with the factor."""
        left = (self.observed[lines] - prediction).square().sum(1)
        grown = torch.as_tensor(factor, dtype=left.dtype, device=left.device).square().clamp(min=1.0)
        return left <= self._limit * self.noise[lines] * grown


def off_by(observed: Tensor, truth: Tensor) -> str:
    """What is said of lines of which nothing else can be."""
    return f"are {percent(_relative(observed, truth), '.2g')} off"


def _relative(observed: Tensor, truth: Tensor) -> float:
    return float((observed - truth).square().sum() / truth.square().sum().clamp(min=1e-300)) ** 0.5
