"""The result of an inspection: plain frozen dataclasses, and their JSON (schema "attn-diag-diagnosis" 3).

A quantity that needs a tensor the capture lacks is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from attn_diag.errors import InputError
from attn_diag.results.attribution import HeadAttribution
from attn_diag.results.base import Number, Result, Tool
from attn_diag.results.estimates import (
    Bias,
    BiasEstimate,
    Certificate,
    DeltaRounding,
    Drift,
    DriftPoint,
    GradientError,
    Label,
    Propagation,
    RepeatCount,
    RoundingBias,
    RowMaxima,
    Swamped,
    TopRow,
    Verdict,
)
from attn_diag.results.figures import HeadFigures
from attn_diag.results.microscope import Microscope
from attn_diag.results.quality import Answer, Pattern, Quantity, QuantityVerdict

# Everything that a Diagnosis is made of is found here, wherever it is defined.
__all__ = [
    "Answer",
    "Assumptions",
    "Bias",
    "BiasEstimate",
    "CaptureDiagnosis",
    "Certificate",
    "DeltaRounding",
    "Diagnosis",
    "Drift",
    "DriftPoint",
    "Family",
    "GradientError",
    "HeadAttribution",
    "HeadDiagnosis",
    "HeadFigures",
    "KvBias",
    "KvHeadDiagnosis",
    "Label",
    "Microscope",
    "Misfit",
    "NonFinite",
    "Number",
    "ObservationDiagnosis",
    "Pattern",
    "Propagation",
    "Quantity",
    "QuantityVerdict",
    "RepeatCount",
    "RoundingBias",
    "RowMaxima",
    "Summary",
    "Swamped",
    "Tool",
    "TopRow",
    "Verdict",
    "json_schema",
    "severity",
]


@dataclass(frozen=True)
class HeadDiagnosis:
    """What was found for one head (over the batch), or for all heads pooled."""

    layer: int | None
    """The model's number of the layer; null where the capture does not state it."""
    batch: int | None
    """The one batch item looked at; null if several are pooled."""
    head: int | None
    """The model's number of the head (the capture's, where it states no offset); null: all heads pooled."""
    rows_all: int
    """Query rows analysed."""
    rows_fully_masked: int
    """Rows left out because they see no key."""
    rows_nonfinite: int
    """Rows left out because of NaN or Inf in what goes in or comes out."""
    row_maxima: RowMaxima
    """How often the row maximum is repeated."""
    swamped: Swamped | None
    """Where O is a copy of V; null without an O."""
    bias: Bias
    """Signed errors and their significance."""
    rounding_bias: RoundingBias
    """What correct rounding of O gives on this input."""
    delta_source: Literal["captured", "from_o"] | None
    """Whether delta was captured or is rowsum(dO o O) of the captured O, in float64; null: neither."""
    delta_rounding: DeltaRounding | None
    """The rounding of a captured delta itself; null unless O was captured too."""
    noise_factor: Number | None
    """rms of delta's error over the noise floor, that of one correct rounding of O: about 1 for a good kernel."""
    conditioning: Number | None
    """||alpha diag(delta) P K|| / ||dQ||: how much of dQ cancels, and so how much a relative error of delta grows."""
    propagation: Propagation
    """Errors of the gradients."""
    top_rows: tuple[TopRow, ...]
    """The rows with the largest errors of delta, the largest first."""
    attribution: HeadAttribution | None
    """Each rounding site's part in the errors; null unless asked for (``details``), see ``details_note``."""
    verdict: Verdict | None
    """Null where the assumption check failed."""
    certificate: Certificate | None = None
    """The reference's check by the oracle; null unless asked for (``certify``)."""
    rows_unknown: int = 0
    """Rows left out because float64 cannot say what is true there (an additive mask of -1e38 on all keys)."""
    figures: HeadFigures | None = None
    """What the head's figures show; null for pooled entries, and in documents of version 1."""
    microscope: Microscope | None = None
    """One element of O followed rounding by rounding; null unless asked for (``details``), see ``details_note``."""
    details_note: str | None = None
    """Why attribution or microscope is missing though asked for, or what it does not follow; null: nothing to say."""
    quantities: tuple[QuantityVerdict, ...] = ()
    """Each captured quantity judged (dK and dV with the query heads that share them); none in documents before version
    3, and of formats without a published recipe."""
    not_judged: tuple[str, ...] = ()
    """The quantities that were not judged, in words, with the reason: not captured, no dO, no recipe of this format."""
    noise_factor_ci95: tuple[Number, Number] | None = None
    """95 % interval of ``noise_factor``; null where its rows have one argmax key in common, and before version 3."""


# The gravest first.
LABELS: tuple[Label, ...] = ("nonfinite", "wrong", "lossy", "biased", "ill_conditioned", "undecided", "clean")


def severity(head: HeadDiagnosis) -> tuple[int, float]:
    """Sorts the worst first by label (no verdict after "undecided"), then by dQ's error."""
    order = (*LABELS[:-1], None, LABELS[-1])
    found = head.verdict.labels if head.verdict else (None,)
    dq = head.propagation.dq
    error = (dq.relative_error or dq.predicted_relative_error or 0.0) if dq else 0.0
    # NaN would leave a sort in any order.
    return min(order.index(label) for label in found), -math.inf if math.isnan(error) else -error


@dataclass(frozen=True)
class KvBias:
    """Signed error of dK and dV. No test: one query row's error hits every key, keys are not independent."""

    dk: BiasEstimate | None = None
    """dK; null where not captured."""
    dv: BiasEstimate | None = None
    """dV; null where not captured."""


@dataclass(frozen=True)
class KvHeadDiagnosis:
    """dK and dV of one key head, with the query heads that share it."""

    kv_head: int
    """The model's number of the key head."""
    query_heads: tuple[int, ...]
    """The model's numbers of the query heads that share it."""
    bias: KvBias
    """Signed errors."""
    propagation: Propagation
    """Sizes of the errors (dk and dv)."""


@dataclass(frozen=True)
class ObservationDiagnosis:
    """What one kernel (or an emulated recipe) returned, and what was found in it."""

    name: str
    """The observation's name in the capture, or the recipe's."""
    recipe: str | None
    """The emulated recipe, or the known one(s) that reproduce a captured O bit for bit; null where none does."""
    agreement: Number | None
    """The fraction of sampled elements of O that the recognised recipe reproduces; null where none was recognised."""
    backend: str
    """What made the observation."""
    emulated: bool
    """Whether it comes from an emulation."""
    outputs: tuple[str, ...]
    """Which outputs were captured: o, lse, delta, dq, dk, dv."""
    heads: tuple[HeadDiagnosis, ...]
    """One entry a head, then the pooled one."""
    kv_heads: tuple[KvHeadDiagnosis, ...]
    """One entry a key head whose dK or dV was captured."""

    @property
    def pooled(self) -> HeadDiagnosis:
        """The entry over all heads."""
        found = next((head for head in self.heads if head.head is None), None)
        if found is None:
            raise InputError(
                f"observation {self.name} needs an entry of all heads together (head null), got {len(self.heads)} "
                "entries without one; the document was edited: make it again"
            )
        return found


@dataclass(frozen=True)
class Misfit:
    """How badly an observation's O or LSE fits the reference under the stated metadata, and what would fit."""

    observation: str
    """Its name."""
    output: Literal["o", "lse"]
    """Which output was compared."""
    relative_error: Number
    """||observed - reference|| / ||reference||."""
    ok: bool
    """Whether that is small enough to go on."""
    better: str | None = None
    """The metadata that fit, in words; null where none was looked for or found."""
    better_error: Number | None = None
    """``relative_error`` under these."""


@dataclass(frozen=True)
class Assumptions:
    """What was taken for granted, and the check of it."""

    ok: bool | None
    """Whether all checks passed; null: there was no O to check with."""
    defaults: tuple[str, ...]
    """What the capture does not state and was assumed."""
    checks: tuple[Misfit, ...]
    """One a checked output."""
    message: str
    """The result in words."""

    @property
    def refused(self) -> bool:
        """Whether no verdict is given: other metadata fit, or nothing can be compared.

        What no metadata explain is a verdict: the kernel or the capture is wrong.
        """
        return any(not c.ok and (c.better is not None or math.isnan(c.relative_error)) for c in self.checks)


@dataclass(frozen=True)
class NonFinite:
    """NaN or Inf in a tensor."""

    tensor: str
    """Its name in the capture."""
    count: int
    """How many elements."""
    first: tuple[int, ...]
    """The first one's position in [B, H, T, D] order."""


@dataclass(frozen=True)
class CaptureDiagnosis:
    """Everything found in one capture."""

    source: str
    """Its file, or "memory"."""
    metadata: dict[str, str]
    """What the capture states of itself (capture format 1), and its dtype."""
    shape: dict[str, int]
    """B, Hq, Hk, Tq, Tk and D: batch items, query and key heads, query rows, keys, head dimension."""
    assumptions: Assumptions
    """What was taken for granted, and the check of it."""
    nonfinite: tuple[NonFinite, ...]
    """NaN and Inf that were met."""
    observations: tuple[ObservationDiagnosis, ...]
    """Captured ones, then recipes that were run."""

    def __post_init__(self) -> None:
        if missing := {"B", "Hq", "Hk", "Tq", "Tk", "D"} - {*self.shape} | {"causal", "dtype"} - {*self.metadata}:
            raise ValueError(f"shape or metadata lack {', '.join(sorted(missing))}")

    @property
    def unjudged(self) -> bool:
        """Whether no verdict is given, because what was assumed of the capture does not hold."""
        heads = (head for observation in self.observations for head in observation.heads)
        return self.assumptions.ok is False and all(head.verdict is None for head in heads)


@dataclass(frozen=True)
class Family:
    """The Benjamini-Hochberg family of all primary p-values of the run."""

    size: int
    """How many tests."""
    level: Number
    """The significance level."""


@dataclass(frozen=True)
class Summary:
    """The run in brief."""

    sentence: str
    """In one sentence."""
    labels: dict[Label, int]
    """Heads by label; a head may have several."""
    unreadable: tuple[str, ...] = ()
    """Inputs that could not be read or judged, and why."""
    warnings: tuple[str, ...] = ()
    """What a reader should know before trusting the numbers."""


def _integer(value: object) -> object:
    """Refuses true and 1.0, which equal 1 and would pass for it."""
    if type(value) is not int:
        raise ValueError("expected an integer")
    return value


# In the JSON of a diagnosis; only its own key stands behind a line break and two spaces.
_NO_CAPTURES, _END = b'\n  "captures": []', b"\n  ]"


@dataclass(frozen=True, repr=False)
class Diagnosis(Result):
    """The result of ``attn_diag.inspect``. ``print(d.report())`` shows it; ``d.to_json()`` exports it."""

    tool: Tool
    """Versions and device of what produced the numbers."""
    family: Family
    """The tests that were adjusted together."""
    captures: tuple[CaptureDiagnosis, ...]
    """One entry a capture."""
    summary: Summary
    """The run in brief."""
    schema: Literal["attn-diag-diagnosis"] = "attn-diag-diagnosis"
    schema_version: Annotated[Literal[1, 2, 3], BeforeValidator(_integer)] = 3
    """Version of its schema; 1, 2: read from an older document, without what is new since."""
    left_out: str | None = None
    """What a document that was saved in short is without; null: nothing, or it is an older one."""
    made_by: ClassVar[str] = "`attn-diag inspect CAPTURE --json FILE` (or --html)"

    def json_parts(self) -> Iterator[bytes]:
        """What ``to_json_bytes()`` returns, a capture at a time: of thousands of heads it is a gigabyte."""
        start, place, end = replace(self, captures=()).to_json_bytes().partition(_NO_CAPTURES)
        if not self.captures:
            yield start + place + end
            return
        # Each capture in a document of its own, which has the same indentation; the summary may be long.
        small = replace(self, captures=(), summary=Summary("", {}))
        before, _, after = small.to_json_bytes().partition(_NO_CAPTURES)
        around = slice(len(before) + len(_NO_CAPTURES) - 1, -len(after) - len(_END))
        for number, capture in enumerate(self.captures):
            yield b"," if number else start + _NO_CAPTURES[:-1]
            yield replace(small, captures=(capture,)).to_json_bytes()[around]
        yield _END + end

    def entries(self) -> Iterator[tuple[CaptureDiagnosis, ObservationDiagnosis, HeadDiagnosis]]:
        """Every judged entry: the heads of every observation (not the pooled ones)."""
        for capture in self.captures:
            for observation in capture.observations:
                for head in observation.heads:
                    if head.head is not None:
                        yield capture, observation, head

    def ranked(self) -> list[tuple[CaptureDiagnosis, ObservationDiagnosis, HeadDiagnosis]]:
        """The entries, the worst first: by label, then by dQ's error."""
        return sorted(self.entries(), key=lambda entry: severity(entry[2]))

    @property
    def labels(self) -> frozenset[Label]:
        """Every label that any entry carries, pooled ones included."""
        heads = [h for c in self.captures for o in c.observations for h in o.heads]
        return frozenset(label for h in heads if h.verdict for label in h.verdict.labels)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of ``Diagnosis.to_json`` (draft 2020-12), as a dict; every field with a description.

    The package ships it as ``attn_diag/reports/schema/diagnosis-3.schema.json``.
    """
    return Diagnosis.json_schema()
