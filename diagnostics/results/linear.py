"""What ``inspect`` says of linear attention (RWKV-7, delta rules, KDA, GLA, Mamba-2, …): plain frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Number, Result, Tool
from attn_diag.results.estimates import Label
from attn_diag.results.quality import Answer


@dataclass(frozen=True)
class LinearQuantity:
    """One captured quantity of a head: is it the mathematics, as good as a well-rounded kernel's, biased?"""

    quantity: str
    """Its name in the capture: o, final_state, dq, dk, dv, dg, dbeta, da, db, …"""
    answer: Answer
    """nonfinite: it holds NaN or Inf. wrong: beyond any rounding. lossy: 1.25 times a well-rounded kernel's error or
    more. good: as good as a well-rounded kernel. undecided: between these, or too little data. stated: its error is
    stated, there is nothing to compare with."""
    words: str
    """Why, in words with numbers."""
    relative_error: Number | None
    """||error|| / ||reference||; null where the reference is zero."""
    relative_error_well_rounded: Number | None
    """The same of a well-rounded chunked kernel; null: not compared."""
    factor: Number | None
    """Its rms error over the larger of the well-rounded kernel's and one rounding's; null: not compared."""
    factor_ci95: tuple[Number, Number] | None
    """The factor's 95 % interval, a jackknife over groups of 16 steps."""
    cause: str | None
    """The fault or rounding site that explains the error, by its name, or the recipe whose bits it has where none is
    at fault; null: none does, or none was looked for."""
    explained: Number | None
    """The part of the squared error that emulating it makes; null without one."""
    mean_away: Number | None
    """Mean of the error away from zero beyond one correct rounding, over the root mean square of the error; null: not
    tested."""
    p_adjusted: Number | None
    """Of that mean being zero, after Benjamini-Hochberg over the run; null: not tested."""


@dataclass(frozen=True)
class ChunkError:
    """The error of O in 64 steps."""

    start: int
    """The first of them."""
    error: Number | None
    """||error|| / ||reference|| there; null where the reference is zero."""
    error_well_rounded: Number | None
    """The same of a well-rounded kernel; null: not compared."""


@dataclass(frozen=True)
class LinearHead:
    """What was found in one head."""

    head: int
    """The model's number of the head (of v's, where q and k have fewer)."""
    labels: tuple[Label, ...]
    """The gravest first."""
    reasons: tuple[str, ...]
    """Why, in words with numbers."""
    quantities: tuple[LinearQuantity, ...]
    """Each captured one."""
    largest_step: Number
    """The largest ||diag(w_t) + b_t a_t^T||: above 1 an error can grow in a step."""
    memory: Number
    """Steps after which what is left of the state is at most half; Infinity: no bound tells."""
    amplification: Number | None
    """Relative error of a well-rounded kernel's O over its format's unit roundoff; null: not compared."""
    drift: Number | None
    """The farthest that the running sum of O's errors gets from zero, over its 99 % band; null without O. Above 1
    errors of one sign follow each other."""
    chunks: tuple[ChunkError, ...]
    """O's error along the longest sequence; none without O."""


@dataclass(frozen=True)
class LinearObservation:
    """What one kernel returned."""

    name: str
    """Its name in the capture."""
    outputs: tuple[str, ...]
    """Which outputs were captured."""
    heads: tuple[LinearHead, ...]
    """One entry a head."""


@dataclass(frozen=True)
class LinearDiagnosedCapture:
    """Everything found in one capture."""

    source: str
    """Its file, or "memory"."""
    operator: str
    """Which operator."""
    metadata: dict[str, str]
    """What the capture states of itself, and its dtype."""
    shape: dict[str, int]
    """B, T, H (of v), Hk (of q and k), K, V and N, the number of sequences."""
    not_judged: tuple[str, ...]
    """What was not captured, or cannot be judged, with the reason."""
    reference_bound: Number
    """The proven error of the reference's O over its root mean square, at most; Infinity: float64 knows nothing."""
    observations: tuple[LinearObservation, ...]
    """What was captured."""


@dataclass(frozen=True)
class LinearFinding:
    """Heads of a capture that share a label and a cause."""

    label: Label
    """What it is."""
    source: str
    """The capture."""
    observation: str
    """The kernel's name in it."""
    layer: int | None
    """The model's number of the layer; null: not stated."""
    step: int | None
    """The training step; null: not stated."""
    heads: tuple[int, ...]
    """Which heads."""
    of: int
    """How many heads were looked at."""
    quantities: tuple[str, ...]
    """In which quantities."""
    cause: str | None
    """The fault or rounding site that explains it; null: none is known."""
    words: str
    """Why, of the worst head, in words with numbers."""


@dataclass(frozen=True, repr=False)
class LinearDiagnosis(Result):
    """The result of ``attn_diag.inspect_linear``. ``print(d.report())`` shows it; ``d.to_json()`` exports it."""

    tool: Tool
    """Versions and device of what produced the numbers."""
    sentence: str
    """The run in one sentence."""
    findings: tuple[LinearFinding, ...]
    """What was found, the gravest first."""
    captures: tuple[LinearDiagnosedCapture, ...]
    """One entry a capture."""
    tests: int
    """How many tests of means were adjusted together."""
    level: Number
    """Their significance level."""
    unreadable: tuple[str, ...] = ()
    """Inputs that could not be read or judged, and why."""
    schema: Literal["attn-diag-linear"] = "attn-diag-linear"
    schema_version: Literal[1] = 1

    @property
    def labels(self) -> frozenset[Label]:
        """Every label that any head carries."""
        return frozenset(label for c in self.captures for o in c.observations for h in o.heads for label in h.labels)

    @property
    def heads(self) -> tuple[LinearHead, ...]:
        """The heads of all captures and observations."""
        return tuple(h for c in self.captures for o in c.observations for h in o.heads)
