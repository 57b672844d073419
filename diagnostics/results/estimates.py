"""What is found in a head, quantity by quantity: plain frozen dataclasses that ``HeadDiagnosis`` is made of.

A quantity that needs a tensor the capture lacks is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, overload

import numpy as np
import numpy.typing as npt
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypedDict

from attn_diag.results.base import Number

Label = Literal["clean", "nonfinite", "wrong", "lossy", "ill_conditioned", "biased", "undecided"]


class DriftPoint(TypedDict):
    """One point of a running sum."""

    row: int
    """The last row summed, counted over the analysed rows in the pooled order."""
    sum: Number
    """The signed error, summed over all rows so far and their elements; in the unit of the error."""


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

    def __iter__(self) -> Iterator[DriftPoint]:
        for row, total in zip(self._rows.tolist(), self._sums.tolist(), strict=True):
            yield {"row": row, "sum": total}

    def at(self, indices: Sequence[int]) -> Drift:
        """These points alone."""
        chosen = np.asarray(indices, dtype=np.int64)
        return Drift(self._rows[chosen], self._sums[chosen])

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
    """Mean of a signed error (observed - reference) with its uncertainty; see ``statistics.means``.

    Errors are in the quantity's own unit (that of O, L, delta, dQ, …) unless a field says otherwise. Null: not tested,
    or nothing to test.
    """

    n: int = 0
    """Elements averaged over."""
    n_clusters: int = 0
    """Clusters whose sums are taken as independent: sequences, argmax keys, features or rows."""
    n_eff: Number | None = None
    """Effective number of clusters, (sum s^2)^2 / sum s^4 over their sums s."""
    mean: Number | None = None
    """Mean signed error."""
    mean_ulp: Number | None = None
    """mean(error) / mean(ulp); for delta mean(error / noise floor)."""
    rms: Number | None = None
    """Root mean square of the error."""
    standard_error: Number | None = None
    """Cluster-robust standard error of the mean."""
    t: Number | None = None
    """mean / standard_error."""
    p_value: Number | None = None
    """Two-sided p-value of a zero mean."""
    degrees_of_freedom: Number | None = None
    """Degrees of freedom of the t-test; null also in documents written before this was stated."""
    p_adjusted: Number | None = None
    """p_value after Benjamini-Hochberg over the run's family; the primary tests alone have one."""
    ci95: tuple[Number, Number] | None = None
    """95 % confidence interval of the mean."""
    positive_fraction: Number | None = None
    """Positive errors of those that are not 0; descriptive, no test."""
    cumulative_sum: Number | None = None
    """Sum of all errors: where ``drift`` ends."""
    drift: Drift = field(default_factory=Drift)
    """The running sum over the rows, at most 256 points."""
    drift_band99: Number | None = None
    """An unbiased running sum stays inside +- this with probability 99 %."""
    drift_outside: bool | None = None
    """Whether the running sum leaves that band."""
    minimum_detectable: Number | None = None
    """The mean that the test would find with 80 % power."""
    reference_bound: Number | None = None
    """The float64 reference's own error, and the rounding of sums, moved ``mean`` by no more; null: not known."""
    well_rounded_mean: Number | None = None
    """The mean of a well-rounded kernel of this format on the same input, of primary tests: a mean that it has too, by
    half and more, is no fault of the kernel. Null: not known; null also in documents written before this was stated."""


@dataclass(frozen=True)
class RepeatCount:
    """Rows whose maximum is repeated, by one definition."""

    rows: int
    """How many they are."""
    rows_eligible: int
    """Rows with at least two visible keys."""
    fraction: Number | None
    """``rows`` of all rows analysed."""
    max_multiplicity: int
    """The largest number of keys that share a row's maximum."""


@dataclass(frozen=True)
class RowMaxima:
    """Repeated row maxima by four definitions."""

    exact: RepeatCount
    """Ties of the float64 scores rounded once, nearest-even, to q's dtype."""
    as_run: RepeatCount | None
    """Ties in the recipe's own format of the scores; null where the recipe is unknown."""
    window: RepeatCount
    """Scores within 1e-3 of the maximum, in float64."""
    unit: RepeatCount
    """P_bar rounds to 1 in q's dtype."""


@dataclass(frozen=True)
class Swamped:
    """Where O equals V of the row's top key exactly, though the true O does not."""

    rows: int
    """Rows of two or more keys in which every feature is so."""
    elements: int
    """Elements of O that are so."""


@dataclass(frozen=True)
class Bias:
    """Bias of every observed quantity; excess is observed - correctly rounded reference. Null: not captured."""

    o: BiasEstimate | None = None
    """O, in total."""
    o_excess: BiasEstimate | None = None
    """O beyond its correct rounding."""
    o_away_excess: BiasEstimate | None = None
    """O beyond its correct rounding, away from zero."""
    lse: BiasEstimate | None = None
    """L, the log-sum-exp (natural logarithm)."""
    delta: BiasEstimate | None = None
    """delta = rowsum(dO o O), in total."""
    delta_excess: BiasEstimate | None = None
    """delta beyond what O's correct rounding makes of it."""
    dq: BiasEstimate | None = None
    """dQ."""


@dataclass(frozen=True)
class RoundingBias:
    """Mean error that correct rounding of O itself makes on this input: no kernel's fault."""

    o: BiasEstimate | None = None
    """Of O."""
    delta: BiasEstimate | None = None
    """Of delta, through O; null without dO."""


@dataclass(frozen=True)
class DeltaRounding:
    """Captured delta minus rowsum(dO o O_obs): the rounding of delta itself, in delta's unit."""

    mean: Number
    """Mean over the rows."""
    rms: Number
    """Root mean square over the rows."""
    max_abs: Number
    """The largest magnitude."""


@dataclass(frozen=True)
class GradientError:
    """Error of one gradient and where it comes from; norms are Frobenius, over everything pooled. Null: unknown.

    The atoms a_t are the rank-1 parts that the rows' errors of delta add to the gradient.
    """

    relative_error: Number | None = None
    """||observed - reference|| / ||reference||; null where the gradient was not captured."""
    predicted_relative_error: Number | None = None
    """The same of what delta's error alone makes (Qiu & Yao, arXiv 2510.04212, section 3.2)."""
    unexplained_fraction: Number | None = None
    """||error - predicted|| / ||error||, predicted from delta alone."""
    shares: dict[str, Number | None] | None = None
    """<part, error> / ||error||^2 of delta, lse and the casts; they and the unexplained rest add up to 1."""
    unexplained_with_casts: Number | None = None
    """||error - predicted|| / ||error||, predicted from delta, LSE and the casts together."""
    over_noise_floor: Number | None = None
    """||error|| over what one correct rounding of O would cause through delta."""
    coherence: Number | None = None
    """||sum a||^2 / sum ||a||^2."""
    coherence_null95: Number | None = None
    """The 95 % quantile of ``coherence`` under random signs."""
    cancellation: Number | None = None
    """||sum a|| / sum ||a||."""
    participation: Number | None = None
    """(sum ||a||^2)^2 / sum ||a||^4: how many rows carry the error."""

    @property
    def known_error(self) -> float | None:
        """The observed relative error, else the predicted one."""
        return self.predicted_relative_error if self.relative_error is None else self.relative_error


@dataclass(frozen=True)
class Propagation:
    """Errors of the gradients. dK and dV of a shared key head are in ``kv_heads``."""

    dq: GradientError | None = None
    """dQ; null without dO."""
    dw_q: GradientError | None = None
    """dW_Q; null where it does not follow from dQ (see ``notes``)."""
    dk: GradientError | None = None
    """dK; null where not captured, or where query heads share it."""
    dv: GradientError | None = None
    """dV, likewise."""
    notes: tuple[str, ...] = ()
    """Why one of them is null, and what was assumed."""


@dataclass(frozen=True)
class TopRow:
    """A row that carries much of delta's squared error."""

    batch: int
    """Batch item."""
    head: int
    """Head, counted within the capture."""
    row: int
    """Query row."""
    error: Number
    """delta's signed error there."""
    share: Number
    """Its square's share of the sum over all rows."""


@dataclass(frozen=True)
class Verdict:
    """What to call it, why, and what to do."""

    labels: tuple[Label, ...]
    """Several may apply."""
    evidence: Literal["none", "seen", "significant"]
    """How far the case has come: "seen", an error stands out in this capture; "significant", its mean differs from
    zero beyond chance. Site, cure and growth over steps need more than one capture's inspection."""
    reasons: tuple[str, ...]
    """Why, in words with numbers."""
    suggestions: tuple[str, ...]
    """What to try next."""


@dataclass(frozen=True)
class Certificate:
    """Rows of the reference recomputed by the oracle (mpmath)."""

    rows: int
    """How many."""
    bits: int
    """Working precision it started with, in bits."""
    worst_ratio: dict[str, Number]
    """The largest |reference - truth| / bound by output (o, lse, delta, dq)."""
    held: bool
    """Whether none of these exceeds 1."""
