"""The result of ``attn_diag.invariance``: one call in every arrangement that should not matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Number, Result, Tool

Promise = Literal["bits", "rounding"]
Status = Literal["same", "rounding", "allowed", "bits", "unsteady", "fault", "refused", "not-run"]


@dataclass(frozen=True)
class PathDifference:
    """One quantity of a path beside that of the call that it must agree with."""

    quantity: str
    """Which output: o, lse, dq, dk, dv; of linear attention also final_state and the gradients of other arguments."""
    elements: int
    """How many were compared."""
    differing: int
    """How many have other bits."""
    nonfinite: int
    """How many are NaN or Inf in one of the two calls alone."""
    max_ulp: Number | None
    """The largest difference, in spacings of the output's format at the row's largest element; null where none is
    finite."""
    of_noise: Number | None
    """Rms of the difference over the rms error of a well-rounded kernel on these inputs; null as ``max_ulp``."""
    of_limit: Number | None
    """The largest difference of an element, a row or all of it, over what two kernels that round as this one does may
    differ by; above 1 another order of adding does not explain it. Null as ``max_ulp``."""
    first: tuple[int, int, int] | None
    """Batch item, head and row (of dk and dv: key) of the largest difference over its limit, or of the first NaN; null
    where the bits are the same."""


@dataclass(frozen=True)
class PathFinding:
    """One way to make the same call."""

    arrangement: str
    """Its name."""
    changes: str
    """What is changed, in words."""
    path: str
    """How, in a few words."""
    promise: Promise
    """bits: nothing that the compared outputs depend on has changed, and neither has the work, so that every bit must
    be the same; rounding: a kernel may add in another order, and be off by its rounding."""
    status: Status
    """same: every bit;
    rounding: other bits within the noise, where that may be;
    allowed: other bits within the noise that were allowed by name;
    bits: other bits within the noise, where that may not be;
    unsteady: no more than the same call again changes;
    fault: beyond the noise, or NaN;
    refused: the kernel raised, or returned no attention's shape;
    not-run: there is no such call of this kernel or mask."""
    words: str
    """What was found, what the kernel said where it refused, or why it was not run."""
    differences: tuple[PathDifference, ...] = ()
    """One entry a quantity that both calls returned."""
    schedule: str | None = None
    """The recipe and order of keys that made O, or those nearest; null where they were not looked for."""


# How a headline begins that blames no arrangement.
ITSELF = "the call itself"


@dataclass(frozen=True)
class OwnError:
    """A quantity of the call itself, beside the truth."""

    quantity: str
    """Which output."""
    of_noise: Number | None
    """Its rms error over that of a well-rounded kernel; null where it is not finite."""


@dataclass(frozen=True, repr=False)
class Invariance(Result):
    """The result of ``attn_diag.invariance``."""

    tool: Tool
    """Versions and device of what produced the numbers."""
    source: str
    """The kernel."""
    backend: str
    """What ran it."""
    dtype: str
    """The inputs' dtype."""
    shape: tuple[int, int, int, int]
    """[B, H, T, D] of the call."""
    causal: str
    """The mask: none, top-left or bottom-right; of linear attention none is stated."""
    scale: Number
    """The softmax scale."""
    seed: int
    """Seed of the inputs."""
    outcome: Literal["pass", "fail", "other-function"]
    """fail: a path has the status bits or fault, or the call itself is wrong; other-function: the kernel is not the
    attention that was asked for, but other options fit, and nothing was compared."""
    headline: str
    """The result in a sentence, which names the arrangement."""
    notes: tuple[str, ...]
    """What else is to be known, in sentences."""
    schedule: str | None
    """The recipe and order of keys of the call itself; null as in ``PathFinding``."""
    errors: tuple[OwnError, ...]
    """The call itself beside the truth."""
    paths: tuple[PathFinding, ...]
    """Every path, by arrangement."""
    next: str | None = None
    """What to run next."""
    operator: str | None = None
    """Of linear attention the operator; null: softmax attention."""
    window: tuple[int, int] | None = None
    """(left, right), inclusive, -1 unlimited; null: none."""
    softcap: Number | None = None
    """c of S = c tanh(alpha q.k / c); null: none."""
    alibi_slopes: tuple[Number, ...] | None = None
    """ALiBi's slopes, one a head; null: none."""
    sinks: tuple[Number, ...] | None = None
    """Logits of attention sinks, one a head; null: none."""
    schema: Literal["attn-diag-invariance"] = "attn-diag-invariance"
    schema_version: Literal[1] = 1

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return self.outcome == "pass"

    @property
    def wrong_itself(self) -> bool:
        """Whether the call is wrong before anything is arranged."""
        return self.outcome == "fail" and self.headline.startswith(ITSELF)

    @property
    def failed(self) -> tuple[str, ...]:
        """The arrangements that failed, once each, the likeliest cause first."""
        return tuple(dict.fromkeys(p.arrangement for p in self.paths if p.status in ("bits", "fault")))
