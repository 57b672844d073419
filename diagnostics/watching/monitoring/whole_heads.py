"""Some heads of one call, whole sequences of them, judged as ``inspect`` judges a capture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.capture import Capture
from attn_diag.results.diagnosis import CaptureDiagnosis, HeadDiagnosis
from attn_diag.results.wording import SYMBOLS, percent
from attn_diag.watching.live.call import AttentionCall, Part
from attn_diag.watching.monitoring.record import JUDGED_FLAGS, LayerCheck
from attn_diag.watching.monitoring.stacks import Key

# What a verdict on the attention itself does not ask for.
_UNUSED = ("x", "w_q", "dq_pre")
_GRADIENTS = ("do", "dq", "dk", "dv")


@dataclass(frozen=True)
class WholeHeads:
    """Copies of some heads of one call, whole sequences of them."""

    part: Part
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any]
    heads: int
    """How many the call has."""

    @classmethod
    def of(cls, call: AttentionCall, part: Part, **metadata: Any) -> WholeHeads:
        """Copy the forward's part of a call; ``metadata`` goes beside the call's own."""
        tensors = {name: t for name, t in call.tensors().items() if name not in _UNUSED}
        own = {**call.metadata(), "head_offset": part.heads(call)[0], **metadata}
        return cls(part, part.clones(call, tensors), own, call.q.shape[1])

    def with_gradient(self, call: AttentionCall) -> WholeHeads:
        """Add the gradients, once the backward has brought them."""
        late = {name: t for name, t in call.tensors().items() if name in _GRADIENTS}
        return replace(self, tensors={**self.tensors, **self.part.clones(call, late)})

    def judge(self, key: Key, level: float, *, again: bool = False) -> LayerCheck:
        """Judge the heads.

        Args:
            key: The layer's.
            level: Significance of the tests of means.
            again: See ``LayerCheck``.

        Raises:
            InputError: They cannot be judged.
        """
        capture = Capture.from_tensors(self.tensors, **self.metadata)
        where = self.tensors["q"].device.type
        found = inspect_captures([capture], level=level, device=where).captures[0]
        heads = [head for head in found.observations[0].heads if head.head is not None]
        names = {name for head in heads for q in head.quantities for name in _names(q.quantity)}
        values = {name: np.full(self.heads, np.nan) for name in (*sorted(names), *JUDGED_FLAGS.values())}
        words: list[str | None] = [None] * self.heads
        for head in heads:
            number = head.head or 0
            labels, said = _verdict(head, found)
            for q in head.quantities:
                for name, value in zip(_names(q.quantity), (q.relative_error, q.factor), strict=True):
                    values[name][number] = np.nan if value is None else value
            for label, flag in JUDGED_FLAGS.items():
                values[flag][number] = float(label in labels)
            words[number] = said if labels & JUDGED_FLAGS.keys() else None
        return LayerCheck(*key, values, tuple(words), self.metadata.get("declared"), again)


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
    faulty = (q for q in head.quantities if q.answer in ("wrong", "lossy"))
    named = (q.words for q in faulty if any(pattern.kind == "scale" for pattern in q.patterns))
    return {*head.verdict.labels}, next(named, head.verdict.reasons[0])


def _names(quantity: str) -> tuple[str, str]:
    return f"{quantity}_error", f"{quantity}_factor"
