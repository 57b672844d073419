"""What is kept of an attention call until its gradient comes: a few sequences, evenly spaced query rows, all keys.

Also what is told of W_Q. Layers whose samples are alike are stacked, so that one measurement is of all of them. The
host never waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from attn_diag.captures.metadata import AlibiOrigin
from attn_diag.reference import Masking
from attn_diag.watching.live.call import AttentionCall, Documents, OwnRows
from attn_diag.watching.live.pending import TOTALS
from attn_diag.watching.monitoring.key_gradients import ForwardSketch, GradientFit
from attn_diag.watching.monitoring.nonfinite import Largest

# 2**10 powers of the Gram matrix; see ``spectral_norms`` for what that leaves.
_SQUARINGS = 10
# Of a float64 tensor there may be so many elements as an eighth of the temporaries' bytes: half of them.
_BYTES_AN_ELEMENT = 16
# W_Q of at most so many bytes is copied, to be looked at together with that of other layers.
_SMALL_WEIGHT = 2**23


@dataclass(frozen=True)
class Sample:
    """Copies of some sequences and query rows of one call, in the kernel's own dtypes; or of L layers' calls, alike."""

    q: Tensor
    """[S, L * Hq, R, D]: row r is query ``evenly(r, q_length, R)``."""
    k: Tensor
    """[S, L * Hk, Tk, D]."""
    v: Tensor
    """[S, L * Hk, Tk, Dv]."""
    o: Tensor
    """[S, L * Hq, R, Dv]."""
    lse: Tensor | None
    """[S, L * Hq, R]."""
    mask: Tensor | None
    """[1 or S, L, 1 or Hq, 1 or R, 1 or Tk], bool (True attends) or additive."""
    x: Tensor | None
    """[S, L, R, C]. None also where q is known not to be the projection's output itself (there is another ``dq_pre``):
    dW_Q does not follow from dQ there."""
    w_q: Tensor | None
    """[L * Hq, D, C], a copy: a step of the optimizer may come, or a sharded model have its weights no more."""
    projection: LayerProjection | None
    """What is told of W_Q, where it is too large for a copy."""
    do: Tensor | None
    """[S, L * Hq, R, Dv]; None: no backward was seen."""
    dq: Tensor | None
    """[S, L * Hq, R, D]; None also where it is a total over several uses of q."""
    q_length: int
    masking: Masking
    """Causality and window; ``positions`` are those of the sampled rows."""
    scale: float
    softcap: float | None
    own: OwnRows | None = None
    """Where other ranks have other rows of the sequence."""
    layers: int = 1
    """L."""
    sinks: Tensor | None = None
    """[L * Hq], a logit a head in the softmax's denominator."""
    alibi_slopes: Tensor | None = None
    """[S, L * Hq, R or 1] float64."""
    alibi_origin: AlibiOrigin = "row"
    dropout_mask: Tensor | None = None
    """bool [S, L * Hq, R, Tk]: which probabilities were kept."""
    dropout_p: float | None = None
    documents: Documents | None = None
    """Of packed sequences: which the sampled rows and the keys belong to; L is then 1."""
    fused: bool = True
    """Whether what O is off by tells dQ's error: see ``AttentionCall.fused``."""
    sketch: ForwardSketch | None = None
    """Where rows are left out: what the rest of the forward tells dK and dV, until these have come."""
    keys: GradientFit | None = None
    """Then: how well they fit, [L * Hk]."""
    dk: Tensor | None = None
    """[S, L * Hk, Tk, D], where no row is left out; None also where not all gradients were seen."""
    dv: Tensor | None = None
    """[S, L * Hk, Tk, Dv]."""
    largest: Largest | None = None
    """Of the whole tensors, where NaN and Inf show."""

    @classmethod
    def of(cls, call: AttentionCall, sequences: int = 1, rows: int = 1024) -> Sample:
        """Copy the first ``sequences`` of the batch, and of each all query rows or ``rows`` evenly spaced ones."""
        length = call.q.shape[2]
        count, several = min(rows, length), min(sequences, len(call.q))
        if (documents := call.documents()) is not None:
            at = evenly(torch.arange(count, device=call.q.device), length, count)
            documents = documents._replace(rows=documents.rows[at], positions=documents.positions[at])

        def pick(tensor: Tensor, axis: int = 2) -> Tensor:
            return _picked(tensor, several, length, count, axis)

        q, mask, w_q = pick(call.q), call.mask, call.w_q
        if mask is not None:
            mask = pick(mask[(None,) * (4 - mask.ndim)])[:, None]
        if w_q is not None and (type(w_q) not in (Tensor, torch.nn.Parameter) or len(w_q) != q.shape[1] * q.shape[3]):
            w_q = None  # a shard of it
        x = None if call.x is None or w_q is None else pick(call.x, 1).to(call.x_dtype)[:, None]
        projection = None
        if w_q is not None:
            weight = w_q.detach().view(q.shape[1], q.shape[3], -1)
            if weight.numel() * weight.element_size() <= _SMALL_WEIGHT:
                w_q = weight.clone(memory_format=torch.contiguous_format)
            else:
                w_q, projection = None, LayerProjection.of(weight, q, x)
        sample = cls(
            q=q,
            k=_picked(call.k, several),
            v=_picked(call.v, several),
            o=pick(call.o),
            lse=None if call.lse is None or _elsewhere(call) else _with_sinks(pick(call.lse), call),
            mask=mask,
            x=x,
            w_q=w_q,
            projection=projection,
            do=None,
            dq=None,
            q_length=length,
            masking=call.masking,
            scale=call.q.shape[3] ** -0.5 if call.scale is None else call.scale,
            softcap=call.softcap,
            own=call.own,
            sinks=None if call.sinks is None else call.sinks.detach().clone(),
            alibi_slopes=_slopes(call, several, documents),
            alibi_origin="row" if documents is not None else call.alibi_origin,
            dropout_mask=None if call.dropout_mask is None else pick(call.dropout_mask),
            dropout_p=call.dropout_p,
            documents=documents,
            fused=call.fused,
            sketch=ForwardSketch.of(call.q[:several], call.o[:several])
            if count < length and call.own is None and (call.awaits_backward or call.do is not None)
            else None,
            largest=Largest.of(call),
        )
        return sample.with_gradient(call)

    def with_gradient(self, call: AttentionCall) -> Sample:
        """Add dO, once the backward has brought it."""
        if call.do is None:
            return self
        # A bias alone leaves dQ the gradient at the projection: the watch then gives the same tensor twice.
        between = call.dq_pre is not None and call.dq_pre is not call.dq
        own = TOTALS not in call.notes
        gradients = (call.do, call.dq if own else None)
        do, dq = (None if t is None else _picked(t, len(self.q), self.q_length, self.q.shape[2]) for t in gradients)
        keys = self._key_gradients(call) if own and call.own is None else {}
        largest = None if self.largest is None else self.largest.with_gradient(call)
        x = None if between else self.x
        return replace(self, do=do, dq=dq, x=x, sketch=None, largest=largest, **keys)

    def _key_gradients(self, call: AttentionCall) -> dict[str, Any]:
        """Copies of dK and dV, or what takes their place where rows are left out; nothing where one is not there."""
        if call.do is None or call.dq is None or call.dk is None or call.dv is None:
            return {}
        do, dq, dk, dv = (t[: len(self.q)] for t in (call.do, call.dq, call.dk, call.dv))
        if dk.shape != self.k.shape or dv.shape != self.v.shape:
            return {}
        if self.sketch is None:
            return {"dk": _picked(dk, len(dk)), "dv": _picked(dv, len(dv))}
        return {"keys": GradientFit.of(self.sketch, self.k, self.v, do=do, dq=dq, dk=dk, dv=dv)}

    @property
    def likeness(self) -> tuple[object, ...]:
        """Equal for calls that can be measured as one of more heads."""
        tensors = (getattr(self, name) for name in _STACKED)
        kinds = (None if t is None else (t.shape, t.dtype, t.device) for t in tensors)
        own: object = None if self.own is None else self.own.positions.numpy().tobytes()
        if self.documents is not None:
            own = id(self)  # whether others are packed alike would have to be looked up on the device
        options = (
            self.masking.causal, self.masking.window, self.scale, self.softcap, self.alibi_origin, self.dropout_p,
            self.fused, self.keys is not None, self.largest and self.largest.known,
        )  # fmt: skip
        return *kinds, self.q_length, *options, own

    @classmethod
    def stacked(cls, samples: Sequence[Sample]) -> Sample:
        """One of several that are alike, head after head."""

        def joined(name: str, axis: int) -> Tensor | None:
            parts = [getattr(sample, name) for sample in samples]
            for part in parts:
                if part is not None and part.is_cuda:  # copied on the stream of its call, which may be another
                    part.record_stream(torch.cuda.current_stream(part.device))
            return None if parts[0] is None else torch.cat(parts, axis)

        tensors: dict[str, Any] = {name: joined(name, axis) for name, axis in _STACKED.items()}
        projections = [sample.projection for sample in samples if sample.projection is not None]
        projection = LayerProjection(*map(torch.cat, zip(*projections, strict=True))) if projections else None
        each = [sample.keys for sample in samples if sample.keys is not None]
        keys = GradientFit(*map(torch.cat, zip(*each, strict=True))) if each else None
        tensors["largest"] = Largest.stacked([sample.largest for sample in samples])
        return replace(samples[0], **tensors, projection=projection, keys=keys, layers=len(samples))

    @property
    def all_see_keys(self) -> bool:
        """Whether it is known on the host that every row sees a key, those left out too."""
        if self.mask is not None or self.documents is not None or self.own is not None:
            return False
        shift = self.masking.shift(self.q_length, self.k.shape[2])
        # Between the first and the last row spans move by no more than a key a row.
        spans = (self.masking.span(at + shift, at + shift, self.k.shape[2]) for at in (0, self.q_length - 1))
        return all(span.start < span.stop for span in spans)

    def position(self, index: int) -> int:
        """Compute ``positions`` of one sampled row on the host, without asking the device."""
        row = evenly(index, self.q_length, self.q.shape[2])
        if self.own is not None:
            return int(self.own.positions[row])
        return row + self.masking.shift(self.q_length, self.k.shape[2])

    def positions(self, rows: slice) -> Tensor:
        """position(t) of some of the sampled rows, int64 on the device; see ``Masking``."""
        if self.documents is not None:
            return self.documents.positions[rows]
        device = "cpu" if self.own is not None else self.q.device
        at = evenly(torch.arange(rows.start, rows.stop, device=device), self.q_length, self.q.shape[2])
        if self.own is not None:
            return self.own.positions[at].to(self.q.device, non_blocking=True)
        return at + self.masking.shift(self.q_length, self.k.shape[2])


# Tensors of a sample, and the axis that layers share.
_STACKED = {"q": 1, "k": 1, "v": 1, "o": 1, "lse": 1, "mask": 1, "x": 1, "w_q": 0, "do": 1, "dq": 1, "dk": 1, "dv": 1,
            "sinks": 0, "alibi_slopes": 1, "dropout_mask": 1}  # fmt: skip

Index = TypeVar("Index", int, Tensor)


def evenly(index: Index, length: int, rows: int) -> Index:
    """Say which of ``length`` queries the sampled row ``index`` of ``rows`` is: a number, or a tensor of them."""
    return (2 * index + 1) * length // (2 * rows)


def _slopes(call: AttentionCall, sequences: int, documents: Documents | None) -> Tensor | None:
    """ALiBi's slopes of every sampled row, [S, Hq, R or 1] float64."""
    if call.alibi_slopes is None:
        return None
    slopes = call.alibi_slopes.detach().double().to(call.q.device, copy=True)
    if slopes.dim() == 1:
        return slopes[None, :, None].expand(sequences, -1, -1)
    if documents is None:
        return slopes[:sequences, :, None]
    return slopes[documents.rows.clamp(max=len(slopes) - 1)].T[None]


def _elsewhere(call: AttentionCall) -> bool:
    """Whether the LSE counts ALiBi's distances from where packed documents begin, which rows do not know."""
    return call.alibi_slopes is not None and call.cu_seqlens_q is not None and call.alibi_origin != "row"


def _with_sinks(lse: Tensor, call: AttentionCall) -> Tensor:
    """The LSE of keys and sinks together, whatever the kernel's own is."""
    if call.sinks is None or call.lse_sink == "included":
        return lse
    return torch.logaddexp(lse, call.sinks.detach().to(lse.dtype)[:, None])


def _picked(tensor: Tensor, sequences: int, length: int = 0, rows: int = 0, axis: int = 2) -> Tensor:
    """A copy of the first sequences, and of ``rows`` of ``length`` queries (0: of all); never waits for the device."""
    part = tensor.detach()[:sequences]
    if rows < length and part.shape[axis] > 1:
        if length % rows:
            return part.index_select(axis, evenly(torch.arange(rows, device=part.device), length, rows))
        every = length // rows
        part = part[(slice(None),) * axis + (slice(every // 2, None, every),)]
    return part.clone(memory_format=torch.contiguous_format)


class LayerProjection(NamedTuple):
    """What is computed of W_Q; [L * Hq] float64 each."""

    norms: Tensor
    """Spectral norms of W_Q."""
    q: Tensor
    """Squared norms of q; NaN without x."""
    misfit: Tensor
    """Squared norms of q - x W_Q^T, less a bias; NaN without x."""

    @classmethod
    def of(cls, w_q: Tensor, q: Tensor, x: Tensor | None, temporaries: int = 2**26) -> LayerProjection:
        """Compute them from w_q [L * Hq, D, C], and the sampled q [S, L * Hq, R, D] and x [S, L, R, C]."""
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            norms = spectral_norms(w_q, temporaries)
            if x is None:
                unknown = torch.full_like(norms, torch.nan)
                return cls(norms, unknown, unknown)
            weight, each = by_layer(w_q, 0, x.shape[1]), by_layer(q, 1, x.shape[1])
            at_once = temporaries // _BYTES_AN_ELEMENT // (len(q) * q.shape[3] * (q.shape[2] + x.shape[3]))
            parts = [
                _fit(weight[layers, heads], each[:, layers, heads], x[:, layers].double())
                for layers, heads in pieces(weight.shape[0], weight.shape[1], at_once)
            ]
            return cls(norms, torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))


def pieces(layers: int, heads: int, at_once: int) -> Iterator[tuple[slice, slice]]:
    """Layers and heads of each, in order: whole layers where one is no more than ``at_once`` heads."""
    many, few = max(1, at_once // heads), max(1, min(heads, at_once))
    for layer in range(0, layers, many):
        for head in range(0, heads, few):
            yield slice(layer, layer + many), slice(head, head + few)


def by_layer(tensor: Tensor, axis: int, layers: int) -> Tensor:
    """With an axis of layers' heads (or of heads' features) as two."""
    return tensor.view(*tensor.shape[:axis], layers, -1, *tensor.shape[axis + 1 :])


def _fit(weight: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms of q [S, l, h, R, D] and of q - x W^T less its mean over rows, which is a bias; [l * h] each."""
    values = q.double()
    made = x @ weight.double().flatten(1, 2).mT  # [S, l, R, h * D]
    missed = values - by_layer(made, 3, weight.shape[1]).transpose(2, 3)
    missed = missed - missed.mean((0, 3), keepdim=True)
    return values.square().sum((0, 3, 4)).flatten(), missed.square().sum((0, 3, 4)).flatten()


def spectral_norms(weight: Tensor, temporaries: int = 2**26) -> Tensor:
    """The largest singular value of each of ``weight`` [h, D, C]: float64 [h].

    With G = W W^T [D, D] of eigenvalues g_i, the result is sqrt(tr(G^(k+1)) / tr(G^k)), k = 1024, by ten squarings:
    a mean of the eigenvalues with weights g_i^k. It is never above the truth and, for any spectrum of D = 128
    eigenvalues, at most 0.14 % below. A decomposition would make the host wait; a power iteration needs a start vector,
    and its error depends on it.
    """
    step = max(1, temporaries // _BYTES_AN_ELEMENT // (weight.shape[1] * weight.shape[2]))
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
