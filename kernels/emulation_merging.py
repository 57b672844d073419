"""What joins sums of the emulated forward: independent splits of the keys, and a sink."""

from __future__ import annotations

import torch
from torch import Tensor

# Past this exp(s - m) comes close to fp32's largest number, and m moves to the sink.
_FAR_SINK = 64.0


def sink_step(sink: float, factor: float, maxima: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m with a sink, what multiplies the old sums, and exp(s - m), [R, 1] each; as FlashAttention-4 has it."""
    difference = sink - maxima * factor  # inf in a row without keys
    far = difference > _FAR_SINK
    shrink = torch.where(far, torch.exp(-difference), 1.0)
    own = torch.where(far, 1.0, torch.exp(difference.clamp(max=_FAR_SINK)))
    return torch.where(far, sink / factor, maxima), shrink, own


def with_sink(out: Tensor, lse: Tensor, sink: float) -> tuple[Tensor, Tensor]:
    """Merged splits with the sink as one more."""
    whole = torch.logaddexp(lse, lse.new_tensor(sink))
    return out * torch.exp(lse - whole)[..., None], whole


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Independent splits weighted by exp(L_i - L)."""
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts])
    lse = torch.logsumexp(lses, 0)
    weights = torch.where(lses == -torch.inf, 0.0, torch.exp(lses - lse))
    return (weights[..., None] * torch.stack([out for out, _ in parts])).sum(0), lse
