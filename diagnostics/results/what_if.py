"""The result of a what-if: plain frozen dataclasses, and their JSON (schema "attn-diag-what-if" 1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from attn_diag.results.base import Number, Result, Tool
from attn_diag.results.estimates import BiasEstimate
from attn_diag.results.several import OneHead

CandidateKind = Literal["baseline", "mitigation", "mix", "other recipe"]
EquivalenceStatus = Literal["exact", "nearly exact", "breaks down", "changes the model"]


@dataclass(frozen=True)
class Errors:
    """Sizes of errors; null where the capture lacks what it takes."""

    o: Number | None = None
    """||error|| / ||reference|| of O."""
    delta: Number | None = None
    """rms of delta's error over its noise floor: the noise factor."""
    dq: Number | None = None
    """||error|| / ||reference|| of dQ."""
    dw_q: Number | None = None
    """||error|| / ||reference|| of dW_Q."""


@dataclass(frozen=True)
class Cost:
    """What a change costs on top of fused attention: estimated from what is stored and multiplied, not measured."""

    bytes_per_row: Number
    """More bytes written and read, for each row of a head."""
    bytes_fraction: Number
    """These as a fraction of what fused attention moves, forward and backward."""
    tensor_flops: Number
    """More matrix products, as a fraction of attention's own seven."""
    vector_ops: Number
    """More elementwise operations on every score."""
    words: str
    """What it is spent on."""


@dataclass(frozen=True)
class Equivalence:
    """Whether a candidate computes attention in exact arithmetic, from a float64 run without any rounding site.

    Where the stabilised softmax acts, it may be judged by a run with only the scores rounded; ``reason`` says so.
    """

    status: EquivalenceStatus
    """exact: within the bounds; nearly exact: beyond, but below one rounding in fp32 (2^-24); breaks down: more, or an
    output is not finite, or P_bar underflows; changes the model: on purpose."""
    o: Number | None = None
    """||that run - reference|| / ||reference|| of O; for a change of the model that of its exact O."""
    dq: Number | None = None
    """The same of dQ; null without dO, and for a change of the model."""
    bound_o: Number | None = None
    """What float64's own rounding may make of ``o``."""
    bound_dq: Number | None = None
    """What float64's own rounding may make of ``dq``."""
    reason: str | None = None
    """Why it is not exact, in words; null where it is."""


@dataclass(frozen=True)
class Candidate:
    """One recipe on the capture's inputs."""

    name: str
    """Its name, such as stabilised-4."""
    description: str
    """What it does, in words."""
    kind: CandidateKind
    """mitigation: something is repaired; mix: scores rounded otherwise in one pass; other recipe: another kernel's."""
    changes: dict[str, str]
    """Field of the recipe -> "before -> after", against the baseline."""
    errors: Errors
    """Against the float64 reference (of the changed model, for a change of it); means over ``seeds`` runs."""
    equivalence: Equivalence
    """Whether it still computes attention."""
    finite: bool = True
    """Whether all of its outputs are finite."""
    seeds: int = 1
    """How many runs there were: several where roundings are random."""
    spread: Errors | None = None
    """Standard deviations of ``errors`` over the runs; null for a single one."""
    bias_o: BiasEstimate | None = None
    """O's mean error away from zero in ulp, rows clustered by top key: beyond one correct rounding where the recipe
    rounds O to nearest, else in all; null for a change of the model, and where O is not finite."""
    bias_delta: BiasEstimate | None = None
    """delta's mean error in noise floors, clustered by top key and by feature; null without dO, and where it is not
    finite."""
    left: Number | None = None
    """The error that ranks: dQ's, or O's without dO; Infinity where an output is not finite."""
    removed: Number | None = None
    """1 - ``left`` / the baseline's; null where the baseline has no error, or no finite one."""
    cost: Cost | None = None
    """What it costs besides; null for the baseline and for other recipes."""
    biased: tuple[Literal["o", "delta"], ...] = ()
    """Which of these are biased at the what-if's level."""
    rank: int | None = None
    """Place by the error left, then by cost, from 1; null for the baseline and for what is not equivalent."""
    pareto: bool = False
    """Whether no other mitigation leaves as little at as little cost."""


@dataclass(frozen=True)
class StabilisedLimits:
    """What the stabilised softmax can be given here; see ``attn_diag.stabilised``.

    All but the counts is null where no maximum above 0 is repeated.
    """

    rows: int
    """Rows in which the rule acts: the maximum is repeated among the baseline's own scores."""
    rows_all: int
    """Rows used."""
    largest: Number | None = None
    """The largest repeated maximum, in scaled scores."""
    clamp: Number | None = None
    """The beta from which l falls below 1e-10."""
    flush: Number | None = None
    """The beta from which P_bar's largest element falls below the smallest normal number of its format."""
    subnormal: Number | None = None
    """The beta from which that rounds to 0 even where subnormal numbers are kept."""
    best: Number | None = None
    """The beta among those run and equivalent that leaves least; null where there is none."""
    best_helps: bool | None = None
    """Whether that is less than the baseline leaves; null likewise."""


@dataclass(frozen=True)
class ProbsUnderflow:
    """How much of P_bar becomes 0 in its cast to 8 bits, with one scale and order of keys; see ``head.underflow``."""

    words: str
    """What is changed, in words; "as it is" for the baseline."""
    scale: Number
    """What P_bar is multiplied by before its cast."""
    order: str
    """The order of the keys."""
    counted: Number
    """The part of the visible P_bar that is rounded to 0."""
    predicted: Number
    """The same from every row's mean score, deviation and running maximum, as of normal scores."""
    closed_form: Number | None
    """The same from the head's alone, where the first keys are met first: Phi((gap + 1.03 sigma - 6.93 - ln S) / sigma)
    for E4M3; with sigma = 1 that of arXiv 2606.06521. Null for another order."""


@dataclass(frozen=True, repr=False)
class WhatIf(OneHead, Result):
    """The result of ``attn_diag.what_if``: other recipes and mitigations on one head's inputs."""

    tool: Tool
    """Versions and device of what produced the numbers."""
    source: str
    """The capture."""
    layer: int | None
    """The model's number of the layer; null where it is not stated."""
    batch: int
    """Index of the batch item."""
    head: int
    """The model's number of the head."""
    rows: int
    """Query rows used: those that are finite and see a key."""
    observation: str | None
    """The observation looked at; null: none with an O."""
    recipe: str
    """The baseline's name."""
    baseline_from: Literal["given", "recognised", "assumed"]
    """Where the baseline comes from; recognised: from the captured O."""
    agreement: Number | None
    """The fraction of sampled elements of O that it reproduces bit for bit; null unless it was recognised."""
    ranked_by: Literal["dq", "o"]
    """Whose error ranks: dQ's; O's without dO."""
    max_logit: Number
    """The largest scaled score of the rows used."""
    level: float
    """Significance level of the candidates' biases."""
    observed: Errors | None
    """Errors of what was captured; null: no O was."""
    baseline: Candidate
    """The recipe that the others change."""
    candidates: tuple[Candidate, ...]
    """Ranked ones first, then those that are not equivalent."""
    stabilised: StabilisedLimits | None
    """The limits of the stabilised softmax."""
    summary: tuple[str, ...]
    """The result in sentences."""
    underflow: tuple[ProbsUnderflow, ...] = ()
    """What of P_bar its cast rounds to 0, the baseline first; empty where P_bar is not cast to 8 bits, one scale for
    all."""
    notes: tuple[str, ...] = ()
    """What was left out or assumed."""
    family_size: int = field(default=0)
    """How many p-values of biases were adjusted together (Benjamini-Hochberg)."""
    unfit: str = ""
    """Why nothing here is about the captured kernel: no recipe made its O, it is wrong in places, or its outputs are
    not the recipe's; empty: the recipe errs as it does, or nothing was captured."""
    schema: Literal["attn-diag-what-if"] = "attn-diag-what-if"
    schema_version: Literal[1] = 1

    @property
    def findings(self) -> tuple[str, ...]:
        """What was found, in sentences."""
        return self.summary

    def __getitem__(self, name: str) -> Candidate:
        """The candidate of that name; KeyError names those there are."""
        for candidate in (self.baseline, *self.candidates):
            if candidate.name == name:
                return candidate
        raise KeyError(f"no candidate {name!r}; there are {', '.join(c.name for c in self.candidates)}")
