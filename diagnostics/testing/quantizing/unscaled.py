"""Values that no quantiser made: the weight itself, or what a cast alone made of it."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_diag.kernels.quantizers import Quantizer

Verdict = tuple[str, str, str | None]
"""Outcome, headline, and what to do next."""
_UNSCALED = ", without a scale"
_CASTS = {
    "BF16": torch.bfloat16,
    "FP16": torch.float16,
    "FP8 (E4M3)": torch.float8_e4m3fn,
    "FP8 (E5M2)": torch.float8_e5m2,
}


def of_a_cast(
    w: Tensor, observed: Tensor, declared: Quantizer | None, verdict: Verdict, *, known: bool = False
) -> Verdict:
    """The verdict, where the values are not the declared quantiser's; unless a cast makes all of them.

    Args:
        w: The weight.
        observed: The values.
        declared: The quantiser that should be; None: it is not known.
        verdict: What is said without.
        known: Whether other scales are known that make them, of which those of a cast are all 1.
    """
    itself = torch.equal(observed.double(), w.double())
    found = "w itself, as nothing was quantised" if itself else _cast(w, observed)
    if found is None or (known and (itself or not found.endswith(_UNSCALED))):
        return verdict
    outcome, *_ = verdict
    following = "look whether the fake quantiser is switched on, and whether these are its values"
    if found.endswith(_UNSCALED):
        following = "scale w before the cast, and multiply by the scale after it"
    name = "" if declared is None else f"not {declared.name}'s: "
    return outcome, f"the values are {name}{found}", following


def _cast(w: Tensor, observed: Tensor) -> str | None:
    for name, dtype in _CASTS.items():
        largest = torch.finfo(dtype).max
        if dtype != w.dtype and torch.equal(w.double().clamp(-largest, largest).to(dtype).double(), observed.double()):
            return f"w cast to {name}" + (_UNSCALED if dtype.itemsize == 1 else "")
    return None
