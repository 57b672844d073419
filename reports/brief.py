"""What a debugger prompt shows of a diagnosis: at most 25 lines of 80 columns, the worst heads first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from attn_diag.reports import words
from attn_diag.results.diagnosis import CaptureDiagnosis, Diagnosis, HeadDiagnosis, ObservationDiagnosis

WIDTH = 80
# Lines that each part may take; with a head line, and the 5 of ``break_if`` before them, they are 25 at most.
_SUMMARY, _WARNINGS, _UNJUDGED, _HEADS, _REASON, _SUGGESTION, _NEXT = 3, 2, 2, 5, 3, 2, 2
_COLUMNS = "{:<9}{:<17}{:>7}{:>8}{:>9}{:>9}  "

Entry = tuple[CaptureDiagnosis, ObservationDiagnosis, HeadDiagnosis]


def brief(diagnosis: Diagnosis, found: str = "this") -> str:
    """The summary, the worst heads, why the worst one is, and what to type next.

    ``found``: an expression for the diagnosis.
    """
    lines = wrapped(f"Diagnosis: {diagnosis.summary.sentence}", _SUMMARY)
    s = diagnosis.summary
    warnings = [*s.warnings, *(f"not read: {u}" for u in s.unreadable)]
    shown = warnings if len(warnings) <= _WARNINGS else warnings[: _WARNINGS - 1]
    lines += [line for warning in shown for line in wrapped(f"warning: {warning}", 1)]
    if len(warnings) > len(shown):
        lines.append(f"… and {len(warnings) - len(shown)} more warnings")
    failed = [c for c in diagnosis.captures if c.assumptions.ok is False]
    if failed:
        lines += wrapped(f"no verdict for {_name(failed[0].source)}: {failed[0].assumptions.message}", _UNJUDGED)
    ranked = diagnosis.ranked()
    if ranked:
        lines += _table(ranked)
        lines += _worst(ranked[0][2])
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
    return "\n".join([*lines, brief(found.diagnosis, "attn_diag.last_finding().diagnosis")])


def wrapped(text: str, most: int, indent: str = "  ") -> list[str]:
    """``text`` in at most ``most`` lines of 80 columns, the later ones indented; cut with an ellipsis."""
    console = Console(width=WIDTH, color_system=None)
    first, *rest = Text(words.printable(text)).wrap(console, WIDTH)
    lines = [first.plain.rstrip()]
    if rest:
        following = Text(words.printable(text)[len(first.plain) :].lstrip())
        lines += [indent + line.plain.rstrip() for line in following.wrap(console, WIDTH - len(indent))]
    return lines if len(lines) <= most else [*lines[: most - 1], _cut(lines[most - 1] + " …" * WIDTH, WIDTH)]


def _cut(text: str, width: int) -> str:
    """``text`` in at most ``width`` columns, an ellipsis for what is left out."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip(" …") + "…"


def _name(source: str) -> str:
    """The end of a path: what tells captures apart."""
    return source.rpartition("/")[2] or source


def _table(ranked: list[Entry]) -> list[str]:
    shown = ranked if len(ranked) <= _HEADS else ranked[: _HEADS - 1]
    lines = [_COLUMNS.format("head", "verdict", "noise", "condit.", "dQ off", "dW_Q off") + "where"]
    # Only what tells the entries apart: the line has no room for more.
    observations, sources = {o.name for _, o, _ in ranked}, {c.source for c, _, _ in ranked}
    lines += [_row(entry, observation=len(observations) > 1, source=len(sources) > 1) for entry in shown]
    if rest := ranked[len(shown) :]:
        counts = Counter(words.labels(head) for _, _, head in rest)
        lines += wrapped(f"… and {len(rest)} more: " + "; ".join(f"{n} {label}" for label, n in counts.items()), 1)
    return lines


def _row(entry: Entry, *, observation: bool, source: bool) -> str:
    capture, made, head = entry
    dq, dw_q = head.propagation.dq, head.propagation.dw_q
    labels = words.labels(head)
    error = words.DASH
    if dq is not None:
        predicted = dq.relative_error is None and dq.predicted_relative_error is not None
        error = words.percent(dq.predicted_relative_error if predicted else dq.relative_error)
        error = f"~{error}" if predicted else error
    cells = _COLUMNS.format(
        words.head_name(head),
        labels if len(labels) <= 16 else f"{labels.partition(',')[0]} +{labels.count(',')}",
        words.number(head.noise_factor),
        words.number(head.conditioning),
        error,
        words.percent(dw_q.relative_error if dw_q else None),
    )
    step = capture.metadata.get("step")
    where = [f"step {step}"] if step else []
    where += [made.name] if observation else []
    where += [_name(capture.source)] if source else []
    return _cut(cells + words.printable(", ".join(where)), WIDTH)


def _worst(head: HeadDiagnosis) -> Iterator[str]:
    if head.verdict is None:
        return
    name = words.head_name(head)
    yield from wrapped(f"{name}: {head.verdict.reasons[0]}" if head.verdict.reasons else name, _REASON)
    if head.verdict.suggestions:
        yield from wrapped(f"> {head.verdict.suggestions[0]}", _SUGGESTION)


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
