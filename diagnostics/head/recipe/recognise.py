"""Which known recipe made a captured O, quickly: the shallow end of the search behind ``identify``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_diag.captures.capture import Capture
from attn_diag.head.recipe import search
from attn_diag.head.recipe.agreement import spread_rows
from attn_diag.kernels import Recipe

# Rows that are compared: as many as have so many scores together, and at least so many.
_SCORES, _ROWS = 2**18, 48


@dataclass(frozen=True)
class Recognised:
    """The recipe that fits best, the fraction of equal elements, and the names of all that fit as well."""

    recipe: Recipe
    agreement: float | None
    name: str


def recognise(capture: Capture, observation: str, batch: int, head: int, device: torch.device) -> Recognised | None:
    """The published kernel of an observation, from a few rows of one head; None where no known one fits."""
    subject = search.read_subject(capture, observation, batch, head, device)
    if subject is None:
        return None
    rows = spread_rows(capture.q_length, max(_ROWS, _SCORES // capture.k_length), device)
    recipes = search.known(subject)
    # Kernels with fp32 scores first: a match among them is never mistaken for one with coarse scores.
    for fine in (True, False):
        trials = subject.run([r for r in recipes if (r.scores == "fp32") == fine], rows)
        trials = search.ranked(trials, capture.head_dim)
        best = trials[0]
        if best.match.agreement >= search.threshold(subject.fmt, best.match.equal.numel()):
            names = [t.recipe.name for t in trials if best.match.compare(t.match).p_value > search.LEVEL]
            return Recognised(best.recipe, best.match.agreement, " or ".join(dict.fromkeys(names)))
    return None
