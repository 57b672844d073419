"""The result of an inspection: plain frozen dataclasses, and their JSON (schema "attn-diag-diagnosis" 2).

A quantity that needs a tensor the capture lacks is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema, from_json
from typing_extensions import TypedDict

from attn_diag.attribution.result import HeadAttribution
from attn_diag.errors import InputError
from attn_diag.figures import HeadFigures
from attn_diag.microscopy.result import Microscope
from attn_diag.plain import Number as Number
from attn_diag.plain import Tool as Tool

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

SCHEMA = "attn-diag-diagnosis"
Label = Literal["clean", "lossy", "ill_conditioned", "biased", "undecided"]


class DriftPoint(TypedDict):
    """The running sum of a signed error up to and including a row (rows counted over the pooled order)."""

    row: int
    sum: Number


class Drift(Sequence[DriftPoint]):
    """A thinned running sum. Points are made when asked for: a run makes twenty thousand, and a report shows few."""

    def __init__(self, rows: npt.ArrayLike = (), sums: npt.ArrayLike = ()) -> None:
        self._rows, self._sums = np.asarray(rows, dtype=np.int64), np.asarray(sums, dtype=np.float64)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> DriftPoint: ...
    @overload
    def __getitem__(self, index: slice) -> Drift: ...
    def __getitem__(self, index: int | slice) -> DriftPoint | Drift:
        if isinstance(index, slice):
            return Drift(self._rows[index], self._sums[index])
        return {"row": int(self._rows[index]), "sum": float(self._sums[index])}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Drift) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash((self._rows.tobytes(), self._sums.tobytes()))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """In JSON: a list of points."""
        points = handler.generate_schema(list[DriftPoint])
        as_list = core_schema.plain_serializer_function_ser_schema(list, return_schema=points)
        return core_schema.no_info_after_validator_function(cls._of, points, serialization=as_list)

    @classmethod
    def _of(cls, points: list[DriftPoint]) -> Drift:
        return cls([p["row"] for p in points], [p["sum"] for p in points])


@dataclass(frozen=True)
class BiasEstimate:
    """Mean of a signed error (observed - reference) with its uncertainty; see ``attn_diag.bias``.

    ``mean_ulp``: mean(e)/mean(ulp); for delta mean(delta error / noise floor). ``p_adjusted`` only for the
    primary tests. ``drift_band99``: an unbiased running sum stays inside +- this with probability 99 %.
    ``reference_bound``: the float64 reference's own error, and the rounding of sums, cannot have moved ``mean`` by
    more; None where no bound is known.
    """

    n: int = 0
    n_clusters: int = 0
    n_eff: Number | None = None
    mean: Number | None = None
    mean_ulp: Number | None = None
    rms: Number | None = None
    standard_error: Number | None = None
    t: Number | None = None
    p_value: Number | None = None
    p_adjusted: Number | None = None
    ci95: tuple[Number, Number] | None = None
    positive_fraction: Number | None = None
    cumulative_sum: Number | None = None
    drift: Drift = field(default_factory=Drift)
    drift_band99: Number | None = None
    drift_outside: bool | None = None
    minimum_detectable: Number | None = None
    reference_bound: Number | None = None


@dataclass(frozen=True)
class RepeatCount:
    """Rows whose maximum is repeated, of all analysed rows; ``rows_eligible`` have at least two visible keys."""

    rows: int
    rows_eligible: int
    fraction: Number | None
    max_multiplicity: int


@dataclass(frozen=True)
class RowMaxima:
    """Repeated row maxima by four definitions; ``as_run`` is None where the recipe is unknown."""

    exact: RepeatCount
    as_run: RepeatCount | None
    window: RepeatCount
    unit: RepeatCount


@dataclass(frozen=True)
class Swamped:
    """Elements (and whole rows) of O that equal V of the top key exactly though the true O does not."""

    rows: int
    elements: int


@dataclass(frozen=True)
class Bias:
    """Bias of every observed quantity; excess is observed - correctly rounded reference."""

    o: BiasEstimate | None = None
    o_excess: BiasEstimate | None = None
    o_away_excess: BiasEstimate | None = None
    lse: BiasEstimate | None = None
    delta: BiasEstimate | None = None
    delta_excess: BiasEstimate | None = None
    dq: BiasEstimate | None = None


@dataclass(frozen=True)
class RoundingBias:
    """Mean error that correct rounding of O itself makes on this input: no kernel's fault."""

    o: BiasEstimate | None = None
    delta: BiasEstimate | None = None


@dataclass(frozen=True)
class DeltaRounding:
    """Captured delta minus rowsum(dO o O_obs): the rounding of delta itself."""

    mean: Number
    rms: Number
    max_abs: Number


@dataclass(frozen=True)
class GradientError:
    """Error of one gradient and where it comes from; norms are Frobenius, over everything pooled.

    ``relative_error`` ||observed - reference|| / ||reference||; ``predicted_relative_error`` and
    ``unexplained_fraction`` ||error - predicted|| / ||error|| from delta alone, ``unexplained_with_casts`` from
    delta, LSE and the casts together. ``shares``: <part, error> / ||error||^2; they and the unexplained rest
    add up to 1. ``over_noise_floor``: error over what one correct rounding of O would cause through delta.
    Coherence of the rank-1 atoms a_t: ||sum a||^2 / sum ||a||^2, ``coherence_null95`` its 95 % quantile under
    random signs; cancellation ||sum a|| / sum ||a||; participation (sum ||a||^2)^2 / sum ||a||^4.
    """

    relative_error: Number | None = None
    predicted_relative_error: Number | None = None
    unexplained_fraction: Number | None = None
    shares: dict[str, Number | None] | None = None
    unexplained_with_casts: Number | None = None
    over_noise_floor: Number | None = None
    coherence: Number | None = None
    coherence_null95: Number | None = None
    cancellation: Number | None = None
    participation: Number | None = None


@dataclass(frozen=True)
class Propagation:
    """Errors of the gradients; ``notes`` says why one is None. dK and dV of a shared key head are in ``kv_heads``."""

    dq: GradientError | None = None
    dw_q: GradientError | None = None
    dk: GradientError | None = None
    dv: GradientError | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TopRow:
    """A row that carries much of delta's squared error; ``share`` of the sum over all rows."""

    batch: int
    head: int
    row: int
    error: Number
    share: Number


@dataclass(frozen=True)
class Verdict:
    """Labels (several may apply), the reasons in words with numbers, and what to try next.

    ``evidence``: how far the case has come. "seen": an error stands out in this capture; "significant": its mean
    differs from zero beyond chance. Site, cure and growth over steps need more than one capture's inspection.
    """

    labels: tuple[Label, ...]
    evidence: Literal["none", "seen", "significant"]
    reasons: tuple[str, ...]
    suggestions: tuple[str, ...]


@dataclass(frozen=True)
class Certificate:
    """``rows`` rows of the reference recomputed by the oracle, starting at ``bits`` bits.

    ``worst_ratio``: the largest |reference - truth| / bound by output (o, lse, delta, dq); ``held``: none exceeds 1.
    """

    rows: int
    bits: int
    worst_ratio: dict[str, Number]
    held: bool


@dataclass(frozen=True)
class HeadDiagnosis:
    """What was found for one head (over the batch), or for all heads pooled (``head`` None).

    ``layer`` and ``head`` are the model's own numbers where the capture states them. ``batch`` is the one
    batch item looked at, None if several are pooled. ``verdict`` is None where the assumption check failed.
    ``rows_unknown``: left out because float64 cannot say what is true there (an additive mask of -1e38 on all keys).
    """

    layer: int | None
    batch: int | None
    head: int | None
    rows_all: int
    rows_fully_masked: int
    rows_nonfinite: int
    row_maxima: RowMaxima
    swamped: Swamped | None
    bias: Bias
    rounding_bias: RoundingBias
    delta_source: Literal["captured", "from_o"] | None
    delta_rounding: DeltaRounding | None
    noise_factor: Number | None
    conditioning: Number | None
    propagation: Propagation
    top_rows: tuple[TopRow, ...]
    attribution: HeadAttribution | None
    verdict: Verdict | None
    certificate: Certificate | None = None
    rows_unknown: int = 0
    figures: HeadFigures | None = None
    microscope: Microscope | None = None
    details_note: str | None = None


def severity(head: HeadDiagnosis) -> tuple[int, float]:
    """Sorts the worst first: biased or lossy, ill-conditioned, undecided, no verdict, clean; then by dQ's error."""
    order = ("biased", "lossy", "ill_conditioned", "undecided", None, "clean")
    found = head.verdict.labels if head.verdict else (None,)
    dq = head.propagation.dq
    error = (dq.relative_error or dq.predicted_relative_error or 0.0) if dq else 0.0
    # NaN would leave a sort in any order.
    return min(order.index(label) for label in found), -math.inf if math.isnan(error) else -error


@dataclass(frozen=True)
class KvBias:
    """Signed error of dK and dV. No test: one query row's error hits every key, keys are not independent."""

    dk: BiasEstimate | None = None
    dv: BiasEstimate | None = None


@dataclass(frozen=True)
class KvHeadDiagnosis:
    """dK and dV of one key head, with the query heads that share it."""

    kv_head: int
    query_heads: tuple[int, ...]
    bias: KvBias
    propagation: Propagation


@dataclass(frozen=True)
class ObservationDiagnosis:
    """What one kernel (or an emulated recipe) returned, and what was found in it.

    ``recipe``: the emulated one, or the known one(s) whose emulation reproduces the fraction ``agreement`` of
    sampled elements of a captured O bit for bit; None where none does.
    """

    name: str
    recipe: str | None
    agreement: Number | None
    backend: str
    emulated: bool
    outputs: tuple[str, ...]
    heads: tuple[HeadDiagnosis, ...]
    kv_heads: tuple[KvHeadDiagnosis, ...]

    @property
    def pooled(self) -> HeadDiagnosis:
        """The entry over all heads."""
        return next(h for h in self.heads if h.head is None)


@dataclass(frozen=True)
class Misfit:
    """How badly an observation's O or LSE fits the reference under the stated metadata, and what would fit."""

    observation: str
    output: Literal["o", "lse"]
    relative_error: Number
    ok: bool
    better: str | None = None
    better_error: Number | None = None


@dataclass(frozen=True)
class Assumptions:
    """What was taken for granted, and the check of it. ``ok`` None: there was no O to check it with."""

    ok: bool | None
    defaults: tuple[str, ...]
    checks: tuple[Misfit, ...]
    message: str


@dataclass(frozen=True)
class NonFinite:
    """NaN or Inf in a tensor: how many, and the first position in [B, H, T, D] order."""

    tensor: str
    count: int
    first: tuple[int, ...]


@dataclass(frozen=True)
class CaptureDiagnosis:
    """Everything found in one capture."""

    source: str
    metadata: dict[str, str]
    shape: dict[str, int]
    assumptions: Assumptions
    nonfinite: tuple[NonFinite, ...]
    observations: tuple[ObservationDiagnosis, ...]


@dataclass(frozen=True)
class Family:
    """The Benjamini-Hochberg family of all primary p-values of the run, and the significance level."""

    size: int
    level: Number


@dataclass(frozen=True)
class Summary:
    """The run in one sentence, with heads counted by label, and what could not be read or judged."""

    sentence: str
    labels: dict[Label, int]
    unreadable: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The result of ``attn_diag.inspect``. ``print(d.report())`` shows it; ``d.to_json()`` exports it."""

    tool: Tool
    family: Family
    captures: tuple[CaptureDiagnosis, ...]
    summary: Summary
    schema: Literal["attn-diag-diagnosis"] = "attn-diag-diagnosis"
    schema_version: Literal[1, 2] = 2
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="strings")

    def to_json(self, *, indent: int | None = 2) -> str:
        """As JSON text; NaN and infinities are the strings "NaN", "Infinity", "-Infinity"."""
        return _adapter().dump_json(self, indent=indent).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Diagnosis:
        """Read what ``to_json`` wrote, in this version of the schema or version 1 (what is new is None then).

        Raises InputError for text that is not JSON, another schema or version, and a document with missing or wrong
        fields; it says which.
        """
        _require_known(text)
        try:
            return _adapter().validate_json(text)
        except ValidationError as error:
            raise InputError(_broken(error)) from None

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

    def report(self, width: int = 100) -> str:
        """The terminal report as plain text, ``width`` columns wide."""
        from attn_diag.reports import terminal_text

        return terminal_text(self, width=width)

    def __repr__(self) -> str:
        from attn_diag.reports import brief

        return brief(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from attn_diag.reports import terminal_renderables

        yield from terminal_renderables(self)

    def _repr_html_(self) -> str:
        from attn_diag.reports import html_fragment

        return html_fragment(self)


def _require_known(text: str | bytes) -> None:
    """Raise InputError unless ``text`` is JSON that says to be a diagnosis of version 1 or 2."""
    try:
        document = from_json(text)
    except ValueError as error:
        raise InputError(
            f"expected the JSON of a diagnosis, got text that is not JSON ({error}); name the file that "
            "`attn-diag inspect --json FILE` wrote"
        ) from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        got = f"schema {schema!r}" if isinstance(document, dict) else f"a JSON {type(document).__name__}"
        raise InputError(
            f'expected a document with "schema": "{SCHEMA}", got {got}; name what `attn-diag inspect --json FILE` wrote'
        )
    version = document.get("schema_version")
    if version not in (1, 2) or isinstance(version, bool):
        raise InputError(
            f"expected schema_version 1 or 2, got {version!r}: this attn-diag does not know it; read it with the "
            "attn-diag that wrote it (or a newer one), or inspect the captures again"
        )


def _broken(error: ValidationError) -> str:
    """What is wrong with a document that says to be a diagnosis, with the first place."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return (
        f"expected a diagnosis as `attn-diag inspect --json` writes it, got a document with {error.error_count()} "
        f"wrong or missing fields, the first at {place}: {first['msg']}; inspect the captures again"
    )


@cache
def _adapter() -> TypeAdapter[Diagnosis]:
    return TypeAdapter(Diagnosis)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of ``Diagnosis.to_json`` (draft 2020-12), as a dict."""
    return _adapter().json_schema(mode="serialization")
