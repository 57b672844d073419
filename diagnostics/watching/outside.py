"""How far two runs are from their model outside attention: products, norms and MLPs, from the run's own O below."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from attn_diag.analyses.mismatch.logprobs import Logprobs
from attn_diag.head.quality import LOSSY
from attn_diag.results.mismatch import Mismatch, MismatchCause, OutsideError, Place
from attn_diag.results.wording import number, times
from attn_diag.statistics.ratios import paired_ratio
from attn_diag.watching.forced_runs import LayerTargets, SeenRun

# Errors below are of no 16-bit format; they differ between any two orders of a sum in fp32.
_NO_ROUNDING = 2.0**-16

_Own = tuple[SeenRun, Mapping[int, LayerTargets]]
_Squares = tuple[Tensor, Tensor]
"""Squared error and squared size, by token [B T]; NaN where not compared."""


def outside_errors(own: Sequence[_Own], given: Logprobs, hidden: tuple[Tensor, Tensor] | None) -> list[OutsideError]:
    """By place, in the order of the model.

    Args:
        own: Of train and of rollout, what float64 makes of its own values, and these values.
        given: The log-probabilities.
        hidden: What entered the LM head in both; None: not known.
    """
    found = []
    for layer in own[0][1]:
        if own[0][1][layer].x is not None:
            found.append(_error(layer, "stream", [_stream(seen.x[layer], mine[layer].x) for seen, mine in own]))
        found.append(_error(layer, "projection", [_projected(seen, mine[layer], layer) for seen, mine in own]))
    if hidden is not None:
        streams = [_stream(seen.head, h) for (seen, _), h in zip(own, hidden, strict=True)]
        found.append(_error(None, "stream", streams))
        kept = torch.as_tensor(given.counted)
        heads = []
        for (seen, _), observed in zip(own, (given.train, given.rollout), strict=True):
            off = (torch.as_tensor(observed) - seen.logprobs).square().masked_fill(~kept, torch.nan)
            heads.append((off.flatten(), torch.ones_like(off).flatten()))
        found.append(_error(None, "head", heads))
    return [one for one in found if one is not None]


def _stream(exact: Tensor | None, observed: Tensor | None) -> _Squares:
    assert exact is not None
    assert observed is not None
    there = exact.double().cpu()
    return (observed.double().cpu() - there).square().sum(-1).flatten(), there.square().sum(-1).flatten()


def _projected(seen: SeenRun, mine: LayerTargets, layer: int) -> _Squares:
    error = size = torch.zeros(1, dtype=torch.float64)
    for name in "qkv":
        observed, exact = getattr(mine, name), seen.calls[layer][name].double().cpu()
        exact = exact.repeat_interleave(observed.shape[1] // exact.shape[1], 1)
        error = error + (observed - exact).square().sum((1, 3)).flatten()
        size = size + exact.square().sum((1, 3)).flatten()
    return error, size


def _error(
    layer: int | None, place: Literal["stream", "projection", "head"], both: Sequence[_Squares]
) -> OutsideError | None:
    kept = both[0][0].isfinite() & both[1][0].isfinite()
    if not bool(kept.any()):
        return None
    sizes = [math.sqrt(float(error[kept].sum()) / float(size[kept].sum())) for error, size in both]
    ratio = paired_ratio(np.asarray(both[1][0][kept]), np.asarray(both[0][0][kept]))
    low, factor, high = (None, None, None) if ratio is None else (ratio.low, ratio.factor, ratio.high)
    return OutsideError(layer, place, sizes[0], sizes[1], factor, low, high)


def outside_causes(found: Mismatch, outside: Sequence[OutsideError]) -> Iterator[MismatchCause]:
    """The first place at which one run is further from train's model than the other, where nothing is named yet."""
    of_inputs = ("position", "weights", "norm", "storage", "unnamed-input")
    named = {c.layer: c.kind for c in found.causes if c.kind in of_inputs}
    layers = [layer.layer for layer in found.layers]
    # Errors of the stream stay in it: what is told at one place may have arisen since the last that shows nothing.
    first: int | None = None
    for error in outside:
        at = len(layers) if error.layer is None else layers.index(error.layer)
        if error.place == "stream":
            first = at if not _apart(error, 1.0) else at if first is None else first
        if not _apart(error, LOSSY):
            continue
        since = at if first is None or error.place != "stream" else min(first + 1, at)
        # Weights of another kind are the whole layer's, and all that comes out of it.
        below = {layers[i - 1] for i in range(since, at + 1) if i > 0}
        if error.layer not in named and "weights" not in {named.get(layer) for layer in below}:
            yield _cause(error, layers, since, at)
        return


def _apart(error: OutsideError, by: float) -> bool:
    """Whether the two runs' errors differ by more than this factor, beyond their uncertainty."""
    if error.low is None or error.high is None or max(error.train, error.rollout) <= _NO_ROUNDING:
        return False
    return error.low > by or error.high < 1 / by


def _cause(error: OutsideError, layers: Sequence[int], since: int, at: int) -> MismatchCause:
    assert error.factor is not None
    side: Literal["train", "rollout"] = "rollout" if error.factor > 1 else "train"
    factor = max(error.factor, 1 / error.factor)
    if error.place == "projection":
        where = "the projection to q, k and v"
    elif error.place == "head":
        where = "the LM head and the log-probabilities"
    elif since == 0:
        where = "before attention" if at == 0 else f"somewhere before attention of layer {layers[at - 1] + 1}"
    elif since == at:
        where = f"behind attention of layer {layers[at - 1]}"
    else:
        where = f"behind attention of layer {layers[since - 1]}, or of a later one up to {layers[at - 1]}"
    words = (
        f"{where}: {side} is {times(factor)} times as far from train's model in float64 as the other run "
        f"({number(100 * error.train, 2)} % and {number(100 * error.rollout, 2)} %): other weights, another norm, or "
        "coarser rounding outside attention"
    )
    place: Place = "projection" if error.place == "projection" else "stream"
    layer = layers[min(since, len(layers) - 1)]
    return MismatchCause(layer, "unnamed-input", "unnamed", side, words, "fitted", None, "", place)
