"""The softcap that a captured O fits, found continuously: any, where the usual ones do not fit."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attn_diag.captures.capture import Capture
from attn_diag.head.output_fit import OutputFit, out_fit
from attn_diag.reference import format_of

# Caps are tried from one that leaves hardly a score to one that changes hardly any, by factors of 2.
_APART = 2.0
_CAPS = [_APART**n for n in range(-2, 10)]
# One of them leaves less of the error than none does; then they are looked for between its neighbours.
_LESS, _STEPS = 0.8, 16
_GOLDEN = (math.sqrt(5) - 1) / 2
# A cap of few digits leaves hardly more than the best one.
_AS_GOOD = 1.02


def fitted_softcap(capture: Capture, observation: str, device: torch.device) -> tuple[float, OutputFit] | None:
    """The cap and how well O fits it; None where no cap leaves so little as one rounding of O makes.

    Args:
        capture: The capture.
        observation: The observation's name.
        device: Where O is recomputed.
    """

    def fit(log_cap: float) -> OutputFit | None:
        metadata = replace(capture.metadata, softcap=math.exp(log_cap))
        return out_fit(replace(capture, metadata=metadata), observation, device)

    def error(log_cap: float) -> float:
        found = fit(log_cap)
        return math.inf if found is None else found.error

    without = out_fit(replace(capture, metadata=replace(capture.metadata, softcap=None)), observation, device)
    least, best = min((error(math.log(cap)), math.log(cap)) for cap in _CAPS)
    if without is None or least > _LESS * without.error:
        return None
    low, high = best - math.log(_APART), best + math.log(_APART)
    for _ in range(_STEPS):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (low, right) if error(left) < error(right) else (left, high)
    best = (low + high) / 2
    least = error(best)
    for digits in (1, 2, 3):
        near = math.log(float(f"{math.exp(best):.{digits}g}"))
        if error(near) <= _AS_GOOD * least:
            best = near
            break
    found, fmt = fit(best), format_of(capture.tensors[capture.key(observation, "o")].dtype)
    return (math.exp(best), found) if found is not None and found.error < 2.0**-fmt.precision else None
