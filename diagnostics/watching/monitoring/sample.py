"""What is kept of an attention call until its gradient comes: a few sequences, evenly spaced query rows, all keys.

Also what is told of W_Q. The host never waits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from attn_diag.reference import Masking
from attn_diag.watching.live.call import AttentionCall, Documents, OwnRows

# 2**10 powers of the Gram matrix; see ``spectral_norms`` for what that leaves.
_SQUARINGS = 10
_ELEMENTS = 2**22  # float64, 32 MB


@dataclass(frozen=True)
class Sample:
    """Copies of some sequences and query rows of one call, in the kernel's own dtypes."""

    q: Tensor
    """[S, Hq, R, D]: row r is query ``evenly(r, q_length, R)``."""
    k: Tensor
    """[S, Hk, Tk, D]."""
    v: Tensor
    """[S, Hk, Tk, Dv]."""
    o: Tensor
    """[S, Hq, R, Dv]."""
    lse: Tensor | None
    """[S, Hq, R]."""
    mask: Tensor | None
    """[1 or S, 1 or Hq, 1 or R, 1 or Tk], bool (True attends) or additive."""
    x: Tensor | None
    """[S, R, C]. None also where q is known not to be the projection's output itself (there is another ``dq_pre``):
    dW_Q does not follow from dQ there."""
    projection: LayerProjection | None
    do: Tensor | None
    """[S, Hq, R, Dv]; None: no backward was seen."""
    q_length: int
    masking: Masking
    """Causality and window, with the sampled rows' positions on the device."""
    scale: float
    softcap: float | None
    own: OwnRows | None = None
    """Where other ranks have other rows of the sequence."""
    documents: Documents | None = None
    """Of packed sequences: which the sampled rows and the keys belong to."""

    @classmethod
    def of(cls, call: AttentionCall, sequences: int = 1, rows: int = 1024) -> Sample:
        """Copy the first ``sequences`` of the batch, and of each all query rows or ``rows`` evenly spaced ones."""
        length, device = call.q.shape[2], call.q.device
        count = min(rows, length)
        positions = evenly(torch.arange(count, device=device), length, count)
        if (documents := call.documents()) is not None:
            documents = documents._replace(
                rows=documents.rows[positions], positions=(positions := documents.positions[positions])
            )
        elif call.own is None:
            positions += call.masking.shift(length, call.k.shape[2])
        else:
            positions = call.own.positions.to(device)[positions]
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
            own=call.own,
            documents=documents,
        )
        return sample.with_gradient(call)

    def with_gradient(self, call: AttentionCall) -> Sample:
        """Add dO, once the backward has brought it."""
        if call.do is None:
            return self
        pick = _Picker(len(self.q), self.q_length, self.q.shape[2], call.do.device)
        # A bias alone leaves dQ the gradient at the projection: the watch then gives the same tensor twice.
        between = call.dq_pre is not None and call.dq_pre is not call.dq
        return replace(self, do=pick.rows(call.do), x=None if between else self.x)

    def position(self, index: int) -> int:
        """Compute ``masking.positions`` of one sampled row on the host, without asking the device."""
        row = evenly(index, self.q_length, self.q.shape[2])
        if self.own is not None:
            return int(self.own.positions[row])
        return row + self.masking.shift(self.q_length, self.k.shape[2])


Index = TypeVar("Index", int, Tensor)


def evenly(index: Index, length: int, rows: int) -> Index:
    """Say which of ``length`` queries the sampled row ``index`` of ``rows`` is: a number, or a tensor of them."""
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


@dataclass(frozen=True)
class LayerProjection:
    """What is computed of W_Q during the forward, as a sharded model has its weights only then; [Hq] float64 each."""

    norms: Tensor
    """Spectral norms of W_Q."""
    q: Tensor
    """Squared norms of q; NaN without x."""
    misfit: Tensor
    """Squared norms of q - x W_Q^T, less a bias; NaN without x."""

    @classmethod
    def of(cls, w_q: Tensor, q: Tensor, x: Tensor | None) -> LayerProjection:
        """Compute them from w_q [Hq * D, C], and the sampled q [S, Hq, R, D] and x [S, R, C]."""
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            heads = q.shape[1]
            weight = w_q.detach().view(heads, q.shape[3], -1)
            norms = spectral_norms(weight)
            if x is None:
                unknown = torch.full_like(norms, torch.nan)
                return cls(norms, unknown, unknown)
            inputs = x.double()
            step = max(1, _ELEMENTS // (q.shape[0] * q.shape[2] * q.shape[3]))
            parts = [_fit(weight[i : i + step], q[:, i : i + step], inputs) for i in range(0, heads, step)]
            return cls(norms, torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))


def _fit(weight: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms of q and of q - x W^T less its mean over rows, which is a bias of the projection; [h] each."""
    values = q.double()
    missed = values - torch.einsum("src,hdc->shrd", x, weight.double())
    missed = missed - missed.mean((0, 2), keepdim=True)
    return values.square().sum((0, 2, 3)), missed.square().sum((0, 2, 3))


def spectral_norms(weight: Tensor) -> Tensor:
    """The largest singular value of each of ``weight`` [h, D, C]: float64 [h].

    With G = W W^T [D, D] of eigenvalues g_i, the result is sqrt(tr(G^(k+1)) / tr(G^k)), k = 1024, by ten squarings:
    a mean of the eigenvalues with weights g_i^k. It is never above the truth and, for any spectrum of D = 128
    eigenvalues, at most 0.14 % below. A decomposition would make the host wait; a power iteration needs a start vector,
    and its error depends on it.
    """
    step = max(1, _ELEMENTS // (weight.shape[1] * weight.shape[2]))
    return torch.cat([_norms(weight[start : start + step].double()) for start in range(0, len(weight), step)])


def _norms(weight: Tensor) -> Tensor:
    gram = weight @ weight.mT
    power = gram
    for i in range(_SQUARINGS):
        if i % 3 == 0:  # each squaring of a matrix of norm 1 leaves D^(-1/2) of it at least
            power = power / torch.linalg.vector_norm(power, dim=(1, 2), keepdim=True)
        power = torch.bmm(power, power)
    trace = power.diagonal(dim1=1, dim2=2).sum(1)
    # W = 0 gives 0 / 0.
    norms = ((gram * power).sum((1, 2)) / trace).clamp_(min=0.0).sqrt_()
    return torch.where(gram.diagonal(dim1=1, dim2=2).sum(1) == 0, 0.0, norms)
