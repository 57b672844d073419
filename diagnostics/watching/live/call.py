"""One attention call of a running model, which part of it is kept, and who is told of it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from attn_diag.captures.absorbed import is_fused
from attn_diag.captures.alibi import SLOPES
from attn_diag.captures.capture import Capture
from attn_diag.captures.dropout import KEPT
from attn_diag.captures.metadata import AlibiOrigin, Causal, LseSink
from attn_diag.captures.sinks import OF_HEADS
from attn_diag.captures.sources import PACKING
from attn_diag.errors import InputError
from attn_diag.reference import Masking
from attn_diag.watching.live.hops import RingHops
from attn_diag.watching.live.pipeline import Stage


@dataclass(frozen=True)
class CallPlace:
    """Where a call stands, known before it runs."""

    step: int
    """Step of training; see ``Watch`` for when one ends."""
    layer: int
    """Its number: the module's ``layer_idx`` (from 0 on), else the first number in its name, else the order in which
    layers first appeared."""
    module: str | None
    """The dotted name of the innermost module of the model that makes the call ("" for the model itself); None outside
    the model."""
    call: int
    """How many calls this module made before in this step (micro-batches, or several attentions)."""
    gradients: bool
    """Whether the call takes part in autograd."""


@dataclass(frozen=True)
class OwnRows:
    """Which rows of its sequences a rank has, where a group of ranks shares them (context parallelism)."""

    positions: Tensor
    """Their places in the sequence, ascending; int64 [Tq] on the host. Keys are in the sequence's order."""
    ranks: tuple[int, ...]
    """The group."""
    hops: str
    """Whose keys, and which of them, came in which order."""


class Documents(NamedTuple):
    """Packed sequences: documents that share the axes of rows and keys."""

    rows: Tensor
    """The number of each row's document, int64 [Tq]."""
    keys: Tensor
    """The number of each key's, int64 [Tk]; -1 for padding."""
    positions: Tensor
    """Among all keys the place of each row's own, position(t) of ``Masking``, int64 [Tq]."""

    def hidden(self, rows: slice, keys: slice) -> Tensor:
        """Tell which keys are another document's, bool [R, K], in a part of the rows and keys."""
        return self.rows[rows, None] != self.keys[None, keys]


class _Gone(NamedTuple):
    """What is left of a tensor that was let go."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    is_cuda: bool

    @classmethod
    def of(cls, t: Tensor) -> _Gone:
        return cls(t.shape, t.dtype, t.device, t.is_cuda)


@dataclass
class AttentionCall:
    """The tensors of one call, as the kernel saw them. They are the model's own, not copies: clone what must last."""

    place: CallPlace
    kernel: str
    q: Tensor
    """[B, Hq, Tq, D] in the kernel's dtype."""
    k: Tensor
    """[B, Hk, Tk, D]."""
    v: Tensor
    """[B, Hk, Tk, Dv]."""
    o: Tensor
    """[B, Hq, Tq, Dv]."""
    lse: Tensor | None = None
    """[B, Hq, Tq], natural logarithm; None where the kernel keeps it to itself."""
    mask: Tensor | None = None
    """bool (True attends) or additive, broadcastable to [B, Hq, Tq, Tk]."""
    cu_seqlens_q: Tensor | None = None
    """Of packed sequences, which share T of a batch of 1: where each begins among the rows, and the last one ends."""
    cu_seqlens_k: Tensor | None = None
    """The same among the keys."""
    causal: Causal = "none"
    """Of packed sequences each one's own, as ``window`` is."""
    scale: float | None = None
    window: tuple[int, int] | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    """[Hq], a logit a head in the softmax's denominator."""
    lse_sink: LseSink = "included"
    """Whether ``lse`` has the sinks in it, or is that of the keys alone."""
    alibi_slopes: Tensor | None = None
    """[Hq], or [B, Hq] ([documents, Hq])."""
    alibi_origin: AlibiOrigin = "row"
    """What ALiBi's bias is counted from; see ``Metadata``."""
    dropout_mask: Tensor | None = None
    """bool [B, Hq, Tq, Tk], True where a probability was kept."""
    dropout_p: float | None = None
    """How many are dropped in the mean."""
    do: Tensor | None = None
    """This and dq, dk, dv: None before the backward pass, and without one."""
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsinks: Tensor | None = None
    """[Hq], summed over rows and the whole batch."""
    dmask: Tensor | None = None
    """Of ``mask``'s shape, where it is additive and learned."""
    x: Tensor | None = None
    """Input of the query projection, [B, Tq, C], where it was found."""
    x_dtype: torch.dtype | None = None
    """The dtype in which the product saw ``x``: cast what is kept of it."""
    w_q: Tensor | None = None
    """The rows [Hq * D, C] of the projection's weight."""
    dq_pre: Tensor | None = None
    """After the backward, the gradient at the projection's output, [B, Hq, Tq, D], where q is not x w_q^T itself."""
    head_offset: int = 0
    """The number of the first head in the whole model, where tensor parallelism gives this rank some of them."""
    own: OwnRows | None = None
    """Where other ranks have other rows: which are these. dk and dv are those of the rank's own keys then, summed over
    the rows of all ranks, while k and v are all the keys that the rows may see."""
    hops: RingHops | None = None
    """Of a ring what each hop returned: in the forward, and behind the backward there."""
    stage: Stage | None = None
    """Of a pipeline, where there is one: it is a model of its own."""
    refused: str | None = None
    """Why attn-diag cannot analyse the call (dropout)."""
    written: str | None = None
    """What the function wrote into of its inputs, though they are its caller's, in words."""
    lent: bool = False
    """Whether what ran is somebody's own, which may write into what it is given."""
    copied: Set[str] = frozenset()
    """Names of tensors that are copies already: they last."""
    awaits_backward: bool = False
    """Whether o takes part in autograd, so that ``Listener.backward`` may follow."""
    notes: list[str] = field(default_factory=list)

    @property
    def masking(self) -> Masking:
        """Which keys a row may see by causality and window; what ``mask`` hides of them comes on top."""
        return Masking(self.causal, self.window, positions=None if self.own is None else self.own.positions)

    @property
    def fused(self) -> bool:
        """Whether the backward may take delta from O and make P again, as a fused kernel does; plain torch does not."""
        return is_fused(self.kernel)

    def documents(self) -> Documents | None:
        """Say which document every row and key of packed sequences belongs to; None where there are none.

        Nothing waits for the device.
        """
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            return None
        device, count = self.q.device, len(self.cu_seqlens_q) - 1
        ends = [t.to(device=device, dtype=torch.int64) for t in (self.cu_seqlens_q, self.cu_seqlens_k)]
        places = [torch.arange(t.shape[2], device=device) for t in (self.q, self.k)]
        rows, keys = (torch.searchsorted(end, place, right=True) - 1 for end, place in zip(ends, places, strict=True))
        # Rows behind the last document see no key: no document's number is that of the keys there.
        keys = keys.masked_fill(keys == count, -1)
        own = rows.clamp(max=count - 1)
        starts, lengths = ([end[:-1][own] for end in ends], [end.diff()[own] for end in ends])
        shift = 0 if self.causal == "top-left" else lengths[1] - lengths[0]
        return Documents(rows, keys, places[0] - starts[0] + starts[1] + shift)

    def let_go(self) -> None:
        """Forget the forward's data, once copied: else it would live on, checkpointed or not, until the backward."""
        # Tensors on "meta" would take microseconds, and what is asked for afterwards is what these were.
        self.q, self.k, self.v, self.o = (cast(Tensor, _Gone.of(t)) for t in (self.q, self.k, self.v, self.o))
        self.lse = self.mask = self.x = self.w_q = self.sinks = self.alibi_slopes = self.dropout_mask = self.hops = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are there, by their names in capture format 1.

        Where other ranks have other rows, dK and dV are sums over those too: "own_dk" and "own_dv".
        """
        names = (
            "q", "k", "v", "o", "lse", "do", "dq", "dk", "dv", "x", "w_q", "dq_pre", "mask", "dmask", SLOPES, KEPT,
            *PACKING, *OF_HEADS,
        )  # fmt: skip
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.own is None:
            return found
        renamed = {"dk": "own_dk", "dv": "own_dv"}
        return {"q_positions": self.own.positions} | {renamed.get(name, name): t for name, t in found.items()}

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of capture format 1 (keywords of ``Metadata``) that the call itself knows."""
        extra: Mapping[str, str] = {"call": str(self.place.call)}
        if self.place.module is not None:
            extra = {**extra, "module": self.place.module}
        if self.own is not None:
            extra = {**extra, "sequence_ranks": ",".join(map(str, self.own.ranks)), "hops": self.own.hops}
        if self.stage is not None:
            named = {"stage": f"{self.stage.number + 1} of {self.stage.count}", "stage_ranks": str(self.stage.ranks)}
            extra = {**extra, **named}
        own = ("causal", "scale", "window", "softcap", "lse_sink", "alibi_origin", "dropout_p")
        return {
            **{name: getattr(self, name) for name in own},
            "layer": self.place.layer,
            "step": self.place.step,
            "kernel": self.kernel,
            "device": torch.cuda.get_device_name(self.q.device) if self.q.is_cuda else self.q.device.type,
            "torch": torch.__version__,
            "notes": self.metadata_notes(),
            "extra": extra,
        }

    def metadata_notes(self) -> str | None:
        """Its notes, in one."""
        return "; ".join(self.notes) or None

    def capture(self) -> Capture:
        """Make a Capture in memory of the tensors as they are now.

        Raises:
            InputError: they do not fit each other.
        """
        tensors: dict[str, Tensor | None] = {**self.tensors()}
        if self.x is not None:
            tensors["x"] = self.x.to(self.x_dtype)
        return Capture.from_tensors(tensors, **self.metadata())


class Part:
    """Which items of the batch and which query heads of every call are kept.

    Args:
        heads: query heads; the smallest range of whole key groups that holds them is taken. None: all.
        batch: items of the batch; None: all.

    Raises:
        InputError: one of them is below 0, or no number.
    """

    def __init__(self, heads: Iterable[int] | None, batch: Iterable[int] | None) -> None:
        self._heads, self._batch = _indices("heads", heads), _indices("batch", batch)

    @property
    def sequences(self) -> int | None:
        """All that is kept is of the first so many items of a batch; None: no such number."""
        return None if self._batch is None else self._batch[-1] + 1

    def missing(self, call: AttentionCall) -> str | None:
        """Say in words what a call lacks of this part; None where it has something of it."""
        if not (call.q.numel() and call.k.numel()):
            return f"nothing was attended to: q has the shape {tuple(call.q.shape)}, k {tuple(call.k.shape)}"
        for name, wanted, there in (("heads", self._heads, call.q.shape[1]), ("batch", self._batch, len(call.q))):
            if wanted is not None and wanted[0] >= there:
                return f"{name} {wanted}, but the call has 0 to {there - 1}"
        return None

    def items(self, call: AttentionCall) -> list[int]:
        """List the kept items of the call's batch."""
        batch = call.q.shape[0]
        return list(range(batch)) if self._batch is None else [b for b in self._batch if b < batch]

    def heads(self, call: AttentionCall) -> tuple[int, int]:
        """Give the first kept head and the one after the last: whole groups, whose gradient a key head's is."""
        heads = call.q.shape[1]
        if not self._heads:
            return 0, heads
        group = heads // call.k.shape[1]
        first = self._heads[0] // group * group
        return first, min(-(-(self._heads[-1] + 1) // group) * group, heads)

    def clones(self, call: AttentionCall, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Clone this part of ``given``, some of the call's tensors by name."""
        batch, heads = call.q.shape[:2]
        group = heads // call.k.shape[1]
        items, (first, last) = self.items(call), self.heads(call)
        together = items == list(range(items[0], items[-1] + 1))
        # What is all of a tensor is not cut out of it, and the stream is asked for once: each takes microseconds.
        some_items, some_heads = len(items) < batch, last - first < heads
        stream = torch.cuda.current_stream(call.q.device) if call.q.is_cuda else None
        parts: dict[str, Tensor] = {}
        for name, t in given.items():
            part = t
            if name == "q_positions":
                parts[name] = t.to(call.q.device)  # as everything that is taken
                continue
            if name in PACKING:
                parts[name] = _clone(t, stream)
                continue
            if name in OF_HEADS:
                if name == "sinks" or not some_items:  # their gradient is one sum over the whole batch
                    parts[name] = _clone(t[first:last], stream)
                continue
            if name == SLOPES:
                own = t[items] if some_items and t.dim() == 2 and call.cu_seqlens_q is None else t
                parts[name] = _clone(own[..., first:last], stream)
                continue
            if name == "w_q":
                part = t[first * call.q.shape[3] : last * call.q.shape[3]] if some_heads else t
                parts[name] = part if part is t and name in call.copied else _clone(part, stream)
                continue
            if name == "dmask" and ((some_items and _shared(t, 4)) or (some_heads and _shared(t, 3))):
                continue  # one sum over what is not kept
            if name in ("mask", "dmask"):
                part = t[(None,) * (4 - t.dim())]
            if name == "mask":
                # Expanded axes hold one mask.
                for axis in range(4):
                    part = part.narrow(axis, 0, 1) if part.stride(axis) == 0 else part
            if some_items and (part.shape[0] == batch or name == KEPT):
                part = part[items[0] : items[-1] + 1] if together else torch.stack([part[b] for b in items])
            if not some_heads:
                pass
            elif name in ("k", "v") or name.endswith(("dk", "dv")):
                part = part[:, first // group : last // group]
            elif name != "x" and part.shape[1] == heads:
                part = part[:, first:last]
            part = part.to(call.x_dtype) if name == "x" else part
            parts[name] = part if part is t and name in call.copied and t.is_contiguous() else _clone(part, stream)
        return parts


def _shared(gradient: Tensor, axis: int) -> bool:
    """Whether the gradient of a mask is one sum along the axis so many from the last."""
    return gradient.dim() < axis or gradient.shape[-axis] == 1


class Listener(Protocol):
    """Who is told of calls. Its exceptions never reach the training loop: they are warned about, once."""

    @property
    def sequences(self) -> int | None:
        """So many sequences, the first of a batch, are all that it looks at; None: it looks at every one."""

    @property
    def may_be_late(self) -> bool:
        """Whether it may be told at the end of the step, of copies: it need not see the call while that runs."""

    @property
    def may_wait(self) -> bool:
        """Whether a call that it wants may wait for the device."""

    def wants(self, place: CallPlace) -> bool:
        """Whether to be told of the call that is about to run. Asked for every call: no work, no synchronisation."""

    def wants_step(self, step: int) -> bool:
        """Whether any call of this step may be wanted; where not, nothing at all is kept during it."""

    def forward(self, call: AttentionCall) -> None:
        """After the call's forward."""

    def backward(self, call: AttentionCall) -> None:
        """After its backward: do, dq, dk, dv and, where there is one, dq_pre have come in."""

    def step_ended(self, step: int) -> None:
        """After an optimizer's step (or the end of a forward in a loop that does not train)."""

    def failed(self, error: Exception) -> None:
        """After a failure of ours in one of the calls, which has been logged."""

    def forked(self) -> None:
        """In a forked child, which nothing is told of any more: close, without waiting for a lock."""


def _indices(name: str, chosen: Iterable[int] | None) -> list[int] | None:
    """Sort the numbers; InputError unless all are 0 or more."""
    if chosen is None:
        return None
    try:
        numbers = sorted(operator.index(number) for number in chosen)
    except TypeError:
        numbers = []
    if not numbers or numbers[0] < 0:
        raise InputError(f"{name} must hold numbers from 0 on, such as [0, 1], got {chosen!r}")
    return numbers


def _clone(part: Tensor, stream: torch.cuda.Stream | None) -> Tensor:
    """A copy in order of its axes, on the current stream; the original's memory waits for that stream too."""
    if stream is not None and part.is_cuda:
        part.record_stream(stream)
    return part.clone(memory_format=torch.contiguous_format)
