"""What ``paper_figures`` returns: the numbers of each figure, None where data are missing, with the reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from attn_diag.results.base import Number, Result, Tool
from attn_diag.results.wording import head_name

Matrix = tuple[tuple[Number, ...], ...]
FIGURES = ("spectral_norms", "atoms", "delta_rows", "delta_steps", "features", "prefix", "triggers")


@dataclass(frozen=True)
class ModelHead:
    """A head of the model."""

    layer: int | None
    """The model's number of the layer; null where it is not stated."""
    head: int
    """The model's number of the head."""


@dataclass(frozen=True)
class Chosen(ModelHead):
    """The head that is drawn."""

    observation: str
    """Which observation of it."""
    module: str | None
    """The module, as the capture says; null where it does not."""
    run: str | None
    """The run, likewise."""
    source: str
    """The capture in which it is worst: figures of one step show that one."""
    step: int | None
    """That capture's step; null where it is not stated."""
    reason: str
    """How it was chosen."""
    steps: tuple[int, ...]
    """Steps of all captures of this head that state one, in order; a step may occur several times."""
    emulated: bool = False
    """Whether no kernel's outputs were captured, and those of a recipe's emulation are judged instead."""

    @property
    def name(self) -> str:
        """L2H4, or H4 where the layer is not stated."""
        return head_name(self.layer, self.head)


@dataclass(frozen=True)
class HeadNorms(ModelHead):
    """Norms of one head's rows of W_Q, [D, C], by step."""

    steps: tuple[int | None, ...]
    """Steps, ascending; null where one is not stated."""
    spectral: tuple[Number, ...]
    """The largest singular value at each step."""
    frobenius: tuple[Number, ...]
    """The root of the sum of all singular values' squares: equal for a matrix of rank 1."""
    first_share: Number | None
    """Of ||W_Q||^2, what the first singular direction holds at the last step; null where W_Q is 0."""


@dataclass(frozen=True)
class SpectralNorms:
    """Figure 3: spectral norms of W_Q over steps."""

    heads: tuple[HeadNorms, ...]
    """Heads of the run whose w_q was captured, by layer and head; one head only where one was asked for."""
    dtype: str
    """w_q's, as captured."""


@dataclass(frozen=True)
class RowAtStep:
    """A query row at one step."""

    step: int | None
    """The step; null where it is not stated."""
    batch: int
    """Batch item."""
    row: int
    """Query row."""


@dataclass(frozen=True)
class AtomRow(RowAtStep):
    """A row whose atom is shown."""

    weight: Number
    """The atom's share of the step's sum ||a_t||^2; without x, of the atoms' parts on q's side."""


@dataclass(frozen=True)
class Similarity:
    """How parallel directions are."""

    cosines: Matrix
    """|cosine| of the rows shown (``Atoms.rows``), in their order."""
    rows: int
    """How many evenly spread rows of the step shown the other figures come from."""
    mean_square: Number | None
    """Mean squared cosine over pairs of different rows; null for fewer than two."""
    random: Number
    """Its mean for independent directions, uniform on the sphere."""
    random99: Number | None
    """Its 99 % quantile for these (Bingham's test of uniformity, Ann. Stat. 2 (1974) 1201); null for atoms."""
    first_share: Number | None
    """Of the unit vectors' energy, what their first singular direction holds; null for fewer than two rows."""


@dataclass(frozen=True)
class StepAtoms:
    """One step's delta part of dW_Q's error, M = sum over rows of a_t = -alpha Delta_delta_t (PK)_t (x) x_t."""

    step: int
    """The step."""
    norm: Number
    """||M||."""
    first_share: Number | None
    """Of ||M||^2, what its first singular direction holds; null where M is 0."""
    coherence: Number | None
    """||M||^2 / sum ||a_t||^2 over the rows; null where it is not known."""
    coherence_null95: Number | None
    """Its 95 % quantile under random signs of the rows."""


@dataclass(frozen=True)
class OverSteps:
    """Whether the M of several steps add up."""

    count: int
    """How many steps."""
    steps: tuple[int, ...]
    """The steps in the matrices: at most 100, evenly spread."""
    cosines: Matrix
    """<M_s, M_t> / (||M_s|| ||M_t||), signed."""
    left: Matrix
    """|cosine| of their first singular directions, on the side of q's features."""
    right: Matrix
    """|cosine| of their first singular directions, on the side of x."""
    left_random95: Number
    """95 % quantile of ``left`` for random directions."""
    right_random95: Number
    """95 % quantile of ``right`` for random directions."""
    coherence: Number
    """||sum M||^2 / sum ||M||^2."""
    null95: Number
    """Its 95 % quantile under random signs of the steps."""
    p_value: Number
    """How often random signs reach it."""
    draws: int
    """How many random signs were drawn."""


@dataclass(frozen=True)
class Atoms:
    """Figure 4: the rank-1 atoms of delta's error."""

    rows: tuple[AtomRow, ...]
    """Rows with the largest atoms, a few of every step (of at most 16)."""
    probs_k: Similarity
    """Of the rows (PK)_t."""
    x: Similarity | None
    """Of the rows x_t; null without x."""
    atoms: Similarity | None
    """Of the atoms; null without x."""
    steps: tuple[StepAtoms, ...] = ()
    """By step, where dW_Q follows from dQ."""
    over_steps: OverSteps | None = None
    """Of two steps or more, likewise; null where there are fewer, or one has no error at all."""
    note: str | None = None
    """What lies between dQ and dW_Q, or why dW_Q does not follow; null: nothing to say."""


@dataclass(frozen=True)
class DeltaRows:
    """Figure 5a within one step: the running sum of delta's signed error over the rows, thinned."""

    step: int | None
    """The step; null where it is not stated."""
    rows: tuple[int, ...]
    """The last row of each sum, counted over the analysed rows."""
    sums: tuple[Number, ...]
    """The running sums."""
    band99: Number
    """An unbiased sum of independent rows stays inside +- this with probability 99 % throughout."""
    outside: bool
    """Whether the running sum leaves that band."""


@dataclass(frozen=True)
class Accumulated:
    """A step's mean signed errors and their running sum over the steps, in delta's own unit (that of the loss)."""

    means: tuple[Number, ...]
    """Each step's mean."""
    standard_errors: tuple[Number, ...]
    """Their standard errors; 0 where every error of the step is 0."""
    sums: tuple[Number, ...]
    """Running sum of the means."""
    band99: Number
    """Independent unbiased steps' running sum stays inside +- this with probability 99 % or a little more."""
    outside: bool
    """Whether the running sum leaves that band."""
    t_over_steps: Number | None
    """Student's t of the means as a sample, which uses their spread alone; null below three steps."""
    p_over_steps: Number | None
    """Its two-sided p-value; null likewise."""
    lag1: Number | None
    """Correlation of neighbouring steps' mean / standard error; null below eight steps."""
    lag1_limit: Number | None
    """Independent steps stay within +- this in 95 % of cases; beyond it the band is too narrow."""


@dataclass(frozen=True)
class HeadDrift(ModelHead):
    """One head's running sum of delta's mean errors over its steps."""

    extreme: Number
    """The sum that is largest in size, signed, over the head's own band. Beyond +-1 it leaves the band, as 1 % of
    unbiased heads or a little fewer do."""


@dataclass(frozen=True)
class DeltaSteps:
    """Figure 5a: delta's error over steps."""

    steps: tuple[int, ...]
    """The steps, ascending."""
    total: Accumulated
    """The whole error."""
    excess: Accumulated | None
    """The error beyond one correct rounding of O; null where it is not known at every step."""
    heads: tuple[HeadDrift, ...]
    """All heads of the run and observation that were looked at over steps, in order. Where the head drawn was chosen
    among them for being the worst, its band does not allow for the choice; the number of heads outside does."""


@dataclass(frozen=True)
class FeatureProducts(RowAtStep):
    """Figures 5b-c: dO, the error of O and their product by feature, in the row with the largest |Delta_delta|."""

    delta_error: Number
    """delta's signed error there."""
    share: Number
    """Its square's share of the sum over the step's rows."""
    do: tuple[Number, ...]
    """dO in that row, by feature."""
    o_error: tuple[Number, ...]
    """O's signed error in that row."""
    product: tuple[Number, ...]
    """Their product."""
    alignment: Number
    """|sum of products| / (sum of their squares)^1/2: 1 in the mean square under random signs."""
    alignment_p: Number
    """A bound on the probability that random signs do as much in any of the rows (Chernoff's, times the rows)."""
    rows: int
    """Rows of the step that were used."""
    aligned: tuple[Number | None, ...]
    """Over all rows, by feature: fraction with a positive product, of those where it is not 0; null: there are none."""
    contribution: tuple[Number, ...]
    """Over all rows, by feature: sum of the products."""


@dataclass(frozen=True)
class PrefixError(RowAtStep):
    """Figure 6: the error of O_bar after the first t visible keys of one row and feature; see ``attn_diag.microscope``.

    The kernel's inside is inferred: this is the walk of ``recipe``.
    """

    feature: int
    """Feature of O."""
    recipe: str
    """The recipe that is followed."""
    recipe_reason: str
    """Where it comes from."""
    as_observed: bool | None
    """Whether the walk ends at O as observed; null: none was captured."""
    format: str
    """What O_bar is rounded to."""
    keys: int
    """Visible keys."""
    unit_keys: int
    """At how many P_bar = 1."""
    positions: tuple[int, ...]
    """t, of at most 512 points."""
    error: tuple[Number, ...]
    """The error against float64."""
    rounding_error: tuple[Number, ...]
    """The error against the recipe's own terms."""
    unit: tuple[bool, ...]
    """Whether P_bar = 1 at the last of the t keys."""


@dataclass(frozen=True)
class TriggerCounts:
    """Rows with a repeated maximum, by step: exact counts of the rows captured, nothing sampled."""

    rows: tuple[int, ...]
    """All rows."""
    exact: tuple[int, ...]
    """Ties of the float64 scores rounded once to q's dtype."""
    window: tuple[int, ...]
    """Scores within 1e-3 of the maximum."""
    unit: tuple[int, ...]
    """P_bar rounds to 1 in q's dtype more than once."""


@dataclass(frozen=True)
class Triggers:
    """Figure 13: trigger rows over steps."""

    steps: tuple[int, ...]
    """The steps, ascending."""
    head: TriggerCounts
    """Of the head chosen."""
    layer: TriggerCounts
    """Of all heads of its layer that were looked at."""


@dataclass(frozen=True, repr=False)
class PaperFigures(Result):
    """Figures after Qiu & Yao, "Why Low-Precision Transformer Training Fails" (arXiv 2510.04212).

    A figure is null where data are missing; ``missing`` then has the reason.
    """

    chosen: Chosen
    """The head that is drawn."""
    captures: int
    """How many captures were used."""
    spectral_norms: SpectralNorms | None
    """Figure 3: spectral norms of W_Q over steps."""
    atoms: Atoms | None
    """Figure 4: the rank-1 atoms of delta's error."""
    delta_rows: DeltaRows | None
    """Figure 5a within one step."""
    delta_steps: DeltaSteps | None
    """Figure 5a over steps."""
    features: FeatureProducts | None
    """Figures 5b-c: delta's error by feature."""
    prefix: PrefixError | None
    """Figure 6: the error of O_bar key by key."""
    triggers: Triggers | None
    """Figure 13: trigger rows over steps."""
    tool: Tool
    """Versions and device of what produced the numbers."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why a figure is null, by its field's name."""
    notes: tuple[str, ...] = ()
    """What was left out, and assumptions."""
    schema: Literal["attn-diag-paper-figures"] = "attn-diag-paper-figures"
    schema_version: Literal[1] = 1
