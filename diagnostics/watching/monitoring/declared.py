"""Attention that is declared to run below 16 bits, under the monitor: a call is judged as ``inspect`` judges a capture.

Sixteen draws of the declared recipe cost more than a training step, so of each layer some heads are looked at, in two
checks on end, which an alarm takes; then the next ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.capture import Capture
from attn_diag.errors import InputError
from attn_diag.results.diagnosis import CaptureDiagnosis, HeadDiagnosis
from attn_diag.results.wording import SYMBOLS, percent
from attn_diag.watching.live.call import AttentionCall, Part
from attn_diag.watching.monitoring.record import JUDGED_FLAGS, LayerCheck
from attn_diag.watching.monitoring.stacks import Key

# Scores of a layer that are looked at in one check: two heads of 256 rows; one group of heads at least.
_MOST = 2**17
# What the verdict of a declared kernel does not ask for.
_UNUSED = ("x", "w_q", "dq_pre")
_GRADIENTS = ("do", "dq", "dk", "dv")


@dataclass(frozen=True)
class DeclaredSample:
    """Copies of some heads of one call, whole sequences of them."""

    part: Part
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any]
    heads: int
    """How many the call has."""

    def with_gradient(self, call: AttentionCall) -> DeclaredSample:
        """Add the gradients, once the backward has brought them."""
        late = {name: t for name, t in call.tensors().items() if name in _GRADIENTS}
        return replace(self, tensors={**self.tensors, **self.part.clones(call, late)})


class DeclaredLayers:
    """The calls of a model whose attention is declared to be a recipe below 16 bits.

    Args:
        recipe: Its name.
        sequences: How many of a batch are looked at.
        level: Significance of the tests of means in one check.
    """

    def __init__(self, recipe: str, sequences: int, level: float) -> None:
        self._recipe, self._sequences, self._level, self._checks = recipe, sequences, level, 0

    def sample(self, call: AttentionCall) -> DeclaredSample:
        """Copy the heads of a call whose turn it is."""
        (heads, rows), groups = call.q.shape[1:3], call.k.shape[1]
        group = heads // groups
        few = max(1, min(groups, _MOST // (rows * call.k.shape[2] * group)))
        first = min(self._checks // 2 % -(-groups // few) * few, groups - few)
        part = Part(range(first * group, (first + few) * group), range(self._sequences))
        tensors = {name: t for name, t in call.tensors().items() if name not in _UNUSED}
        metadata = {**call.metadata(), "head_offset": first * group, "declared": self._recipe}
        return DeclaredSample(part, part.clones(call, tensors), metadata, heads)

    def judge(self, samples: Mapping[Key, DeclaredSample]) -> tuple[list[LayerCheck], list[str]]:
        """What the samples of one check show, and why others show nothing."""
        self._checks += 1
        captures: dict[Key, Capture] = {}
        unknown = []
        for key, sample in samples.items():
            try:
                captures[key] = Capture.from_tensors(dict(sample.tensors), **sample.metadata)
            except InputError as error:
                unknown.append(str(error))
        found = []
        for key, capture in captures.items():
            try:
                # Each alone, so that one that cannot be judged does not cost the others; the level is shared out.
                where = samples[key].tensors["q"].device.type
                diagnosis = inspect_captures([capture], level=self._level / len(captures), device=where)
            except InputError as error:
                unknown.append(str(error))
                continue
            found.append(self._checked(key, samples[key].heads, diagnosis.captures[0]))
        return found, unknown

    def _checked(self, key: Key, count: int, found: CaptureDiagnosis) -> LayerCheck:
        heads = [head for head in found.observations[0].heads if head.head is not None]
        names = {name for head in heads for q in head.quantities for name in _names(q.quantity)}
        values = {name: np.full(count, np.nan) for name in (*sorted(names), *JUDGED_FLAGS.values())}
        words: list[str | None] = [None] * count
        for head in heads:
            number = head.head or 0
            labels, said = _verdict(head, found)
            for q in head.quantities:
                for name, value in zip(_names(q.quantity), (q.relative_error, q.factor), strict=True):
                    values[name][number] = np.nan if value is None else value
            for label, flag in JUDGED_FLAGS.items():
                values[flag][number] = float(label in labels)
            words[number] = said if labels & JUDGED_FLAGS.keys() else None
        return LayerCheck(*key, values, tuple(words), self._recipe)


def _verdict(head: HeadDiagnosis, found: CaptureDiagnosis) -> tuple[set[str], str]:
    """A head's labels and the first reason.

    ``inspect`` asks first whether the capture is as stated. What a running call says of itself is what its kernel was
    given: where something else fits O, the kernel is wrong.
    """
    for check in found.assumptions.checks:
        if check.better is not None and check.better_error is not None:
            off = f"{percent(check.relative_error)} off, under {check.better} {percent(check.better_error)}"
            return {"wrong"}, f"{SYMBOLS[check.output]} is {off}: mask, scale or descale factors are not those stated"
    if head.verdict is None:
        return set(), ""
    named = (q.words for q in head.quantities if any(pattern.kind == "scale" for pattern in q.patterns))
    return {*head.verdict.labels}, next(named, head.verdict.reasons[0])


def _names(quantity: str) -> tuple[str, str]:
    return f"{quantity}_error", f"{quantity}_factor"
