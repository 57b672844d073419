"""Whether q is the projection of x alone, so that dW_Q = sum of dQ (x) x."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from attn_diag.capture import Capture
from attn_diag.heads import read_float64

# q = x w_q^T in BF16 leaves about half a percent; RoPE, QK-norm or a bias in between leaves of the order of 1.
PROJECTION_TOLERANCE = 0.05


def projection_misfit(capture: Capture, batches: Iterable[int], heads: Iterable[int], device: torch.device) -> float:
    """||q - x w_q^T|| / ||q|| over the finite rows of these heads; the capture must hold x and w_q."""
    d = capture.head_dim
    weight, wrong, right = capture.tensors["w_q"][...].to(device).double(), 0.0, 0.0
    first = 0 if len(weight) == capture.q_heads * d else capture.metadata.head_offset * d
    chosen = list(heads)
    for batch in batches:
        x = capture.tensors["x"][batch].to(device).double()
        for head in chosen:
            q = read_float64(capture, "q", batch, head, device)
            assert q is not None
            projected = x @ weight[first + head * d : first + (head + 1) * d].T
            finite = q.isfinite().all(1) & projected.isfinite().all(1)
            wrong += float((q - projected)[finite].square().sum())
            right += float(q[finite].square().sum())
    return math.sqrt(wrong / right) if right else math.inf
