"""From the records of a trace to its result."""

from __future__ import annotations

import torch

from attn_diag.head.machine import describe_tool
from attn_diag.results.dtypes import DtypeDrift, DtypeEvent, Severity, TracedCall
from attn_diag.watching.drift import words
from attn_diag.watching.drift.calls import Call, CallLog
from attn_diag.watching.drift.dtypes import short, short_or_none
from attn_diag.watching.drift.history import DtypeChange, History
from attn_diag.watching.drift.source import operation_name

_ORDER: tuple[Severity, ...] = ("mixed", "alike", "elsewhere")


def summarise(source: str, history: History, log: CallLog, error: str | None) -> DtypeDrift:
    """The result, from what was recorded so far."""
    events = sorted(map(event_of, history.changes), key=lambda e: _ORDER.index(e.severity))
    findings = tuple(e for e in events if e.kind in ("widened", "narrowed") or e.severity == "mixed")
    calls = tuple(sorted(map(_call, log.calls.values()), key=lambda c: not c.differing))
    return DtypeDrift(
        tool=describe_tool(torch.device("cpu")),
        source=source,
        operations=history.operations,
        attention_calls=log.seen,
        calls=calls,
        findings=findings,
        by_design=tuple(e for e in events if e not in findings),
        compiled=tuple(history.compiled),
        error=error,
        summary=words.summary(history.operations, log.seen, calls, findings, tuple(history.compiled), error),
    )


def event_of(change: DtypeChange) -> DtypeEvent:
    """A change as the result has it."""
    result, regime = short(change.result), short_or_none(change.regime)
    severity: Severity = "mixed" if change.reaches_mixed else "alike" if change.reaches_alike else "elsewhere"
    reached = change.reaches_mixed or change.reaches_alike
    return DtypeEvent(
        kind=change.kind,
        severity=severity,
        reaches=tuple(name for name in "qkv" if name in reached),
        operation=operation_name(change.func),
        result=result,
        regime=regime,
        operands=change.operands,
        source=change.source,
        count=change.count,
        fix=words.event_fix(change.kind, result, regime, change.operands),
    )


def _call(call: Call) -> TracedCall:
    dtypes = {name: short(dtype) for name, dtype in call.dtypes.items()}
    regime, expected = short_or_none(call.regime), short(call.expected)
    if not call.differing:
        # All alike, and not autocast's.
        expected = regime or expected
    causes = {name: tuple(map(event_of, changes)) for name, changes in call.causes.items()}
    return TracedCall(
        operation=call.operation,
        dtypes=dtypes,
        regime=regime,
        expected=expected,
        differing=call.differing,
        outcome=call.outcome,
        paths=call.paths,
        causes=causes,
        source=call.source,
        count=call.count,
        words=words.call_words(call.operation, dtypes, regime, call.differing, call.outcome),
        fix=words.call_fix(dtypes, expected, call.differing, causes),
    )
