"""What a diagnosis says of each capture, observation and head: plain frozen dataclasses.

A quantity that needs a tensor that the capture lacks is None, never 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from attn_diag.errors import InputError
from attn_diag.results.attribution import HeadAttribution
from attn_diag.results.base import Number
from attn_diag.results.estimates import (
    Bias,
    BiasEstimate,
    Certificate,
    DeltaRounding,
    Label,
    Propagation,
    RoundingBias,
    RowMaxima,
    Swamped,
    TopRow,
    Verdict,
)
from attn_diag.results.figures import HeadFigures
from attn_diag.results.microscope import Microscope
from attn_diag.results.quality import QuantityVerdict


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

    def answered(self, answer: str) -> list[QuantityVerdict]:
        """The quantities with this answer."""
        return [q for q in self.quantities if q.answer == answer]


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
    coarse: str | None = None
    """What the recipe rounds that published kernels keep in fp32, in words; null: nothing, or no recipe is known."""

    @property
    def judged(self) -> bool:
        """Whether a head of it has a verdict."""
        return any(head.verdict is not None for head in self.heads)

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
    documents: str | None = None
    """Of packed sequences: which other documents O fits, in words; a fault of the kernel or of cu_seqlens."""
    sinks: str | None = None
    """Other sinks that O fits, in a sentence; then the kernel or the stated sinks are wrong."""
    slopes: str | None = None
    """Other ALiBi slopes that O fits, likewise."""
    dropout: str | None = None
    """Other dropout that O fits, likewise; with ``better``, dropout whose mask the capture lacks."""


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
    """B, Hq, Hk, Tq, Tk and D: batch items (of packed sequences the documents), query and key heads, query rows and
    keys (the longest document's), head dimension."""
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
        return self.assumptions.ok is False and not any(observation.judged for observation in self.observations)
