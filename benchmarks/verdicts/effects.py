"""What a kernel's error really is: against this module's own float64 attention, beside healthy kernels' errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from verdicts.inputs import Inputs, in_blocks
from verdicts.kernels import QUANTITIES, Outputs

_PRECISION = {torch.bfloat16: (8, -126), torch.float16: (11, -14), torch.float32: (24, -126)}
"""Significant bits, and the exponent of the smallest normal number."""


@dataclass(frozen=True)
class Effect:
    """One quantity of one head of a kernel, beside healthy kernels."""

    quantity: str
    batch: int
    head: int
    factor: float
    """Root of the sum of squared errors, over that of the worst healthy kernel or, if larger, of ulp²/12 in every
    element; 1 where all are zero."""
    healthy_factor: float
    """The largest such factor of a healthy kernel beside the others: what this head gives by chance."""
    row_factor: float
    """The largest, over rows (keys, of dK and dV), of the row's error over the largest of what a healthy kernel leaves
    there, of its expected noise there and of its ulp²/12; of rows whose error is larger than what the worst healthy
    kernel has in a typical row."""
    small_row_factor: float
    """The largest of the other rows: errors that a typical row has anyway."""
    healthy_row_factor: float
    """The largest of a healthy kernel beside the others, and of independent roundings: what chance gives a row."""
    row: int
    """The row of ``row_factor``."""
    typical_factor: float
    """Root of the mean, over rows, of the squared error over the healthy kernels' mean there (and ulp²/12)."""
    rows_off: tuple[int, ...]
    """Rows with more than ``OFF`` times the root of that mean, and those whose error is the defect's: larger than the
    first healthy kernel's, and half of it in what differs from that kernel's output."""
    element_ulp: float
    """The largest error of an element in units in the last place of the true value."""
    relative: float
    """Norm of the error over the norm of the true quantity."""
    changed: int
    """Elements whose bits differ from the first healthy kernel's."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.factor)


OFF = 1.5
TINY = 2.0**-18


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
def effects(
    truth: Outputs, planted: Outputs, healthy: Sequence[Outputs], noisy: Sequence[Outputs] = ()
) -> list[Effect]:
    """Every quantity of every head.

    Args:
        truth (Outputs): What ``reference`` returned, float64.
        planted (Outputs): What the kernel in question returned.
        healthy (Sequence[Outputs]): What healthy kernels returned, that of the same schedule first.
        noisy (Sequence[Outputs]): What ``defects.other_roundings`` returned: in a row of few keys all healthy kernels
            round alike, and may be right by luck.
    """
    found = []
    for name in QUANTITIES:
        batch, heads = getattr(truth, name).shape[:2]
        for b, h in product(range(batch), range(heads)):
            true, observed, *others = (getattr(x, name)[b, h] for x in (truth, planted, *healthy, *noisy))
            split = len(healthy)
            if name == "o":
                # What O is in a row that sees no key, nobody has fixed: 0, NaN and the mean of V are all in use.
                seen = truth.lse[b, h] > -math.inf
                true, observed, *others = (x[seen] for x in (true, observed, *others))
            found.append(_effect(name, b, h, true, observed, others[:split], others[split:]))
    return found


def _effect(
    name: str, batch: int, head: int, truth: Tensor, planted: Tensor, healthy: Sequence[Tensor], noisy: Sequence[Tensor]
) -> Effect:
    changed = int((_bits(planted) != _bits(healthy[0])).sum())
    error = _error(truth, planted)
    finite = truth.masked_fill(truth.isinf(), 0)
    spacing = ulp(finite, planted.dtype)
    smallest = _by_row(spacing).square() / 12
    # A row that is zero but for the rounding of fp32 sums of much larger terms is as good as zero.
    floor = torch.maximum(smallest, _by_row(finite).square().mean() * TINY**2)
    draws = [_by_row(_error(truth, x)).square() / 2 for x in noisy]
    if draws:
        # A stochastic rounding has twice the variance of one to nearest.
        noise = torch.stack(draws).mean(0)
        smallest, floor = torch.maximum(smallest, noise), torch.maximum(floor, noise)
    rows = _by_row(error).square()
    healthy_rows = torch.stack([_by_row(_error(truth, x)).square() for x in healthy])
    ratios = _ratios(rows, healthy_rows, floor)
    usual = rows / torch.maximum(healthy_rows.mean(0), smallest)
    moved = _by_row(_error(healthy[0].double(), planted)).square()
    made = (rows > 1.2 * healthy_rows[0]) & (moved > rows / 4)
    large = ~(rows <= healthy_rows.mean(1).max())
    beside = [_beside(healthy_rows, i, floor) for i in range(len(healthy))]
    # Healthy kernels share most bits: only independent roundings show how far a row with few terms goes by chance.
    by_chance = [_ratios(draw, healthy_rows, floor).max().item() for draw in draws]
    return Effect(
        name,
        batch,
        head,
        factor=_root(rows.sum(), healthy_rows.sum(1), floor.sum()),
        healthy_factor=max((factor for factor, _ in beside), default=1.0),
        row_factor=ratios.masked_fill(~large, 0).max().item(),
        small_row_factor=ratios.masked_fill(large, 0).max().item(),
        healthy_row_factor=max((*(row for _, row in beside), *by_chance), default=1.0),
        row=int(ratios.masked_fill(~large, 0).argmax()),
        typical_factor=usual.mean().sqrt().nan_to_num(math.inf).item(),
        rows_off=tuple((~(usual <= OFF**2) | made).nonzero()[:, 0].tolist()),
        element_ulp=(error.abs() / spacing).nan_to_num(math.inf).max().item(),
        relative=_root(rows.sum(), _by_row(finite).square().sum()[None], rows.new_zeros(())),
        changed=changed,
    )


def _error(truth: Tensor, observed: Tensor) -> Tensor:
    # A row without keys has LSE = -inf, rightly.
    return (observed.double() - truth).masked_fill(observed.double() == truth, 0)


def _by_row(x: Tensor) -> Tensor:
    """[n] norms of rows."""
    return x.abs() if x.ndim == 1 else x.norm(dim=-1)


def _ratios(rows: Tensor, healthy: Tensor, floor: Tensor) -> Tensor:
    """Roots of squared errors [n] over the largest of the healthy kernels' [kernels, n] and of the floor [n]."""
    limit = torch.maximum(healthy.amax(0), floor) if len(healthy) else floor
    return (rows / limit).sqrt().masked_fill(rows == 0, 0).nan_to_num(math.inf)


def _beside(healthy: Tensor, chosen: int, floor: Tensor) -> tuple[float, float]:
    """The factor, and the largest of a row, of one healthy kernel beside the others."""
    others = torch.cat([healthy[:chosen], healthy[chosen + 1 :]])
    rows = _ratios(healthy[chosen], others, floor).max().item()
    return _root(healthy[chosen].sum(), others.sum(1), floor.sum()), rows


def _root(total: Tensor, others: Tensor, floor: Tensor) -> float:
    """Square root of a sum of squares over the largest of several others; 1 where all are zero, inf where NaN."""
    of = max([floor.item(), *others.tolist()])
    if not math.isfinite(total.item()):
        return math.inf
    if of == 0:
        return 1.0 if total == 0 else math.inf
    return math.sqrt(total.item() / of)


def _bits(x: Tensor) -> Tensor:
    """The bit patterns, so that NaN equals NaN and 0 differs from -0."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])
