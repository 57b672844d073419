"""All that one call of an attention is given, whatever computes it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.captures.lent import bits_of
from attn_diag.captures.metadata import AlibiOrigin, Causal
from attn_diag.reference import Alibi, AttentionHead, Dropout, Masking


@dataclass(frozen=True)
class CaseInputs:
    """What a target is called with."""

    name: str
    """The case or probe."""
    q: Tensor
    """[B, Hq, Tq, D], on the CPU."""
    k: Tensor
    """[B, Hk, Tk, D], on the CPU; Hq is a multiple of Hk."""
    v: Tensor
    """[B, Hk, Tk, Dv], on the CPU."""
    do: Tensor | None
    """[B, Hq, Tq, Dv], on the CPU; None where no gradients are asked for."""
    scale: float
    """alpha."""
    causal: Causal
    """What is masked."""
    capture: Capture | None = None
    """Where the inputs come from, if from a file of the user's."""
    window: tuple[int, int] | None = None
    """(left, right), inclusive, -1 unlimited."""
    softcap: float | None = None
    """c of S = c tanh(alpha q.k / c)."""
    mask: Tensor | None = None
    """Broadcastable to [B, Hq, Tq, Tk]: bool (true = attend) or additive."""
    positions: Tensor | None = None
    """[Tq]: where only chosen query rows are kept, the last key that a causal row sees."""
    sinks: Tensor | None = None
    """[Hq]: the logits of attention sinks."""
    alibi_slopes: Tensor | None = None
    """[Hq] or [B, Hq] fp32: ALiBi's slopes."""
    alibi_origin: AlibiOrigin = "row"
    """What its distances are counted from."""
    dropout_mask: Tensor | None = None
    """bool [B, Hq, Tq, Tk]: which probabilities are kept."""
    dropout_p: float | None = None
    """How many are dropped in the mean: what is kept is multiplied by 1 / (1 - p)."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those of them that a capture states, by its names; the mask and chosen rows are left out."""
        names = ("q", "k", "v", "do", "sinks", "alibi_slopes", "dropout_mask")
        return {n: x for n in names if (x := getattr(self, n)) is not None}

    @property
    def needs_places(self) -> bool:
        """Whether what a row gives depends on its place among the keys, which nothing states of fewer rows."""
        return self.causal == "none" and (self.window is not None or self.alibi_slopes is not None)

    @property
    def heads_differ(self) -> bool:
        """Whether every head is a function of its own."""
        return self.alibi_slopes is not None or self.sinks is not None

    def head_mask(self, batch: int, head: int, device: torch.device) -> Tensor | None:
        """The mask of one head, [Tq, Tk], if there is one."""
        if self.mask is None:
            return None
        full = (self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2])
        return self.mask.expand(full)[batch, head].to(device)

    def masking(self, batch: int, head: int, device: torch.device) -> Masking:
        """What one head sees, ALiBi included."""
        slope = 0.0 if self.alibi_slopes is None else float(self.alibi_slopes.expand(len(self.q), -1)[batch, head])
        alibi = Alibi(slope, self.alibi_origin) if slope else None
        return Masking(self.causal, self.window, self.head_mask(batch, head, device), self.positions, alibi)

    def head(self, batch: int, head: int, device: torch.device, *, gradients: bool = True) -> AttentionHead:
        """One query head in float64; without dO where no ``gradients`` are asked for."""
        kv = head // (self.q.shape[1] // self.k.shape[1])
        q, k, v = (x.to(device).double() for x in (self.q[batch, head], self.k[batch, kv], self.v[batch, kv]))
        do = None if self.do is None or not gradients else self.do[batch, head].to(device).double()
        sink = None if self.sinks is None else float(self.sinks[head])
        dropout = None
        if self.dropout_mask is not None:
            assert self.dropout_p is not None
            dropout = Dropout(self.dropout_mask[batch, head].to(device), self.dropout_p)
        return AttentionHead(
            q, k, v, do, self.scale, self.masking(batch, head, device), self.softcap,
            None if sink == -math.inf else sink, dropout,
        )  # fmt: skip

    def captured(self, outputs: Mapping[str, Tensor], **metadata: Any) -> Capture:
        """A capture of the call, with what was returned; its mask and chosen rows are left out.

        Args:
            outputs: By name.
            **metadata: More fields of ``Metadata``.
        """
        return Capture.from_tensors(
            {**self.tensors, **outputs}, scale=self.scale, causal=self.causal, window=self.window,
            softcap=self.softcap, alibi_origin=self.alibi_origin, dropout_p=self.dropout_p, **metadata,
        )  # fmt: skip

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the inputs' bits, shapes and dtypes, of the scale, the mask, p, and all else that is stated."""
        dropped = "" if self.dropout_p is None else f" {self.dropout_p!r}"
        limits = "".join(f" {x!r}" for x in (self.window, self.softcap) if x is not None)
        return fingerprint(self.tensors, f"{self.scale!r} {self.causal}{dropped}{limits}")


def fingerprint(tensors: dict[str, Tensor], also: str = "") -> str:
    """SHA-256 over names, dtypes, shapes and bits."""
    digest = hashlib.sha256(also.encode())
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(bits_of(tensor.detach().cpu()).numpy().tobytes())
    return digest.hexdigest()
