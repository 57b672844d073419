"""The report of ``invariance``: what failed and where, and a line for every way to make the call; text and page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Column
from rich.text import Text

from attn_diag.reports import layout, words
from attn_diag.reports.charts import Gallery, Section
from attn_diag.reports.html import gallery_document
from attn_diag.reports.lead import FAIL, OK, lead
from attn_diag.results.invariance import Invariance, PathFinding
from attn_diag.results.wording import EVERY_SYMBOL, function_words, percent, times

# The gravest first; of an arrangement with several paths the table's line has the gravest.
_WORDS = {
    "fault": "FAULT", "bits": "OTHER BITS", "unsteady": "unsteady", "refused": "refused", "allowed": "allowed",
    "rounding": "rounding", "same": "same bits", "not-run": "not run",
}  # fmt: skip
_STYLES = {
    "fault": "bold red", "bits": "bold yellow", "unsteady": "yellow", "refused": "yellow", "allowed": "green",
    "rounding": "green", "same": "green", "not-run": "dim",
}  # fmt: skip
# What each stands for; only those that occur are told.
_MEANINGS = {
    "fault": "FAULT: moved further than any rounding can, or NaN.",
    "bits": "OTHER BITS: by rounding alone, but nothing that the outputs depend on was changed, nor the work, so that "
    "every bit had to be the same.",
    "unsteady": "unsteady: no further than the same call again.",
    "refused": "refused: the kernel raised, or returned another shape.",
    "allowed": "allowed: by rounding alone, where that was allowed.",
    "rounding": "rounding: by rounding alone, where a kernel may add in another order.",
}
# Figures below are of no interest.
_SMALL = 0.01
_UNITS = (
    "Figures: how many elements have other bits; the largest difference in ulp (the last bit of its row's largest "
    "element); the rms difference in units of a well-rounded kernel's error (×)."
)


def invariance_renderables(found: Invariance) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    verdict = OK if found.passed else FAIL
    yield from lead(verdict, f"{found.source}: {found.headline}", found.notes, found.next)
    yield Text("")
    yield layout.heading(f"invariance of {found.source}")
    yield Text(_about(found), style="bold")
    yield layout.paragraph(_itself(found))
    if found.paths:
        yield Text("")
        fixed = [Column(name, no_wrap=True) for name in ("arrangement", "")]
        table = layout.table(*fixed, "what was changed, and what differs then", collapse=True)
        for paths in _arrangements(found):
            worst = _worst(paths)
            told = Text(paths[0].changes).append(f" ({len(paths)} ways)" if len(paths) > 1 else "", style="dim")
            told.append("".join(f"\n{line}" for line in _told(paths)), style=_STYLES[worst])
            table.add_row(paths[0].arrangement, Text(_WORDS[worst], style=_STYLES[worst]), told)
        yield layout.indented(table)
        yield Text("")
        yield layout.note(_legend(found))
    yield layout.note(words.tool_line(found.tool))


def invariance_document(found: Invariance) -> str:
    """The same as a self-contained page."""
    verdict = OK if found.passed else FAIL
    lead_ = f"{found.headline}." + (f" Next: {found.next}" if found.next else "")
    paragraphs = (*found.notes, _about(found), _itself(found))
    head = ("arrangement", "what was changed", "how", "verdict", "what differs then")
    rows = tuple(row for paths in _arrangements(found) for row in _rows(paths))
    section = Section("Every way to make the call", paragraphs, (head, *rows) if rows else ())
    footer = f"{_legend(found)} {words.tool_line(found.tool)}"
    return gallery_document(Gallery(f"{verdict} {found.source}", lead_, (section,), footer))


def _rows(paths: Sequence[PathFinding]) -> Iterator[tuple[str, ...]]:
    """The page's rows of an arrangement: one for what is the same, and one for every path that is not."""
    name, changes = paths[0].arrangement, paths[0].changes
    same = [p.path for p in paths if p.status == "same"]
    told = [("; ".join(same), _WORDS["same"], "")] if same else []
    other = [p for p in paths if p.status != "same"]
    told += [(p.path, _WORDS[p.status], ". ".join(_figures(p)) or p.words) for p in other]
    for number, row in enumerate(told):
        yield (name, changes, *row) if not number else ("", "", *row)


def _about(found: Invariance) -> str:
    b, h, t, d = found.shape
    kind = f"{found.operator}, scale {found.scale:g}"
    if found.operator is None:
        each = found.alibi_slopes, found.sinks
        kind = function_words(found.causal, found.scale, found.window, found.softcap, *each)
    return f"B={b} H={h} T={t} D={d} {found.dtype}, {kind}; {found.backend}; seed {found.seed}"


def _itself(found: Invariance) -> str:
    """The call that all others are compared with."""
    errors = ", ".join(f"{EVERY_SYMBOL[e.quantity]} {times(e.of_noise)}" for e in found.errors)
    made = f" Its schedule: {found.schedule}." if found.schedule is not None else ""
    return f"The call itself, in units of a well-rounded kernel's error: {errors}.{made}"


def _figures(path: PathFinding) -> Iterator[str]:
    """What differs, and the schedule that makes it so; nothing where the bits are the same."""
    figures = []
    for d in (d for d in path.differences if d.differing):
        share, size = percent(d.differing / d.elements), times(d.of_noise)
        if (d.of_noise or 0.0) < _SMALL:
            size = f"< {_SMALL:g}"
        cell = f"NaN in {d.nonfinite}" if d.nonfinite else f"{share}, {times(d.max_ulp)} ulp, {size}×"
        figures.append(f"{EVERY_SYMBOL[d.quantity]} {cell}")
    if figures:
        yield "; ".join(figures)
    if path.schedule is not None:
        yield f"schedule: {path.schedule}"


def _arrangements(found: Invariance) -> Iterator[list[PathFinding]]:
    """The paths of each."""
    names = dict.fromkeys(p.arrangement for p in found.paths)
    return ([p for p in found.paths if p.arrangement == name] for name in names)


def _told(paths: Sequence[PathFinding]) -> Iterator[str]:
    """A line for every path that says more than that the bits are the same, and for its schedule."""
    refused = [p for p in paths if p.status in ("not-run", "refused")]
    for why in dict.fromkeys(p.words for p in refused):
        names = [p.path for p in refused if p.words == why and p.path]
        yield f"{', '.join(names)}: {why}" if names and len(refused) < len(paths) else why
    worst = _worst(paths)
    for path in paths:
        figures = list(_figures(path))
        if figures:
            mark = "" if path.status == worst else f"{_WORDS[path.status]}, "
            yield f"{path.path}: {mark}{figures[0]}"
            yield from (f"  {line}" for line in figures[1:])


def _worst(paths: Sequence[PathFinding]) -> str:
    """The gravest status."""
    return min((p.status for p in paths), key=list(_WORDS).index)


def _legend(found: Invariance) -> str:
    seen = {p.status for p in found.paths}
    units = [_UNITS] if any(d.differing for p in found.paths for d in p.differences) else []
    return " ".join([*units, *(meaning for status, meaning in _MEANINGS.items() if status in seen)])
