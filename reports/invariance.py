"""The report of ``invariance``: what failed and where, and a line for every way to make the call; text and page."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Column
from rich.text import Text

from attn_diag.reports import layout, words
from attn_diag.reports.charts import Gallery, Section
from attn_diag.reports.html import gallery_document
from attn_diag.reports.lead import FAIL, OK, lead
from attn_diag.results.invariance import Invariance, PathFinding
from attn_diag.results.wording import DASH, SYMBOLS, number, percent, times

_STYLES = {
    "same": "green", "rounding": "green", "allowed": "green", "bits": "bold yellow", "fault": "bold red",
    "not-run": "dim",
}  # fmt: skip
_WORDS = {
    "same": "same bits", "rounding": "rounding", "allowed": "allowed", "bits": "OTHER BITS", "fault": "FAULT",
    "not-run": "not run",
}  # fmt: skip
_LEGEND = (
    "What differs: how many elements have other bits; the largest difference in ulp of its row's largest element; rms "
    "of the difference in units of a well-rounded kernel's error. FAULT: more than another order of adding makes, or "
    "NaN. OTHER BITS: by rounding alone, where nothing that O or the gradients depend on has changed, nor the work. "
    "rounding: likewise, where a kernel may add in another order."
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
        fixed = [Column(name, no_wrap=True) for name in ("arrangement", "how", "")]
        table = layout.table(*fixed, "what differs, and the order of keys", collapse=True)
        for path in found.paths:
            cells = (path.arrangement, path.path, _WORDS[path.status], _told(path))
            table.add_row(*(Text(cell, style=_STYLES[path.status]) for cell in cells))
        yield layout.indented(table)
        yield Text("")
        yield layout.note(_LEGEND)
    yield layout.note(words.tool_line(found.tool))


def invariance_document(found: Invariance) -> str:
    """The same as a self-contained page."""
    verdict = OK if found.passed else FAIL
    outputs = _outputs(found)
    head = ("arrangement", "path", "verdict", *outputs, "schedule", "found")
    rows = tuple(
        (p.arrangement, p.path, _WORDS[p.status], *_cells(p, outputs), p.schedule or "", p.words) for p in found.paths
    )
    paragraphs = (*found.notes, _about(found), _itself(found), _LEGEND)
    section = Section("Every way to make the call", paragraphs, (head, *rows) if rows else ())
    lead_ = f"{found.source}: {found.headline}" + (f" Next: {found.next}" if found.next else "")
    return gallery_document(Gallery(f"{verdict} {found.source}", lead_, (section,), words.tool_line(found.tool)))


def _about(found: Invariance) -> str:
    b, h, t, d = found.shape
    return (
        f"B={b} H={h} T={t} D={d} {found.dtype}, causal {found.causal}, scale {found.scale:g}; {found.backend}; seed "
        f"{found.seed}"
    )


def _itself(found: Invariance) -> str:
    """The call that all others are compared with."""
    errors = ", ".join(f"{SYMBOLS[e.quantity]} {times(e.of_noise)}" for e in found.errors)
    made = f" Its schedule: {found.schedule}." if found.schedule is not None else ""
    return f"The call itself, in units of a well-rounded kernel's error: {errors}.{made}"


def _outputs(found: Invariance) -> list[str]:
    """The columns."""
    known = dict.fromkeys(d.quantity for p in found.paths for d in p.differences)
    return [SYMBOLS[name] for name in SYMBOLS if name in known]


def _cells(path: PathFinding, outputs: list[str]) -> list[str]:
    by_name = {SYMBOLS[d.quantity]: d for d in path.differences}
    cells = []
    for name in outputs:
        if (d := by_name.get(name)) is None:
            cells.append("" if path.status == "not-run" else DASH)
        elif not d.differing:
            cells.append("same")
        elif d.nonfinite:
            cells.append(f"NaN in {d.nonfinite}")
        else:
            share = percent(d.differing / d.elements, ".2g")
            cells.append(f"{share}; {number(d.max_ulp, 2)} ulp; {times(d.of_noise)}×")
    return cells


def _told(path: PathFinding) -> str:
    """What differs, in one cell."""
    if path.status == "not-run":
        return path.words
    if path.status == "same":
        return ""
    outputs = [SYMBOLS[d.quantity] for d in path.differences if d.differing]
    told = "\n".join(f"{name} {cell}" for name, cell in zip(outputs, _cells(path, outputs), strict=True))
    return told if path.schedule is None else f"{told}\nschedule: {path.schedule}"
