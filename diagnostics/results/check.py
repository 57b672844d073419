"""What ``check`` returns: every case of the suite measured, compared with the baseline, and what failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from attn_diag.results.base import Number, Result, Tool
from attn_diag.results.invariance import PathFinding
from attn_diag.results.linear import LinearQuantity
from attn_diag.results.quality import QuantityVerdict

# "fit": what came back is not this attention (or the kernel raised); "determinism": two runs on the same inputs differ
# although bits were demanded; "nonfinite", "wrong" and "lossy": the verdicts of ``inspect``; "invariance": a call
# depends on what should not matter to it.
Kind = Literal["fit", "nonfinite", "determinism", "wrong", "invariance", "bits", "bias", "lossy", "growth"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# The case that has no inputs of its own to be judged on.
ARRANGED = "arrangements"
# What is broken is never accepted as a baseline.
BROKEN: tuple[Kind, ...] = ("fit", "nonfinite", "determinism", "wrong", "invariance")


GRADIENTS, FACTOR = ("dq", "dk", "dv"), "_factor"
OF_QUANTITY = {
    "o_excess": "o", "o_away_excess": "o", "delta_excess": "delta", **{name + FACTOR: name for name in GRADIENTS},
}  # fmt: skip
"""By the name of a bias's test: the quantity."""


@dataclass(frozen=True)
class CheckedBias:
    """A mean signed error beyond correct rounding; sequences are independent.

    In ulp of O (mean over its elements); of delta in the rms error that correct rounding of O makes of it; of a
    gradient relative: by how much it is longer along the true one, <error, true> / ||true||^2.
    """

    mean: Number
    """Mean over the sequences, in the unit above."""
    standard_error: Number | None
    """Standard error of the mean; null for one sequence."""
    degrees_of_freedom: Number | None
    """Sequences - 1; null for one sequence."""
    accepted: tuple[Number, Number]
    """The interval that the mean is tested against where there is no baseline."""
    p_value: Number | None = None
    """Two-sided, against the baseline's mean, else against ``accepted``; null: the bits are the baseline's."""
    p_adjusted: Number | None = None
    """p_value after Holm over all tests of the run."""
    baseline_mean: Number | None = None
    """The baseline's mean; null without one."""


@dataclass(frozen=True)
class Size:
    """An error's size beside what it may be.

    "o": rms in ulp; "lse": rms; "delta": the noise factor; gradients: ||error|| / ||reference||.
    """

    error: Number
    """The kernel's, as an rms over sequences."""
    yardstick: Number
    """That of the published recipe on the same inputs."""
    budget: Number | None
    """1.25 times the yardstick: above it the quantity is lossy, if its factor's interval is too (see ``quantities``);
    null for lse and delta, which are held to what they make of dQ, or to nothing."""
    baseline: Number | None = None
    """The baseline's error, carried over to these inputs by the yardstick; null without a baseline."""
    limit: Number | None = None
    """How far the error may have grown since the baseline; null without one."""
    p_value: Number | None = None
    """Of no growth; null without a baseline, and on its own inputs, where growth is no matter of chance."""
    p_adjusted: Number | None = None
    """p_value after Holm over all tests of the run."""


@dataclass(frozen=True)
class CheckedCase:
    """One input of the suite and what the kernel made of it."""

    name: str
    """Of the input, such as "pairs", or of a capture."""
    shape: tuple[int, ...]
    """[B, H, T, D] of q."""
    dtype: str
    """q's, such as bfloat16."""
    outputs: tuple[str, ...] = ()
    """Which outputs came back; empty where none could be used."""
    inputs_fingerprint: str = ""
    """SHA-256 of the inputs' bits, of scale and mask."""
    fingerprint: str = ""
    """SHA-256 of the outputs' bits, in the order of ``outputs``; empty where there are none."""
    deterministic: bool | None = None
    """Whether a second run returned the same bits; null: not known, as of stored outputs."""
    same_bits: bool | None = None
    """Whether the bits are the baseline's; null where they cannot be compared."""
    biases: dict[str, CheckedBias] = field(default_factory=dict)
    """By test: o_excess, o_away_excess, delta_excess, dq_factor, dk_factor, dv_factor; what is unknown is absent."""
    sizes: dict[str, Size] = field(default_factory=dict)
    """By quantity: o, lse, delta, dq, dk, dv; what is unknown is absent. Of linear attention all are relative."""
    quantities: tuple[QuantityVerdict, ...] = ()
    """Each returned quantity over all sequences, beside a well-rounded kernel's, as ``inspect`` judges it; of several
    heads the gravest. Empty where nothing could be measured, and in documents of older versions."""
    documented: dict[str, str] = field(default_factory=dict)
    """By quantity: the published kernel that makes the same errors on these inputs, and why it does, so that they are
    no failure."""
    linear: tuple[LinearQuantity, ...] = ()
    """Of linear attention each returned quantity, as ``inspect`` judges it; of several heads the gravest."""
    worst: tuple[int, int, int, Number] | None = None
    """Batch item, head and row of O's largest error, and that error in ulp of the row's largest element."""
    seconds: float = 0.0
    """Time for running and measuring it; 0 where it could not be measured."""


@dataclass(frozen=True)
class Failure:
    """One thing that is wrong, in one case."""

    kind: Kind
    """fit: not this attention, or it raised; nonfinite: NaN or Inf; determinism: two runs differ; wrong: no rounding
    makes this error; invariance: the outputs depend on what should not matter; bits; bias; lossy: above 1.25 times a
    well-rounded kernel's error; growth."""
    case: str
    """The case's name."""
    quantity: str
    """o, lse, delta, dq, dk or dv; of linear attention also final_state and the gradients of its other arguments."""
    message: str
    """A sentence with where (case, head, row) and how much."""
    suspect: str | None = None
    """The change of the recipe that reproduces these bits, or what the kernel computes instead, in words; null where
    none was found or looked for."""
    look_closer: str | None = None
    """A command, or a call in Python, that shows more."""
    factor: Number | None = None
    """Of wrong and lossy: the error over a well-rounded kernel's, with all rows weighted alike where that alone shows
    it lossy; null: not compared."""


@dataclass(frozen=True, repr=False)
class CheckReport(Result):
    """The result of ``attn_diag.check``."""

    tool: Tool
    """Versions and device of what produced the numbers."""
    source: str
    """The kernel's name."""
    backend: str
    """What ran it; "stored" for captured outputs."""
    key: str
    """Kernel, device and versions, by which baselines are kept."""
    level: float
    """The significance level, after Holm over the run."""
    seed: int
    """Seed of the suite's inputs."""
    exact: bool
    """Whether equal bits were demanded."""
    baseline: str | None
    """The baseline file; null: none was named."""
    baseline_key: str | None
    """The entry that was compared with; null: there is none."""
    cases: tuple[CheckedCase, ...]
    """One entry a case."""
    failures: tuple[Failure, ...]
    """What is wrong; empty where the check passed."""
    notes: tuple[str, ...] = ()
    """What a reader should know besides."""
    tests: int = 0
    """How many p-values were adjusted together."""
    saved: Literal["saved", "updated"] | None = None
    """What was done to the baseline file; null: nothing was written."""
    arrangements: tuple[PathFinding, ...] = ()
    """Every way to make one call of the case "arrangements"; empty where that was not run, and in documents of older
    versions."""
    declared: str | None = None
    """The recipe below 16 bits that the kernel is declared to be, and that its errors are held against, where other
    documents are held against a published kernel of 16 bits; null: none is."""
    operator: str | None = None
    """Of linear attention the operator whose arguments the function has; null: softmax attention."""
    schema: Literal["attn-diag-check"] = "attn-diag-check"
    schema_version: Literal[1] = 1

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures
