"""The report on linear attention: what was found and where, every quantity, O's error along the sequence."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from attn_diag.reports import layout, words
from attn_diag.reports.charts import Gallery, Section
from attn_diag.reports.html import gallery_document
from attn_diag.reports.lead import OK, lead
from attn_diag.results.linear import (
    LinearDiagnosedCapture,
    LinearDiagnosis,
    LinearFinding,
    LinearHead,
    LinearQuantity,
)
from attn_diag.results.wording import DASH, LINEAR_SYMBOLS, number, percent, plural, ranges, together

_COLUMNS = ("quantity", "answer", "off", "well-rounded", "factor", "cause")
_LEGEND = (
    "Factor: error over that of an emulated chunked kernel of the same format, with its 95 % interval; up to 1.1 is as "
    "good, above 1.25 lossy. Wrong: beyond three times what a kernel that also rounds state, decays and sums leaves."
)
_MOST = 8


def linear_renderables(found: LinearDiagnosis) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    verdict, said, told = _opening(found)
    style = "bold green" if verdict == OK else "bold red" if verdict in ("WRONG", "NONFINITE") else "bold yellow"
    yield from lead(verdict, said, told, None, style)
    for message in found.unreadable:
        yield Text(f"warning: not read: {message}", style="yellow")
    for capture in found.captures:
        yield Text("")
        yield layout.heading(f"{capture.operator} in {capture.source}")
        yield Text(_about(capture))
        for observation in capture.observations:
            shown = _worst(observation.heads)
            for head in shown:
                yield Text("")
                yield Text(f"{_prefix(observation.name)}head {head.head}: {', '.join(head.labels)}", style="bold")
                yield layout.indented(layout.table(*_COLUMNS, rows=map(_cells, head.quantities)))
                for sentence in _more(head):
                    yield layout.bullet("-", sentence)
                errors = [c.error for c in head.chunks if c.error is not None and math.isfinite(c.error)]
                if len(errors) > 1:
                    yield Text("  O's error, 64 steps a bar:")
                    yield layout.indented(layout.bars(errors, zero=True))
            if len(observation.heads) > len(shown):
                yield layout.note(f"… and {plural(len(observation.heads) - len(shown), 'head')} more (--json, --html)")
        if capture.not_judged:
            yield layout.note(f"not judged: {', '.join(capture.not_judged)}")
    yield layout.note(_LEGEND)
    yield layout.note(words.tool_line(found.tool))


def linear_document(found: LinearDiagnosis) -> str:
    """The page."""
    verdict, said, told = _opening(found)
    sections = []
    for capture in found.captures:
        for observation in capture.observations:
            for head in observation.heads:
                title = f"{capture.operator}, {_prefix(observation.name)}head {head.head}: {', '.join(head.labels)}"
                paragraphs = (f"{capture.source}: {_about(capture)}", *_more(head))
                sections.append(Section(title, paragraphs, (_COLUMNS, *map(_cells, head.quantities))))
    return gallery_document(
        Gallery(f"{verdict} {said}", " ".join(told) or _LEGEND, tuple(sections), words.tool_line(found.tool))
    )


def _opening(found: LinearDiagnosis) -> tuple[str, str, list[str]]:
    if not found.findings:
        return OK, found.sentence, []
    first = found.findings[0]
    if all(f.label == "undecided" for f in found.findings):
        return "UNDECIDED", found.sentence, [first.words]
    told = [first.words, *(f"{_place(f)}: {f.label}: {f.words}" for f in found.findings[1:5])]
    return first.label.upper(), f"{_place(first)}: {_quantities(first)}", told


def _place(finding: LinearFinding) -> str:
    where = [
        f"{name} {value}" for name, value in (("layer", finding.layer), ("step", finding.step)) if value is not None
    ]
    named = "all heads" if len(finding.heads) == finding.of > 1 else f"head {ranges(finding.heads)}"
    return ", ".join([*where, named, *([] if finding.observation == "observed" else [finding.observation])])


def _quantities(finding: LinearFinding) -> str:
    return together([LINEAR_SYMBOLS.get(q, q) for q in finding.quantities]) if finding.quantities else "the inputs"


def _prefix(observation: str) -> str:
    return "" if observation == "observed" else f"{observation}, "


def _worst(heads: tuple[LinearHead, ...]) -> list[LinearHead]:
    return sorted(heads, key=lambda h: (h.labels == ("clean",), h.head))[:_MOST]


def _about(capture: LinearDiagnosedCapture) -> str:
    s = capture.shape
    shape = f"{plural(s['N'], 'sequence')}, {s['T']} steps, {plural(s['H'], 'head')}, K {s['K']}, V {s['V']}"
    bound = f"float64 reference within {number(capture.reference_bound, 2)} of O's size, proven"
    return f"{shape}, {capture.metadata['dtype']}; {bound}"


def _cells(q: LinearQuantity) -> tuple[str, ...]:
    factor = number(q.factor)
    if q.factor is not None and q.factor_ci95 is not None:
        factor += f" ({number(q.factor_ci95[0])}–{number(q.factor_ci95[1])})"
    cause = DASH if q.cause is None else f"{q.cause} ({percent(q.explained, '.2g')})"
    return (
        LINEAR_SYMBOLS.get(q.quantity, q.quantity), q.answer, percent(q.relative_error),
        percent(q.relative_error_well_rounded), factor, cause,
    )  # fmt: skip


def _more(head: LinearHead) -> Iterator[str]:
    yield from head.reasons
    if head.memory == math.inf:
        kept = "its norms do not bound how long the state lives"
    else:
        kept = f"at most half of the state is left after {number(head.memory)} steps"
    grows = "no step makes an error larger" if head.largest_step <= 1 + 1e-6 else (
        f"a step may make an error {number(head.largest_step)} times larger"
    )  # fmt: skip
    yield f"Recurrence: {grows}; {kept}."
    if head.drift is not None and head.drift > 1:
        yield f"O's running error leaves its 99 % band ({number(head.drift)} times it): errors share a sign for long."
