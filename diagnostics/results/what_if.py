"""The result of a what-if: plain frozen dataclasses, and their JSON (schema "attn-diag-what-if" 1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from attn_diag.results.base import Result
from attn_diag.results.diagnosis import BiasEstimate, Number, Tool

CandidateKind = Literal["baseline", "mitigation", "mix", "other recipe"]
EquivalenceStatus = Literal["exact", "nearly exact", "breaks down", "changes the model"]


@dataclass(frozen=True)
class Errors:
    """||error|| / ||reference|| of O, dQ and dW_Q; ``delta``: rms(delta error / noise floor), the noise factor.

    None where the capture lacks what it takes.
    """

    o: Number | None = None
    delta: Number | None = None
    dq: Number | None = None
    dw_q: Number | None = None


@dataclass(frozen=True)
class Cost:
    """Estimated from what is stored and multiplied besides, not measured.

    ``bytes_per_row``: more bytes written and read, for each row of a head; ``bytes_fraction`` of what fused attention
    moves, forward and backward. ``tensor_flops``: more matrix products, as a fraction of attention's own seven.
    ``vector_ops``: more elementwise operations on every score.
    """

    bytes_per_row: Number
    bytes_fraction: Number
    tensor_flops: Number
    vector_ops: Number
    words: str


@dataclass(frozen=True)
class Equivalence:
    """Whether a candidate computes attention in exact arithmetic, from a run in float64 without any rounding site.

    ``o``, ``dq``: ||that run - reference|| / ||reference||; ``bound_o``, ``bound_dq``: what float64's own rounding
    may make of them. "exact": both within; "nearly exact": beyond, but below one rounding in fp32 (2^-24); "breaks
    down": more, or an output is not finite, or underflows (``reason``); "changes the model": on purpose.
    """

    status: EquivalenceStatus
    o: Number | None = None
    dq: Number | None = None
    bound_o: Number | None = None
    bound_dq: Number | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Candidate:
    """One recipe on the capture's inputs.

    ``changes``: field -> "before -> after" against the baseline. ``errors`` against the float64 reference (for a
    change of the model: of the changed model); means over ``seeds`` runs with random roundings, ``spread`` their
    standard deviation. ``bias_o``: mean error away from zero beyond one correct rounding (where O is not rounded to
    nearest: in all), in ulp, clustered by top key; ``bias_delta``: mean error of delta in noise floors, likewise.
    ``removed``: 1 - error / baseline's, of dQ, or of O without dO. ``left`` is the error that ranks. ``rank`` from
    1, None for what is not equivalent. ``biased``: which of "o" and "delta" are biased at the what-if's level.
    ``pareto``: no other mitigation leaves less at no more cost.
    """

    name: str
    description: str
    kind: CandidateKind
    changes: dict[str, str]
    errors: Errors
    equivalence: Equivalence
    finite: bool = True
    seeds: int = 1
    spread: Errors | None = None
    bias_o: BiasEstimate | None = None
    bias_delta: BiasEstimate | None = None
    left: Number | None = None
    removed: Number | None = None
    cost: Cost | None = None
    biased: tuple[Literal["o", "delta"], ...] = ()
    rank: int | None = None
    pareto: bool = False


@dataclass(frozen=True)
class StabilisedLimits:
    """What the stabilised softmax can be given here; see ``attn_diag.stabilised``.

    ``rows``: rows in which the rule acts, of ``rows_all``; ``largest``: the largest repeated maximum r (scaled
    scores). Limits of beta: ``clamp``, where l falls below 1e-10; ``flush``, where P_bar's largest element falls
    below the smallest normal number, and ``subnormal``, where it falls below the smallest of all. ``best``: the beta
    among those run, within the limits, that leaves least; ``best_helps``: whether that is less than the baseline.
    """

    rows: int
    rows_all: int
    largest: Number | None = None
    clamp: Number | None = None
    flush: Number | None = None
    subnormal: Number | None = None
    best: Number | None = None
    best_helps: bool | None = None


@dataclass(frozen=True, repr=False)
class WhatIf(Result):
    """Other recipes and mitigations on one head's inputs. ``print(result.report())``, ``result.to_json()``.

    ``baseline_from``: "given", "recognised" from the captured O (with its ``agreement``: the fraction of sampled
    elements that are bit-equal), or "assumed". ``observed``: errors of the captured O and dQ. ``max_logit``: the
    largest scaled score. ``candidates``: ranked ones first, then those that are not equivalent.
    """

    tool: Tool
    source: str
    layer: int | None
    batch: int
    head: int
    rows: int
    observation: str | None
    recipe: str
    baseline_from: Literal["given", "recognised", "assumed"]
    agreement: Number | None
    ranked_by: Literal["dq", "o"]
    max_logit: Number
    level: float
    observed: Errors | None
    baseline: Candidate
    candidates: tuple[Candidate, ...]
    stabilised: StabilisedLimits | None
    summary: tuple[str, ...]
    notes: tuple[str, ...] = ()
    family_size: int = field(default=0)
    schema: Literal["attn-diag-what-if"] = "attn-diag-what-if"
    schema_version: Literal[1] = 1

    def __getitem__(self, name: str) -> Candidate:
        """The candidate of that name; KeyError names those there are."""
        for candidate in (self.baseline, *self.candidates):
            if candidate.name == name:
                return candidate
        raise KeyError(f"no candidate {name!r}; there are {', '.join(c.name for c in self.candidates)}")
