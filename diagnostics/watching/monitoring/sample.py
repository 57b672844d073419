"""What is kept of an attention call until its gradient comes: a few sequences, evenly spaced query rows, all keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from attn_diag.reference import Masking
from attn_diag.watching.live.call import AttentionCall
from attn_diag.watching.monitoring.weight import LayerProjection


@dataclass(frozen=True)
class Sample:
    """Copies of some sequences and query rows of one call, in the kernel's own dtypes.

    q, o, do [S, Hq, R, D or Dv], k [S, Hk, Tk, D], v [S, Hk, Tk, Dv], lse [S, Hq, R], x [S, R, C]. ``mask`` [1 or S, 1
    or Hq, 1 or R, 1 or Tk], bool (True attends) or additive. Row r is query ``evenly(r, q_length, R)`` of ``q_length``,
    and ``masking`` has its position. ``do`` None: no
    backward was seen. ``x`` None also where q is known not to be the projection's output itself (there is another
    ``dq_pre``): dW_Q does not follow from dQ there.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor | None
    mask: Tensor | None
    x: Tensor | None
    projection: LayerProjection | None
    do: Tensor | None
    q_length: int
    masking: Masking
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, call: AttentionCall, sequences: int = 1, rows: int = 1024) -> Sample:
        """The first ``sequences`` of the batch, and all rows or ``rows`` evenly spaced ones."""
        length, device = call.q.shape[2], call.q.device
        count = min(rows, length)
        positions = evenly(torch.arange(count, device=device), length, count)
        positions += call.masking.shift(length, call.k.shape[2])
        pick = _Picker(min(sequences, len(call.q)), length, count, device)
        mask = call.mask
        if mask is not None:
            mask = pick.rows(mask.detach()[(None,) * (4 - mask.ndim)])
        q, w_q = pick.rows(call.q), call.w_q
        if w_q is not None and (type(w_q) not in (Tensor, torch.nn.Parameter) or len(w_q) != q.shape[1] * q.shape[3]):
            w_q = None  # a shard of it
        x = None if call.x is None or w_q is None else pick.rows(call.x, axis=1).to(call.x_dtype)
        sample = cls(
            q=q,
            k=pick.all(call.k),
            v=pick.all(call.v),
            o=pick.rows(call.o),
            lse=None if call.lse is None else pick.rows(call.lse),
            mask=mask,
            x=x,
            projection=None if w_q is None else LayerProjection.of(w_q, q, x),
            do=None,
            q_length=length,
            masking=replace(call.masking, positions=positions),
            scale=call.q.shape[3] ** -0.5 if call.scale is None else call.scale,
            softcap=call.softcap,
        )
        return sample.with_gradient(call)

    def with_gradient(self, call: AttentionCall) -> Sample:
        """The same with dO, once the backward has brought it."""
        if call.do is None:
            return self
        pick = _Picker(len(self.q), self.q_length, self.q.shape[2], call.do.device)
        # A bias alone leaves dQ the gradient at the projection: the watch then gives the same tensor twice.
        between = call.dq_pre is not None and call.dq_pre is not call.dq
        return replace(self, do=pick.rows(call.do), x=None if between else self.x)

    def position(self, index: int) -> int:
        """``masking.positions`` of sampled row ``index``, known to the host."""
        return evenly(index, self.q_length, self.q.shape[2]) + self.masking.shift(self.q_length, self.k.shape[2])


Index = TypeVar("Index", int, Tensor)


def evenly(index: Index, length: int, rows: int) -> Index:
    """Which of ``length`` queries sampled row ``index`` of ``rows`` is."""
    return (2 * index + 1) * length // (2 * rows)


class _Picker:
    """Copies the sampled part of a tensor; never waits for the device."""

    def __init__(self, sequences: int, length: int, rows: int, device: torch.device) -> None:
        self._sequences = sequences
        self._index = evenly(torch.arange(rows, device=device), length, rows) if rows < length else None

    def all(self, tensor: Tensor) -> Tensor:
        return tensor.detach()[: self._sequences].clone(memory_format=torch.contiguous_format)

    def rows(self, tensor: Tensor, axis: int = 2) -> Tensor:
        if self._index is None or tensor.shape[axis] == 1:
            return self.all(tensor)
        return tensor.detach()[: self._sequences].index_select(axis, self._index)
