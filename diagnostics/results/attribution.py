"""What ``attribute`` returns: every rounding site's part in the errors of O, delta, dQ and dW_Q."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from attn_diag.results.base import Number, Result, Tool
from attn_diag.results.wording import head_name

Quantity = Literal["o", "delta", "dq", "dw_q"]
QUANTITIES = ("o", "delta", "dq", "dw_q")

# A site with a larger share has half of the whole or more cancelled by other sites: repairing it alone adds an error.
CANCELLED = 1.5


@dataclass(frozen=True)
class MeanError:
    """A mean signed error and its uncertainty.

    O's away from zero in ulp and delta's in noise floors (rows clustered by their top key), dQ's in ulp (by row). dW_Q
    has no rows: the error's part along it, <error, dW_Q> / ||dW_Q||^2.
    """

    mean: Number
    """The mean, in the unit above."""
    standard_error: Number | None = None
    """Its standard error; null where it is not tested."""
    n_eff: Number | None = None
    """How many clusters or rows carry it in effect; below 4 the test leans on few of them."""
    p_value: Number | None = None
    """Two-sided p-value of a zero mean."""
    p_adjusted: Number | None = None
    """p_value after Benjamini-Hochberg over the sites of one quantity."""


@dataclass(frozen=True)
class Effect:
    """What one site does to one quantity.

    Sizes are ||error|| / ||reference|| (delta: the noise factor). A sham has the site's rounding errors with signs
    drawn at random: equal variance, no bias.
    """

    share: Number
    """The site's Shapley value of the squared size over the total; shares of a quantity add up to 1."""
    share_error: Number | None
    """Standard error of ``share`` where orders were sampled; null where all subsets were run."""
    alone: Number
    """Size with this site as the only one that rounds (besides fp32 arithmetic, which comes first)."""
    repaired: Number
    """Size with this site exact and all others as they are."""
    sham: Number | None
    """Size under the site's sham; null where it has none."""
    bias: MeanError | None = None
    """The site's Shapley value of the mean signed error."""
    bias_alone: Number | None = None
    """Mean signed error with this site alone."""
    bias_repaired: Number | None = None
    """Mean signed error that is left with this site exact."""
    bias_sham: Number | None = None
    """Mean signed error that is left under its sham."""


@dataclass(frozen=True)
class SiteAttribution:
    """One rounding site and its effects."""

    site: str
    """The recipe's field."""
    words: str
    """The site in words."""
    format: str | None
    """What it rounds to; null where it is no rounding to a format (sums, exp)."""
    effects: dict[str, Effect]
    """By quantity: o, delta, dq, dw_q."""


@dataclass(frozen=True)
class Total:
    """One quantity's error; sizes as in Effect."""

    error: Number
    """Size under the whole recipe."""
    exact: Number
    """Size with every site exact."""
    captured: Number | None
    """Size of the captured one's error; null: not captured."""
    bias: MeanError | None = None
    """Mean signed error under the whole recipe."""


@dataclass(frozen=True)
class Repair:
    """A step of making sites exact one after the other, the guiltiest of dQ (or O) first."""

    site: str
    """The site that this step makes exact."""
    left: dict[str, Number]
    """Sizes that are left after it, by quantity."""


@dataclass(frozen=True)
class Twin:
    """The recipe with every rounding to a format stochastic; sums and exp stay as they are.

    A bias that vanishes came from the rounding mode, one that stays from elsewhere, such as the curvature of exp.
    """

    seeds: int
    """How many draws."""
    sizes: dict[str, Number]
    """Root mean square over the draws of the sizes, by quantity."""
    bias: dict[str, MeanError]
    """Mean signed errors over the draws, by quantity."""


@dataclass(frozen=True)
class RowKind:
    """Rows of one kind, and what they carry."""

    rows: int
    """How many."""
    error_share: Number | None
    """Their share of dQ's (without dO: O's) squared error."""
    reference_share: Number | None
    """Their share of dQ's squared norm; null without dO."""


@dataclass(frozen=True)
class HeadAttribution:
    """One head's errors, attributed to the rounding sites of the recipe that is taken to have made them."""

    layer: int | None
    """The model's number of the layer; null where it is not stated."""
    batch: int | None
    """Batch item; null where there is one only."""
    head: int
    """The model's number of the head."""
    rows: int
    """Query rows used."""
    recipe: str
    """The recipe, and where it comes from."""
    recipe_json: str
    """The recipe, as JSON that ``Recipe.from_json`` reads."""
    agreement: Number | None
    """The fraction of sampled elements of O that it reproduces bit for bit; null where it was not recognised."""
    runs: int
    """How many variants of the recipe were run."""
    orders: int | None
    """How many orders of the sites were sampled; null where all subsets were run."""
    noise_factor: Number | None
    """rms of the emulated delta's error over that of one correct rounding of O; null without dO."""
    conditioning: Number | None
    """||alpha diag(delta) P K|| / ||dQ||; null without dO."""
    totals: dict[str, Total]
    """The whole error, by quantity."""
    sites: tuple[SiteAttribution, ...]
    """Every site that rounds."""
    inert: tuple[str, Number]
    """A site that reaches none of the quantities, and the largest change that repairing it made (another sham)."""
    repairs: tuple[Repair, ...]
    """Sites made exact one after the other."""
    twin: Twin
    """The recipe with stochastic rounding."""
    row_kinds: dict[str, RowKind]
    """Rows with a repeated maximum, swamped rows and near one-hot rows."""
    guilty: dict[str, str]
    """By quantity, the site with the largest share; absent where a captured kernel does otherwise than the recipe."""
    biased: dict[str, str]
    """By quantity, the site with the largest significant mean error; absent where there is none, and likewise."""
    recipe_from: Literal["given", "recognised", "assumed"] = "given"
    """Where the recipe comes from; recognised: it has the bits of the captured O."""
    unfit: str = ""
    """Why nothing here is about the captured kernel: no recipe made its O, or it is wrong in places; else empty."""
    differences: dict[str, str] = field(default_factory=dict)
    """By quantity (o, lse, delta, dq), in what the captured kernel errs otherwise than the recipe."""
    well_rounded: dict[str, tuple[Number, Number, Number]] = field(default_factory=dict)
    """Of o and dq: the error over a well-rounded kernel's, and the ends of its 99 % interval."""
    notes: tuple[str, ...] = ()
    """What was left out or assumed."""
    reasons: tuple[str, ...] = ()
    """All of it in words."""
    norms: dict[str, Number] = field(default_factory=dict)
    """||reference|| of o, dq and dw_q, by which sizes of several heads are compared; none in older documents."""


@dataclass(frozen=True, repr=False)
class Attribution(Result):
    """The result of ``attn_diag.attribute``."""

    tool: Tool
    """Versions and device of what produced the numbers."""
    source: str
    """The capture."""
    observation: str | None
    """Whose O the recipe was recognised from, and whose errors stand beside it; null: the capture has no O."""
    level: Number
    """Significance level of a site's mean error."""
    backend: str
    """What ran the recipe."""
    heads: tuple[HeadAttribution, ...]
    """One entry a head and batch item."""
    step: int | None = None
    """Training step; null where it is not stated."""
    schema: Literal["attn-diag-attribution"] = "attn-diag-attribution"
    schema_version: Literal[1] = 1

    @property
    def findings(self) -> tuple[str, ...]:
        """What was found, in sentences, head by head."""
        return tuple(f"{head_name(head.layer, head.head)}: {words}" for head in self.heads for words in head.reasons)
