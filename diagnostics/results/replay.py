"""What ``replay`` returns: a capture's inputs through every kernel, and whether a kernel or the head is at fault."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from attn_diag.results.base import Number, Result, Tool
from attn_diag.results.estimates import Label
from attn_diag.results.findings import SharedFinding
from attn_diag.results.quality import Answer

Outcome = Literal["captured", "ran", "other-function", "refused", "unusable", "raised", "crashed", "timed-out"]
Cause = Literal["kernel", "metadata", "head", "undecided", "pass"]

# The gravest first.
CAUSES: tuple[Cause, ...] = ("kernel", "metadata", "head", "undecided", "pass")
# A kernel that did this is broken here, whatever its numbers are.
FAILED: tuple[Outcome, ...] = ("unusable", "raised", "crashed", "timed-out")


@dataclass(frozen=True)
class ReplayedQuantity:
    """One output of one kernel, over all heads looked at."""

    quantity: str
    """Its name; of linear attention also final_state and the gradients of its other arguments."""
    answer: Answer
    """The gravest of its heads', as ``inspect`` answers."""
    factor: Number | None
    """Its error in units of a well-rounded kernel's, of the head where that is largest; null: not compared."""
    relative_error: Number | None
    """||error|| / ||reference|| there."""
    words: str
    """Why, in words with numbers."""
    excused: str | None = None
    """The published kernel that is known to make this error, or what it rounds so on purpose; null: nothing."""

    @property
    def at_fault(self) -> bool:
        """Whether no sound kernel returns this."""
        return self.answer in ("nonfinite", "wrong", "lossy") and self.excused is None


@dataclass(frozen=True)
class ReplayedKernel:
    """What one kernel made of the inputs."""

    name: str
    """Under which it is asked for, or its observation in the capture."""
    captured: bool
    """Whether its outputs are the capture's own; false: it was run here."""
    version: str | None
    """Of the package that it comes in; null: not known."""
    backend: str
    """Where it ran."""
    outcome: Outcome
    """captured, ran: its outputs are judged. other-function: they are of another mask, scale or layout. refused: it
    does not take these inputs, or not here. unusable: what it returned is no attention's output, or it changed an input
    in place. raised: an exception. crashed: its process died. timed-out: it was stopped."""
    stage: Literal["start", "forward", "backward"] | None
    """In which pass that was; null: it ended well. What it returned before is judged."""
    message: str | None
    """What there is to say of that; null: nothing."""
    labels: tuple[Label, ...]
    """What ``inspect`` calls its heads; none where nothing could be judged."""
    quantities: tuple[ReplayedQuantity, ...]
    """Its outputs, judged."""
    recipe: str | None
    """The known recipe(s) that have its O's bits; null: none has."""
    agreement: Number | None
    """In which part of O's sampled elements."""
    schedule: str | None
    """The order of keys in which the recipe takes them; null: not known."""
    deterministic: bool | None
    """Whether a second call returned the same bits; null: it was not called twice."""
    forward_ms: Number | None
    """Time of its forward, the best of the later calls; null: not measured (emulations, captured ones)."""
    backward_ms: Number | None
    """Time of its backward."""
    finding: SharedFinding | None
    """What ``inspect`` finds in it, the gravest; null: nothing."""
    dq_errors: dict[int, Number] = field(default_factory=dict)
    """By head, the relative error of its dQ (its prediction from delta, where it returned no dQ)."""
    biased: bool = False
    """Whether a mean error is beyond chance, and beyond what adds up to less than correct rounding does."""
    bias_excused: str | None = None
    """The published kernel that is known to have such a mean; null: nothing is known."""

    @property
    def faults(self) -> tuple[str, ...]:
        """Its outputs that no sound kernel returns; "bias" where only a mean is beyond chance."""
        found = tuple(q.quantity for q in self.quantities if q.at_fault)
        return found or (("bias",) if self.biased and self.bias_excused is None else ())

    @property
    def judged(self) -> bool:
        """Whether there is a verdict on its outputs."""
        return bool(self.labels)


@dataclass(frozen=True)
class Help:
    """A kernel whose dQ is far less off in a fragile head."""

    name: str
    """The kernel."""
    dq_error: Number
    """The relative error of its dQ in the head that is worst."""
    times_less: Number
    """How many times smaller than that of the captured kernel (or of a well-rounded one, where none was captured)."""


@dataclass(frozen=True)
class ReplayedCapture:
    """One capture through all kernels."""

    source: str
    """The capture."""
    shape: dict[str, int]
    """B, Hq, Hk, Tq, Tk and D; of linear attention B, T, H, K and V."""
    dtype: str
    """The inputs' dtype."""
    cause: Cause
    """kernel: one is wrong where others are right, or one that was captured or asked for by name is coarser. metadata:
    what was captured is not the attention that the capture states. head: all are off by as much. undecided: too little
    could be judged. pass: nothing is wrong."""
    culprits: tuple[str, ...]
    """The kernels at fault, the captured ones first."""
    right: tuple[str, ...]
    """Kernels that are as good as a well-rounded one in everything that the culprits have wrong."""
    fragile: tuple[str, ...]
    """Kernels whose dQ is off by over 2 % though they are well rounded: the inputs amplify rounding."""
    dq_error: Number | None
    """The largest relative error of dQ among these; null: there are none."""
    helps: tuple[Help, ...]
    """Kernels that would help there, the best first."""
    words: str
    """The answer in a paragraph."""
    kernels: tuple[ReplayedKernel, ...]
    """One entry a kernel, the captured ones first."""
    operator: str | None = None
    """Of linear attention, its operator; null: softmax attention."""


@dataclass(frozen=True, repr=False)
class Replay(Result):
    """The result of ``attn_diag.replay``: is it the kernel, or the head?"""

    tool: Tool
    """Versions and device of what produced the numbers."""
    captures: tuple[ReplayedCapture, ...]
    """One entry a capture."""
    not_here: tuple[str, ...]
    """Known kernels that are not installed, or need a GPU."""
    limit_s: Number
    """How long each kernel had, in seconds."""
    unreadable: tuple[str, ...] = ()
    """Inputs that could not be read or replayed, and why."""
    schema: Literal["attn-diag-replay"] = "attn-diag-replay"
    schema_version: Literal[1] = 1

    @property
    def cause(self) -> Cause:
        """The gravest of the captures'."""
        return min((c.cause for c in self.captures), key=CAUSES.index)

    @property
    def failed(self) -> tuple[str, ...]:
        """Kernels that returned nothing usable, raised, crashed or were stopped on some capture."""
        return tuple(dict.fromkeys(k.name for c in self.captures for k in c.kernels if k.outcome in FAILED))

    @property
    def findings(self) -> tuple[str, ...]:
        """The answers, in sentences."""
        return tuple(c.words for c in self.captures)
