"""Whether dW_Q = sum over rows of dQ (x) x holds for a capture: only where q = x w_q^T with nothing in between."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from attn_diag.captures import Capture
from attn_diag.heads import read_float64

# q = x w_q^T in BF16 leaves about half a percent; RoPE, QK-norm or a bias in between leaves of the order of 1.
_TOLERANCE = 0.05


def projection_note(
    capture: Capture, batches: Iterable[int], heads: Iterable[int], device: torch.device, *, dq_pre: bool = False
) -> str | None:
    """None where dW_Q follows from dQ and x; else why not. ``dq_pre``: the observation looked at holds it."""
    if "x" not in capture.tensors or "w_q" not in capture.tensors:
        return "dW_Q: not computed, x or w_q was not captured"
    weight, wrong, right = capture.tensors["w_q"][...].to(device).double(), 0.0, 0.0
    d = capture.head_dim
    first = 0 if len(weight) == capture.q_heads * d else capture.metadata.head_offset * d
    chosen = list(heads)
    for batch in batches:
        x = projection_input(capture, batch, device)
        for head in chosen:
            q = read_float64(capture, "q", batch, head, device)
            assert q is not None
            projected = x @ weight[first + head * d : first + (head + 1) * d].T
            finite = q.isfinite().all(1) & projected.isfinite().all(1)
            wrong += float((q - projected)[finite].square().sum())
            right += float(q[finite].square().sum())
    misfit = math.sqrt(wrong / right) if right else math.inf
    if misfit <= _TOLERANCE:
        return None
    captured = " (dq_pre was captured, but is not used yet)" if dq_pre else ""
    return f"dW_Q: not computed, q is not x w_q^T (off by {misfit:.0%}): RoPE, QK-norm or a bias lies between{captured}"


def projection_input(capture: Capture, batch: int, device: torch.device) -> Tensor:
    """x of one sequence, [Tq, C] float64."""
    return capture.tensors["x"][batch].to(device).double()
