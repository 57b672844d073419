"""What ``identify``, ``attribute`` and ``what-if`` say of linear attention: plain frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Number, Result, Tool
from attn_diag.results.several import OneHead


@dataclass(frozen=True)
class LinearRecipeMatch:
    """One recipe that was run on the capture's inputs."""

    recipe: str
    """The fields that differ from a well-rounded kernel's, and the chunk: "chunk=64,state=bf16"."""
    words: str
    """The same in words."""
    bits: Number
    """Fraction of O's elements with the observed bits."""
    left: Number
    """||observed - emulated|| / ||observed - reference||: 0 where the recipe makes the whole error, about 1.4 where
    both err independently by as much."""
    factor: Number | None
    """||observed - emulated|| over the best recipe's; null for the best, or where that is 0."""
    told_apart: bool
    """Whether the 95 % interval of ``factor`` (a jackknife over 16 steps) lies above 1, and ``left`` is more than
    sums in another order leave."""


@dataclass(frozen=True, repr=False)
class LinearIdentification(OneHead, Result):
    """Which recipe of a chunked or recurrent kernel made a head's O."""

    tool: Tool
    """Versions and device of what produced the numbers."""
    source: str
    """The capture."""
    observation: str
    """The observation's name."""
    operator: str
    """Which operator."""
    layer: int | None
    """The model's number of the layer; null: not stated."""
    head: int
    """The model's number of the head."""
    outcome: Literal["identified", "ambiguous", "unknown"]
    """identified: one recipe makes 80 % of the squared error or more, and no other does as well; ambiguous: several do,
    which these inputs do not tell apart; unknown: none."""
    recipes: tuple[str, ...]
    """Those, the best first; empty: unknown."""
    verdict: str
    """The outcome in words."""
    tried: int
    """How many recipes were run."""
    candidates: tuple[LinearRecipeMatch, ...]
    """All of them, the best first."""
    schema: Literal["attn-diag-linear-identification"] = "attn-diag-linear-identification"
    schema_version: Literal[1] = 1

    @property
    def findings(self) -> tuple[str, ...]:
        """What was found, in a sentence."""
        return (self.verdict,)


@dataclass(frozen=True)
class LinearSiteEffect:
    """What one rounding site does to one quantity; sizes are ||error|| / ||reference||."""

    share: Number
    """Its Shapley value of the squared size over the total; the shares of a quantity, with that of fp32's own
    arithmetic, add up to 1."""
    alone: Number
    """Size with this site as the only one that rounds, beside fp32 arithmetic."""
    repaired: Number
    """Size with this site in fp32 and all others as they are."""


@dataclass(frozen=True)
class LinearSite:
    """One rounding site of the recipe."""

    site: str
    """The recipe's field; "gradients": the last rounding of those."""
    words: str
    """In words."""
    format: str
    """What it rounds to."""
    effects: dict[str, LinearSiteEffect]
    """By quantity: o, final_state, dq, dk, …"""


@dataclass(frozen=True)
class LinearHeadAttribution:
    """One head's errors under a recipe, attributed to its sites."""

    head: int
    """The model's number of the head."""
    totals: dict[str, Number]
    """||error|| / ||reference|| under the whole recipe, by quantity."""
    captured: dict[str, Number]
    """The same of what was captured."""
    arithmetic: dict[str, Number]
    """The share of fp32's own arithmetic, by quantity."""
    sites: tuple[LinearSite, ...]
    """Every site that rounds."""
    guilty: dict[str, str]
    """By quantity, the site with the largest share, where that is half or more; absent where errors of sites cancel (a
    share below -0.1), and where the captured one errs 1.25 times as much as the recipe or more."""


@dataclass(frozen=True, repr=False)
class LinearAttribution(Result):
    """Which rounding sites of a recipe make the errors of o, of the state and of every gradient."""

    tool: Tool
    """Versions and device of what produced the numbers."""
    source: str
    """The capture."""
    observation: str | None
    """Whose errors stand beside the recipe's; null: nothing was captured."""
    operator: str
    """Which operator."""
    layer: int | None
    """The model's number of the layer; null: not stated."""
    recipe: str
    """The recipe."""
    recipe_from: Literal["given", "recognised", "assumed"]
    """recognised: it makes 80 % of the captured O's squared error or more; assumed: a well-rounded kernel's, and what
    is said here need not hold of the captured one."""
    runs: int
    """How many variants were run."""
    heads: tuple[LinearHeadAttribution, ...]
    """One entry a head."""
    reasons: tuple[str, ...]
    """The result in sentences."""
    schema: Literal["attn-diag-linear-attribution"] = "attn-diag-linear-attribution"
    schema_version: Literal[1] = 1

    @property
    def findings(self) -> tuple[str, ...]:
        """What was found, in sentences."""
        return self.reasons


@dataclass(frozen=True)
class LinearCandidate:
    """Another recipe on the same inputs."""

    name: str
    """What is changed: "chunk=32", "state=fp32", …"""
    words: str
    """In words."""
    errors: dict[str, Number]
    """||error|| / ||reference||, by quantity."""
    left: Number
    """Geometric mean over the quantities of the error over the baseline's; Infinity where an output is not finite."""
    state_bytes: Number
    """Bytes of states that a forward writes, a step and head: what a kernel keeps for its backward."""


@dataclass(frozen=True, repr=False)
class LinearWhatIf(OneHead, Result):
    """What other chunk sizes and formats would leave of the errors."""

    tool: Tool
    """Versions and device of what produced the numbers."""
    source: str
    """The capture."""
    operator: str
    """Which operator."""
    layer: int | None
    """The model's number of the layer; null: not stated."""
    head: int
    """The model's number of the head."""
    recipe: str
    """The baseline."""
    recipe_from: Literal["given", "recognised", "assumed"]
    """As in ``LinearAttribution``."""
    observed: dict[str, Number]
    """Errors of what was captured, by quantity."""
    baseline: LinearCandidate
    """The recipe that the others change."""
    candidates: tuple[LinearCandidate, ...]
    """What leaves least first."""
    summary: tuple[str, ...]
    """The result in sentences."""
    schema: Literal["attn-diag-linear-what-if"] = "attn-diag-linear-what-if"
    schema_version: Literal[1] = 1

    @property
    def findings(self) -> tuple[str, ...]:
        """What was found, in sentences."""
        return self.summary

    def __getitem__(self, name: str) -> LinearCandidate:
        """The candidate of that name; KeyError names those there are."""
        for candidate in (self.baseline, *self.candidates):
            if candidate.name == name:
                return candidate
        raise KeyError(f"no candidate {name!r}; there are {', '.join(c.name for c in self.candidates)}")
