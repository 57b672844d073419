"""The recipe that a captured O is taken to come from: given, recognised by its bits, or assumed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from attn_diag.captures.capture import Capture
from attn_diag.errors import InputError
from attn_diag.head.engines import DEFAULT_RECIPE, require_known, select_recipes
from attn_diag.head.recipe import search
from attn_diag.head.recipe.agreement import spread_rows
from attn_diag.kernels import Recipe

# Rows that are compared: as many as have so many scores together, and at least so many.
_SCORES, _ROWS = 2**18, 48


@dataclass(frozen=True)
class Recognised:
    """The known recipe that fits a captured O best."""

    recipe: Recipe
    """The recipe."""
    agreement: float | None
    """The fraction of compared elements that it reproduces bit for bit; None where it was stated, not recognised."""
    name: str
    """The names of all recipes that fit as well."""


def recognise(capture: Capture, observation: str, batch: int, head: int, device: torch.device) -> Recognised | None:
    """The published kernel of an observation, from a few rows of one head: the shallow end of ``identify``'s search.

    Args:
        capture: The capture.
        observation: One of its observations.
        batch: Index of the batch item.
        head: Index of the head in the capture.
        device: Where recipes are emulated.

    Returns:
        None where no known recipe fits, or where none covers the formats of inputs and O.
    """
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


@dataclass(frozen=True)
class Baseline:
    """The recipe that a head is taken to be made by."""

    recipe: Recipe
    """The recipe."""
    name: str
    """Its name, or the names of all recipes that fit as well."""
    origin: Literal["given", "recognised", "assumed"]
    """Where it comes from."""
    agreement: float | None = None
    """Where it was recognised, the fraction of the compared elements of O that it reproduces bit for bit."""

    @property
    def words(self) -> str:
        """For a report."""
        if self.origin == "recognised" and self.agreement is not None:
            # Never rounded up: 100 % is said of every bit alone.
            share = math.floor(1e4 * self.agreement) / 100
            return f"{self.name}, recognised ({share:g} % of sampled elements of O bit-equal)"
        reason = "as asked for" if self.origin == "given" else "assumed: no captured O was recognised"
        return f"{self.name}, {reason}"


def find_baseline(capture: Capture, wanted: str | Recipe | None, found: Recognised | None) -> Baseline:
    """The recipe ``wanted``, else the one ``found`` by the bits of O, else fa2.

    Raises:
        InputError: The recipe does not exist, or no recipe covers the inputs.
    """
    if wanted is None and found is not None:
        return Baseline(found.recipe, found.name, "recognised", found.agreement)
    chosen = DEFAULT_RECIPE if wanted is None else wanted
    require_known("emulation", [chosen])
    (recipe,) = select_recipes(capture, [chosen], "emulation", needed=True).values()
    return Baseline(recipe, recipe.name, "assumed" if wanted is None else "given")


def observation_with_o(capture: Capture, wanted: str | None) -> str | None:
    """The observation asked for, else the first that has an O; None where none has. Raises InputError."""
    with_o = [name for name, outputs in capture.observations.items() if "o" in outputs]
    if wanted is None:
        return with_o[0] if with_o else None
    if wanted not in with_o:
        known = ", ".join(with_o) or "none"
        raise InputError(f"{capture.source}: no observation {wanted!r} with an O; there are: {known}")
    return wanted
