"""Which scales a kernel has that is declared to be a recipe below 16 bits: the recipe's, powers of two, a stale amax's.

Kernels that quantise q, k and v at the same scales differ in the casts of P_bar and in sums alone. Of O that leaves a
part of what the format's roundings make (``benchmarks/study_declared.py``: up to 0.13 of its mean square in FP8, 0.3
in INT8 on most inputs); with scales of their own they differ by about 2, as two independent noises do. So a hypothesis
that leaves at most ``_EXACT``, and a small part of what the recipe itself leaves, is what the kernel does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.kernels import Recipe, emulate_rows
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

    def _left(self, changed: Mapping[str, str]) -> float:
        """The mean square of what O is off the recipe with these fields, in units of the noise's."""
        rows = self.out.isfinite().all(1).nonzero()[:, 0]
        rows = rows[torch.linspace(0, len(rows) - 1, min(_ROWS, len(rows)), device=rows.device).long()]
        other = replace(self.recipe, accumulation="fp32-nearest", **changed)  # type: ignore[arg-type]
        made = emulate_rows(other, replace(self.head, do=None), rows).double()
        unit = float(self.noise[:, rows].double().square().mean())
        return float((self.out[rows] - made).square().mean()) / unit if len(rows) and unit else 0.0

    def _scaled(self) -> Iterator[tuple[str, str]]:
        """The fields of q, k and v that have scales in fp32 from an amax, and what they hold."""
        for field in (f"quantize_{name}" for name in _OPERANDS):
            text = getattr(self.recipe, field)
            by = parse_quantizer(text)
            if by is not None and by.scale == "fp32" and by.symmetric and not by.tensor_scale:
                yield field, text

    @staticmethod
    def _explains(left: float, stated: float) -> bool:
        return left <= _EXACT and left <= _PART * stated


def stale_words(parts: Mapping[str, float]) -> str:
    """In words, after what O is off: "as where …"."""
    said = together([f"{name} is taken for {number(part, 2)} times what it is" for name, part in parts.items()])
    return f"as where the largest number of {said}, and what lies beyond is clipped (a stale amax)"
