"""What a head adds to the gradient of an additive mask, and how far that may be off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attn_diag.head.no_recipe import coarsest, noise_collector
from attn_diag.head.read import HeadInputs
from attn_diag.reference import BoundCollector, RowBlock, reference_head, row_blocks
from attn_diag.reference.bias_gradient import bias_gradient

# An exponential below fp32's smallest normal is 0 in many kernels: torch's, of keys that a mask of -100 hides.
_SMALLEST = 2.0**-126
# What mistakes make of the gradient, by what is said of it then.
NO_DELTA = "lacks delta: it is the sum of P o dP"
SLOPED = "has the softcap's derivative in it, which does not belong there: the mask is added behind softcap"


@dataclass
class MaskTerms:
    """Sums over rows, keys and heads that share an element of the mask; float64 [Tq or 1, Tk or 1] each."""

    shape: tuple[int, int]
    device: torch.device
    total: Tensor = field(init=False)
    """The gradient."""
    bound: Tensor = field(init=False)
    """Of the reference's own error, and of what fp32 may lose of a P below its smallest normal."""
    size: Tensor = field(init=False)
    """The sum of the sizes of P o dP and P o delta."""
    variance: Tensor = field(init=False)
    """Of a well-rounded kernel: delta's, of O's rounding, and two roundings of each term to the inputs' format."""
    coarse: Tensor = field(init=False)
    """What scores, P and dP in the inputs' format add to it."""
    others: dict[str, Tensor] = field(init=False)
    """What mistakes make of it."""
    rows: int = 0
    """Query rows that were summed."""

    def __post_init__(self) -> None:
        for name in ("total", "bound", "size", "variance", "coarse"):
            setattr(self, name, torch.zeros(self.shape, dtype=torch.float64, device=self.device))
        self.others = {}

    def add(self, inputs: HeadInputs) -> bool:
        """Take one head of one sequence; whether all its rows are known.

        Args:
            inputs: The head, with dO.
        """
        head, fmt = inputs.head, inputs.input_format
        noise, collector = noise_collector(head, fmt, {}, want_keys=False), BoundCollector(head)

        def see(block: RowBlock) -> None:
            inputs.mark_rows(block)
            noise.add(block)
            collector.add(block)

        reference = reference_head(head, see, key_gradients=False, gradient_sums=True)
        bounds = collector.bounds(reference)
        if bool((inputs.unusable | ~(bounds.known_rows | reference.fully_masked)).any()):
            return False
        unit, of_delta = 2.0 ** -(coarsest(head, fmt, {}).precision + 1), noise.variance["delta"]
        for block in row_blocks(head, keep_dprobs=True):
            assert block.dprobs is not None
            assert block.delta is not None
            own, bound = bias_gradient(head, bounds, block)
            products = block.probs * block.dprobs
            whole = products.square().sum(1, keepdim=True).sqrt()
            logits = 2 + block.row_max.masked_fill(block.fully_masked, 0.0).abs()[:, None]
            spread = block.probs * (block.dprobs.abs() + whole)
            variance = block.probs.square() * of_delta[block.rows, None] + own.square() * (2 * unit**2 / 3)
            sizes = block.dprobs.abs() + block.delta.abs()[:, None]
            found = {
                "total": own, "bound": bound + block.probs.clamp(max=_SMALLEST) * sizes, "variance": variance,
                "size": block.probs * sizes,
                "coarse": (unit * logits * own).square() + (2 * unit * spread).square(),
            }  # fmt: skip
            for name, values in found.items():
                self._sum(getattr(self, name), values, block.rows, block.keys)
            others = {NO_DELTA: products} | ({} if block.slope is None else {SLOPED: own * block.slope})
            for name, values in others.items():
                self._sum(self.others.setdefault(name, torch.zeros_like(self.total)), values, block.rows, block.keys)
        self.rows += len(head.q)
        return True

    def _sum(self, into: Tensor, values: Tensor, rows: slice | Tensor, keys: slice) -> None:
        if self.shape[1] == 1:
            values, keys = values.sum(1, keepdim=True), slice(0, 1)
        if self.shape[0] == 1:
            values, rows = values.sum(0, keepdim=True), slice(0, 1)
        into[rows, keys] += values


def summed(parts: Sequence[MaskTerms]) -> MaskTerms:
    """Those of several sequences that share the mask.

    Args:
        parts: One at least.

    Returns:
        Their sum.
    """
    found = MaskTerms(parts[0].shape, parts[0].device)
    for name in ("total", "bound", "size", "variance", "coarse"):
        setattr(found, name, torch.stack([getattr(p, name) for p in parts]).sum(0))
    found.others = {name: torch.stack([p.others[name] for p in parts]).sum(0) for name in parts[0].others}
    found.rows = sum(p.rows for p in parts)
    return found
