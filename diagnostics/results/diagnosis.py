"""The result of an inspection: plain frozen dataclasses, and their JSON (schema "attn-diag-diagnosis" 3; in short 4).

A quantity that needs a tensor the capture lacks is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator
from pydantic_core import from_json, to_json

from attn_diag.errors import InputError
from attn_diag.results import compact
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
from attn_diag.results.finding_places import step_of
from attn_diag.results.findings import FindingAtStep, FindingPlace, SharedFinding, WorstHead
from attn_diag.results.grouping import find
from attn_diag.results.heads import (
    LABELS,
    Assumptions,
    CaptureDiagnosis,
    HeadDiagnosis,
    KvBias,
    KvHeadDiagnosis,
    Misfit,
    NonFinite,
    ObservationDiagnosis,
    severity,
)
from attn_diag.results.microscope import Microscope
from attn_diag.results.quality import Answer, Pattern, Quantity, QuantityVerdict
from attn_diag.results.rows import Row, row_of

# Everything that a Diagnosis is made of is found here, wherever it is defined.
__all__ = [
    "LABELS",
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
    "FindingAtStep",
    "FindingPlace",
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
    "SharedFinding",
    "Summary",
    "Swamped",
    "Tool",
    "TopRow",
    "Verdict",
    "WorstHead",
    "json_schema",
    "severity",
]


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


# In the JSON of a diagnosis; in a string its quotation marks have a backslash.
_NO_CAPTURES = b'"captures":[]'


# What heads share follows from them where it is not given, as by documents that are older than it.
_DERIVED: Any = None


@dataclass(frozen=True, repr=False)
class Diagnosis(Result):
    """The result of ``attn_diag.inspect``. ``print(d.report())`` shows it; ``d.to_json()`` exports it."""

    findings: tuple[SharedFinding, ...] = field(default=_DERIVED, kw_only=True)
    """What was found, heads that share it together: of captured observations first, then the gravest."""
    undecided: tuple[SharedFinding, ...] = field(default=_DERIVED, kw_only=True)
    """What was captured does not decide, grouped alike: neither found nor ruled out."""
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
    folded_versions: ClassVar[tuple[int, ...]] = (compact.VERSION,)
    made_by: ClassVar[str] = "`attn-diag inspect CAPTURE --json FILE` (or --html)"

    def __post_init__(self) -> None:
        if _DERIVED in (self.findings, self.undecided):
            findings, undecided = find(self.captures)
            object.__setattr__(self, "findings", findings)
            object.__setattr__(self, "undecided", undecided)

    def json_parts(self) -> Iterator[bytes]:
        """What ``to_json_bytes(indent=None)`` returns, a capture at a time: of thousands of heads it is a gigabyte."""
        start, place, end = replace(self, captures=()).to_json_bytes(indent=None).partition(_NO_CAPTURES)
        if not self.captures:
            yield start + place + end
            return
        # Each capture in a document of its own; the summary may be long.
        small = replace(self, captures=(), summary=Summary("", {}))
        before, _, after = small.to_json_bytes(indent=None).partition(_NO_CAPTURES)
        around = slice(len(before) + len(_NO_CAPTURES) - 1, -len(after) - 1)
        for number, capture in enumerate(self.captures):
            yield b"," if number else start + _NO_CAPTURES[:-1]
            yield replace(small, captures=(capture,)).to_json_bytes(indent=None)[around]
        yield b"]" + end

    def saved_parts(self, *, full: bool = False) -> Iterator[bytes]:
        """The JSON that a command writes: heads in tables, without running sums and figures (version 4).

        Args:
            full: Write everything, as ``to_json`` does, but without blanks.
        """
        if full or self.schema_version < compact.WHOLE:
            yield from self.json_parts()
        else:
            short = replace(self, captures=compact.without_details(self.captures), left_out=compact.LEFT_OUT)
            yield from compact.folded(short.to_json_bytes(indent=None))

    @classmethod
    def unfolded(cls, text: str | bytes) -> bytes | None:
        """The document of version 3 for one of version 4; None for any other text."""
        try:
            document = from_json(text)
        except ValueError:
            return None
        if not compact.is_folded(document):
            return None
        try:
            return to_json(compact.expanded(document))
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration, RuntimeError) as error:
            raise InputError(f"this diagnosis is damaged or was edited ({error}): make it again") from None

    def entries(self) -> Iterator[tuple[CaptureDiagnosis, ObservationDiagnosis, HeadDiagnosis]]:
        """Every judged entry: the heads of every observation (not the pooled ones)."""
        for capture in self.captures:
            for observation in capture.observations:
                for head in observation.heads:
                    if head.head is not None:
                        yield capture, observation, head

    @property
    def heads(self) -> tuple[HeadDiagnosis, ...]:
        """The heads of all captures and observations, in order, without the pooled entries."""
        return tuple(head for _, _, head in self.entries())

    def to_rows(self) -> list[Row]:
        """A row of plain values for every head: where it is, and then its figures; see ``attn_diag.results.rows``."""
        found = []
        for capture, observation, head in self.entries():
            stated = capture.metadata
            where: Row = {
                "source": capture.source, "step": step_of(capture), "layer": head.layer, "head": head.head,
                "rank": stated.get("rank"), "kernel": stated.get("kernel"), "dtype": stated["dtype"],
                "observation": observation.name, "recipe": observation.recipe,
            }  # fmt: skip
            found.append(row_of(head, where))
        return found

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
