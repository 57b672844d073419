"""What would make two runs agree better: how much of O's difference each change takes away, predicted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from attn_diag.analyses.mismatch.layers import ComparedLayer
from attn_diag.analyses.mismatch.split import PARTS
from attn_diag.results.mismatch import MismatchCause, MismatchRepair

# FP16 has three more bits in its mantissa than BF16: every rounding is an eighth (arXiv 2510.26788).
FP16_LEAVES = 2.0**-3
FP16 = "FP16 instead of BF16 in both"
SAME_KERNEL = "the same attention kernel and schedule, batch-invariant, in both"
BF16_UNIT = 2.0**-8
DOES = {
    "scale": "the same softmax scale",
    "window": "the same window",
    "mask": "the same mask",
    "sink": "the sink restored in both",
    "softcap": "the same softcap",
    "position": "the same RoPE positions",
    "norm": "the same epsilon and weight of the norm",
    "merge": "LSE kept in fp32 where splits are merged",
    "lse-base": "one base of the LSE",
    "weights": "the same weights, quantised alike",
    "storage": "the same format of q, k and v",
}
"""By a cause's kind, what removes it."""
PART_OF = {"merge": "rounding", "weights": "inputs", "norm": "inputs", "storage": "inputs"}
"""By kind, the part of O's difference that it makes; the semantics' of others."""


def repairs_of(layers: Sequence[ComparedLayer], causes: Sequence[MismatchCause]) -> list[MismatchRepair]:
    """The list, for the differences that arise in the layers: without what came in from below."""
    causes = [c for c in causes if c.place != "output"]
    arising = {c.layer for c in causes if c.kind in ("weights", "norm", "storage", "unnamed-input")}
    total = sum(_own(layer, arising, {}) for layer in layers)
    if not total > 0:
        return []
    size = sum(float(layer.sums["reference"].sum()) for layer in layers)
    result = []
    for what, chosen, left_of in _repairs(layers, causes):
        left = sum(_own(layer, arising, left_of if layer.layer in chosen else {}) for layer in layers)
        result.append(MismatchRepair(what, tuple(sorted(chosen)), "O", 1 - left / total, math.sqrt(left / size)))
    return sorted(result, key=lambda repair: -repair.removes)


def _repairs(
    layers: Sequence[ComparedLayer], causes: Sequence[MismatchCause]
) -> Iterator[tuple[str, set[int], dict[str, float]]]:
    """What, in which layers, and the factor that it leaves of a part."""
    every = {layer.layer for layer in layers}
    for kind, what in DOES.items():
        if chosen := {cause.layer for cause in causes if cause.kind == kind}:
            yield what, chosen, {PART_OF.get(kind, "semantics"): 0.0}
    # What nothing explains is no rounding.
    if not any(cause.kind == "unnamed-o" for cause in causes):
        yield SAME_KERNEL, every, {"rounding": 0.0}
        if all(unit == BF16_UNIT for layer in layers for unit in layer.units):
            yield FP16, every, {"rounding": FP16_LEAVES}


def _own(layer: ComparedLayer, arising: set[int], left_of: dict[str, float]) -> float:
    """The squared norm of what arises in the layer, its parts multiplied by these."""
    names = PARTS if layer.layer in arising else PARTS[1:]
    total = 0.0
    for split in layer.splits:
        part = sum(left_of.get(name, 1.0) * split.parts[name] for name in names)
        assert isinstance(part, Tensor)
        total += float(part[split.usable].square().sum())
    return total
