"""The report of ``hunt``: what a kernel gets wrong and where, each axis by itself, what was saved; as text and page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Column
from rich.text import Text

from attn_diag.reports import layout, words
from attn_diag.reports.charts import Gallery, Section
from attn_diag.reports.html import gallery_document
from attn_diag.reports.lead import lead
from attn_diag.results.hunt import FAULTS, Fault, Hunt, HuntedAxis, HuntedKernel, HuntFinding, TriedLevel
from attn_diag.results.wording import DASH, SYMBOLS, listed, number, percent, plural

_VERDICTS: dict[Fault, str] = {
    "crashed": "CRASH", "timed-out": "HANG", "nonfinite": "WRONG", "wrong": "WRONG", "raised": "ERROR",
    "lossy": "LOSSY",
}  # fmt: skip
_MARKS: dict[Fault, str] = {
    "crashed": "crash", "timed-out": "hang", "nonfinite": "NaN", "wrong": "wrong", "raised": "error", "lossy": "lossy",
}  # fmt: skip
_LEGEND = (
    "Each axis by itself: all else as in the first case, bf16 and contiguous unless said. Wrong: more than any "
    "rounding makes; lossy: over 1.25 times a well-rounded kernel's error, beyond chance; refused: the kernel does "
    "not take it, which is no fault."
)
_LEVELS = 24


def hunt_renderables(found: Hunt) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    verdict, said, told = _opening(found)
    style = "bold green" if verdict == "PASS" else "bold yellow" if verdict in ("LOSSY", "NOT RUN") else "bold red"
    yield from lead(verdict, said, told, _next(found), style)
    for message in found.unreadable:
        yield Text(f"warning: not read: {message}", style="yellow")
    for kernel in found.kernels:
        yield Text("")
        yield layout.heading(f"{kernel.name}{f' {kernel.version}' if kernel.version else ''} on {kernel.capture}")
        yield Text(_about(kernel), style="bold")
        for finding in kernel.findings:
            yield layout.bullet("-", finding.words)
            for line in _more(finding):
                yield layout.bullet("", line)
        if kernel.axes:
            yield Text("")
            fixed = [Column("axis", no_wrap=True), Column("passed"), Column("refused"), Column("wrong", min_width=24)]
            table = layout.table(*fixed, collapse=True)
            for axis in kernel.axes:
                cells = _cells(axis)
                table.add_row(*(Text(c, style="bold red" if i == 3 and c != DASH else "") for i, c in enumerate(cells)))
            yield layout.indented(table)
        for note in (*kernel.refusals, *(f"as documented: {text}" for text in kernel.documented)):
            yield layout.bullet("-", note)
    yield Text("")
    yield layout.note(_LEGEND)
    yield layout.note(words.tool_line(found.tool))


def hunt_document(found: Hunt) -> str:
    """The same as a self-contained page."""
    verdict, said, told = _opening(found)
    sections = []
    for kernel in found.kernels:
        paragraphs = [_about(kernel)]
        for finding in kernel.findings:
            paragraphs += [finding.words, *_more(finding)]
        paragraphs += [*kernel.refusals, *(f"as documented: {text}" for text in kernel.documented)]
        table = (("axis", "passed", "refused", "wrong"), *map(_cells, kernel.axes)) if kernel.axes else ()
        sections.append(Section(f"{kernel.name} on {kernel.capture}", tuple(paragraphs), table))
    return gallery_document(
        Gallery(f"{verdict} {said}", " ".join(told) or _LEGEND, tuple(sections), words.tool_line(found.tool))
    )


def _opening(found: Hunt) -> tuple[str, str, list[str]]:
    """The gravest kernel's verdict and answer, and a sentence for each other."""
    ordered = sorted(found.kernels, key=_rank)
    if not ordered:
        return "NOT RUN", "nothing was hunted", []
    first = ordered[0]
    told = [f"{f.words}." for f in first.findings[1:]]
    told += [f"{k.name}: {k.words}." for k in ordered[1:]]
    said = first.findings[0].words if first.findings else first.words
    return _verdict(first), f"{first.name}: {said}", told


def _rank(kernel: HuntedKernel) -> int:
    if not kernel.findings:
        # None of its cases ran: nothing is known of it.
        return len(FAULTS) + (kernel.first is not None)
    return FAULTS.index(kernel.findings[0].fault)


def _verdict(kernel: HuntedKernel) -> str:
    if kernel.findings:
        return _VERDICTS[kernel.findings[0].fault]
    return "NOT RUN" if kernel.first is None else "PASS"


def _next(found: Hunt) -> str | None:
    """The gravest finding's script."""
    saved = [f for k in sorted(found.kernels, key=_rank) for f in k.findings if f.script is not None]
    return f"python {saved[0].script}" if saved else None


def _about(kernel: HuntedKernel) -> str:
    said = [f"{plural(kernel.cases, 'case')} judged", f"{kernel.refused} refused"]
    if kernel.not_run:
        said.append(f"{kernel.not_run} not run (time, or beside levels that crash or hang)")
    first = "" if kernel.first is None else f"; first case: {kernel.first.words}"
    return f"{', '.join(said)}, in {number(kernel.seconds)} s on {kernel.backend}{first}"


def _more(finding: HuntFinding) -> Iterator[str]:
    """What was found in the smallest case, which levels do not fail, and the files."""
    if finding.details:
        yield finding.details
    elif finding.relative_errors:
        yield ", ".join(f"{SYMBOLS.get(n, n)} {percent(e)} off" for n, e in finding.relative_errors.items())
    for condition in finding.conditions:
        if condition.passing and len(finding.conditions) > 1:
            yield f"not at {condition.axis} {listed(condition.passing, 8)}"
    if finding.script is not None:
        yield f"saved: {finding.script} with {finding.capture}"


def _cells(axis: HuntedAxis) -> tuple[str, str, str, str]:
    def named(levels: Sequence[TriedLevel]) -> str:
        return listed([x.level for x in levels], _LEVELS) or DASH

    passed = [x for x in axis.levels if x.outcome == "passed"]
    refused = [x for x in axis.levels if x.outcome == "refused"]
    by_fault: dict[str, list[TriedLevel]] = {}
    for level in axis.levels:
        if level.outcome == "failed":
            said = ", ".join(f"{SYMBOLS.get(name, name)} {_MARKS[fault]}" for name, fault in level.faults.items())
            by_fault.setdefault(said, []).append(level)
    wrong = "; ".join(f"{named(levels)}: {said}" for said, levels in by_fault.items())
    return axis.name, named(passed), named(refused), wrong or DASH
