"""What ``check`` returns: every case of the suite measured, compared with the baseline, and what failed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attn_diag.diagnosis import Tool
from attn_diag.result import Result

if TYPE_CHECKING:
    from rich.console import RenderableType

# "fit": what came back is not this attention (or the kernel raised); "determinism": two runs on the same inputs differ
# although bits were demanded.
Kind = Literal["fit", "determinism", "bits", "bias", "growth"]


@dataclass(frozen=True)
class Bias:
    """A mean signed error beyond correct rounding, in ulp of O or in noise floors of delta, with its standard error.

    ``p_value`` of the test that counts here: against the baseline's mean where there is one, else against 0.
    ``p_adjusted``: Holm over all tests of the run.
    """

    mean: float
    standard_error: float | None
    degrees_of_freedom: float | None
    p_value: float | None = None
    p_adjusted: float | None = None
    baseline_mean: float | None = None


@dataclass(frozen=True)
class Size:
    """An error's size ||error|| / ||reference|| beside its budget, and beside the baseline's size.

    ``budget``: derived, see ``attn_diag.regression.budget``.
    """

    error: float
    budget: float
    baseline: float | None = None


@dataclass(frozen=True)
class Case:
    """One input of the suite and what the kernel made of it.

    ``name``: of the input, such as "pairs", or of a capture. ``fingerprint``: SHA-256 of the outputs' bits, in the
    order of ``outputs``; ``inputs_fingerprint`` likewise. ``deterministic``: whether a second run returned the same
    bits (None: stored observations are not run). ``biases``: "o_excess", "o_away_excess", "delta_excess"; ``sizes``:
    "o", "lse", "delta" (the noise factor), "dq", "dk", "dv"; what is unknown is not there. ``worst``: head and row of
    the largest error of O, and that error in ulp.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    outputs: tuple[str, ...]
    inputs_fingerprint: str
    fingerprint: str
    deterministic: bool | None
    same_bits: bool | None
    biases: dict[str, Bias]
    sizes: dict[str, Size]
    worst: tuple[int, int, float] | None = None


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

    ``key``: device and versions that baselines are kept by; ``baseline``: the file, ``baseline_key``: the entry that
    was compared with (None: there is none), ``exact``: whether equal bits were demanded. ``seed`` of the inputs.
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
    cases: tuple[Case, ...]
    failures: tuple[Failure, ...]
    notes: tuple[str, ...] = ()
    schema: Literal["attn-diag-check"] = "attn-diag-check"
    schema_version: Literal[1] = 1

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    def renderables(self) -> Iterator[RenderableType]:
        """The report, piece by piece, for a rich console."""
        from attn_diag.reports.check import check_renderables

        yield from check_renderables(self)
