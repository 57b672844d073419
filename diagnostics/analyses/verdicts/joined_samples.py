"""The samples of several sequences as one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from attn_diag.head.quality import QuantitySample

# A sequence whose error is more than so many times that of all that show a rounding is not made by it.
_BEYOND_SITE = 2.0


def joined(samples: Sequence[QuantitySample]) -> QuantitySample:
    """The rows of several sequences one after the other; rows keep their numbers."""
    first = samples[0]
    if len(samples) == 1:
        return first
    # A copy of a sequence tells nothing new: its rows count with those that they copy.
    first_of: dict[bytes, tuple[int, int]] = {}
    clusters, copied, start, rows = [], [], 0, 0
    for s in samples:
        own = np.arange(len(s.rows)) if s.clusters is None else s.clusters
        alike = s.reference.tobytes() + s.counterfactual.tobytes()
        at, row = first_of.setdefault(alike, (start, rows))
        clusters.append(own + at)
        copied.append(np.arange(row, row + len(own)))
        if row == rows:
            start += int(own.max()) + 1 if len(own) else 0
            rows += len(own)
    arrays = {
        name: np.concatenate([getattr(s, name) for s in samples])
        for name in (
            "rows",
            "error",
            "counterfactual",
            "floor",
            "reference",
            "expected",
            "bad_rows",
            "not_zero",
            "zeroed",
            "misplaced",
        )
    }
    arrays["features"] = np.concatenate([s.features for s in samples], 1)
    unlike = [np.zeros(len(s.rows), bool) if s.unlike is None else s.unlike for s in samples]
    unlike_features = [s.unlike_features for s in samples if s.unlike_features is not None]
    standing_out = [s for s in samples if s.outlying.any() or (not first.compared and s.bad_features.any())]
    ways = {s.way for s in standing_out}
    return QuantitySample(
        **arrays,
        bad_features=np.stack([s.bad_features for s in samples]).max(0),
        misplaced_features=np.logical_or.reduce([s.misplaced_features for s in samples]),
        bad_elements=np.concatenate([s.bad_elements for s in samples]),
        in_outlying_element=np.concatenate([s.in_outlying_element for s in samples]),
        largest=max((s.largest for s in samples), key=lambda found: found[3]),
        clusters=np.concatenate(clusters),
        copied=np.concatenate(copied) if rows < len(arrays["rows"]) else None,
        carriers=first.carriers,
        site=_site(samples),
        made_by_site=sum(s.made_by_site for s in samples),
        unlike=np.concatenate(unlike) if unlike_features else None,
        unlike_features=np.logical_or.reduce(unlike_features) if unlike_features else None,
        declared=first.declared,
        factors=next((s.factors for s in samples if s.factors), ""),
        scales=next((s.scales for s in samples if s.scales), ""),
        beyond_backward=max(s.beyond_backward for s in samples),
        in_16_bits=None if first.in_16_bits is None else sum(s.in_16_bits or 0.0 for s in samples),
        compared=first.compared,
        way=ways.pop() if len(ways) == 1 else "",
        ceiling=sum(s.ceiling for s in samples),
        rounding=bool(standing_out) and all(s.rounding for s in standing_out),
        features_rounding=all(s.features_rounding for s in samples if s.bad_features.any()),
    )


def _site(samples: Sequence[QuantitySample]) -> str | None:
    """The first rounding that some sequences show, unless others are clearly further off, and do not show it."""
    showing = [s for s in samples if s.site is not None]
    most = max(map(_size, showing), default=0.0)
    beyond = any(s.site is None and _size(s) > _BEYOND_SITE * most for s in samples)
    return None if not showing or beyond else showing[0].site


def _size(found: QuantitySample) -> float:
    """How many times a well-rounded kernel's error it has."""
    return math.sqrt(found.error.sum() / max(found.counterfactual.sum(), found.floor.sum(), 1e-300))
