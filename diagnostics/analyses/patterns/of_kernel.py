"""What a kernel below 16 bits that nobody declared returned: a published one whose bits O has."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence
from attn_diag.captures.capture import Capture
from attn_diag.head.baseline import Recognised, equal_bits, recognise_low_bit
from attn_diag.head.declared import is_undeclared
from attn_diag.head.quality import AS_GOOD
from attn_diag.kernels import Recipe, emulate_head
from attn_diag.results.quality import OPERANDS, PROBS, Pattern
from attn_diag.results.wording import number, share

# Heads with more scores are not emulated whole: of O a few rows tell the kernel.
_MOST_SCORES = 2**21
# So much of the squared error it explains, at least.
_EXPLAINED = 0.5


class UndeclaredKernels:
    """Which heads of a capture have the bits of the kernel that the first one has, or the first that is asked about."""

    def __init__(self, capture: Capture, recognised: Mapping[str, Recognised]) -> None:
        """``recognised``: by observation, what its first head shows, or is said to be."""
        self._capture, self._recognised = capture, recognised
        self._asked = dict[str, Recognised | None]()
        self._bits = dict[tuple[str, int, int], float | None]()
        self._made = dict[tuple[str, int, int], dict[str, Tensor]]()

    def pattern(self, observation: str, batch: int, head: int, evidence: Evidence) -> Pattern | None:
        """That O, or LSE or a gradient beside it, is what such a kernel gives; None: it is not, or nobody knows.

        Args:
            observation, batch, head: Whose.
            evidence: A quantity that is lossy or wrong.
        """
        where, key = (self._capture, observation, batch, head), (observation, batch, head)
        found = self._recognised.get(observation)
        if found is None or found.agreement is None:
            if observation not in self._asked and evidence.quantity == "o" and self._capture.metadata.declared is None:
                self._asked[observation] = recognise_low_bit(*where)
            found = self._asked.get(observation)
        if found is None or not is_undeclared(self._capture, found):
            return None
        formats = formats_of(found.recipe)
        if not formats.keys() & {"q", PROBS}:
            return None  # of a cache more is told by what k and v were held in
        if key not in self._bits:
            self._bits[key] = equal_bits(found.recipe, *where)
        if (equal := self._bits[key]) is None:
            return None
        name, rows = found.recipe.name, evidence.usable.nonzero()[:, 0]
        if evidence.quantity == "o":
            words = f"all rows have the bits of {name}, a kernel below 16 bits ({share(equal)} of those compared)"
            return Pattern("kernel", words, formats=formats, kernel=name)
        made = self._emulated(key, found.recipe, evidence)
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


def formats_of(recipe: Recipe) -> dict[str, str]:
    """Which of q, k, v and P_bar it holds below 16 bits, and in which format."""
    every = {name: getattr(recipe, f"quantize_{name}") for name in OPERANDS} | {PROBS: recipe.quantize_probs}
    found = {name: spec.partition(" ")[0].upper() for name, spec in every.items() if spec != "none"}
    if recipe.probs in ("e4m3", "e5m2"):
        found[PROBS] = f"FP8 ({recipe.probs.upper()})"
    return found
