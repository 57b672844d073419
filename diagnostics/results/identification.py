"""What ``identify`` returns: the recipes that were tried, ranked by bit agreement, and what follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Result


@dataclass(frozen=True)
class RankedRecipe:
    """One recipe that was tried on the compared rows.

    ``recipe``: the preset with these roundings in this schedule, None if none has them; ``roundings``: the first preset
    with these roundings in any schedule. ``schedule`` in words, and as numbers behind it. ``agreement``: fraction of
    O's elements with the observed bits, ``standard_error`` over rows. ``group``: recipes with the same number returned
    the same bits in every compared row.

    Against the best: ``lost``, elements that only the best reproduces; ``won``, that only this one does;
    ``disputed_rows``, rows that hold such; ``p_value`` of "this one is right at least as often" (see ``Comparison`` in
    ``attn_diag.head.recipe_search``), None for the best and its group; ``told_apart``: whether it is at most the
    level.
    """

    rank: int
    recipe: str | None
    roundings: str
    schedule: str
    query_block: int
    key_tile: int
    order: str
    split_keys: int | None
    exp: str
    row_sum_of: str
    agreement: float
    standard_error: float | None
    group: int
    won: int
    lost: int
    disputed_rows: int
    p_value: float | None
    told_apart: bool


@dataclass(frozen=True)
class BackwardMatch:
    """How a preset's dQ agrees with the captured one; ``p_value`` of the difference to the best, None for that."""

    recipe: str
    agreement: float
    p_value: float | None
    told_apart: bool


@dataclass(frozen=True)
class HardwareMatch:
    """A recipe that O alone left possible, run with the tensor core's own truncation of sums (Hopper's) over every head
    of the sequence: in how many of the ``elements`` of O its bits are not the observed ones."""

    recipe: str
    missed: int
    elements: int


@dataclass(frozen=True, repr=False)
class Identification(Result):
    """Which recipe and schedule made one head of an observation.

    ``outcome``: "identified" (one preset fits and no other does as well), "ambiguous" (several presets fit equally
    well on this input), "unnamed" (modelled roundings fit in a schedule that no preset has), "unknown" (nothing
    reaches ``threshold``). ``recipes``: the presets that fit, best first. ``margin``: agreement of the best less that
    of the next recipe that is told apart from it, and ``margin_p_value``; None if none is. ``contested``: compared
    elements on which the recipes differ that fit and are not told apart; where there are few, this input cannot tell
    them apart. ``hardware``: where several presets were left, what of them holds under the tensor core's truncation;
    only those are named then that have every bit, if any has. ``rows`` and ``elements`` were compared, ``tried``
    recipes run. ``head`` is the model's number.
    """

    source: str
    observation: str
    layer: int | None
    batch: int
    head: int
    shape: dict[str, int]
    dtype: str
    backend: str
    rows: int
    rows_all: int
    elements: int
    contested: int
    tried: int
    threshold: float
    level: float
    outcome: Literal["identified", "ambiguous", "unnamed", "unknown"]
    recipes: tuple[str, ...]
    verdict: str
    margin: float | None
    margin_p_value: float | None
    notes: tuple[str, ...]
    candidates: tuple[RankedRecipe, ...]
    backward: tuple[BackwardMatch, ...]
    hardware: tuple[HardwareMatch, ...]
    schema: Literal["attn-diag-identification"] = "attn-diag-identification"
    schema_version: Literal[1] = 1

    @property
    def best(self) -> RankedRecipe:
        """The recipe with the highest agreement."""
        return self.candidates[0]


@dataclass(frozen=True, repr=False)
class Identifications(Result):
    """One identification for each head of each observation that was asked for; ``unreadable``: files left out."""

    results: tuple[Identification, ...]
    unreadable: tuple[str, ...]
    schema: Literal["attn-diag-identifications"] = "attn-diag-identifications"
    schema_version: Literal[1] = 1
