"""What would be left of two runs' difference of log-probabilities, were one of its causes gone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attn_diag.analyses.mismatch.layers import ComparedLayer
from attn_diag.analyses.mismatch.logprobs import Logprobs
from attn_diag.analyses.mismatch.repairs import BF16_UNIT, DOES, FP16, FP16_LEAVES, SAME_KERNEL
from attn_diag.analyses.mismatch.sums import IN_FP32
from attn_diag.results.mismatch import Mismatch, MismatchCause, MismatchRepair, OutsideError, SharePlace
from attn_diag.watching.forced_runs import ForcedModel, LayerTargets

LogprobPlace = tuple[int | None, SharePlace]
LogprobParts = Mapping[LogprobPlace, "npt.NDArray[np.float64]"]
_ROUNDING = ("merge", "coarse")


@dataclass(frozen=True)
class SplitDifference:
    """What the prediction is made from."""

    found: Mismatch
    """The comparison, with its causes."""
    given: Logprobs
    """The log-probabilities."""
    parts: LogprobParts
    """By place what it adds to their difference, [B, T - 1]."""
    in_fp32: Mapping[int, npt.NDArray[np.float64]]
    """By layer what its output projection's sum would add, were it one in fp32 with one cast."""
    outside: Sequence[OutsideError]
    """Errors outside attention."""
    layers: Sequence[ComparedLayer]
    """As they were compared."""
    as_run: ForcedModel
    """Train's model in its own format."""
    rounding: Mapping[int, Tensor]
    """By layer what rounding and schedule add to O, [B, Hq, T, Dv]."""

    @property
    def invariant(self) -> bool:
        """Whether nothing speaks against products that give a token the same bits in any batch.

        Where x of the first layer is the same in every bit, v has to be too.
        """
        first = self.found.layers[0]
        of_v = any(c.layer == first.layer and c.kind in ("weights", "storage") for c in self.found.causes)
        return not (first.x == 0 and first.v > 0 and not of_v)


def repairs_of_logprobs(made: SplitDifference) -> Iterator[MismatchRepair]:
    """The list, what removes most first."""
    causes = made.found.causes
    if not float(np.square(made.given.difference).sum()):
        return
    unnamed = any(cause.label == "unnamed" for cause in causes)
    every = {layer.layer for layer in made.layers}
    results = []
    for kind, what in DOES.items():
        if not (mine := [c for c in causes if c.kind == kind]):
            continue
        layers = {c.layer for c in mine}
        if len(mine) == len(causes) and made.invariant:
            cured = layers if kind in _ROUNDING else set()
            results.append(_repair(made, what, layers, _run_again(made, cured)))
        else:
            results.append(_repair(made, what, layers, _without(made, dict.fromkeys(_places(made, mine), 0.0))))
    if not any(cause.kind == "unnamed-o" for cause in causes):
        results.append(_repair(made, SAME_KERNEL, every, _same_kernel(made)))
    if not unnamed and all(layer.unit == BF16_UNIT for layer in made.layers):
        kept = _places(made, causes)
        leaves = {p: FP16_LEAVES for p in made.parts if p not in kept and p[1] != "semantics"}
        results.append(_repair(made, FP16, every, _without(made, leaves)))
    if sums := {layer for layer, place in made.parts if place == "sum" and layer is not None}:
        removed: Any = sum(made.parts[layer, "sum"] - made.in_fp32[layer] for layer in sums)
        results.append(_repair(made, IN_FP32, sums, np.asarray(made.given.difference - removed)))
    yield from sorted(results, key=lambda repair: -repair.removes)


def _repair(made: SplitDifference, what: str, layers: set[int], left: npt.NDArray[np.float64]) -> MismatchRepair:
    kept = made.given.counted
    total = float(np.square(made.given.difference).sum())
    squared = float(np.square(np.where(kept, left, 0.0)).sum())
    return MismatchRepair(
        what, tuple(sorted(layers)), "log-probability", 1 - squared / total, math.sqrt(squared / int(kept.sum()))
    )


def _without(made: SplitDifference, leaves: Mapping[LogprobPlace, float]) -> npt.NDArray[np.float64]:
    """The difference less what arises at these places, of which a part is left."""
    removed: Any = sum((1 - left) * made.parts[p] for p, left in leaves.items() if p in made.parts)
    return np.asarray(made.given.difference - removed)


def _run_again(made: SplitDifference, cured: set[int]) -> npt.NDArray[np.float64]:
    """The difference that rounding of O alone makes in train's model in its own format, but in these layers.

    Where a cause moves everything behind it, all roundings there differ too, which is not so once it is gone: what is
    left is less than the difference without the cause's part.
    """
    targets = {layer: LayerTargets(added=added) for layer, added in made.rounding.items() if layer not in cured}
    return np.asarray((made.as_run.run(targets).logprobs - made.as_run.run().logprobs).numpy())


def _same_kernel(made: SplitDifference) -> npt.NDArray[np.float64]:
    """What is left where O is rounded alike: outside attention all bits are then the same up to the first cause."""
    other = [cause.layer for cause in made.found.causes if cause.kind not in _ROUNDING]
    if made.invariant and not other:
        return np.zeros_like(made.given.difference)
    first = min(other, default=math.inf)
    leaves: dict[LogprobPlace, float] = {
        (layer, place): 0.0
        for layer, place in made.parts
        if place == "rounding" or (made.invariant and place != "semantics" and layer is not None and layer < first)
    }
    return _without(made, leaves)


def _places(made: SplitDifference, causes: Sequence[MismatchCause]) -> set[LogprobPlace]:
    """Where in the model these causes make the log-probabilities differ."""
    places: set[LogprobPlace] = set()
    for cause in causes:
        if cause.place == "attention":
            places.add((cause.layer, "rounding" if cause.kind in _ROUNDING else "semantics"))
        elif cause.place == "output":
            places |= {(cause.layer, "sum")} if cause.kind == "sum" else set()
        else:
            known = (cause.layer, cause.place) in made.parts
            places.add((cause.layer, cause.place if known else "projection"))
        if cause.kind == "weights":
            # Those of the other products of the layer come from where the query's do, and show in the next one's x.
            later = (o for o in made.outside if o.place == "stream" and (o.layer is None or o.layer > cause.layer))
            places |= {(o.layer, o.place) for o in list(later)[:1] if o.low is not None and o.low > 1}
    return places
