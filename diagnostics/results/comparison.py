"""What changed between two diagnoses: plain frozen dataclasses, and their JSON (schema "attn-diag-comparison" 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Result
from attn_diag.results.diagnosis import Label, Number, Tool

MeanOutcome = Literal["became biased", "cured", "grew", "shrank", "reversed", "moved", "none", "untested"]
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

    ``a_units``, ``b_units``: the means in ulp, or for delta in noise floors. ``a_biased``: significant in A's own run.
    ``df``: Welch and Satterthwaite's degrees of freedom. ``p_adjusted``: Benjamini-Hochberg over all differences.
    ``outcome``: "became biased", "cured": significant in B (in A) only; "grew", "shrank", "reversed": significant in
    both; "moved": in neither; all of them only where the difference itself is significant. "untested": no test in A or
    in B.
    """

    name: str
    a: Number | None
    b: Number | None
    a_units: Number | None
    b_units: Number | None
    a_biased: bool
    b_biased: bool
    difference: Number | None = None
    standard_error: Number | None = None
    df: Number | None = None
    t: Number | None = None
    p_value: Number | None = None
    p_adjusted: Number | None = None
    ci95: tuple[Number, Number] | None = None
    outcome: MeanOutcome = "untested"


@dataclass(frozen=True)
class SizeChange:
    """A figure without a standard error in A and B; see ``attn_diag.statistics.sizes``.

    Chance alone leaves B / A between ``low`` and ``high``; beyond them it "grew" or "shrank". A figure of the inputs
    alone (conditioning, repeated maxima) has no such bounds: where it differs, the inputs do ("other inputs").
    "unknown": there is nothing to derive bounds from, or a figure is missing.
    """

    name: str
    a: Number | None
    b: Number | None
    ratio: Number | None
    low: Number | None
    high: Number | None
    outcome: SizeOutcome


@dataclass(frozen=True)
class HeadComparison:
    """One head of one observation in A and B (``head`` None: all heads pooled).

    ``outcomes``: significant changes; "relabelled" where only the verdict's labels differ, which chance does near a
    threshold. ``same_inputs``: whether all that is known of q, k, v and the mask agrees; None: it is too little.
    ``gained``, ``lost``: labels of the verdict that B has and A has not, and the reverse.
    """

    layer: int | None
    head: int | None
    batch: int | None
    a_source: str
    b_source: str
    a_observation: str
    b_observation: str
    a_labels: tuple[Label, ...]
    b_labels: tuple[Label, ...]
    same_inputs: bool | None
    means: tuple[MeanChange, ...]
    sizes: tuple[SizeChange, ...]
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...] = ()

    @property
    def gained(self) -> tuple[Label, ...]:
        """Labels of B that A has not."""
        return tuple(label for label in self.b_labels if label not in self.a_labels)

    @property
    def lost(self) -> tuple[Label, ...]:
        """Labels of A that B has not."""
        return tuple(label for label in self.a_labels if label not in self.b_labels)


@dataclass(frozen=True)
class Unmatched:
    """What only one side has, or what cannot be compared, and why."""

    side: Literal["A", "B", "both"]
    what: str
    reason: str


@dataclass(frozen=True)
class Side:
    """One of the two: where it was read, what made it, its heads, and what could not be read of it."""

    source: str
    tool: Tool
    level: Number
    heads: int
    sentence: str
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """The result of ``attn_diag.diff``. ``print(c.report())`` shows it; ``c.to_json()`` exports it.

    ``identical``: every figure compared is the same in A and B. ``counts``: heads by outcome, pooled entries left out.
    """

    a: Side
    b: Side
    level: Number
    family_size: int
    matched_by: tuple[str, ...]
    entries: tuple[HeadComparison, ...]
    unmatched: tuple[Unmatched, ...]
    identical: bool
    counts: dict[Outcome, int]
    summary: str
    notes: tuple[str, ...] = ()
    schema: Literal["attn-diag-comparison"] = "attn-diag-comparison"
    schema_version: Literal[1] = 1

    @property
    def outcomes(self) -> frozenset[Outcome]:
        """Every outcome of any head, of the pooled entries too."""
        return frozenset(outcome for entry in self.entries for outcome in entry.outcomes)
