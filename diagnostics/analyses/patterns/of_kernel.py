"""What a kernel below 16 bits that nobody declared returned: a published one whose bits O has."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence
from attn_diag.analyses.patterns.of_beyond import beyond
from attn_diag.captures.capture import Capture
from attn_diag.head.baseline import Recognised, has_bits, recognise_low_bit, rows_with_bits
from attn_diag.head.declared import is_undeclared
from attn_diag.head.quality import AS_GOOD
from attn_diag.kernels import Recipe, emulate_head
from attn_diag.results.quality import OPERANDS, PROBS, Pattern
from attn_diag.results.wording import number, share

# Heads with more scores are not emulated whole: of O a few rows tell the kernel.
_MOST_SCORES = 2**21
# So much of the squared error it explains, at least.
_EXPLAINED = 0.5
# A kernel is looked for in so many heads of an observation that show none.
_MOST_ASKED = 3
# So many rows that are furthest off are compared beside those that are spread.
_WORST = 64
# A row that is so many times as far off the kernel's as that usually is off the truth, or one number, is not its.
_ROW, _ELEMENT = 3.0, 8.0
# So many other sequences are asked whether they show it too.
_MOST_SEQUENCES = 8


@dataclass(frozen=True)
class _Shown:
    """The kernel below 16 bits that one head has the bits of."""

    recipe: Recipe
    equal: float
    """How much of the rows compared."""
    rows: Tensor
    """int64 [R], those that were run."""
    out: Tensor
    """[R, D], the kernel's O there."""


class UndeclaredKernels:
    """Which heads of a capture have the bits of a published kernel below 16 bits, though none is declared."""

    def __init__(self, capture: Capture, recognised: Mapping[str, Recognised]) -> None:
        """``recognised``: by observation, what its first head shows, or is said to be."""
        self._capture, self._recognised = capture, recognised
        self._known, self._missed = dict[str, list[Recipe]](), Counter[str]()
        self._heads = dict[tuple[str, int, int], _Shown | None]()
        self._made = dict[tuple[str, int, int], dict[str, Tensor]]()

    def pattern(self, observation: str, batch: int, head: int, evidence: Evidence) -> Pattern | None:
        """That O, or LSE or a gradient beside it, is what such a kernel gives; None: it is not, or nobody knows.

        Args:
            observation, batch, head: Whose.
            evidence: A quantity that is lossy or wrong.
        """
        key = (observation, batch, head)
        shown = self._shown(key, evidence)
        if shown is None:
            return None
        name, rows, formats = shown.recipe.name, evidence.usable.nonzero()[:, 0], formats_of(shown.recipe)
        if evidence.quantity == "o":
            if (others := _beyond(evidence, shown)) is not None:
                return others
            words = f"all rows have the bits of {name}, a kernel below 16 bits ({share(shown.equal)} of those compared)"
            return Pattern("kernel", words, formats=formats, kernel=name)
        made = self._emulated(key, shown.recipe, evidence)
        if made is None:
            return None
        left = (evidence.observed - made)[rows].square().sum()
        explained = 1 - float(left / evidence.error[rows].square().sum().clamp(min=1e-300))
        remaining = math.sqrt(float(left / evidence.noise[rows].sum().clamp(min=1e-300)))
        if not explained >= _EXPLAINED:
            return None
        words = f"all {evidence.unit} are what {name} gives, a kernel below 16 bits"
        if remaining > AS_GOOD:
            off = f"{number(remaining)} times a well-rounded kernel's error off that"
            words = f"all {evidence.unit} are near what {name} gives, a kernel below 16 bits, {off}"
        return Pattern("kernel", words, explained, remaining, formats=formats, kernel=name)

    def shared(self, observation: str, batches: Collection[int], head: int, kernel: str) -> bool:
        """Whether a head has the bits of the kernel of this name in these sequences (in some, where they are many)."""
        known = next(one for one in self._known[observation] if one.name == kernel)
        some = sorted(batches)[:: -(-len(batches) // _MOST_SEQUENCES)] if batches else ()
        return all(has_bits(known, self._capture, observation, batch, head) for batch in some)

    def _shown(self, key: tuple[str, int, int], evidence: Evidence) -> _Shown | None:
        """Of one head; looked for in O alone, on so many heads that show none, or another than those before."""
        observation, of_o = key[0], evidence.quantity == "o"
        if key in self._heads:
            return self._heads[key]
        if observation not in self._known:
            first = self._recognised.get(observation)
            stated = first is None or first.agreement is None or not self._is_told(first)
            self._known[observation] = [] if stated or first is None else [first.recipe]
        known = self._known[observation]
        # Of rows that were not compared the worst tell whether the kernel made them as well.
        also = sorted(_size(evidence).topk(min(_WORST, len(evidence.error))).indices.tolist()) if of_o else ()
        for recipe in known:
            if (found := self._with_bits(recipe, key, also)) is not None:
                self._heads[key] = found
                return found
        if not of_o:
            return None
        self._heads[key] = None
        if self._capture.metadata.declared is None and self._missed[observation] < _MOST_ASKED:
            asked = recognise_low_bit(self._capture, *key)
            if asked is None or not self._is_told(asked) or asked.recipe in known:
                self._missed[observation] += 1
            elif (found := self._with_bits(asked.recipe, key, also)) is not None:
                known.append(asked.recipe)
                self._heads[key] = found
        return self._heads[key]

    def _with_bits(self, recipe: Recipe, key: tuple[str, int, int], also: Sequence[int]) -> _Shown | None:
        """Of zeros alone, as where scales underflow, no kernel is told."""
        found = rows_with_bits(recipe, self._capture, *key, also)
        return _Shown(recipe, *found) if found is not None and bool(found[2].any()) else None

    def _is_told(self, found: Recognised) -> bool:
        """Whether it is a kernel below 16 bits, and not one of a cache alone: of that more is told by its formats."""
        return is_undeclared(self._capture, found) and bool(formats_of(found.recipe).keys() & {"q", PROBS})

    def _emulated(self, key: tuple[str, int, int], recipe: Recipe, evidence: Evidence) -> Tensor | None:
        """The quantity as the kernel makes it; None where the head is long."""
        if sum(len(head.q) * len(head.k) for head in evidence.heads) > _MOST_SCORES:
            return None
        if key not in self._made:
            self._made.clear()
            made = [emulate_head(recipe, head) for head in evidence.heads]
            names = [name for name in ("lse", "dq", "dk", "dv") if getattr(made[0], name) is not None]
            self._made[key] = {
                name: torch.stack([getattr(one, name).double() for one in made]).sum(0) for name in names
            }
        found = self._made[key].get(evidence.quantity)
        return None if found is None else found.reshape(evidence.observed.shape)


def _size(evidence: Evidence) -> Tensor:
    """[n], how far each row is off, over its size; 0 where that is not known."""
    off = evidence.error.square().sum(1) / (evidence.truth.square().sum(1) + evidence.noise)
    return off.masked_fill(~evidence.usable, 0.0)


def _beyond(evidence: Evidence, shown: _Shown) -> Pattern | None:
    """Rows of O that the kernel did not make, though it made all others; None: there are none."""
    rows = shown.rows.to(evidence.truth.device)
    truth, made, noise = evidence.truth[rows], shown.out.to(evidence.truth), evidence.noise[rows]
    usual, size = (made - truth).square().mean(1), truth.square().mean(1)
    # Codes of P_bar that another exponential makes move a row by about what rounding them does, as other rows show.
    typical = float((usual / size.clamp(min=1e-300)).median())
    usual = torch.maximum(usual, torch.maximum(typical * size, noise / truth.shape[1]))
    left = (evidence.observed[rows] - made).square()
    stands_out = (left.mean(1) > _ROW**2 * usual) | (left.amax(1) > _ELEMENT**2 * usual)
    stands_out &= evidence.usable[rows]
    if not bool(stands_out.any()):
        return None
    some = "" if len(rows) == len(evidence.truth) else f", of {len(rows)} rows"
    name = f"{shown.recipe.name}, a kernel below 16 bits"
    others = f"{share(shown.equal)} of the numbers compared{some} have the bits of {name}"
    return beyond(evidence, rows[stands_out], left[stands_out].sqrt(), "", others)


def formats_of(recipe: Recipe) -> dict[str, str]:
    """Which of q, k, v and P_bar it holds below 16 bits, and in which format."""
    every = {name: getattr(recipe, f"quantize_{name}") for name in OPERANDS} | {PROBS: recipe.quantize_probs}
    found = {name: spec.partition(" ")[0].upper() for name, spec in every.items() if spec != "none"}
    if recipe.probs in ("e4m3", "e5m2"):
        found[PROBS] = f"FP8 ({recipe.probs.upper()})"
    return found
