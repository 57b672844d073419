"""The report of ``dtypes``: mixed calls with the path that made them so, then what else drifts; from 80 columns on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from attn_diag.reports import layout, words
from attn_diag.reports.lead import FAIL, OK, lead
from attn_diag.results.dtypes import DtypeDrift, DtypeEvent, SourceLine, TracedCall
from attn_diag.results.wording import plural

# Tensors that are rounded in place and named in the first lines; the list has them all.
_MOST_NAMED = 3
_NOTHING_LOST = (
    "Nothing is less exact for it; it costs casts and memory. A kernel that autocast does not cast for would get these "
    "dtypes: where they come from is below."
)


def drift_renderables(found: DtypeDrift) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    yield from _first(found)
    yield Text("")
    yield layout.heading(f"dtypes of {found.source}")
    calls = plural(found.attention_calls, "attention call")
    yield Text(f"{found.operations} operations with floating results, {calls}", style="bold")
    for sentence in found.summary:
        yield layout.bullet("-", sentence)
    for call in found.calls:
        yield Text("")
        yield from _call(call)
    explained = {(c.source, c.operation) for call in found.calls for causes in call.causes.values() for c in causes}
    reaching = [e for e in found.findings if e.severity != "elsewhere" and (e.source, e.operation) not in explained]
    elsewhere = [e for e in found.findings if e.severity == "elsewhere" and e.written is None]
    if found.rounded:
        yield Text("\nRounded in place; where that is repeated, what is small beside the tensor is lost:", style="bold")
        yield from _events(list(found.rounded), fixes=True)
    if reaching:
        yield Text("\nThese reach q, k or v too:", style="bold")
        yield from _events(reaching, fixes=True)
    if elsewhere:
        what = "Also widened, but reaching no attention call:" if found.attention_calls else "Widened:"
        yield Text(f"\n{what}", style="bold")
        yield from _events(elsewhere, fixes=False)
    yield Text("")
    yield layout.note(_legend(found))
    yield layout.note(words.versions(found.tool))


def _first(found: DtypeDrift) -> Iterator[RenderableType]:
    """Whether q, k and v have one dtype, and autocast's; where not, the first place and what to do."""
    worst = found.calls[0] if found.calls else None
    told = [] if found.error is None else [f"The script ended early: {found.error}"]
    rounding = ""
    if found.rounded:
        places = plural(len(found.rounded), "place")
        rounding = f"; {places} {'rounds' if len(found.rounded) == 1 else 'round'} in place"
        names = ", ".join(dict.fromkeys(f"{_into(e)} at {_where(e.source)}" for e in found.rounded[:_MOST_NAMED]))
        more = (
            f" and at {plural(len(found.rounded) - _MOST_NAMED, 'more place')}"
            if len(found.rounded) > _MOST_NAMED
            else ""
        )
        told.append(f"Wider values are rounded in place into {names}{more}.")
    if worst is None:
        calls = plural(found.attention_calls, "attention call")
        if not found.attention_calls:
            yield from lead(
                "NOTHING", f"{found.source}: no attention call was seen{rounding}", told, style="bold yellow"
            )
            return
        others = sum(e.severity == "elsewhere" and e.written is None for e in found.findings)
        also = f"; {plural(others, 'place')} elsewhere {'drifts' if others == 1 else 'drift'}" if others else ""
        yield from lead(OK, f"{found.source}: q, k and v agree in all of {calls}{also}{rounding}", told)
        return
    place = f"({', '.join(f'{name} {dtype}' for name, dtype in worst.dtypes.items())} at {_where(worst.source)})"
    key = worst.settled or bool(worst.differing)
    count = sum(c.count for c in found.calls if c.settled == worst.settled and (c.settled or bool(c.differing)) == key)
    if worst.settled:
        what = f"autocast makes q, k and v {worst.regime} inside {plural(count, 'attention call')} that got wider ones"
        yield from lead(OK, f"{found.source}: {what} {place}", [_NOTHING_LOST, *told])
        return
    what = "differ in dtype" if worst.differing else "have not autocast's dtype"
    said = f"q, k and v {what} in {count} of {plural(found.attention_calls, 'attention call')}"
    yield from lead(FAIL, f"{found.source}: {said} {place}", [f"Fix: {worst.fix}", *told])


def _call(call: TracedCall) -> Iterator[RenderableType]:
    style = "bold red" if call.differing else "bold yellow"
    head = "MIXED CALL" if call.differing else "NOT AUTOCAST'S DTYPE"
    yield Text.assemble((f"{head}  ", style), (_where(call.source), "bold"), _times(call.count))
    yield layout.indented(Text(call.words))
    wanted = call.differing or tuple(call.dtypes)
    if not any(call.paths.get(name) for name in wanted):
        # What differs comes from outside: perhaps it is the others that changed.
        wanted = tuple(call.dtypes)
    for name in wanted:
        yield from map(layout.indented, _path(name, call))
    grid = _grid()
    grid.add_row(Text("fix", style="bold green"), Text(call.fix))
    yield layout.indented(grid)


def _path(name: str, call: TracedCall) -> Iterator[RenderableType]:
    """How q, k or v came by its dtype, the cause first; steps of one line together."""
    steps, causes = call.paths.get(name, ()), call.causes.get(name, ())
    if not steps:
        yield Text(f"{name} was {call.dtypes[name]} before the trace began, or was made where it cannot see.")
        return
    yield Text.assemble((name, "bold"), f" is {call.dtypes[name]} since")
    grid = _grid()
    for i, (source, together) in enumerate(groupby(steps, key=lambda step: step.source)):
        operations = ", ".join(step.operation for step in together)
        if i == 0 and causes:
            operations = operations.replace(causes[0].operation, f"{causes[0].operation}({_operands(causes[0])})", 1)
        what = Text("" if source is None else source.text, style="red" if i == 0 else "")
        what.append(f"\n{operations}", style="dim")
        if i == 0:
            for cause in causes[1:]:
                elsewhere = "" if cause.source == source else f" at {_where(cause.source)}"
                what.append(f"\nand from {cause.operation}({_operands(cause)}){elsewhere}", style="dim")
        grid.add_row(Text(f"  {_where(source)}", style="red" if i == 0 else ""), what)
    yield grid


def _events(events: list[DtypeEvent], *, fixes: bool) -> Iterator[RenderableType]:
    table = _grid()
    for event in events:
        what = Text("" if event.source is None else event.source.text)
        result = event.result if event.written is None else _into(event)
        what.append(f"\n{event.operation}({_operands(event)}) -> {result}{_times(event.count)}", style="dim")
        if fixes:
            what.append(f"\n{event.fix}", style="green")
        table.add_row(Text(f"  {_where(event.source)}"), what)
    yield table


def _into(event: DtypeEvent) -> str:
    assert event.written is not None
    return f"{event.written.name or '…'} ({event.result})"


def _operands(event: DtypeEvent) -> str:
    return ", ".join(f"{o.name or '…'} {o.dtype}{list(o.shape)}" for o in event.operands)


def _legend(found: DtypeDrift) -> str:
    by_design = sum(event.count for event in found.by_design)
    return (
        f"Not listed: changes of dtype that the code asks for, or autocast's rules ({by_design}). Expected of q, k and "
        "v: autocast's dtype, else the narrowest among them. Not seen: backward passes on a GPU, other threads, and "
        "what operators, autograd Functions, TorchScript and nn.MultiheadAttention compute inside."
    )


def _where(source: SourceLine | None) -> str:
    """The file as seen from the working directory, where it lies below it; else its last three parts."""
    if source is None:
        return "?"
    file = Path(source.file)
    try:
        return f"{file.relative_to(Path.cwd())}:{source.line}"
    except (ValueError, OSError):
        return f"{Path(*file.parts[-3:])}:{source.line}" if len(file.parts) > 4 else f"{file}:{source.line}"


def _times(count: int) -> str:
    return f" ({count}×)" if count > 1 else ""


def _grid() -> Table:
    return Table.grid(padding=(0, 2))
