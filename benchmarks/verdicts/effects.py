"""What a kernel's error really is: against this module's own float64 attention, beside a healthy kernel's error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verdicts.inputs import Inputs, in_blocks
from verdicts.kernels import QUANTITIES, Outputs

_PRECISION = {torch.bfloat16: (8, -126), torch.float16: (11, -14), torch.float32: (24, -126)}
"""Significant bits, and the exponent of the smallest normal number."""


@dataclass(frozen=True)
class Effect:
    """One quantity of one head, of a planted kernel and of the healthy one of the same schedule."""

    quantity: str
    batch: int
    head: int
    ratio: float
    """Root of the sum of squared errors, over the healthy kernel's; 1 where both are zero."""
    floored: float
    """The same over the larger of the healthy kernel's error and of ulp²/12 summed over the elements."""
    row_ratio: float
    """The largest, over rows (keys, of dK and dV), of the row's error over the larger of the healthy kernel's there and
    the root of ulp²/12 summed over its elements."""
    row: int
    """The row of ``row_ratio``."""
    element_ulp: float
    """The largest error of an element in units in the last place of the true value."""
    relative: float
    """Norm of the error over the norm of the true quantity."""
    changed: int
    """Elements whose bits differ from the healthy kernel's."""


@torch.no_grad()
def reference(inputs: Inputs) -> Outputs:
    """The call in float64, without tiles: softmax(scale QK^T) V, its LSE and its gradients."""
    group, d = inputs.group, inputs.q.device
    q, do = inputs.q.double(), inputs.do.double()
    k, v = (x.double().repeat_interleave(group, 1) for x in (inputs.k, inputs.v))
    scores = inputs.scale * (q @ k.mT)
    slope = None
    if inputs.softcap is not None:
        bent = (scores / inputs.softcap).tanh()
        scores, slope = inputs.softcap * bent, 1 - bent.square()
    rows, keys = (torch.arange(x.shape[2], device=d) for x in (q, k))
    scores = scores.masked_fill(~inputs.visible(rows, keys), -math.inf)
    lse = scores.logsumexp(-1)
    # A row without keys has P = 0.
    probs = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp_()
    o = probs @ v
    dp = do @ v.mT
    ds = probs * (dp - (do * o).sum(-1, keepdim=True))
    if slope is not None:
        ds = ds * slope
    dk, dv = inputs.scale * ds.mT @ q, probs.mT @ do
    dk, dv = (in_blocks(x, 1, group).sum(2) for x in (dk, dv))
    return Outputs(o, lse, inputs.scale * ds @ k, dk, dv)


def ulp(truth: Tensor, dtype: torch.dtype) -> Tensor:
    """Spacing of ``dtype`` at the float64 numbers ``truth``, at least that of the smallest normal number."""
    bits, lowest = _PRECISION[dtype]
    # frexp gives zero the exponent 0.
    exponent = (torch.frexp(truth)[1] - 1).masked_fill(truth == 0, lowest)
    return torch.ldexp(torch.ones_like(truth), exponent.clamp(min=lowest) - bits + 1)


@torch.no_grad()
def effects(truth: Outputs, planted: Outputs, healthy: Outputs) -> list[Effect]:
    """Every quantity of every head.

    Args:
        truth (Outputs): What ``reference`` returned, float64.
        planted (Outputs): What the kernel in question returned.
        healthy (Outputs): What a healthy kernel of the same schedule returned.
    """
    return [
        _effect(name, b, h, *(getattr(x, name)[b, h] for x in (truth, planted, healthy)))
        for name in QUANTITIES
        for b in range(truth.o.shape[0])
        for h in range(getattr(truth, name).shape[1])
    ]


def _effect(name: str, batch: int, head: int, truth: Tensor, planted: Tensor, healthy: Tensor) -> Effect:
    if truth.ndim == 1:
        truth, planted, healthy = truth[:, None], planted[:, None], healthy[:, None]
    changed = int((_bits(planted) != _bits(healthy)).sum())
    # A row without keys has LSE = -inf, rightly.
    same = (planted.double() == truth) | (truth.isinf() & (healthy.double() == truth) & (planted == healthy))
    error = (planted.double() - truth).masked_fill(same, 0)
    finite = truth.masked_fill(truth.isinf(), 0)
    error_healthy = (healthy.double() - truth).masked_fill(healthy.double() == truth, 0)
    spacing = ulp(finite, planted.dtype)
    row, row_healthy = error.square().sum(-1), error_healthy.square().sum(-1)
    row_floor = spacing.square().sum(-1) / 12
    ratios = (row / torch.maximum(row_healthy, row_floor)).sqrt().nan_to_num(math.inf)
    total, total_healthy = row.sum().item(), row_healthy.sum().item()
    return Effect(
        name,
        batch,
        head,
        ratio=_root(total, total_healthy),
        floored=_root(total, max(total_healthy, row_floor.sum().item())),
        row_ratio=ratios.max().item(),
        row=int(ratios.argmax()),
        element_ulp=(error.abs() / spacing).nan_to_num(math.inf).max().item(),
        relative=_root(total, finite.square().sum().item()),
        changed=changed,
    )


def _root(total: float, of: float) -> float:
    """Square root of a quotient; 1 where both are zero, inf where something is not a number."""
    if not math.isfinite(total):
        return math.inf
    if of == 0:
        return 1.0 if total == 0 else math.inf
    return math.sqrt(total / of)


def _bits(x: Tensor) -> Tensor:
    """The bit patterns, so that NaN equals NaN and 0 differs from -0."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])
