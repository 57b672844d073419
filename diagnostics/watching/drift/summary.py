"""From the records of a trace to its result: what was seen, what it means, and what to do about it, in words."""

from __future__ import annotations

from pathlib import PurePath

import torch

from attn_diag.head.machine import describe_tool
from attn_diag.results.dtypes import (
    DtypeDrift,
    DtypeEvent,
    Kind,
    Outcome,
    Severity,
    SourceLine,
    Step,
    TracedCall,
    TracedOperand,
)
from attn_diag.watching.drift.calls import Call, CallLog
from attn_diag.watching.drift.history import DtypeChange, History, short, short_or_none
from attn_diag.watching.drift.source import operation_name

_ORDER: tuple[Severity, ...] = ("mixed", "alike", "elsewhere")


def summarise(source: str, history: History, log: CallLog, error: str | None) -> DtypeDrift:
    """Make the result of what was recorded so far."""
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
        summary=_sentences(history.operations, log.seen, calls, findings, tuple(history.compiled), error),
    )


def event_of(change: DtypeChange) -> DtypeEvent:
    """Describe a change as the result has it."""
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
        fix=_event_fix(change.kind, result, regime, change.operands),
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
        words=_call_words(call.operation, dtypes, regime, call.differing, call.outcome),
        fix=_call_fix(dtypes, expected, call.differing, causes),
    )


def _event_fix(kind: Kind, result: str, regime: str | None, operands: tuple[TracedOperand, ...]) -> str:
    """What to do about an operation that gives ``result``."""
    if kind == "cast":
        return f"The code asks for {result} here: leave the cast out, or cast back before the attention."
    if kind == "policy":
        return f"Autocast's rule, or the operation's own, makes this {result}: cast its result back."
    wide = [o for o in operands if o.dtype == result]
    narrow = [o for o in operands if o.dtype != result]
    if kind == "narrowed" or not wide:
        both = " and ".join(dict.fromkeys(o.dtype for o in operands))
        return f"{both} together give {result}: bring the operands to one dtype first."
    target = regime if regime in {o.dtype for o in narrow} else narrow[0].dtype
    # Where the like has a name, its dtype follows autocast; else the dtype itself.
    like = next((f"{o.name}.dtype" for o in narrow if o.name and o.dtype == target), f"torch.{target}")
    casts = [f"{o.name}.to({like})" if o.name else _unnamed(o, like) for o in wide]
    return f"Cast to {target} first: {', '.join(dict.fromkeys(casts))}."


def _unnamed(operand: TracedOperand, like: str) -> str:
    made = "" if operand.made is None else f" made at {_place(operand.made)}"
    return f".to({like}) on the {operand.dtype} intermediate{made}"


def _call_fix(
    dtypes: dict[str, str], expected: str, differing: tuple[str, ...], causes: dict[str, tuple[DtypeEvent, ...]]
) -> str:
    """What to do about a call whose q, k and v differ, or have not autocast's dtype."""
    wrong = differing or tuple(dtypes)
    events = [event for name in wrong for event in causes.get(name, ()) if event.kind in ("widened", "narrowed")]
    like = next((f"{name}.dtype" for name in dtypes if dtypes[name] == expected), f"torch.{expected}")
    casts = ", ".join(f"{name} = {name}.to({like})" for name in wrong)
    either = f"Or, at the call: {casts}." if events else f"Before the call: {casts}."
    return " ".join([*_together([event.fix for event in events]), either])


def _together(fixes: list[str]) -> list[str]:
    """Fixes that begin alike, up to the colon, in one sentence."""
    parts: dict[str, dict[str, None]] = {}
    for fix in fixes:
        head, colon, tail = fix.partition(": ")
        parts.setdefault(head + colon, {}).update(dict.fromkeys(tail.removesuffix(".").split(", ")))
    return [f"{head}{', '.join(tails)}." if head.endswith(": ") else head for head, tails in parts.items()]


def _call_words(
    operation: str,
    dtypes: dict[str, str],
    regime: str | None,
    differing: tuple[str, ...],
    outcome: Outcome,
) -> str:
    """What was given, and what the call did with it."""
    given = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
    if outcome == "raised":
        return f"{operation} was given {given}, and raised."
    if outcome == "autocast":
        these = listed(differing) if differing else "q, k and v"
        return (
            f"{operation} was given {given}. Autocast casts {these} to {regime} inside the call: it runs, with an "
            "extra cast, and hides what happened before."
        )
    return f"{operation} was given {given}, and took them as they were."


def _sentences(
    operations: int,
    attention_calls: int,
    calls: tuple[TracedCall, ...],
    findings: tuple[DtypeEvent, ...],
    compiled: tuple[str, ...],
    error: str | None,
) -> tuple[str, ...]:
    """The outcome in sentences, the gravest first."""
    found = []
    if error is not None:
        found.append(f"Ended early ({error}); this is what was seen until then.")
    mixed = [call for call in calls if call.differing]
    alike = [call for call in calls if not call.differing]
    for call in mixed:
        where = "" if call.source is None else f" at {_place(call.source)}"
        causes = dict.fromkeys(_cause(name, call) for name in call.differing)
        found.append(f"{call.operation}{where} mixes dtypes: {'; '.join(causes)}.")
    for call in alike:
        where = "" if call.source is None else f" at {_place(call.source)}"
        found.append(f"{call.operation}{where} is given {call.dtypes['q']} q, k and v under {call.regime} autocast.")
    elsewhere = sum(event.severity == "elsewhere" for event in findings)
    if elsewhere:
        found.append(
            f"{elsewhere} other {'operation promotes' if elsewhere == 1 else 'operations promote'} silently, but no "
            "attention call seen here is the wider for it: usual where a residual stream is float32."
        )
    if not operations:
        found.append("No operation of torch was seen: was anything computed, and in this thread?")
    elif not attention_calls:
        found.append(
            "No attention call was recognised, so nothing here says what reaches q, k and v: put "
            "attn_diag.check_qkv(q, k, v) before the kernel."
        )
    elif not mixed:
        calls_seen = "the attention call" if attention_calls == 1 else f"each of {attention_calls} attention calls"
        found.append(f"q, k and v share one dtype in {calls_seen}.")
    if compiled:
        found.append(
            f"Compiled by torch.compile, but run eagerly for this trace: {', '.join(compiled)}. Inside a compiled "
            "graph no operation could be seen; values may differ from the graph's in their last bits."
        )
    # One place may be called in two ways: under autocast, and without.
    return tuple(dict.fromkeys(found))


def _cause(name: str, call: TracedCall) -> str:
    event = next(iter(call.causes.get(name, ())), None)
    given = f"{name} is {call.dtypes[name]}"
    if event is None:
        steps: tuple[Step, ...] = call.paths.get(name, ())
        if not steps or steps[0].source is None:
            return f"{given}, and was so before the trace began"
        return f"{given} from {steps[0].operation} at {_place(steps[0].source)} on"
    verb = {"widened": "promoted", "narrowed": "narrowed", "cast": "cast", "policy": "made so by rule"}[event.kind]
    where = "" if event.source is None else f" at {_place(event.source)}"
    return f"{given}, {verb} by {event.operation}{where}"


def listed(names: tuple[str, ...]) -> str:
    """Join names in words: q; q and k; q, k and v."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _place(source: SourceLine) -> str:
    """The file's name and the line: sentences stay short."""
    return f"{PurePath(source.file).name}:{source.line}"
