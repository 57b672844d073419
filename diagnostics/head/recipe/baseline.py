"""The recipe that a captured O is taken to come from: given, recognised by its bits, or assumed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from attn_diag.captures.capture import Capture
from attn_diag.errors import InputError
from attn_diag.head.engines import DEFAULT_RECIPE, require_known, select_recipes
from attn_diag.head.recipe.recognise import recognise
from attn_diag.kernels import Recipe


@dataclass(frozen=True)
class Baseline:
    """A recipe, its name (of all recipes that fit as well), where it comes from, and, where it was recognised, the
    fraction of sampled elements of O that it reproduces bit for bit."""

    recipe: Recipe
    name: str
    origin: Literal["given", "recognised", "assumed"]
    agreement: float | None = None

    @property
    def words(self) -> str:
        """For a report."""
        if self.origin == "recognised" and self.agreement is not None:
            # Never rounded up: 100 % is said of every bit alone.
            share = math.floor(1e4 * self.agreement) / 100
            return f"{self.name}, recognised ({share:g} % of sampled elements of O bit-equal)"
        reason = "as asked for" if self.origin == "given" else "assumed: no captured O was recognised"
        return f"{self.name}, {reason}"


def find_baseline(
    capture: Capture, wanted: str | Recipe | None, observation: str | None, batch: int, head: int, device: torch.device
) -> Baseline:
    """``wanted``, else what ``observation`` is recognised as, else fa2.

    Raises InputError for a recipe that does not exist, and for inputs that no recipe covers.
    """
    if wanted is None and observation is not None:
        found = recognise(capture, observation, batch, head, device)
        if found is not None:
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
