"""What a debugger's prompt shows: a diagnosis or a finding in at most 25 lines of 80 columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from attn_diag.printing import made_printable, printable
from attn_diag.reports.opening import headline
from attn_diag.reports.quantities import CONDITIONING, DQ_ERROR, DW_Q_ERROR, NOISE_FACTOR, labels
from attn_diag.reports.story import Entry
from attn_diag.results.diagnosis import Diagnosis, HeadDiagnosis
from attn_diag.results.wording import file_name, head_name

WIDTH = 80
# Lines that each part may take; with a head line, and the 5 of ``break_if`` before them, they are 25 at most.
_SUMMARY, _WARNINGS, _UNJUDGED, _HEADS, _REASON, _SUGGESTION, _NEXT = 3, 2, 2, 5, 3, 2, 2
_COLUMNS = "{:<9}{:<17}{:>7} {:>7} {:>8} {:>8}  "
# Shorter titles than elsewhere: a line has 80 columns.
_FIGURES = {NOISE_FACTOR: "noise", CONDITIONING: "condit.", DQ_ERROR: "dQ off", DW_Q_ERROR: "dW_Q off"}


def brief(diagnosis: Diagnosis, found: str = "this") -> str:
    """The findings, the worst heads, why the worst one is, and what to type next.

    Args:
        diagnosis: What is shown.
        found: An expression that gives the diagnosis at the prompt.
    """
    lines = wrapped(headline(diagnosis), _SUMMARY)
    s = diagnosis.summary
    warnings = [*s.warnings, *(f"not read: {u}" for u in s.unreadable)]
    shown = warnings if len(warnings) <= _WARNINGS else warnings[: _WARNINGS - 1]
    lines += [line for warning in shown for line in wrapped(f"warning: {warning}", 1)]
    if len(warnings) > len(shown):
        lines.append(f"… and {len(warnings) - len(shown)} more warnings")
    failed = [c for c in diagnosis.captures if c.unjudged]
    if failed:
        lines += wrapped(f"no verdict for {file_name(failed[0].source)}: {failed[0].assumptions.message}", _UNJUDGED)
    ranked = diagnosis.ranked()
    if ranked:
        lines += [*_table(ranked), *_worst(ranked[0][2])]
    return "\n".join([*lines, *_next(ranked, found)])


def finding_text(found: Any) -> str:
    """Why ``break_if`` stopped, where, and the diagnosis in brief, in at most 25 lines; ``found`` is a Finding."""
    p = found.place
    module = f" ({p.module})" if p.module else ""
    more = f" {len(found.also)} more in .also." if found.also else ""
    head = f"attn_diag.break_if: {'; '.join(found.reasons)}"
    where = f"Layer {p.layer}{module}, call {p.call} of step {p.step}, {found.kernel}; judged {found.judged}.{more}"
    lines = [*wrapped(head, 2), *wrapped(where, 2)]
    lines += wrapped("import attn_diag; attn_diag.last_finding(): .capture.save(path), .disarm()", 1)
    if found.diagnosis is None:
        return "\n".join([*lines, *wrapped(f"Not analysed: {found.refused}", 3)])
    return "\n".join([*lines, brief(made_printable(found.diagnosis), "attn_diag.last_finding().diagnosis")])


def wrapped(text: str, most: int) -> list[str]:
    """``text`` in at most ``most`` lines of 80 columns, the later ones indented by two; cut with an ellipsis."""
    console = Console(width=WIDTH, color_system=None)
    # A finding is no result: its names come as they are.
    text = printable(text)
    first, *rest = Text(text).wrap(console, WIDTH)
    lines = [first.plain.rstrip()]
    if rest:
        following = Text(text[len(first.plain) :].lstrip())
        lines += [f"  {line.plain.rstrip()}" for line in following.wrap(console, WIDTH - 2)]
    return lines if len(lines) <= most else [*lines[: most - 1], _cut(lines[most - 1] + " …" * WIDTH, WIDTH)]


def _cut(text: str, width: int) -> str:
    """``text`` in at most ``width`` columns, an ellipsis for what is left out."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip(" …") + "…"


def _table(ranked: list[Entry]) -> list[str]:
    shown = ranked if len(ranked) <= _HEADS else ranked[: _HEADS - 1]
    lines = [_COLUMNS.format("head", "verdict", *_FIGURES.values()) + "where"]
    # Only what tells the entries apart: the line has no room for more.
    observations, sources = {o.name for _, o, _ in ranked}, {c.source for c, _, _ in ranked}
    lines += [_row(entry, observation=len(observations) > 1, source=len(sources) > 1) for entry in shown]
    if rest := ranked[len(shown) :]:
        counts = Counter(labels(head) for _, _, head in rest)
        lines += wrapped(f"… and {len(rest)} more: " + "; ".join(f"{n} {label}" for label, n in counts.items()), 1)
    return lines


def _row(entry: Entry, *, observation: bool, source: bool) -> str:
    capture, made, head = entry
    said = labels(head)
    cells = _COLUMNS.format(
        head_name(head.layer, head.head),
        said if len(said) <= 16 else f"{said.partition(',')[0]} +{said.count(',')}",
        *(q.nearest_text(head) if q is DQ_ERROR else q.text(head) for q in _FIGURES),
    )
    where = [f"step {step}"] if (step := capture.metadata.get("step")) else []
    where += [made.name] if observation else []
    where += [file_name(capture.source)] if source else []
    return _cut(cells + ", ".join(where), WIDTH)


def _worst(head: HeadDiagnosis) -> Iterator[str]:
    if head.verdict is None:
        return
    yield from wrapped(": ".join([head_name(head.layer, head.head), *head.verdict.reasons[:1]]), _REASON)
    for suggestion in head.verdict.suggestions[:1]:
        yield from wrapped(f"> {suggestion}", _SUGGESTION)


def _next(ranked: list[Entry], found: str) -> list[str]:
    explain = ""
    if ranked:
        _, worst, head = ranked[0]
        arguments = [str(head.head)] + ([] if head.layer is None else [f"layer={head.layer}"])
        if len({observation.name for _, observation, _ in ranked}) > 1:
            arguments.append(f"observation={worst.name!r}")
        explain = f"print(attn_diag.explain(found, {', '.join(arguments)})); "
    # At a pdb prompt d is "down", and q is "quit".
    return wrapped(f"Next, where found is {found}: {explain}print(found.report())", _NEXT)
