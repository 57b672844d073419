"""SDPA of jagged nested tensors, which torch does in a function of its own, read as packed sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attn_diag.watching.live.sites import AttentionSite, Fields, as_autocast, gradients, refusals
from attn_diag.watching.live.tap import Tap


def _read_jagged(a: Mapping[str, Any], result: Any, tap: Tap) -> Fields | None:  # noqa: ARG001 - one protocol
    """Documents one after the other; of another ragged axis than T the function calls SDPA again, with the values."""
    q, k, v = inputs = [a[name] for name in ("query", "key", "value")]
    if any(t.layout != torch.jagged or t.dim() != 4 or t._ragged_idx != 2 for t in inputs):
        return None
    tensors = zip("qkvo", map(_one_sequence, (*map(as_autocast, inputs), result)), strict=True)
    return dict(tensors) | {
        "kernel": "torch SDPA math",
        "graph": gradients(result, q, k, v, _one_sequence),
        "cu_seqlens_q": q.offsets().int(),
        "cu_seqlens_k": k.offsets().int(),
        "causal": "top-left" if a["is_causal"] else "none",
        "scale": a["scale"],
        "refused": refusals(a["dropout_p"]),
    }


def _one_sequence(jagged: Tensor) -> Tensor:
    """[1, H, total, D] of a jagged [B, H, T*, D]."""
    return jagged.transpose(1, 2).values().transpose(0, 1)[None]


# A fused operator inside is told of instead; on a CPU it is products.
JAGGED = AttentionSite("jagged_scaled_dot_product_attention", _read_jagged)
