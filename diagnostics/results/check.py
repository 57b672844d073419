"""What ``check`` returns: every case of the suite measured, compared with the baseline, and what failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from attn_diag.results.base import Result
from attn_diag.results.diagnosis import Number, Tool

# "fit": what came back is not this attention (or the kernel raised); "determinism": two runs on the same inputs differ
# although bits were demanded.
Kind = Literal["fit", "determinism", "bits", "bias", "growth"]
KINDS: tuple[Kind, ...] = ("fit", "determinism", "bits", "bias", "growth")


@dataclass(frozen=True)
class CheckedBias:
    """A mean signed error beyond correct rounding, with its standard error over independent sequences.

    In ulp of O (mean over elements); of delta in the rms error that correct rounding of O makes of it. ``accepted``:
    the interval that the mean is tested against without a baseline. ``p_value`` of the test that counts: against the
    baseline's mean where there is one, else against ``accepted``; None: not tested, because the bits are the
    baseline's. ``p_adjusted``: Holm over all tests of the run.
    """

    mean: Number
    standard_error: Number | None
    degrees_of_freedom: Number | None
    accepted: tuple[Number, Number]
    p_value: Number | None = None
    p_adjusted: Number | None = None
    baseline_mean: Number | None = None


@dataclass(frozen=True)
class Size:
    """An error's size beside what it may be.

    "o": rms in ulp; "lse": rms; "delta": the noise factor; gradients: ||error|| / ||reference||. ``yardstick``: the
    published recipe's on the same input; ``budget``: twice that and one correct rounding. ``baseline``: the
    baseline's error, carried over to this input by the yardstick; ``limit``: how far the error may have grown.
    ``p_value`` of no growth, where the inputs are not the baseline's; ``p_adjusted`` as in ``CheckedBias``.
    """

    error: Number
    yardstick: Number
    budget: Number
    baseline: Number | None = None
    limit: Number | None = None
    p_value: Number | None = None
    p_adjusted: Number | None = None


@dataclass(frozen=True)
class CheckedCase:
    """One input of the suite and what the kernel made of it.

    ``name``: of the input, such as "pairs", or of a capture; ``shape`` [B, H, T, D] of q. ``fingerprint``: SHA-256 of
    the outputs' bits, in the order of ``outputs``; ``inputs_fingerprint`` likewise. ``deterministic``: whether a second
    run returned the same bits (None: stored observations are not run); ``same_bits``: as the baseline's (None: not
    comparable). ``biases``: "o_excess", "o_away_excess", "delta_excess"; ``sizes``: "o", "lse", "delta" (the noise
    factor), "dq", "dk", "dv"; what is unknown is not there. ``worst``: batch item, head and row of the largest error of
    O, and that error in ulp of the row's largest element. ``seconds``: running and measuring it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    outputs: tuple[str, ...] = ()
    inputs_fingerprint: str = ""
    fingerprint: str = ""
    deterministic: bool | None = None
    same_bits: bool | None = None
    biases: dict[str, CheckedBias] = field(default_factory=dict)
    sizes: dict[str, Size] = field(default_factory=dict)
    worst: tuple[int, int, int, Number] | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Failure:
    """One thing that is wrong, in one case.

    ``quantity``: "o", "delta", "dq", …; ``message``: a sentence with where (case, head, row) and how much; ``suspect``:
    the change of the recipe that reproduces these bits, in words, where one was found; ``look_closer``: a command.
    """

    kind: Kind
    case: str
    quantity: str
    message: str
    suspect: str | None = None
    look_closer: str | None = None


@dataclass(frozen=True, repr=False)
class CheckReport(Result):
    """The result of ``attn_diag.check``. ``source``: the kernel's name.

    ``key``: subject, device and versions that baselines are kept by; ``baseline``: the file, ``baseline_key``: the
    entry that was compared with (None: there is none), ``exact``: whether equal bits were demanded. ``seed`` of the
    inputs. ``tests``: p-values adjusted together. ``saved``: what was done to the file ("saved", "updated").
    """

    tool: Tool
    source: str
    backend: str
    key: str
    level: float
    seed: int
    exact: bool
    baseline: str | None
    baseline_key: str | None
    cases: tuple[CheckedCase, ...]
    failures: tuple[Failure, ...]
    notes: tuple[str, ...] = ()
    tests: int = 0
    saved: Literal["saved", "updated"] | None = None
    schema: Literal["attn-diag-check"] = "attn-diag-check"
    schema_version: Literal[1] = 1

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures
