"""What every query row adds to the gradient of its head's sink, and how far that may be off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.head.streaming import StreamedHead

_FP32 = 2.0**-24


@dataclass(frozen=True)
class SinkTerms:
    """dSink of one head and sequence, all float64; sums over the sequence's rows."""

    total: float
    """dSink = -sum_t P_sink,t delta_t."""
    size: float
    """The sum of the terms' sizes."""
    variance: float
    """Of a well-rounded kernel: delta's, of O's rounding, and two roundings of each term to the inputs' format."""
    coarse: float
    """What scores, L and P in the inputs' format add to it."""
    rows: int
    """Query rows."""
    others: Mapping[str, float]
    """What mistakes make of it, by what is said of dSink then."""


def sink_terms(passed: StreamedHead, outputs: Mapping[str, Tensor]) -> SinkTerms | None:
    """Measure the sink's gradient of a head that has been streamed.

    Args:
        passed: The head.
        outputs: What the kernel returned for it: o and lse in float64, as far as they are known.

    Returns:
        None without a sink or dO, and where the truth of some row is not known.
    """
    inputs, reference = passed.truth.inputs, passed.truth.reference
    head = inputs.head
    probs, terms, delta = reference.sink_probs, reference.dsink, reference.delta
    if head.do is None or head.sink is None or probs is None or terms is None or delta is None:
        return None
    if bool((inputs.unusable | ~passed.bounds.known_rows).any()):
        return None
    unit = 2.0 ** -(inputs.input_format.precision + 1)
    logits = reference.row_max.masked_fill(reference.fully_masked, 0.0).abs().clamp(max=1e6) + abs(head.sink)
    relative = 2 * unit**2 / 3 + (_FP32 * logits).square()
    variance = probs.square() * passed.noise.variance["delta"] + terms.square() * relative
    coarse = (unit * (2 + logits) * terms).square()
    bare = reference.lse + torch.log1p(-probs.clamp(max=1 - 2.0**-40))  # of the keys alone, well enough for a name
    others = {
        "lacks P_sink: it is the sum of -delta": float(-delta.sum()),
        "is made with a P_sink that is not normalised by the sink": float(-((head.sink - bare).exp() * delta).sum()),
        "lacks delta: it is the sum of -P_sink": float(-probs.sum()),
    }
    out, lse = outputs.get("o"), outputs.get("lse", reference.lse)
    if out is not None:
        seen = torch.where(reference.fully_masked, 0.0, (head.sink - lse).exp() * (head.do * out).sum(1))
        others["follows from the O and LSE that the kernel returned"] = float(-seen.sum())
    return SinkTerms(
        float(terms.sum()), float(terms.abs().sum()), float(variance.sum()), float(coarse.sum()), len(terms), others
    )
