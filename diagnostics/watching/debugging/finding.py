"""What a breakpoint waits for, and what it found: the call, its tensors and its diagnosis."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.printing import printable
from attn_diag.reference import hides
from attn_diag.results.base import shown_at_prompt
from attn_diag.results.diagnosis import Diagnosis, Label
from attn_diag.watching.live.call import AttentionCall, CallPlace
from attn_diag.watching.live.overwritten import DO_OVERWRITTEN

_FORWARD, _BACKWARD = ("q", "k", "v", "o", "lse"), ("do", "dq", "dk", "dv")
# Scores that are held at one time.
_ELEMENTS = 2**24


@dataclass(frozen=True, repr=False)
class Finding:
    """An attention call for which a condition of ``break_if`` held. Printed, it takes at most 25 lines."""

    reasons: tuple[str, ...]
    """Which conditions held, in words."""
    place: CallPlace
    """Step, layer, module, call."""
    judged: str
    """After which pass the call was judged, in words."""
    kernel: str
    capture: Capture | None
    """A copy of the call's tensors as they were then (``capture.save(path)`` keeps it for the command line), None where
    they do not fit each other."""
    diagnosis: Diagnosis | None
    """None where attn-diag cannot analyse the call; ``refused`` says why."""
    refused: str | None = None
    also: tuple[Finding, ...] = ()
    """Other calls that were found before the program could be stopped."""
    schema: ClassVar[str] = "attn-diag-finding"
    disarm: Callable[[], None] = field(default=lambda: None, compare=False)
    """Call it, and the breakpoint stops no more."""

    def __str__(self) -> str:
        return str(shown_at_prompt(self))

    def __repr__(self) -> str:
        p = self.place
        return printable(f"<Finding: {'; '.join(self.reasons)}; layer {p.layer}, call {p.call} of step {p.step}>")

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@dataclass(frozen=True)
class Conditions:
    """What a breakpoint waits for; see ``break_if``."""

    labels: tuple[Label, ...]
    nonfinite: bool
    max_logit: float | None
    predicate: Callable[[Diagnosis], object] | None

    @property
    def any(self) -> bool:
        """Whether there is any condition."""
        return bool(self.labels) or self.nonfinite or self.max_logit is not None or self.predicate is not None

    @property
    def need_diagnosis(self) -> bool:
        """Whether a call must be inspected to know if one holds."""
        return bool(self.labels) or self.predicate is not None

    def of_tensors(self, call: AttentionCall, *, after_backward: bool) -> list[str]:
        """List the conditions that hold and need no inspection; after the backward only what it added is looked at."""
        found = []
        if call.written is not None and not after_backward and "wrong" in self.labels:
            found.append(f"wrong: {call.written}")
        if after_backward and DO_OVERWRITTEN in call.notes and "wrong" in self.labels:
            found.append(f"wrong: {DO_OVERWRITTEN}")
        if self.nonfinite and (broken := first_nonfinite(call, _BACKWARD if after_backward else _FORWARD)):
            found.append(broken)
        if self.max_logit is not None and not after_backward:
            largest, head = largest_logit(call)
            if largest > self.max_logit:
                found.append(f"max_logit: {largest:.4g} in head {head}, above {self.max_logit:g}")
        return found

    def graver(self, diagnosis: Diagnosis) -> list[Label]:
        """Labels that were not asked for, but hide those that were: nothing is asked of a head that is not right."""
        asked = (*self.labels, *(["nonfinite"] if self.nonfinite else []))
        graver: tuple[Label, ...] = ("nonfinite", "wrong")
        return [label for label in graver if self.labels and label in diagnosis.labels and label not in asked]

    def of_diagnosis(self, diagnosis: Diagnosis) -> list[str]:
        """List the conditions that hold of an inspected call."""
        found = []
        for label in self.labels:
            heads = [h.head for _, _, h in diagnosis.ranked() if h.verdict and label in h.verdict.labels]
            if heads:
                found.append(f"{label}: head {', '.join(map(str, heads[:4]))}{', …' if len(heads) > 4 else ''}")
        if self.predicate is not None and self.predicate(diagnosis):
            found.append(f"{getattr(self.predicate, '__name__', 'predicate')}(diagnosis) holds")
        return found


@torch.no_grad()
def first_nonfinite(call: AttentionCall, names: tuple[str, ...]) -> str | None:
    """Name the first tensor of ``names`` that holds NaN or Inf, with the position; None where none counts.

    What no sum needs does not count: q and dO of a row that sees no key, its L of plus or minus infinity (kernels
    return either), and k and v of a key that no row sees. Outputs there do: what follows reads every row of them.
    """
    seen: tuple[Tensor, Tensor] | None = None
    for name in names:
        tensor: Tensor | None = getattr(call, name)
        if tensor is None or not bool((bad := ~tensor.isfinite()).any()):
            continue
        if name in ("q", "k", "v", "do", "lse"):
            rows, keys = seen = seen or what_sees(call)
            if name == "lse":
                bad &= rows | tensor.isnan()
            else:
                bad &= (keys if name in ("k", "v") else rows)[..., None]
        if bool(bad.any()):
            where = bad.nonzero()[0].tolist()
            before = names[: names.index(name)]
            others = [n for n in before if (t := getattr(call, n)) is not None and bool(t.isfinite().all())]
            finite = f"; {', '.join(others)} {'are' if len(others) > 1 else 'is'} finite" if others else ""
            empty = ""
            if name in ("o", "dq") and not bool((bad & (seen or what_sees(call))[0][..., None]).any()):
                empty = ", all in rows that see no key"
            return f"nonfinite: {name} holds {int(bad.sum())} NaN or Inf{empty}, first at {where}{finite}"
    return None


def what_sees(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Which rows see a key, [B, Hq, Tq], and which keys some row sees, [B, Hk, Tk]; bool."""
    (batch, heads, rows, _), (_, kv_heads, keys, _) = call.q.shape, call.k.shape
    by_row = torch.ones(batch, heads, rows, dtype=torch.bool, device=call.q.device)
    by_key = torch.zeros(batch, heads, keys, dtype=torch.bool, device=call.q.device)
    for item, chunk, hidden in _chunks(call):
        by_row[item, :, chunk] = ~hidden.all(-1)
        by_key[item] |= ~hidden.all(-2)
    return by_row, by_key.view(batch, kv_heads, heads // kv_heads, keys).any(2)


def _chunks(call: AttentionCall) -> Iterator[tuple[int, slice, Tensor]]:
    """Every item of the batch in chunks of rows R, with what is hidden from them: bool [1 or Hq, R, Tk]."""
    (batch, heads, rows, _), keys = call.q.shape, call.k.shape[2]
    documents = call.documents()
    positions = call.masking.row_positions(rows, keys, call.q.device) if documents is None else documents.positions
    step = max(1, _ELEMENTS // (heads * keys))
    for item, first in product(range(batch), range(0, rows, step)):
        chunk = slice(first, min(first + step, rows))
        found = call.masking.hidden(positions[chunk], slice(0, keys))
        if documents is not None:
            others = documents.hidden(chunk, slice(0, keys))
            found = others if found is None else found | others
        size = (1, chunk.stop - first, keys)
        hidden = torch.zeros(size, dtype=torch.bool, device=call.q.device) if found is None else found[None]
        if call.mask is not None:
            hidden = hidden | hides(call.mask.expand(batch, heads, rows, keys)[item, :, chunk])
        yield item, chunk, hidden


@torch.no_grad()
def largest_logit(call: AttentionCall) -> tuple[float, int]:
    """The largest alpha q.k of all visible keys, before a softcap and additive masks; in float64, NaN passed over.

    Returns:
        It, -inf where no row sees a key, and its head (of the call).
    """
    heads, dim = call.q.shape[1], call.q.shape[3]
    scale = dim**-0.5 if call.scale is None else call.scale
    largest, where = -float("inf"), 0
    for item, chunk, hidden in _chunks(call):
        k = call.k[item].double().repeat_interleave(heads // call.k.shape[1], 0)
        scores = (call.q[item, :, chunk].double() @ k.mT * scale).masked_fill_(hidden, -torch.inf)
        best = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax((1, 2))
        value, head = best.max(0)
        if float(value) > largest:
            largest, where = float(value), int(head)
    return largest, where
