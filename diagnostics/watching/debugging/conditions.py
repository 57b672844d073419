"""What a breakpoint waits for, and whether it holds for an attention call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.reference import hides
from attn_diag.results.diagnosis import Diagnosis, Label
from attn_diag.watching.live.call import AttentionCall

_FORWARD, _BACKWARD = ("q", "k", "v", "o", "lse"), ("do", "dq", "dk", "dv")
# Scores that are held at one time.
_ELEMENTS = 2**24


@dataclass(frozen=True)
class Conditions:
    """See ``break_if``."""

    labels: tuple[Label, ...]
    nonfinite: bool
    max_logit: float | None
    predicate: Callable[[Diagnosis], object] | None

    @property
    def any(self) -> bool:
        """Whether there is one at all."""
        return bool(self.labels) or self.nonfinite or self.max_logit is not None or self.predicate is not None

    @property
    def need_diagnosis(self) -> bool:
        """Whether a call must be inspected to know."""
        return bool(self.labels) or self.predicate is not None

    def of_tensors(self, call: AttentionCall, *, after_backward: bool) -> list[str]:
        """Those that hold and need no inspection; after the backward only what it added is looked at."""
        found = []
        if self.nonfinite and (broken := first_nonfinite(call, _BACKWARD if after_backward else _FORWARD)):
            found.append(broken)
        if self.max_logit is not None and not after_backward:
            largest, head = largest_logit(call)
            if largest > self.max_logit:
                found.append(f"max_logit: {largest:.4g} in head {head}, above {self.max_logit:g}")
        return found

    def of_diagnosis(self, diagnosis: Diagnosis) -> list[str]:
        """Those that hold of an inspected call."""
        found = []
        for label in self.labels:
            heads = [h.head for _, _, h in diagnosis.ranked() if h.verdict and label in h.verdict.labels]
            if heads:
                found.append(f"{label}: head {', '.join(map(str, heads[:4]))}{', …' if len(heads) > 4 else ''}")
        if self.predicate is not None and self.predicate(diagnosis):
            found.append(f"{getattr(self.predicate, '__name__', 'predicate')}(diagnosis) holds")
        return found


def first_nonfinite(call: AttentionCall, names: tuple[str, ...]) -> str | None:
    """The first tensor of ``names`` that holds NaN or Inf, with the position; None where all are finite."""
    for name in names:
        tensor: Tensor | None = getattr(call, name)
        if tensor is None:
            continue
        bad = ~tensor.isfinite()
        if name == "lse":
            bad &= tensor != -torch.inf  # a row without keys
        if bool(bad.any()):
            where = bad.nonzero()[0].tolist()
            before = names[: names.index(name)]
            finite = f"; {', '.join(before)} are finite" if before else ""
            return f"nonfinite: {name} holds {int(bad.sum())} NaN or Inf, first at {where}{finite}"
    return None


@torch.no_grad()
def largest_logit(call: AttentionCall) -> tuple[float, int]:
    """The largest alpha q.k of all visible keys, before a softcap and additive masks, and its head (of the call).

    In float64; NaN is passed over. -inf where no row sees a key.
    """
    (batch, heads, rows, dim), keys = call.q.shape, call.k.shape[2]
    scale = dim**-0.5 if call.scale is None else call.scale
    positions = call.masking.row_positions(rows, keys, call.q.device)
    largest, where = -float("inf"), 0
    step = max(1, _ELEMENTS // (heads * keys))
    for item in range(batch):
        k = call.k[item].double().repeat_interleave(heads // call.k.shape[1], 0)
        for first in range(0, rows, step):
            chunk = slice(first, first + step)
            scores = call.q[item, :, chunk].double() @ k.mT * scale
            if (hidden := call.masking.hidden(positions[chunk], slice(0, keys))) is not None:
                scores.masked_fill_(hidden, -torch.inf)
            if call.mask is not None:
                scores.masked_fill_(hides(call.mask.expand(batch, heads, rows, keys)[item, :, chunk]), -torch.inf)
            best = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax((1, 2))
            value, head = best.max(0)
            if float(value) > largest:
                largest, where = float(value), int(head)
    return largest, where
