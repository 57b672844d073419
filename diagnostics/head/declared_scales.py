"""What a declared kernel does otherwise than its recipe: powers of two, a stale amax, wider blocks, other roundings.

Kernels that quantise q, k and v at the same scales differ in the casts of P_bar and in sums alone. Of O that leaves a
part of what the format's roundings make (``benchmarks/study_declared.py``: up to 0.13 of its mean square in FP8, 0.3
in INT8 on most inputs); with scales of their own they differ by about 2, as two independent noises do. So a hypothesis
that leaves at most ``_EXACT``, or what these casts and sums make (drawn: all but q, k and v rounding stochastically),
and a small part of what the recipe itself leaves, is what the kernel does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attn_diag.head.declared_factors import Factors
from attn_diag.head.declared_noise import dithered, drawn_noise
from attn_diag.head.quality import LOSSY
from attn_diag.kernels import Recipe, emulate_rows
from attn_diag.kernels.formats import Mode, base, parse
from attn_diag.kernels.quantizers import parse_quantizer
from attn_diag.reference import AttentionHead
from attn_diag.results.wording import number, together

# In units of the noise's mean square: what is left of O where the scales are right, and over what is left without.
_EXACT, _PART = 0.5, 0.25
# So many rows tell scales apart.
_ROWS = 64
_OPERANDS = ("q", "k", "v")
# Parts of amax that are tried first, and the steps, and how many each way, in which others are about the best one. What
# is clipped shows from afar; of FP8 a scale that is 1 % off is as good as any other, as every number rounds elsewhere.
_STALE, _SCANS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3), ((0.01, 10), (0.002, 5))
# A part that is nearer to 1 clips next to nothing.
_WHOLE = 0.97
# What leaves this part of what another hypothesis leaves is preferred to it; else both are named.
_BETTER = 0.5
# Draws of the casts of P_bar and the sums.
_DRAWS = 8


@dataclass(frozen=True)
class Culprit:
    """What a kernel does otherwise than its recipe."""

    words: str
    """In words, "the largest number of k is …"."""
    left: float
    """The mean square of what O is off then, in units of the noise's."""


@dataclass(frozen=True)
class ScaleSearch:
    """O of one head beside the recipe's with other scales.

    Args:
        recipe: What it is declared to be.
        head: Its inputs.
        out: What was observed, [Tq, Dv].
        noise: ``drawn_noise`` of the recipe's O, [N, Tq, Dv].
    """

    recipe: Recipe
    head: AttentionHead
    out: Tensor
    noise: Tensor

    def powers_of_two(self) -> Recipe | None:
        """The recipe with scales rounded up to powers of two, where O has those; else None."""
        changed = {name: f"{text} scale=e8m0:up" for name, text in self._scaled()}
        if not changed or (stated := self._left({})) <= _EXACT:
            return None
        left = self._left(changed)
        name = f"{self.recipe.name} with scales of powers of two"
        return replace(self.recipe, name=name, **changed) if self._explains(left, stated) else None  # type: ignore[arg-type]

    def stale(self) -> dict[str, float]:
        """By how much less than amax the scales of q, k and v reach, where O has been clipped so; else nothing."""
        stated = best = self._left({})
        found = dict[str, float]()
        names = [field[-1] for field, _ in self._scaled()]
        while len(found) < len(names):
            tried = {
                (name, part): self._with(found | {name: part})
                for name in names if name not in found for part in _STALE
            }  # fmt: skip
            (name, part), left = min(tried.items(), key=lambda item: item[1])
            if left > 0.9 * best:
                break
            found[name] = part
            for step, count in _SCANS:
                best = self._scan(found, name, step, count)
        if len(found) > 1:
            for name in found:
                best = self._scan(found, name, *_SCANS[-1])
        clipped = {name: part for name, part in found.items() if part < _WHOLE}
        return clipped if clipped and self._explains(best, stated) else {}

    def culprit(self) -> Culprit | None:
        """What the kernel does otherwise; None where nothing that is tried explains O."""
        stale, others = self.stale(), self._others()
        found = [Culprit(stale_words(stale), self._with(stale))] if stale else []
        if others:
            changed = {name: value for _, change in others for name, value in change.items()}
            found.append(Culprit(together([words for words, _ in others]), self._left(changed)))
        if not found:
            return None
        found.sort(key=lambda culprit: culprit.left)
        alike = [culprit for culprit in found if culprit.left * _BETTER <= found[0].left]
        return Culprit(", or ".join(culprit.words for culprit in alike), found[0].left)

    def as_declared(self) -> bool:
        """Whether O has the recipe's scales and roundings of q, k and v."""
        return self._left({}) <= _EXACT * _PART

    def with_factors(self, factors: Factors) -> float:
        """What the recipe leaves whose scores and O are multiplied by these."""
        return self._left({}, factors)

    def explained_by(self, factors: Factors) -> bool:
        """Whether they leave no more than the recipe's codes do where all is right."""
        return self._explains(self.with_factors(factors), self._left({}))

    def _others(self) -> list[tuple[str, dict[str, str]]]:
        """Other blocks, roundings and formats that explain O, one of each field, the most important first."""
        stated = best = self._left({})
        changed, found = dict[str, str](), list[tuple[str, dict[str, str]]]()
        while True:
            tried = [one for one in self._variants() if not set(one[1]) & set(changed)]
            left = [self._left(changed | change) for _, change in tried]
            if not left or min(left) > 0.9 * best:
                break
            best = min(left)
            found.append(tried[left.index(best)])
            changed |= found[-1][1]
        return found if found and self._explains(best, stated) else []

    def _variants(self) -> Iterator[tuple[str, dict[str, str]]]:
        """In words, and the fields that make it, every other way to quantise that is tried."""
        for name in _OPERANDS:
            field = f"quantize_{name}"
            text = getattr(self.recipe, field)
            by = parse_quantizer(text)
            if by is None:
                continue
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
        if self.recipe.smooth_k != "none":
            yield "k's mean is not taken off before it is quantised", {"smooth_k": "none"}
        if (probs := parse(self.recipe.probs)) is not None and probs.mode is Mode.NEAREST_EVEN:
            said = f"P_bar is rounded {_MODES[Mode.TOWARD_ZERO]}, not to the nearest"
            yield said, {"probs": f"{base(self.recipe.probs)}:{Mode.TOWARD_ZERO}"}

    def _scan(self, parts: dict[str, float], name: str, step: float, count: int) -> float:
        """Move the part of one operand to the best one about it; returns what is left."""
        near = [part for i in range(-count, count + 1) if 0 < (part := parts[name] + i * step) < 1]
        left = {part: self._with(parts | {name: part}) for part in near}
        parts[name] = min(near, key=left.__getitem__)
        return left[parts[name]]

    def _with(self, parts: Mapping[str, float]) -> float:
        """What is left with scales of so many times amax."""
        changed = {}
        for field, text in self._scaled():
            by, part = parse_quantizer(text), parts.get(field[-1])
            if by is not None and part is not None:
                changed[field] = f"{text} target={(by.largest if by.target is None else by.target) / part!r}"
        return self._left(changed)

    def _left(self, changed: Mapping[str, str], factors: Factors | None = None) -> float:
        """The mean square of what O is off the recipe with these fields, in units of the noise's."""
        key = tuple(sorted(changed.items())), factors
        if key not in self._known:
            by = Factors("") if factors is None else factors
            # A kernel may add in fp32 what the recipe adds in less.
            sums = {self.recipe.pv_sums, "fp32"}
            others = [replace(self.recipe, accumulation="fp32-nearest", pv_sums=s, **changed) for s in sums]  # type: ignore[arg-type]
            off = [self.out[self._rows] - by.out * self._made(other, by.scores) for other in others]
            self._known[key] = min(float(x.square().mean()) for x in off) / self._unit if self._unit else 0.0
        return self._known[key]

    def _made(self, recipe: Recipe, scores: float = 1.0) -> Tensor:
        head = replace(self.head, do=None, scale=self.head.scale * scores)
        return emulate_rows(recipe, head, self._rows).double()

    @cached_property
    def _known(self) -> dict[tuple[tuple[tuple[str, str], ...], Factors | None], float]:
        return {}

    @cached_property
    def _rows(self) -> Tensor:
        rows = self.out.isfinite().all(1).nonzero()[:, 0]
        return rows[torch.linspace(0, len(rows) - 1, min(_ROWS, len(rows)), device=rows.device).long()]

    @cached_property
    def _unit(self) -> float:
        return float(self.noise[:, self._rows].double().square().mean()) if len(self._rows) else 0.0

    @cached_property
    def _limit(self) -> float:
        """What is left where all is right."""
        kept = [f"quantize_{name}" for name in _OPERANDS]
        draws = [self._made(dithered(self.recipe, n, kept)) for n in range(_DRAWS)]
        # The difference of two kernels has twice the variance of one.
        return max(_EXACT, 2 * LOSSY**2 * float(drawn_noise(draws).double().square().mean()) / self._unit)

    def _scaled(self) -> Iterator[tuple[str, str]]:
        """The fields of q, k and v that have scales in fp32 from an amax, and what they hold."""
        for field in (f"quantize_{name}" for name in _OPERANDS):
            text = getattr(self.recipe, field)
            by = parse_quantizer(text)
            if by is not None and by.scale == "fp32" and by.symmetric and not by.tensor_scale:
                yield field, text

    def _explains(self, left: float, stated: float) -> bool:
        return left <= _PART * stated and left <= self._limit


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


def stale_words(parts: Mapping[str, float]) -> str:
    """In words: "the largest number of k is taken for 0.6 times what it is, …"."""
    said = together([f"{name} is taken for {number(part, 2)} times what it is" for name, part in parts.items()])
    return f"the largest number of {said}, and what lies beyond is clipped (a stale amax)"
