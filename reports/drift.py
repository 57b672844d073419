"""The report of ``dtypes``: mixed calls with the path that made them so, then what else drifts; from 80 columns on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from attn_diag.reports import words

if TYPE_CHECKING:
    from attn_diag.drift.result import AttentionCall, DtypeDrift, DtypeEvent, SourceLine, Step

_AUTOCAST = {"float16": "FP16", "bfloat16": "BF16"}


def drift_renderables(found: DtypeDrift) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    yield Rule(Text(f"dtypes of {found.source}", overflow="ellipsis"), align="left")
    yield Text(f"{found.operations} operations, {found.attention_calls} attention calls", style="bold")
    for sentence in found.summary:
        yield words.bullet("-", sentence)
    for call in found.calls:
        yield Text("")
        yield from _call(call)
    explained = {cause.source for call in found.calls for cause in call.causes.values()}
    reaching = [e for e in found.findings if e.severity != "elsewhere" and e.source not in explained]
    elsewhere = [e for e in found.findings if e.severity == "elsewhere"]
    if reaching:
        yield Text("\nThese reach q, k or v too:", style="bold")
        yield from _events(reaching, fixes=True)
    if elsewhere:
        yield Text("\nAlso widened, but reaching no attention call:", style="bold")
        yield from _events(elsewhere, fixes=False)
    yield Text("")
    yield Text(_legend(found), style="dim")
    triton = f", triton {found.tool.triton}" if found.tool.triton else ""
    yield Text(f"attn-diag {found.tool.version}, torch {found.tool.torch}{triton}", style="dim")


def _call(call: AttentionCall) -> Iterator[RenderableType]:
    style = "bold red" if call.differing else "bold yellow"
    head = "MIXED CALL" if call.differing else "NOT AUTOCAST'S DTYPE"
    yield Text.assemble((f"{head}  ", style), (_where(call.source), "bold"), _times(call.count))
    yield _indented(Text(call.words))
    for name in call.dtypes:
        if name in call.differing or not call.differing:
            yield _indented(_path(name, call))
    yield _indented(Text.assemble(("fix  ", "bold green"), call.fix))


def _path(name: str, call: AttentionCall) -> RenderableType:
    """How q, k or v came by its dtype, the cause first."""
    steps = call.paths.get(name, ())
    if not steps:
        return Text(f"{name} had {call.dtypes[name]} before the trace began, or was made where it cannot see.")
    table = _grid()
    table.add_row(Text(f"{name}'s path", style="bold"), "", "")
    for i, step in enumerate(steps):
        table.add_row(*_step(step, cause=i == 0 and name in call.causes))
    cause = call.causes.get(name)
    if cause is not None:
        operands = Text("of " + ", ".join(map(str, cause.operands)), style="dim")
        table.rows[0].end_section = False
        grid = Table.grid()
        grid.add_row(table)
        grid.add_row(Padding(operands, (0, 0, 0, 2)))
        return grid
    return table


def _step(step: Step, *, cause: bool) -> tuple[Text, Text, Text]:
    style = "red" if cause else ""
    text = "" if step.source is None else step.source.text
    return (
        Text(f"  {step.operation} -> {step.dtype}", style=style),
        Text(_where(step.source), style=style),
        Text(text, style=style),
    )


def _events(events: list[DtypeEvent], *, fixes: bool) -> Iterator[RenderableType]:
    table = _grid()
    for event in events:
        operands = ", ".join(f"{o.name or '…'} {o.dtype}" for o in event.operands)
        what = Text(f"{event.operation}({operands}) -> {event.result}{_times(event.count)}")
        if event.source is not None:
            what.append(f"\n{event.source.text}", style="dim")
        if fixes:
            what.append(f"\n{event.fix}", style="green")
        table.add_row(Text(f"  {_where(event.source)}"), what)
    yield table


def _legend(found: DtypeDrift) -> str:
    by_design = sum(event.count for event in found.by_design)
    return (
        f"Not listed: {by_design} casts that the code asks for or that autocast makes by its rules. Expected of q, k and "
        "v: autocast's dtype, else the narrowest among them. Not seen: backward passes on a GPU, other threads, and what "
        "operators, autograd Functions and nn.MultiheadAttention compute inside."
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


def _indented(renderable: RenderableType) -> RenderableType:
    return Padding(renderable, (0, 0, 0, 2))


def _grid() -> Table:
    return Table.grid(padding=(0, 2))
