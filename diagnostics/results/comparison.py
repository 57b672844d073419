"""What changed between two diagnoses: plain frozen dataclasses, and their JSON (schema "attn-diag-comparison" 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Number, Result, SideBySide, Tool
from attn_diag.results.estimates import Label

MeanOutcome = Literal["became biased", "cured", "grew", "shrank", "reversed", "moved", "none", "untested"]
# Up to this factor a quantity is as good as can be (``analyses.verdicts.verdict``), and a ratio no change.
NO_MATTER = 1.1
TrendOutcome = Literal["grows", "shrinks", "since", "throughout", "none"]
SizeOutcome = Literal["grew", "shrank", "none", "other inputs", "unknown"]
Outcome = Literal[
    "became-biased",
    "bias-grew",
    "bias-reversed",
    "bias-moved",
    "grew",
    "cured",
    "bias-shrank",
    "shrank",
    "relabelled",
]


@dataclass(frozen=True)
class MeanChange:
    """One primary mean error in A and B, and Welch's test of their difference; see ``statistics.welch``.

    The difference is tested where both means have a test of their own; null where it is not.
    """

    name: str
    """Which mean: delta, delta_excess, o_away_excess or o_excess."""
    a: Number | None
    """A's mean, in the unit of the quantity; null where A lacks it."""
    b: Number | None
    """B's mean, likewise."""
    a_units: Number | None
    """A's mean in ulp; delta's and its excess in noise floors."""
    b_units: Number | None
    """B's mean, likewise."""
    a_biased: bool
    """Whether it is significant in A's own run."""
    b_biased: bool
    """Whether it is significant in B's own run."""
    difference: Number | None = None
    """b - a."""
    standard_error: Number | None = None
    """Standard error of the difference."""
    df: Number | None = None
    """Welch and Satterthwaite's degrees of freedom."""
    t: Number | None = None
    """difference / standard_error."""
    p_value: Number | None = None
    """Two-sided p-value of no difference."""
    p_adjusted: Number | None = None
    """p_value after Benjamini-Hochberg over all differences of the run."""
    ci95: tuple[Number, Number] | None = None
    """95 % confidence interval of the difference."""
    outcome: MeanOutcome = "untested"
    """none: no significant difference. Else became biased (cured): the mean is significant in B (A) only; grew, shrank,
    reversed: in both; moved: in neither. untested: A or B has no test of it."""


@dataclass(frozen=True)
class SizeChange:
    """A figure without a standard error in A and B; see ``attn_diag.statistics.sizes``."""

    name: str
    """noise_factor, dq_error, dw_q_error, conditioning, repeated_maxima or nonfinite_rows; or o_factor, dq_factor and
    so on: a quantity's error over a well-rounded kernel's."""
    a: Number | None
    """In A; null where it is not known."""
    b: Number | None
    """In B, likewise."""
    ratio: Number | None
    """b / a; null where that is not a finite number."""
    low: Number | None
    """Chance alone leaves the ratio at or above this; null where nothing is known of chance."""
    high: Number | None
    """Chance alone leaves the ratio at or below this; null likewise."""
    outcome: SizeOutcome
    """grew, shrank: beyond these bounds (of nonfinite_rows: at all; without bounds, a quantity that is wrong on one
    side alone, or on both on the same inputs with twice the error). other inputs: a figure of the inputs alone
    (conditioning, repeated_maxima) differs. unknown: no bounds, or a figure is missing."""


@dataclass(frozen=True)
class HeadComparison:
    """One head of one observation in A and B."""

    layer: int | None
    """The model's number of the layer, in B; null where it is not stated."""
    head: int | None
    """The model's number of the head, in B; null: all heads pooled."""
    batch: int | None
    """The one batch item looked at, in B; null if several are pooled."""
    a_source: str
    """A's capture."""
    b_source: str
    """B's capture."""
    a_observation: str
    """The observation's name in A."""
    b_observation: str
    """The observation's name in B."""
    a_labels: tuple[Label, ...]
    """The verdict's labels in A."""
    b_labels: tuple[Label, ...]
    """The verdict's labels in B."""
    same_inputs: bool | None
    """Whether all that is known of q, k, v and the mask agrees; null: that is too little."""
    means: tuple[MeanChange, ...]
    """The primary means that A or B has."""
    sizes: tuple[SizeChange, ...]
    """The figures without a standard error that A or B has."""
    outcomes: tuple[Outcome, ...]
    """Significant changes, the worst first; relabelled: only the labels differ, as chance does near a threshold."""
    notes: tuple[str, ...] = ()
    """What must be said beside the outcomes."""
    a_step: int | None = None
    """The training step of A's capture; null: not stated."""
    b_step: int | None = None
    """The training step of B's capture; null: not stated."""

    @property
    def gained(self) -> tuple[Label, ...]:
        """Labels of B that A has not."""
        return tuple(label for label in self.b_labels if label not in self.a_labels)

    @property
    def lost(self) -> tuple[Label, ...]:
        """Labels of A that B has not."""
        return tuple(label for label in self.a_labels if label not in self.b_labels)

    @property
    def untested(self) -> tuple[SizeChange, ...]:
        """Of a head that is wrong in both, the quantities whose error is another and could not be tested."""
        if not ("wrong" in self.a_labels and "wrong" in self.b_labels):
            return ()
        other = [s for s in self.sizes if s.outcome == "unknown" and s.ratio is not None and s.name.endswith("_factor")]
        return tuple(
            s for s in other if s.name != "noise_factor" and not 1 / NO_MATTER <= (s.ratio or 0.0) <= NO_MATTER
        )


@dataclass(frozen=True)
class Unmatched:
    """What only one side has, or what cannot be compared."""

    side: Literal["A", "B", "both"]
    """Where it lies."""
    what: str
    """The capture, observation or head."""
    reason: str
    """Why it is not compared."""


@dataclass(frozen=True)
class HeadTrend(SideBySide):
    """One figure of one head over the steps: how the difference of A and B goes on."""

    layer: int | None
    """The model's number of the layer; null where it is not stated."""
    head: int
    """The model's number of the head."""
    batch: int | None
    """The one batch item looked at; null if several are pooled."""
    rank: str | None
    """The rank that captured it; null where it is not stated."""
    b_observation: str
    """The observation's name in B."""
    name: str
    """A mean, as in ``MeanChange``, or a size, as in ``SizeChange``."""
    steps: tuple[int, ...]
    """The steps, in order: B's, or A's where B is one step."""
    values: tuple[Number, ...]
    """At each step B / A of a size; of a mean B - A, in ulp or (delta) noise floors."""
    beyond: tuple[bool, ...]
    """Whether the difference at that step is beyond chance, in the whole run."""
    outcome: TrendOutcome
    """grows, shrinks: beyond chance over the steps. since: as it was, and from ``onset`` on different at every step.
    throughout: different at every step. none: nothing of these."""
    onset: int | None = None
    """The first step from which on every step differs significantly for itself, in one direction, to the last one, and
    one of them beyond chance; null: it does not at the end."""
    tau: Number | None = None
    """Kendall's rank correlation of the steps with the values (of a mean: their magnitudes); null: below 4 steps."""
    p_value: Number | None = None
    """Two-sided p-value of no trend; null: not tested."""
    p_adjusted: Number | None = None
    """p_value after Benjamini-Hochberg over all trends of the run."""


@dataclass(frozen=True)
class Side:
    """One of the two diagnoses."""

    source: str
    """Where it was read."""
    tool: Tool
    """Versions and device of what made it."""
    level: Number
    """Its own significance level."""
    heads: int
    """How many heads it judged, over all captures and observations."""
    sentence: str
    """Its summary."""
    unreadable: tuple[str, ...] = ()
    """Its inputs that could not be read or judged, and why."""


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """The result of ``attn_diag.diff``: what changed from A to B."""

    a: Side
    """The first diagnosis."""
    b: Side
    """The second."""
    level: Number
    """Of the family of all differences of means, and of one false alarm among all sizes."""
    family_size: int
    """How many differences were tested and adjusted together."""
    matched_by: tuple[str, ...]
    """How captures, and observations of other names, were paired, in words."""
    entries: tuple[HeadComparison, ...]
    """One entry a pair of heads; of several, where all are paired, the pooled pair too."""
    unmatched: tuple[Unmatched, ...]
    """What was not compared."""
    identical: bool
    """Whether every figure compared is the same in A and B, and nothing is left over."""
    counts: dict[Outcome, int]
    """Heads by outcome; pooled entries are left out."""
    summary: str
    """The comparison in one sentence."""
    notes: tuple[str, ...] = ()
    """What a reader should know besides."""
    trends: tuple[HeadTrend, ...] = ()
    """Heads that were compared at three steps or more: an entry a figure."""
    schema: Literal["attn-diag-comparison"] = "attn-diag-comparison"
    schema_version: Literal[1] = 1

    @property
    def outcomes(self) -> frozenset[Outcome]:
        """Every outcome of any head, of the pooled entries too."""
        return frozenset(outcome for entry in self.entries for outcome in entry.outcomes)
