"""What ``trace_dtypes`` finds: plain frozen dataclasses, and their JSON (schema "attn-diag-dtypes" 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Result, Tool

Kind = Literal["widened", "narrowed", "cast", "policy"]
Severity = Literal["mixed", "alike", "elsewhere"]
Outcome = Literal["autocast", "raised", "accepted"]


@dataclass(frozen=True)
class SourceLine:
    """Where a call stands in the user's code."""

    file: str
    """Path of the file."""
    line: int
    """Number of the line, from 1."""
    function: str
    """Qualified name of the function."""
    text: str
    """The line, stripped."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class TracedOperand:
    """A tensor that an operation was given."""

    name: str | None
    """What the user's code calls it; null: an unnamed intermediate."""
    dtype: str
    """Its dtype, such as float32."""
    shape: tuple[int, ...]
    """Its shape."""
    made: SourceLine | None = None
    """The line that made it; null where that ran outside the trace."""

    def __str__(self) -> str:
        return f"{self.name or 'an intermediate'} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class DtypeEvent:
    """One operation whose result has another dtype than some operand."""

    kind: Kind
    """widened: operands of several dtypes gave one as wide as the widest or wider, which nobody asked for and autocast
    does not use; narrowed: one narrower than the widest and than autocast's, or a tensor of 16 bits is updated in place
    with wider values; cast: the code names the dtype (``.float()``, ``.to(…)``, ``dtype=…``), or copies wider values
    into a tensor; policy: a rule of autocast or of the operation."""
    severity: Severity
    """mixed: it is why q, k and v of some attention call differ; alike: it reaches q, k or v of a call where all have
    one dtype, but not autocast's; elsewhere: neither."""
    reaches: tuple[str, ...]
    """Which of q, k and v it reaches, in the calls of that severity."""
    operation: str
    """As the user would write it, such as Tensor.mul."""
    result: str
    """The result's dtype."""
    regime: str | None
    """autocast's dtype where the operation first ran; null outside autocast."""
    operands: tuple[TracedOperand, ...]
    """The floating-point tensors that it was given, the first time."""
    source: SourceLine | None
    """Where it stands; null where no frame of the user's is known."""
    count: int
    """How often this very call did it."""
    fix: str
    """What to do, in words."""
    written: TracedOperand | None = None
    """The tensor into which it wrote in place (of a view the one that it is a part of), the first time; null: a new one
    was made."""

    def sentence(self) -> str:
        """What was computed from what, in one line."""
        where = "" if self.source is None else f" at {self.source}"
        result = self.result if self.written is None else f"{self.written} values"
        return f"{self.operation}({', '.join(map(str, self.operands))}) gives {result}{where}"


@dataclass(frozen=True)
class Step:
    """One operation on a tensor's way to an attention call."""

    operation: str
    """As the user would write it."""
    dtype: str
    """The dtype after it."""
    source: SourceLine | None
    """Where it stands; null where no frame of the user's is known."""

    def __str__(self) -> str:
        where = "" if self.source is None else f"  {self.source}: {self.source.text}"
        return f"{self.operation} -> {self.dtype}{where}"


@dataclass(frozen=True)
class TracedCall:
    """Attention calls at one place whose q, k and v differ in dtype, or share one that is not autocast's."""

    operation: str
    """The attention, such as scaled_dot_product_attention, or check_qkv."""
    dtypes: dict[str, str]
    """The dtypes of q, k and v."""
    regime: str | None
    """autocast's dtype there; null outside autocast."""
    expected: str
    """What they should have: autocast's dtype where one of them has it or all agree, else the narrowest."""
    differing: tuple[str, ...]
    """Those of q, k and v that differ from ``expected``; empty where the three have one dtype."""
    outcome: Outcome
    """autocast: it cast all three inside the call; raised; accepted: the call took them as they were."""
    paths: dict[str, tuple[Step, ...]]
    """For each of q, k and v, from the operation that gave it its dtype to the first such call; absent where it was
    made outside the trace."""
    causes: dict[str, tuple[DtypeEvent, ...]]
    """The changes of dtype that each goes back to, first the one that begins its path; absent likewise."""
    source: SourceLine | None
    """Where the call stands; null where no frame of the user's is known."""
    count: int
    """How many such calls there were."""
    words: str
    """What was given, and what the call did with it."""
    fix: str
    """What to do, in words."""

    @property
    def settled(self) -> bool:
        """Whether autocast makes all three its own dtype inside the call, each from that or from float32."""
        return self.outcome == "autocast" and set(self.dtypes.values()) <= {self.regime, "float32"}


@dataclass(frozen=True, repr=False)
class DtypeDrift(Result):
    """What a trace saw."""

    tool: Tool
    """Versions of what produced the result."""
    source: str
    """What was traced."""
    operations: int
    """Floating-point tensors that calls of torch returned."""
    attention_calls: int
    """Attention calls seen, ``check_qkv`` included."""
    calls: tuple[TracedCall, ...]
    """Those whose q, k and v are not all of the expected dtype; those that mix dtypes first."""
    findings: tuple[DtypeEvent, ...]
    """Changes of dtype that nobody asked for, or that mix q, k and v; by severity, then in order of appearance."""
    by_design: tuple[DtypeEvent, ...]
    """The other changes of dtype: casts, and rules of autocast."""
    compiled: tuple[str, ...]
    """Functions that torch.compile had wrapped, and that ran eagerly for the trace."""
    error: str | None
    """What ended the trace early; null: nothing did."""
    summary: tuple[str, ...]
    """The outcome in sentences, the gravest first."""
    schema: Literal["attn-diag-dtypes"] = "attn-diag-dtypes"
    schema_version: Literal[1] = 1

    @property
    def mixed_calls(self) -> tuple[TracedCall, ...]:
        """The calls whose q, k and v differ."""
        return tuple(call for call in self.calls if call.differing)

    @property
    def rounded(self) -> tuple[DtypeEvent, ...]:
        """The findings that round wider values into a tensor of 16 bits, in place."""
        return tuple(event for event in self.findings if event.written is not None)

    @property
    def labels(self) -> frozenset[Severity]:
        """Every severity that was found."""
        found: set[Severity] = {event.severity for event in self.findings}
        return frozenset(found | {"mixed" if call.differing else "alike" for call in self.calls})
