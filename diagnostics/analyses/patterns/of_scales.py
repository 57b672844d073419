"""What O's bits say of the scores, said of LSE: where k alone is quantised otherwise, L may show it first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from attn_diag.head.measurement import HeadMeasurement
from attn_diag.results.quality import Pattern, QuantityVerdict

# A change of q or k, in words.
_OF_SCORES = re.compile(r"\b[qk]\b")


def with_scales(verdict: QuantityVerdict, parts: Sequence[HeadMeasurement]) -> QuantityVerdict:
    """LSE's verdict, with the scales or roundings of q or k that O's bits show in a head's sequences ``parts``."""
    scales = next((p.quality["o"].scales for p in parts if "o" in p.quality and p.quality["o"].scales), "")
    if verdict.quantity != "lse" or verdict.answer not in ("wrong", "lossy") or not _OF_SCORES.search(scales):
        return verdict
    pattern = Pattern("scale", f"O has the bits of a kernel where {scales}")
    return replace(verdict, words=f"{verdict.words} {pattern.words}.", patterns=(*verdict.patterns, pattern))
