"""What the hops of a ring returned, each for the keys of one rank: kept beside the whole where ``capture`` asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from attn_diag.captures.hops import hop_name
from attn_diag.watching.live.operator_calls import OperatorBackward, OperatorCall


@dataclass(frozen=True)
class RingHops:
    """Results of every hop, in the order in which they ran; tensors are the operators' own."""

    results: Sequence[Mapping[str, Tensor | None]] = field(default_factory=tuple)
    """By hop o and lse, or dq, dk and dv: [B, H, T, D] ([B, H, T]) of the hop's own rows, or keys."""

    @classmethod
    def forward(cls, hops: Sequence[OperatorCall], features: int) -> Self:
        """Those of the forward, without what pads v's ``features``."""
        found = []
        for hop in hops:
            q = hop.inputs[0]
            fused = hop.fused(q.shape[-1], features, q.shape[2])
            found.append({"o": fused["o"], "lse": fused["lse"]})
        return cls(found)

    @classmethod
    def backward(cls, hops: Sequence[OperatorBackward]) -> Self:
        """Those of the backward."""
        return cls([dict(zip(("dq", "dk", "dv"), hop.gradients, strict=True)) for hop in hops])

    def tensors(self) -> dict[str, Tensor]:
        """By their names in a capture."""
        return {
            hop_name(number, name): t.detach()
            for number, hop in enumerate(self.results)
            for name, t in hop.items()
            if t is not None
        }
