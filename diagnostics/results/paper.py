"""What ``paper_figures`` returns: the numbers of each figure, None where data are missing, with the reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from attn_diag.results.base import Result
from attn_diag.results.diagnosis import Number, Tool
from attn_diag.results.wording import head_name

Matrix = tuple[tuple[Number, ...], ...]
FIGURES = ("spectral_norms", "atoms", "delta_rows", "delta_steps", "features", "prefix", "triggers")


@dataclass(frozen=True)
class Chosen:
    """The head that is drawn. ``layer``, ``head``: the model's own numbers; ``module``, ``run`` as the capture says.

    ``source``, ``step``: the capture in which it is worst; figures of one step show that one. ``reason``: how it was
    chosen. ``steps``: of all captures of this head that state their step, in order; one may occur several times.
    ``emulated``: no kernel's outputs were captured, those of a recipe's emulation are judged instead.
    """

    layer: int | None
    head: int
    observation: str
    module: str | None
    run: str | None
    source: str
    step: int | None
    reason: str
    steps: tuple[int, ...]
    emulated: bool = False

    @property
    def name(self) -> str:
        """L2H4, or H4 where the layer is not stated."""
        return head_name(self.layer, self.head)


@dataclass(frozen=True)
class HeadNorms:
    """Norms of one head's rows of W_Q, [D, C], by step (None: not stated); ``spectral`` is the largest singular value.

    ``frobenius`` is the root of the sum of their squares: both are equal for a matrix of rank 1. ``first_share``: of
    ||W_Q||^2, what the first singular direction holds at the last step.
    """

    layer: int | None
    head: int
    steps: tuple[int | None, ...]
    spectral: tuple[Number, ...]
    frobenius: tuple[Number, ...]
    first_share: Number | None


@dataclass(frozen=True)
class SpectralNorms:
    """Figure 3: every head of every layer captured with w_q, ordered; ``dtype`` of w_q as captured."""

    heads: tuple[HeadNorms, ...]
    dtype: str


@dataclass(frozen=True)
class AtomRow:
    """A row whose atom is shown: its step, batch item and row; ``weight``: its share of the step's sum ||a_t||^2."""

    step: int | None
    batch: int
    row: int
    weight: Number


@dataclass(frozen=True)
class Similarity:
    """How parallel directions are. ``cosines``: |cosine| of the rows shown (``Atoms.rows``), in their order.

    Of ``rows`` evenly spread rows of the step shown: ``mean_square`` cosine over pairs of different rows; ``random``
    and ``random99``: its mean, and 99 % quantile, for independent directions uniform on the sphere (Bingham's test of
    uniformity, Ann. Stat. 2 (1974) 1201). ``first_share``: of the unit vectors' energy, what their first singular
    direction holds.
    """

    cosines: Matrix
    rows: int
    mean_square: Number | None
    random: Number
    random99: Number | None
    first_share: Number | None


@dataclass(frozen=True)
class StepAtoms:
    """One step's delta part of dW_Q's error, M = sum over rows of -alpha Delta_delta_t (PK)_t (x) x_t.

    ``first_share``: of ||M||^2, what its first singular direction holds. ``coherence`` = ||M||^2 / sum ||a_t||^2 over
    the rows, with its 95 % quantile under random signs of the rows.
    """

    step: int
    norm: Number
    first_share: Number | None
    coherence: Number | None
    coherence_null95: Number | None


@dataclass(frozen=True)
class OverSteps:
    """Whether the M of ``count`` steps add up; matrices are of the ``steps``, at most 100, evenly spread.

    ``cosines``: signed, <M_s, M_t> / (||M_s|| ||M_t||). ``left``, ``right``: |cosine| of their first singular
    directions, on the side of q's features and of x; ``left_random95``, ``right_random95``: 95 % quantiles for random
    directions. ``coherence`` = ||sum M||^2 / sum ||M||^2; ``null95`` and ``p_value`` from ``draws`` random signs of the
    steps.
    """

    count: int
    steps: tuple[int, ...]
    cosines: Matrix
    left: Matrix
    right: Matrix
    left_random95: Number
    right_random95: Number
    coherence: Number
    null95: Number
    p_value: Number
    draws: int


@dataclass(frozen=True)
class Atoms:
    """Figure 4: the rank-1 atoms of delta's error. ``x``, ``atoms`` None without x; ``note`` says what is missing.

    ``rows``: those with the largest atoms, a few of every step. ``steps``, ``over_steps``: where dW_Q follows from dQ.
    """

    rows: tuple[AtomRow, ...]
    probs_k: Similarity
    x: Similarity | None
    atoms: Similarity | None
    steps: tuple[StepAtoms, ...] = ()
    over_steps: OverSteps | None = None
    note: str | None = None


@dataclass(frozen=True)
class DeltaRows:
    """Figure 5a within one step: the running sum of delta's signed error over the rows, thinned.

    An unbiased sum of independent rows stays inside +-``band99`` with probability 99 % throughout.
    """

    step: int | None
    rows: tuple[int, ...]
    sums: tuple[Number, ...]
    band99: Number
    outside: bool


@dataclass(frozen=True)
class Accumulated:
    """A step's mean signed errors and their running sum over the steps, with a flat 99 % band.

    ``means``, ``standard_errors``: of each step, in delta's own units (those of the loss). ``band99``: independent
    unbiased steps' running sum stays inside +- this throughout with probability 99 % or a little more;
    ``outside``: it does not. ``t_over_steps``, ``p_over_steps``: Student's test of the means as a sample, which uses
    their spread alone (None below three steps). ``lag1``: correlation of neighbouring steps' mean / standard error,
    ``lag1_limit`` what independent ones keep within in 95 % of cases (None below eight): beyond it the band is too
    narrow.
    """

    means: tuple[Number, ...]
    standard_errors: tuple[Number, ...]
    sums: tuple[Number, ...]
    band99: Number
    outside: bool
    t_over_steps: Number | None
    p_over_steps: Number | None
    lag1: Number | None
    lag1_limit: Number | None


@dataclass(frozen=True)
class HeadDrift:
    """One head's running sum of delta's mean errors over its steps: its largest |value|, signed, over its own band.

    Beyond +-1 it leaves the band, as 1 % of unbiased heads or a little fewer do.
    """

    layer: int | None
    head: int
    extreme: Number


@dataclass(frozen=True)
class DeltaSteps:
    """Figure 5a: delta's error over steps. ``excess``: beyond one correct rounding of O.

    ``heads``: all heads of the run that were looked at, with this observation, in order. Where the head drawn was
    chosen among them for being the worst, its band does not allow for the choice; the number of heads outside does.
    """

    steps: tuple[int, ...]
    total: Accumulated
    excess: Accumulated | None
    heads: tuple[HeadDrift, ...]


@dataclass(frozen=True)
class FeatureProducts:
    """Figures 5b-c: dO, the error of O and their product by feature, in the row with the largest |Delta_delta|.

    ``share``: of the sum of Delta_delta^2 over the step's rows. ``alignment`` = |sum of products| / (sum of their
    squares)^1/2, 1 in the mean square under random signs; ``alignment_p``: a bound on the probability that random signs
    do as much in any of the ``rows`` (Chernoff's, times the rows). Over all rows, by feature: ``aligned``, the fraction
    of rows where the product is positive, of those where it is not 0, and ``contribution``, the sum of the products.
    """

    step: int | None
    batch: int
    row: int
    delta_error: Number
    share: Number
    do: tuple[Number, ...]
    o_error: tuple[Number, ...]
    product: tuple[Number, ...]
    alignment: Number
    alignment_p: Number
    rows: int
    aligned: tuple[Number | None, ...]
    contribution: tuple[Number, ...]


@dataclass(frozen=True)
class PrefixError:
    """Figure 6: the error of O_bar after the first t visible keys of one row and feature, marks where P_bar = 1.

    See ``attn_diag.microscope``: ``error`` against float64, ``rounding_error`` against the recipe's own terms. The
    kernel's inside is inferred: this is ``recipe``'s walk, which ends at O as observed where ``as_observed``.
    """

    step: int | None
    batch: int
    row: int
    feature: int
    recipe: str
    recipe_reason: str
    as_observed: bool | None
    format: str
    keys: int
    unit_keys: int
    positions: tuple[int, ...]
    error: tuple[Number, ...]
    rounding_error: tuple[Number, ...]
    unit: tuple[bool, ...]


@dataclass(frozen=True)
class TriggerCounts:
    """Rows with a repeated maximum by definition, by step: exact counts of the rows captured, nothing sampled."""

    rows: tuple[int, ...]
    exact: tuple[int, ...]
    window: tuple[int, ...]
    unit: tuple[int, ...]


@dataclass(frozen=True)
class Triggers:
    """Figure 13: trigger rows over steps, of the head chosen and of all heads of its layer that were looked at."""

    steps: tuple[int, ...]
    head: TriggerCounts
    layer: TriggerCounts


@dataclass(frozen=True, repr=False)
class PaperFigures(Result):
    """Figures after Qiu & Yao, "Why Low-Precision Transformer Training Fails" (arXiv 2510.04212).

    A figure is None where data are missing; ``missing`` then has the reason, by field name. ``captures``: how many
    were used; ``notes``: what was left out, and assumptions.
    """

    chosen: Chosen
    captures: int
    spectral_norms: SpectralNorms | None
    atoms: Atoms | None
    delta_rows: DeltaRows | None
    delta_steps: DeltaSteps | None
    features: FeatureProducts | None
    prefix: PrefixError | None
    triggers: Triggers | None
    tool: Tool
    missing: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    schema: Literal["attn-diag-paper-figures"] = "attn-diag-paper-figures"
    schema_version: Literal[1] = 1
