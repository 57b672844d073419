"""What ``identify`` returns: the recipes that were tried, ranked by bit agreement, and what follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Result
from attn_diag.results.several import OneHead
from attn_diag.results.wording import head_name


@dataclass(frozen=True)
class RankedRecipe:
    """One recipe that was tried on the compared rows, beside the best."""

    rank: int
    """Place by agreement, from 1."""
    recipe: str | None
    """The preset with these roundings in this schedule; null if none has them."""
    roundings: str
    """The first preset with these roundings in any schedule."""
    schedule: str
    """The order of keys, in words."""
    query_block: int
    """Query rows of a block."""
    key_tile: int
    """Keys of a range."""
    order: str
    """ascending, descending or diagonal-first."""
    split_keys: int | None
    """Keys of an independent split; null: the keys are not split."""
    exp: str
    """How the exponential is computed."""
    row_sum_of: str
    """Which P_bar l sums: before its cast (fp32-probs) or after it (cast-probs)."""
    agreement: float
    """Fraction of O's compared elements with the observed bits."""
    standard_error: float | None
    """Its standard error over rows; null for a single row."""
    group: int
    """Recipes with the same number returned the same bits in every compared row; 1: those of the best."""
    won: int
    """Elements that this recipe reproduces and the best does not."""
    lost: int
    """Elements that the best reproduces and this recipe does not."""
    disputed_rows: int
    """Rows that hold such elements."""
    p_value: float | None
    """Of "this one is right at least as often as the best": McNemar's test clustered by row; null in group 1."""
    told_apart: bool
    """Whether that is at most the level."""


@dataclass(frozen=True)
class BackwardMatch:
    """How well the backward of some presets agrees with the captured dQ."""

    recipe: str
    """The presets that share it, joined by "or"."""
    agreement: float
    """Fraction of dQ's elements with the observed bits."""
    p_value: float | None
    """Of "this one is right at least as often as the best"; null for the best."""
    told_apart: bool
    """Whether that is at most the level."""


@dataclass(frozen=True)
class HardwareMatch:
    """A preset that O alone left possible, run with the truncation of sums that Hopper's tensor core makes.

    The sequence's heads are run, the one asked for first, as many as have 2^20 scores together.
    """

    recipe: str
    """The preset."""
    missed: int
    """In how many elements its bits are not the observed ones."""
    elements: int
    """Elements of O compared."""


@dataclass(frozen=True)
class Misfitting:
    """Elements of O that the recipe does not explain, though it has the bits of the others."""

    rows: tuple[int, ...]
    """The query rows that hold them."""
    features: tuple[int, ...] | None
    """The features that hold them; null: no few."""
    elements: int
    """How many there are."""
    largest_ulp: float
    """How far the furthest is from the recipe's O, in ulp."""
    words: str
    """Where and by how much."""


@dataclass(frozen=True, repr=False)
class Identification(OneHead, Result):
    """Which recipe and schedule made one head of an observation."""

    source: str
    """The capture."""
    observation: str
    """The observation's name."""
    layer: int | None
    """The model's number of the layer; null where it is not stated."""
    batch: int
    """Index of the batch item."""
    head: int
    """The model's number of the head."""
    shape: dict[str, int]
    """B, Hq, Hk, Tq, Tk and D: batch items, query and key heads, query rows, keys, head dimension."""
    dtype: str
    """The inputs' dtype."""
    backend: str
    """What ran the recipes."""
    rows: int
    """Query rows compared at the end."""
    rows_all: int
    """Query rows of the head."""
    elements: int
    """Elements of O in the rows compared."""
    contested: int
    """Elements on which the recipes differ that fit and are not told apart; few: this input cannot tell them apart."""
    tried: int
    """How many recipes were run."""
    threshold: float
    """The agreement from which a recipe fits."""
    level: float
    """The significance level at which recipes are told apart."""
    outcome: Literal["identified", "ambiguous", "unnamed", "flawed", "unknown"]
    """flawed: one or several fit, but for elements that do not (``flaw``);
    identified: one preset fits and no other does as well; ambiguous: several fit equally well on this input;
    unnamed: modelled roundings fit in a schedule that no preset has, or those of attention that is not fused, which
    ``not_fused`` names, or of a loop, which ``loop`` names; unknown: nothing reaches ``threshold``."""
    recipes: tuple[str, ...]
    """The presets that fit, best first."""
    verdict: str
    """The outcome in words."""
    margin: float | None
    """Agreement of the best less that of the next recipe that is told apart from it; null if none is."""
    margin_p_value: float | None
    """That recipe's p_value; null likewise."""
    notes: tuple[str, ...]
    """What was left out or assumed."""
    candidates: tuple[RankedRecipe, ...]
    """The recipes that reached the last comparison, best first."""
    backward: tuple[BackwardMatch, ...]
    """Presets with one forward told apart by dQ; empty where nothing was to be told, or dQ was not captured."""
    hardware: tuple[HardwareMatch, ...]
    """Where several presets were left, what holds of them under a tensor core's sums; those with every bit are then
    named alone, if there are any."""
    flaw: Misfitting | None = None
    """What the best recipe does not explain though it has the bits of the rest; null: nothing, or it has not."""
    misfit: str | None = None
    """Where nothing fits: why O is not the attention that the metadata state (mask, scale, layout), and what fits; null
    where it is, or something fits."""
    options: tuple[str, ...] = ()
    """The options with which the metadata would be right, such as "--causal top-left"; empty where none are known."""
    not_fused: str | None = None
    """Where nothing fused fits: what attention that is not fused stores, if that has the bits (``recipes`` is empty and
    ``candidates`` are fused ones that do not fit); null where it has not."""
    loop: str | None = None
    """Likewise the loop of a kernel of one's own, and what it keeps in 16 bits where good kernels keep fp32."""
    schema: Literal["attn-diag-identification"] = "attn-diag-identification"
    schema_version: Literal[1] = 1

    @property
    def findings(self) -> tuple[str, ...]:
        """What was found, in sentences."""
        return (self.verdict, *([] if self.flaw is None else [self.flaw.words]))

    @property
    def best(self) -> RankedRecipe:
        """The recipe with the highest agreement."""
        return self.candidates[0]


@dataclass(frozen=True, repr=False)
class Identifications(Result):
    """What ``attn-diag identify`` found in several captures, observations or heads."""

    results: tuple[Identification, ...]
    """One entry for each head of each observation that was asked for."""
    unreadable: tuple[str, ...]
    """What could not be read or identified, and why."""
    schema: Literal["attn-diag-identifications"] = "attn-diag-identifications"
    schema_version: Literal[1] = 1

    @property
    def heads(self) -> tuple[Identification, ...]:
        """The entries of the heads."""
        return self.results

    @property
    def findings(self) -> tuple[str, ...]:
        """What was found, in sentences, head by head."""
        return tuple(f"{head_name(one.layer, one.head)}: {words}" for one in self.results for words in one.findings)
