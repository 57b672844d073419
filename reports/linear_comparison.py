"""The report on two kernels of linear attention: what parts them, quantity by quantity."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from attn_diag.reports import layout, words
from attn_diag.reports.charts import Gallery, Section
from attn_diag.reports.html import gallery_document
from attn_diag.reports.lead import OK, lead
from attn_diag.results.linear_comparison import LinearComparison, LinearDifference
from attn_diag.results.wording import DASH, LINEAR_SYMBOLS, number, percent, plural

_MOST = 8


_COLUMNS = ("quantity", "answer", "differs by", "x two well-rounded", "of it A's", "semantics")
_LEGEND = (
    "X two well-rounded: beside what two well-rounded kernels with independent errors differ by. Semantics: the "
    "part of the squared difference that wrong mathematics makes; the rest is rounding."
)


def comparison_renderables(found: LinearComparison) -> Iterator[RenderableType]:
    """The report, piece by piece."""
    verdict, said, told = _opening(found)
    style = "bold green" if verdict == OK else "bold yellow" if verdict == "UNDECIDED" else "bold red"
    yield from lead(verdict, said, told, None, style)
    for head in found.heads[:_MOST]:
        yield Text("")
        yield layout.heading(f"{found.operator}, head {head.head}")
        yield layout.indented(layout.table(*_COLUMNS, rows=map(_cells, head.quantities)))
    if len(found.heads) > _MOST:
        yield layout.note(f"… and {plural(len(found.heads) - _MOST, 'head')} more (--json, --html)")
    yield layout.note(_LEGEND)
    yield layout.note(words.tool_line(found.tool))


def comparison_document(found: LinearComparison) -> str:
    """The same as a self-contained page, with every head."""
    verdict, said, told = _opening(found)
    sections = tuple(
        Section(f"{found.operator}, head {head.head}", table=(_COLUMNS, *map(_cells, head.quantities)))
        for head in found.heads
    )
    footer = f"{_LEGEND} {words.tool_line(found.tool)}"
    return gallery_document(
        Gallery(f"{verdict} {said}", " ".join(f"{line.removesuffix('.')}." for line in told), sections, footer)
    )


def _opening(found: LinearComparison) -> tuple[str, str, list[str]]:
    """The first word, what it says, and what was compared."""
    grave = [a for a in ("nonfinite", "semantics", "lossy") if a in found.answers]
    verdict = grave[0].upper() if grave else "UNDECIDED" if {"undecided", "stated"} & found.answers else OK
    said = found.sentence.removeprefix(f"{grave[0]}: ") if grave else found.sentence
    told = [f"A: {found.a}", f"B: {found.b}"]
    if found.sequence is not None:
        told.append(f"Sequence {found.sequence} of the one is the other's only one.")
    return verdict, said, told


def _cells(q: LinearDifference) -> tuple[str, ...]:
    beside = DASH if q.beside is None else number(q.beside)
    of_a, semantics = (DASH if x is None else percent(x, ".2g") for x in (q.of_a, q.semantics))
    return LINEAR_SYMBOLS.get(q.quantity, q.quantity), q.answer, percent(q.difference), beside, of_a, semantics
