"""One observation of several heads, side by side: as many usable rows of each, captured alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attn_diag.head.propagation import ForwardErrors
from attn_diag.head.row_maxima import top_keys
from attn_diag.head.streaming import ObservedHead, StreamedHead
from attn_diag.reference import AttentionHead, FloatFormat, Rows
from attn_diag.reference.heads import stacked


@dataclass(frozen=True)
class HeadStack:
    """H heads with n rows each; what is made of them is [H, n, ...]."""

    passes: Sequence[StreamedHead]
    """Their passes."""
    seen: Sequence[ObservedHead]
    """What was observed of each."""
    rows: Sequence[Rows]
    """The rows of each that count, [n]; all of them as a slice."""

    @property
    def head(self) -> AttentionHead:
        """The first, for the scale, the masking and the dimensions, in which all agree."""
        return self.passes[0].truth.head

    @property
    def formats(self) -> dict[str, FloatFormat]:
        """In which the outputs were stored."""
        return self.seen[0].formats

    @cached_property
    def errors(self) -> list[ForwardErrors] | None:
        """What each one's backward was fed; None where it is not known."""
        found = [p.errors.get(s.name) for p, s in zip(self.passes, self.seen, strict=True)]
        return [e for e in found if e is not None] if found[0] is not None else None

    @cached_property
    def variances(self) -> list[dict[str, Tensor]]:
        """The expected squared errors of what each is held against, see ``StreamedHead.variance``."""
        return StreamedHead.each_variance(self.passes, self.seen)

    def only(self, heads: Sequence[int]) -> HeadStack:
        """Some of the heads."""
        return HeadStack([self.passes[h] for h in heads], [self.seen[h] for h in heads], [self.rows[h] for h in heads])

    @cached_property
    def indices(self) -> Tensor:
        """The numbers of the rows, [H, n]."""
        q, first = self.head.q, self.rows[0]
        every = torch.arange(len(q), device=q.device).expand(len(self.rows), -1)
        return every if isinstance(first, slice) else self.chosen(list(every))

    @cached_property
    def top_key(self) -> Tensor:
        """The argmax key of each row, [H, n]."""
        return self.chosen(list(top_keys([passed.truth.maxima for passed in self.passes])))

    def of(self, get: Callable[[StreamedHead], Tensor | None]) -> Tensor:
        """A tensor [Tq, ...] of each head."""
        return self.chosen([get(passed) for passed in self.passes])

    def output(self, name: str) -> Tensor | None:
        """What the kernel returned; None where it was not captured."""
        return self.chosen([seen.outputs[name] for seen in self.seen]) if name in self.seen[0].outputs else None

    def chosen(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The rows that count of a tensor [Tq, ...] of each head."""
        known = [(t, rows) for t, rows in zip(tensors, self.rows, strict=True) if t is not None]
        return stacked([t if isinstance(rows, slice) else t[rows] for t, rows in known])
