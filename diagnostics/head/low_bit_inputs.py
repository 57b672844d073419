"""In which format below 16 bits a kernel may have held q, k or v that it was given in 16: a cache in FP8, keys in INT4.

Rounding q, k or v moves O by what no other rounding makes, as all rows share one k and one v. To first order each of
the three moves O by itself, so that they are told one after the other: what a format makes of O, d, is right where the
observed error e has d in it once, <e, d> / <d, d> is about 1, and no rounding that has nothing to do with d
is as much along it: of n numbers that are independent, e has the part r^2 along d by chance with probability
(1 - r^2)^(n/2). What a factor of O, or of the softmax scale, could make is taken off both before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType

import torch
from torch import Tensor

from attn_diag.head.low_bit_formats import (
    UP_TO_TWO,
    LowBitFormat,
    arithmetics_of,
    expected_square,
    formats_of,
    in_16_bits,
)
from attn_diag.head.low_bit_probs import CastProbs, first_casts, in_other_ways, told_apart
from attn_diag.kernels.quantizers import PRESETS, Quantizer, quantizer
from attn_diag.reference import AttentionHead, reference_rows
from attn_diag.results.quality import PROBS

NAMES = ("k", "v", "q")
# By chance one of those tried has so much of an error along what it makes with probability exp(-_NATS) at most.
_NATS = 10.0
# How often an error may have a part in it that is in it once, beside others.
_ONCE = 0.4, 2.5
# So many of those that explain most to first order are compared as they are.
_COMPARED = 8
# Of two that leave as much as each other neither is named alone.
_SAME = 1.2
# So much of what is left is along the effect of each, at least.
_PART = 0.15
# With less of an error along what is made, of the error's square, either is less: (e d / d d) (e d / e e) is the part.
# A hundredth less, as sums are rounded.
_ALONG = 0.99 * _PART / _ONCE[1]
# So many times more or less than is left, as is expected, an effect is not looked at.
_FAR = 30.0
# Scales that no head has of its own, by which x's largest number is multiplied to be the format's, and the logarithm of
# a step: FP8 has the same numbers in each octave, INT8 uses a third of its codes at least. A step moves few codes, the
# last one nearly none.
_ANY_SCALE = (
    ("FP8 (E4M3)", PRESETS["fp8"], (1.0, 2.0), 1 / 150),
    ("INT8", quantizer("int8", block="tensor"), (1.0, 3.0), 1 / 200),
)
# Casts of P_bar are tried in so many ways, the other orders of so many that most of an error is along.
_MOST_CASTS, _FEW_CASTS = 200, 2
# So much and so often a cast of P_bar is in an error at first: other scores, of another k, fall between other numbers.
_IN_PART = 0.05, 0.2
# So much of what q, k and v leave the cast of P_bar may leave.
_MOST_BESIDE = 0.5
# A scale that was fitted leaves no more, as what else is wrong may look like one in few rows.
_FITTED = 4.0
_FINER, _FINEST, _MOST_NUMBERS = 16, 1e-5, 2**17
# Widened to 16 bits, numbers of FP8 are up to so much larger or smaller in the mean.
_NEAR = 2.0**-8


Held = Mapping[str, LowBitFormat | CastProbs]
"""By the names of q, k and v, what each was held in that was not held as it was given; by "p" how P_bar was cast."""


def held(head: AttentionHead, formats: Held) -> AttentionHead:
    """The head with q, k and v as they were held."""
    inputs = {name: one.of(getattr(head, name)) for name, one in formats.items() if isinstance(one, LowBitFormat)}
    return replace(head, **inputs)  # type: ignore[arg-type]


def out_of(head: AttentionHead, rows: Tensor, formats: Held) -> Tensor:
    """O of some rows [R] of a head whose q, k and v were held and whose P_bar was cast so, [R, Dv]."""
    head = held(head, formats)
    block, cast = reference_rows(head, rows), formats.get(PROBS)
    return cast.out(block, head.v[block.keys]) if isinstance(cast, CastProbs) else block.out


def find_held(
    head: AttentionHead, observed: Tensor, rows: Tensor, numbers: float, noise: float, *, widened: str = "fp32",
    any_scale: bool = True, of_all: Mapping[str, float] = MappingProxyType({}),
) -> list[Held]:  # fmt: skip
    """In which formats q, k and v were held, as O shows.

    Args:
        head: The head; what is beside O is not looked at.
        observed: O of R rows, [R, Dv].
        rows: Which, int64 [R].
        numbers: How many independent numbers its error is.
        noise: A well-rounded kernel's squared error there: of what leaves no more nothing is looked for.
        widened: The format in which codes times scales may be held: bf16, fp16 or fp32.
        any_scale: Also try scales that are not this head's own, which takes as long as all else.
        of_all: Of q, k and v the largest number of all heads, where a scale may be theirs.

    Returns:
        The ways that O does not tell apart; empty: none shows.
    """
    return _Search(replace(head, do=None), observed, rows, numbers, of_all).run(noise, widened, any_scale=any_scale)


class _Search:
    """The search on one head's O."""

    def __init__(
        self,
        head: AttentionHead,
        observed: Tensor,
        rows: Tensor,
        numbers: float,
        of_all: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._of_all = of_all
        self._head, self._observed, self._rows, self._numbers = head, observed, rows, numbers
        self._block = block = reference_rows(head, rows)
        self._sloped = block.probs if block.slope is None else block.probs * block.slope
        self._effects = dict[tuple[str, LowBitFormat], Tensor]()
        self._squares = dict[tuple[str, Quantizer], float]()
        self._along_error = dict[str, Tensor]()
        self._error: Tensor | None = None
        # A factor of O, or of the softmax scale, is no format's.
        common = torch.stack([block.out.flatten(), self._effect("k", 2 * head.k).flatten()], 1)
        self._common = torch.linalg.qr(common).Q
        self._gains = {name: self._gain(name) for name in NAMES}

    def run(self, noise: float, widened: str, *, any_scale: bool, probs: bool = True) -> list[Held]:
        """Of each in turn the format that most of what is left is along; without ``probs`` P_bar was not cast."""
        found, tried = dict[str, LowBitFormat | CastProbs](), dict[str, list[LowBitFormat | CastProbs]]()
        while len(found) <= len(NAMES) and self.left(found) > noise:
            error = self._apart(self._observed - self._out(found))
            open_ones = [name for name in NAMES if name not in found]
            told: list[tuple[float, str, LowBitFormat | CastProbs]] = [
                one for name in open_ones for one in self._along(name, error)
            ]
            told += self._casts(found)[:_FEW_CASTS] if probs and PROBS not in found else []
            if any_scale and not told:
                told = [one for name in open_ones for one in self._any_scale(name, error)]
            if not told and PROBS in found and (behind := self._behind_cast(found, open_ones)):
                tried |= {name: [] for name in behind}
                found |= behind
                continue
            if not told:
                break
            told.sort(key=lambda one: -one[0])
            left = {(name, one): self.left({**found, name: one}) for _, name, one in told[:_COMPARED]}
            name, chosen = min(left, key=left.__getitem__)
            # P_bar may show in part until it is known of which scores it was made.
            if name != PROBS and left[name, chosen] > (1 - _PART) * self.left(found):
                break
            found[name] = chosen
            tried[name] = [fmt for _, of, fmt in told if of == name and fmt != chosen]
        for name, one in found.items():
            if isinstance(one, LowBitFormat):
                found[name] = self._nearest(found, name, [
                    replace(one, by=quantizer(one.by, values=values, arithmetic=arithmetic))
                    for values, arithmetic in product(dict.fromkeys((one.by.values, widened)), arithmetics_of(one.by))
                ])  # fmt: skip
        self._with_scales_of_16_bits(found, noise)
        if found.pop(PROBS, None) is not None:
            if not (ways := self._nearest_casts(found, noise)):
                return self.run(noise, widened, any_scale=any_scale, probs=False)
            found[PROBS], tried[PROBS] = ways[0], [*ways[1:]]
        fitted = any(isinstance(one, LowBitFormat) and one.own_scale for one in found.values())
        if fitted and self.left(found) > _FITTED * noise:
            return self.run(noise, widened, any_scale=False, probs=probs)
        least = _SAME * self.left(found)
        alike = [
            [one, *(other for other in tried[name] if self.left({**found, name: other}) <= least)]
            for name, one in found.items()
        ]
        return [dict(zip(found, every, strict=True)) for every in product(*alike)] if found else []

    def _nearest(self, found: Held, name: str, ways: Sequence[LowBitFormat]) -> LowBitFormat:
        """The way of holding one of those found that leaves least, at the scale that does, by factors as well."""
        step = _NEAR / _FINER

        def left(one: LowBitFormat) -> float:
            return float((self._observed - self._out({**found, name: one})).square().sum())

        best = min(ways, key=left)
        tried = list({way.by.values: way for way in (*ways, best)}.values())
        while best.own_scale and step > _FINEST:
            near = [one.at(math.exp(step * i)) for one in tried for i in range(-_FINER, _FINER + 1)]
            best = min(near, key=left)
            tried, step = [best], step / _FINER
        return best

    def _with_scales_of_16_bits(self, found: dict[str, LowBitFormat | CastProbs], noise: float) -> None:
        """Give those found that are integers scales of 16 bits where that leaves clearly less: all alike, then each.

        Which way of coding them leaves least is no claim of its own; with a zero point there are others (KIVI's), and
        one that leaves something may be nearer by chance.
        """
        ways = {name: in_16_bits(one) for name, one in found.items() if isinstance(one, LowBitFormat)}
        ways = {name: some for name, some in ways.items() if some}
        together = [dict(zip(ways, every, strict=True)) for every in zip(*ways.values(), strict=True)]
        for several in (together, *([{name: one} for one in some] for name, some in ways.items())):
            left = [self.left({**found, **one}) for one in several]
            known = all(found[name] in ways[name] for one in several for name in one)
            symmetric = all(fmt.by.symmetric for one in several for fmt in one.values())
            less = left and (1.0 if known else _SAME) * min(left) < self.left(found)
            if less and (symmetric or min(left) <= _SAME * noise):
                found |= several[left.index(min(left))]

    def _nearest_casts(self, found: Held, noise: float) -> list[CastProbs]:
        """How P_bar was cast, with q, k and v held so: a way a format of those that leave least; empty: in none."""
        left = {one: self.left({**found, PROBS: one}) for *_, one in self._casts(found)}
        least = min(left.values(), default=math.inf)
        if least > _MOST_BESIDE * self.left(found):
            return []
        alike = sorted((one for one in left if left[one] <= _SAME * least), key=left.__getitem__)
        formats = dict.fromkeys(one.format for one in alike)
        told = [told_apart([one for one in alike if one.format == fmt], sure=least <= noise) for fmt in formats]
        return [self._up_to_two(found, one, _SAME * least) for one in told]

    def _up_to_two(self, found: Held, one: CastProbs, least: float) -> CastProbs:
        """The cast, whose factor is not said to be it alone where twice or half of it leaves as little."""
        if one.amax is None or not one.factor:
            return one
        others = (replace(one, amax=one.amax * by) for by in (0.5, 2.0))
        alike = any(self.left({**found, PROBS: other}) <= least for other in others)
        return replace(one, factor=one.factor + UP_TO_TWO) if alike else one

    def left(self, formats: Held) -> float:
        """The squared error that these leave, apart from factors of O and of the softmax scale."""
        return float(self._apart(self._observed - self._out(formats)).square().sum())

    def _apart(self, error: Tensor) -> Tensor:
        """Without what a factor of O and of the softmax scale can make, [R Dv]."""
        flat = error.flatten()
        found: Tensor = flat - self._common @ (self._common.mT @ flat)
        return found

    def _out(self, formats: Held) -> Tensor:
        return out_of(self._head, self._rows, formats) if formats else self._block.out

    def _along(self, name: str, error: Tensor) -> Iterator[tuple[float, str, LowBitFormat]]:
        """The formats whose effect is in an error once, each with the part that is along it and the name."""
        formats = list(formats_of(getattr(self._head, name), name, self._of_all.get(name, 0.0)))
        for one in formats:
            if part := self._part(name, one, error, len(formats)):
                yield part, name, one

    def _casts(self, found: Held) -> list[tuple[float, str, CastProbs]]:
        """Likewise the casts of P_bar, with q, k and v held as they were found to be, those of the most part first."""
        head = held(self._head, found)
        block, keys = reference_rows(head, self._rows), len(head.k)
        error, parts = self._apart(self._observed - block.out), dict[CastProbs, float]()

        def best_of(ways: Iterable[CastProbs]) -> list[CastProbs]:
            for one in ways:
                effect = self._apart(one.out(block, head.v[block.keys]) - block.out)
                if one not in parts and (part := self._once(effect, error, _MOST_CASTS, *_IN_PART)):
                    parts[one] = part
            return sorted(parts, key=lambda one: -parts[one])

        first = best_of(first_casts(keys))[:_FEW_CASTS]
        return [(parts[one], PROBS, one) for one in best_of(way for one in first for way in in_other_ways(one, keys))]

    def _behind_cast(self, found: Held, names: Sequence[str]) -> Held | None:
        """In what q, k or both were held, where P_bar then falls between other numbers; of long heads none."""
        if self._head.k.numel() > _MOST_NUMBERS:
            return None
        before, left = self.left(found), list[tuple[float, dict[str, LowBitFormat]]]()
        for some in (["k", "q"], ["k"], ["q"]):
            for one in formats_of(getattr(self._head, some[0]), some[0]) if set(some) <= set(names) else ():
                formats = {name: replace(one, smooth=one.smooth and name == "k") for name in some}
                if all(self._expected(name, fmt) <= _FAR * before for name, fmt in formats.items()):
                    left.append((self.left({**found, **formats}), formats))
        least, formats = min(left, key=lambda one: one[0], default=(before, {}))
        by_chance = math.log(max(len(left), 1)) + _NATS
        shows = least <= (1 - _PART) * before and self._numbers / 2 * math.log(before / least) > by_chance
        return formats if shows else None

    def _expected(self, name: str, fmt: LowBitFormat) -> float:
        """About the squared error that it makes."""
        if (name, fmt.by) not in self._squares:
            self._squares[name, fmt.by] = expected_square(getattr(self._head, name), fmt.by)
        return self._gains[name] * self._squares[name, fmt.by]

    def _any_scale(self, name: str, error: Tensor) -> Iterator[tuple[float, str, LowBitFormat]]:
        """The formats with one scale that may be any, at the one that fits best; of long heads none."""
        x = getattr(self._head, name)
        if x.numel() > _MOST_NUMBERS:
            return
        largest = float(x.abs().amax())
        for words, by, (first, last), step in _ANY_SCALE:
            count = math.ceil(math.log(last / first) / step)
            at, steps = math.log(first), [step * i for i in range(count)]
            best: tuple[float, float, LowBitFormat] | None = None
            while steps:
                tried = list[tuple[float, float, LowBitFormat]]()
                for more in steps:
                    one = LowBitFormat(words, "", by, largest).at(math.exp(at + more))
                    if part := self._part(name, one, error, math.ceil(math.log(last / first) / _FINEST)):
                        tried.append((part, at + more, one))
                best = max([*tried, *([best] if best else [])], key=lambda one: one[0], default=None)
                step /= _FINER
                if best is None or step < _FINEST:
                    break
                at, steps = best[1], [step * i for i in range(-_FINER, _FINER + 1)]
            if best is not None:
                yield best[0], name, best[2]

    def _part(self, name: str, fmt: LowBitFormat, error: Tensor, tried: int) -> float | None:
        """The part of an error, squared, that lies along what a format makes; None: little, not once, or by chance."""
        whole = float(error.square().sum())
        if not whole / _FAR <= self._expected(name, fmt) <= whole * _FAR:
            return None
        if (name, fmt) not in self._effects:
            x = getattr(self._head, name)
            other = fmt.of(x)
            if float((self._gradient(name, error) * (other - x)).sum()) < _ALONG * whole:
                return None
            self._effects[name, fmt] = self._apart(self._effect(name, other))
        return self._once(self._effects[name, fmt], error, len(NAMES) * tried)

    def _once(
        self, effect: Tensor, error: Tensor, tried: int, least: float = _PART, fewest: float = _ONCE[0]
    ) -> float | None:
        """The part of an error, squared, along the effect of one of so many tried; None as of ``_part``."""
        whole, size = float(error.square().sum()), float(effect.square().sum())
        along = float((error * effect).sum())
        if not 0 < size < math.inf or not fewest <= along / size <= _ONCE[1]:
            return None
        part = along**2 / (size * whole)
        chance = self._numbers / 2 * math.log(max(1 - part, 1e-12))
        return part if part >= least and -chance > math.log(tried) + _NATS else None

    def _effect(self, name: str, other: Tensor) -> Tensor:
        """What another q, k or v makes of O, to first order: P dV, or P o dS (V - O)."""
        block, head = self._block, self._head
        off = other - getattr(head, name)
        made: Tensor
        if name == "v":
            made = block.probs @ off[block.keys]
        else:
            q, k = head.q[self._rows], head.k[block.keys]
            moved = self._sloped * head.scale * (q @ off[block.keys].mT if name == "k" else off[self._rows] @ k.mT)
            made = moved @ head.v[block.keys] - moved.sum(1, keepdim=True) * block.out
        return made

    def _gradient(self, name: str, error: Tensor) -> Tensor:
        """Of <``_effect``, e> by q, k or v, for an error e that ``_apart`` leaves as it is: by far less than an effect
        takes it shows that most of them do not have enough of it."""
        if error is not self._error:
            self._error, self._along_error = error, {}
        if name not in self._along_error:
            block, head = self._block, self._head
            rows, found = error.reshape(self._observed.shape), torch.zeros_like(getattr(head, name))
            if name == "v":
                found[block.keys] = block.probs.mT @ rows
            else:
                along = rows @ head.v[block.keys].mT - (rows * block.out).sum(1, keepdim=True)
                along *= self._sloped * head.scale
                if name == "k":
                    found[block.keys] = along.mT @ head.q[self._rows]
                else:
                    found.index_add_(0, self._rows, along @ head.k[block.keys])
            self._along_error[name] = found
        return self._along_error[name]

    def _gain(self, name: str) -> float:
        """What an error's mean square is multiplied by in O's squared error, as FP8 shows."""
        x, fp8 = getattr(self._head, name), PRESETS["fp8-row"]
        expected = expected_square(x, fp8)
        effect = self._effect(name, LowBitFormat("", "", fp8).of(x)).square().sum()
        return float(effect) / expected if expected else 0.0
