"""From the records of a trace to its result: what was seen, what it means, and what to do about it, in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath

import torch

from attn_diag.captures.validity import short
from attn_diag.head.machine import describe_tool
from attn_diag.results.dtypes import (
    DtypeDrift,
    DtypeEvent,
    Severity,
    SourceLine,
    TracedCall,
    TracedOperand,
)
from attn_diag.results.wording import plural
from attn_diag.watching.drift.calls import Call, CallLog
from attn_diag.watching.drift.history import DtypeChange, History, short_or_none
from attn_diag.watching.drift.source import operation_name

# Sentences of tensors that are rounded in place; the report lists them all.
_MOST_NAMED = 3

_ORDER: tuple[Severity, ...] = ("mixed", "alike", "elsewhere")


def summarise(source: str, history: History, log: CallLog, error: str | None) -> DtypeDrift:
    """Make the result of what was recorded so far."""
    events = sorted(map(event_of, history.changes), key=lambda e: _ORDER.index(e.severity))
    findings = tuple(e for e in events if e.kind in ("widened", "narrowed") or e.severity == "mixed")
    drift = DtypeDrift(
        tool=describe_tool(torch.device("cpu")),
        source=source,
        operations=history.operations,
        attention_calls=log.seen,
        calls=tuple(sorted(map(_call, log.calls.values()), key=lambda c: (c.settled, not c.differing))),
        findings=findings,
        by_design=tuple(e for e in events if e not in findings),
        compiled=tuple(history.compiled),
        error=error,
        summary=(),
    )
    return replace(drift, summary=_sentences(drift))


def event_of(change: DtypeChange) -> DtypeEvent:
    """Describe a change as the result has it."""
    severity: Severity = "mixed" if change.reaches_mixed else "alike" if change.reaches_alike else "elsewhere"
    reached = change.reaches_mixed or change.reaches_alike
    event = DtypeEvent(
        kind=change.kind,
        severity=severity,
        reaches=tuple(name for name in "qkv" if name in reached),
        operation=operation_name(change.func),
        result=short(change.result),
        regime=short_or_none(change.regime),
        operands=change.operands,
        source=change.source,
        count=change.count,
        fix="",
        written=change.written,
    )
    return replace(event, fix=_event_fix(event))


def _call(call: Call) -> TracedCall:
    # Where all are alike they have not autocast's dtype.
    expected = call.expected if call.differing or call.regime is None else call.regime
    traced = TracedCall(
        operation=call.operation,
        dtypes={name: short(dtype) for name, dtype in call.dtypes.items()},
        regime=short_or_none(call.regime),
        expected=short(expected),
        differing=call.differing,
        outcome=call.outcome,
        paths=call.paths,
        causes={name: tuple(map(event_of, changes)) for name, changes in call.causes.items()},
        source=call.source,
        count=call.count,
        words="",
        fix="",
    )
    return replace(traced, words=_call_words(traced), fix=_call_fix(traced))


def _event_fix(event: DtypeEvent) -> str:
    """What to do about an operation that changes dtypes."""
    result, operands = event.result, event.operands
    if event.written is not None:
        return f"Keep {event.written.name or 'it'} in {' or '.join(wider(event))}, and cast it where it is read."
    if event.kind == "cast":
        return f"The code asks for {result} here: leave the cast out, or cast back before the attention."
    if event.kind == "policy":
        return f"Autocast's rule, or the operation's own, makes this {result}: cast its result back."
    wide = [o for o in operands if o.dtype == result]
    narrow = [o for o in operands if o.dtype != result]
    if event.kind == "narrowed" or not wide:
        both = " and ".join(dict.fromkeys(o.dtype for o in operands))
        return f"{both} together give {result}: bring the operands to one dtype first."
    target = event.regime if event.regime in {o.dtype for o in narrow} else narrow[0].dtype
    # Where the like has a name, its dtype follows autocast; else the dtype itself.
    like = next((f"{o.name}.dtype" for o in narrow if o.name and o.dtype == target), f"torch.{target}")
    casts = [f"{o.name}.to({like})" if o.name else _unnamed(o, like) for o in wide]
    return f"Cast to {target} first: {', '.join(dict.fromkeys(casts))}."


def _unnamed(operand: TracedOperand, like: str) -> str:
    made = "" if operand.made is None else f" made{_at(operand.made)}"
    return f".to({like}) on the {operand.dtype} intermediate{made}"


def _call_fix(call: TracedCall) -> str:
    """What to do about a call whose q, k and v differ, or have not autocast's dtype."""
    wrong = call.differing or tuple(call.dtypes)
    events = [event for name in wrong for event in call.causes.get(name, ()) if event.kind in ("widened", "narrowed")]
    like = next((f"{n}.dtype" for n, dtype in call.dtypes.items() if dtype == call.expected), f"torch.{call.expected}")
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


def _call_words(call: TracedCall) -> str:
    """What was given, and what the call did with it."""
    given = f"{call.operation} was given {', '.join(f'{name} {dtype}' for name, dtype in call.dtypes.items())}"
    if call.outcome == "raised":
        return f"{given}, and raised."
    if call.outcome == "autocast":
        these = listed(call.differing) if call.differing else "q, k and v"
        return (
            f"{given}. Autocast casts {these} to {call.regime} inside the call: it runs, with an extra cast, and hides "
            "what happened before."
        )
    return f"{given}, and took them as they were."


def _sentences(drift: DtypeDrift) -> tuple[str, ...]:
    """The outcome in sentences, the gravest first."""
    found = []
    if drift.error is not None:
        found.append(f"Ended early ({drift.error}); this is what was seen until then.")
    # Those that mix dtypes come first.
    for call in drift.calls:
        said = f"is given {call.dtypes['q']} q, k and v under {call.regime} autocast"
        if call.differing:
            said = f"mixes dtypes: {'; '.join(dict.fromkeys(_cause(name, call) for name in call.differing))}"
        cast = f"; autocast makes all three {call.regime} inside" if call.settled else ""
        found.append(f"{call.operation}{_at(call.source)} {said}{cast}.")
    found += map(rounded_in_place, drift.rounded[:_MOST_NAMED])
    if len(drift.rounded) > _MOST_NAMED:
        found.append(f"{plural(len(drift.rounded) - _MOST_NAMED, 'more place')} round in place so.")
    elsewhere = sum(event.severity == "elsewhere" and event.written is None for event in drift.findings)
    if elsewhere:
        promote = f"{'operation promotes' if elsewhere == 1 else 'operations promote'} silently"
        found.append(
            f"{elsewhere} other {promote}, but no attention call seen here is the wider for it: usual where a residual "
            "stream is float32."
            if drift.attention_calls
            else f"{elsewhere} {promote}: usual where a residual stream or a recurrent state is float32."
        )
    if not drift.operations and not drift.attention_calls:
        found.append("No operation of torch was seen: was anything computed, and in this thread?")
    elif not drift.attention_calls:
        found.append(
            "No attention call was recognised, so nothing here says what reaches q, k and v: if there is an attention, "
            "put attn_diag.check_qkv(q, k, v) before its kernel."
        )
    elif not any(call.differing for call in drift.calls):
        calls = (
            "the attention call" if drift.attention_calls == 1 else f"each of {drift.attention_calls} attention calls"
        )
        found.append(f"q, k and v share one dtype in {calls}.")
    if drift.compiled:
        found.append(
            f"Compiled by torch.compile, but run eagerly for this trace: {', '.join(drift.compiled)}. Inside a "
            "compiled graph no operation could be seen; values may differ from the graph's in their last bits."
        )
    # One place may be called in two ways: under autocast, and without.
    return tuple(dict.fromkeys(found))


def _cause(name: str, call: TracedCall) -> str:
    event = next(iter(call.causes.get(name, ())), None)
    given = f"{name} is {call.dtypes[name]}"
    if event is None:
        steps = call.paths.get(name, ())
        if not steps or steps[0].source is None:
            return f"{given}, and was so before the trace began, or was made where it cannot see"
        return f"{given} from {steps[0].operation}{_at(steps[0].source)} on"
    verb = {"widened": "promoted", "narrowed": "narrowed", "cast": "cast", "policy": "made so by rule"}[event.kind]
    return f"{given}, {verb} by {event.operation}{_at(event.source)}"


def wider(event: DtypeEvent) -> tuple[str, ...]:
    """The dtypes of its operands that are not its result's."""
    return tuple(dict.fromkeys(o.dtype for o in event.operands if o.dtype != event.result))


def rounded_in_place(event: DtypeEvent) -> str:
    """Which tensor was written into where, with what, how often, and what that does."""
    assert event.written is not None
    name, values = event.written.name or "A tensor without a name", " and ".join(wider(event))
    once, often = (
        f"{values} values in place: the result is",
        f"{values} values in place {event.count} times: each result is",
    )
    return (
        f"{name} is {event.result}, and {event.operation}{_at(event.source)} gives it "
        f"{once if event.count == 1 else often} rounded to {event.result}."
    )


def listed(names: tuple[str, ...]) -> str:
    """Join names in words: q; q and k; q, k and v."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _at(source: SourceLine | None) -> str:
    """The file's name and the line, where they are known: sentences stay short."""
    return "" if source is None else f" at {PurePath(source.file).name}:{source.line}"
