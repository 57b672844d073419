"""One attention call of a running model, and who is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.captures.metadata import Causal
from attn_diag.reference import Masking


@dataclass(frozen=True)
class CallPlace:
    """Where a call stands, known before it runs.

    ``step``: of training (see ``Steps``). ``module``: the dotted name of the innermost module of the model that makes
    the call ("" for the model itself), None outside the model. ``layer``: its number: the module's ``layer_idx``, else
    the first number in its name, else the order in which layers first appeared. ``call``: how many calls this module
    made before in this step (micro-batches, or several attentions). ``gradients``: whether the call takes part in
    autograd.
    """

    step: int
    layer: int
    module: str | None
    call: int
    gradients: bool


@dataclass
class AttentionCall:
    """The tensors of one call, as the kernel saw them. They are the model's own, not copies: clone what must last.

    q [B, Hq, Tq, D], k, v [B, Hk, Tk, D], o [B, Hq, Tq, Dv] in the kernel's dtype, lse [B, Hq, Tq] natural logarithm or
    None where the kernel keeps it to itself; ``mask`` bool (True attends) or additive, broadcastable to
    [B, Hq, Tq, Tk]. After the backward pass dO, dQ, dK, dV likewise; None before, and without one. Of the query
    projection, where it was found: its input ``x`` [B, Tq, C] (which the product saw as ``x_dtype``: cast what is kept
    of it), the rows ``w_q`` [Hq * D, C] of its weight, and after the backward ``dq_pre`` [B, Hq, Tq, D], the gradient
    at its output, where q is not x w_q^T itself. ``refused``: why attn-diag cannot analyse the call (dropout, sinks),
    or None. ``awaits_backward``: whether o takes part in autograd, so that ``Listener.backward`` may follow.
    """

    place: CallPlace
    kernel: str
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor | None = None
    mask: Tensor | None = None
    causal: Causal = "none"
    scale: float | None = None
    window: tuple[int, int] | None = None
    softcap: float | None = None
    do: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    x: Tensor | None = None
    x_dtype: torch.dtype | None = None
    w_q: Tensor | None = None
    dq_pre: Tensor | None = None
    refused: str | None = None
    awaits_backward: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def masking(self) -> Masking:
        """Which keys a row may see by causality and window; what ``mask`` hides of them comes on top."""
        return Masking(self.causal, self.window)

    def let_go(self) -> None:
        """Forget the forward's data, once copied: else it would live on, checkpointed or not, until the backward."""
        self.q, self.k, self.v, self.o = (torch.empty_like(t, device="meta") for t in (self.q, self.k, self.v, self.o))
        self.lse = self.mask = self.x = self.w_q = None

    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by their names in capture format 1."""
        names = ("q", "k", "v", "o", "lse", "do", "dq", "dk", "dv", "x", "w_q", "dq_pre", "mask")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def metadata(self) -> dict[str, Any]:
        """The metadata of capture format 1 (keywords of ``Metadata``) that the call itself knows."""
        extra: Mapping[str, str] = {"call": str(self.place.call)}
        if self.place.module is not None:
            extra = {**extra, "module": self.place.module}
        return {
            "causal": self.causal,
            "scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
            "layer": self.place.layer,
            "step": self.place.step,
            "kernel": self.kernel,
            "device": torch.cuda.get_device_name(self.q.device) if self.q.is_cuda else self.q.device.type,
            "torch": torch.__version__,
            "notes": "; ".join(self.notes) or None,
            "extra": extra,
        }

    def capture(self) -> Capture:
        """As a Capture in memory, of the tensors as they are now. Raises InputError where they do not fit."""
        tensors: dict[str, Tensor | None] = {**self.tensors()}
        if self.x is not None:
            tensors["x"] = self.x.to(self.x_dtype)
        return Capture.from_tensors(tensors, **self.metadata())


class Listener(Protocol):
    """Who is told of calls. Its exceptions never reach the training loop: they are warned about, once."""

    def wants(self, place: CallPlace) -> bool:
        """Whether to be told of the call that is about to run. Asked for every call: no work, no synchronisation."""
        ...

    def wants_step(self, step: int) -> bool:
        """Whether any call of this step may be wanted; where not, nothing at all is kept during it."""
        ...

    def forward(self, call: AttentionCall) -> None:
        """After the call's forward."""
        ...

    def backward(self, call: AttentionCall) -> None:
        """After its backward: do, dq, dk, dv and, where there is one, dq_pre have come in."""
        ...

    def step_ended(self, step: int) -> None:
        """After an optimizer's step (or the end of a forward in a loop that does not train)."""
        ...
