"""What ``trace_dtypes`` finds: plain frozen dataclasses, and their JSON (schema "attn-diag-dtypes" 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Result
from attn_diag.results.diagnosis import Tool

Kind = Literal["widened", "narrowed", "cast", "policy"]
Severity = Literal["mixed", "alike", "elsewhere"]
Outcome = Literal["autocast", "raised", "accepted"]


@dataclass(frozen=True)
class SourceLine:
    """Where a call stands: ``text`` is the line, stripped."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class TracedOperand:
    """A tensor that an operation was given: what the user calls it (None: an unnamed intermediate), dtype, shape.

    ``made``: the line that made it, where that ran inside the trace.
    """

    name: str | None
    dtype: str
    shape: tuple[int, ...]
    made: SourceLine | None = None

    def __str__(self) -> str:
        return f"{self.name or 'an intermediate'} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class DtypeEvent:
    """One operation whose result has another dtype than some operand.

    ``kind``: "widened": operands of several dtypes, and promotion made the result wider than autocast's dtype, unasked;
    "narrowed": narrower than both autocast's dtype and the widest operand, unasked; "cast": the code names the dtype
    (``.float()``, ``.to(…)``, ``dtype=…``); "policy": autocast, or the operation's own rule.
    ``severity``: "mixed": it is why q, k and v of some attention call differ; "alike": it reaches q, k or v of a call
    whose q, k and v have one dtype, but not autocast's; "elsewhere": neither.
    ``reaches``: which of q, k and v, in the calls of that severity. ``regime``: autocast's dtype where the operation
    first stood, None outside. ``count``: how often this very call did it. ``fix``: what to do, in words.
    """

    kind: Kind
    severity: Severity
    reaches: tuple[str, ...]
    operation: str
    result: str
    regime: str | None
    operands: tuple[TracedOperand, ...]
    source: SourceLine | None
    count: int
    fix: str

    def sentence(self) -> str:
        """What was computed from what, in one line."""
        where = "" if self.source is None else f" at {self.source}"
        return f"{self.operation}({', '.join(map(str, self.operands))}) gives {self.result}{where}"


@dataclass(frozen=True)
class Step:
    """One operation on a tensor's way to an attention call, and the dtype after it."""

    operation: str
    dtype: str
    source: SourceLine | None

    def __str__(self) -> str:
        where = "" if self.source is None else f"  {self.source}: {self.source.text}"
        return f"{self.operation} -> {self.dtype}{where}"


@dataclass(frozen=True)
class TracedCall:
    """A call whose q, k and v differ in dtype (or share one that is not autocast's: ``differing`` is empty then).

    ``expected``: autocast's dtype where one of them has it, else the narrowest; ``differing``: those of another.
    ``paths``: of each of q, k and v, from the operation that gave it its dtype (the cause) to the call; empty where it
    was made outside the trace. ``causes``: the changes of dtype that each goes back to, first that of its path.
    ``outcome``: "autocast": autocast cast all three inside the call; "raised"; "accepted": it took them as they were.
    """

    operation: str
    dtypes: dict[str, str]
    regime: str | None
    expected: str
    differing: tuple[str, ...]
    outcome: Outcome
    paths: dict[str, tuple[Step, ...]]
    causes: dict[str, tuple[DtypeEvent, ...]]
    source: SourceLine | None
    count: int
    words: str
    fix: str


@dataclass(frozen=True, repr=False)
class DtypeDrift(Result):
    """What a trace saw. ``print(r.report())``, ``r.to_json()``.

    ``operations``: calls of torch with a floating result; ``attention_calls``: how many of them, and of ``check_qkv``,
    were attention. ``calls``: the mixed ones first. ``findings``: nobody asked for them, or they mix q, k and v; by
    severity, then in order of appearance. ``by_design``: the other changes of dtype: casts, and autocast's rules.
    ``compiled``: functions that torch.compile had wrapped, and that ran eagerly for the trace. ``error``: what ended it
    early. ``summary``: sentences.
    """

    tool: Tool
    source: str
    operations: int
    attention_calls: int
    calls: tuple[TracedCall, ...]
    findings: tuple[DtypeEvent, ...]
    by_design: tuple[DtypeEvent, ...]
    compiled: tuple[str, ...]
    error: str | None
    summary: tuple[str, ...]
    schema: Literal["attn-diag-dtypes"] = "attn-diag-dtypes"
    schema_version: Literal[1] = 1

    @property
    def mixed_calls(self) -> tuple[TracedCall, ...]:
        """The calls whose q, k and v differ."""
        return tuple(call for call in self.calls if call.differing)

    @property
    def labels(self) -> frozenset[Severity]:
        """Every severity that was found."""
        found: set[Severity] = {event.severity for event in self.findings}
        return frozenset(found | {"mixed" if call.differing else "alike" for call in self.calls})
