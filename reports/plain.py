"""Reports for logs: no colour, no boxes, no blocks, ASCII wherever the text is ours, the same widths everywhere.

A diagnosis is told one fact a line, each line with its kind first, so that grep finds it:

    verdict      BIASED: ...
    head         paper/H0        lossy            noise_factor=11.5 conditioning=248 dq_error=0.929 ...
    test         paper/H0        delta_excess     mean=+0.00017 t=1.34 ...
"""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console

from attn_diag.reports import story, words
from attn_diag.reports.renderers import plain_lines, renderables
from attn_diag.reports.sparks import drift_words, spark
from attn_diag.reports.story import Entry
from attn_diag.reports.terminal import numbers, warnings
from attn_diag.results.base import Result
from attn_diag.results.diagnosis import Diagnosis

# Other reports are wrapped to this width, whatever the terminal's.
WIDTH = 120
_MAX_DETAILS = 16
_OURS = str.maketrans(
    {
        "–": "-", "—": "-", "−": "-", "─": "-", "│": "|",
        "…": "...", "’": "'", "·": ".", "•": "*", "×": "x", "±": "+-", "≥": ">=",
        "²": "^2", "‖": "||", "⊗": "(x)", "✗": "x", "→": "->",
        "∘": "o", "Ō": "O_bar", "\N{COMBINING MACRON}": "_bar", "\N{REPLACEMENT CHARACTER}": "?",
    }
)  # fmt: skip


def plain_text(result: Result) -> str:
    """The report of a diagnosis, a comparison or another result, for a log."""
    found = plain_lines(result)
    lines = _rendered(result).splitlines() if found is None else found
    return "".join(f"{ascii_where_ours(line).rstrip()}\n" for line in lines)


def ascii_where_ours(text: str) -> str:
    """Our own dashes, dots and signs as ASCII; letters of other scripts, as in a file's name, stay."""
    return text.translate(_OURS)


def line(kind: str, *columns: str) -> str:
    """One fact: its kind, then columns of fixed widths (a longer entry pushes the next ones), then the rest."""
    widths = (12, 24, 16)
    padded = [c.ljust(w) for c, w in zip((kind, *columns[:-1]), widths, strict=False)]
    return " ".join([*padded, *columns[-1:]])


class _Ascii(io.StringIO):
    """Says that it takes ASCII only, so that rich draws rules and boxes with it."""

    encoding = "ascii"


def _rendered(result: Result) -> str:
    buffer = _Ascii()
    console = Console(file=buffer, width=WIDTH, color_system=None, legacy_windows=False, safe_box=True)
    for renderable in renderables(result):
        console.print(renderable)
    return buffer.getvalue()


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """A diagnosis: the verdict, what to do, every head in one line, and the facts of the worst ones."""
    entries = [entry for entry in diagnosis.ranked() if entry[2].verdict is not None]
    yield line("verdict", story.headline(diagnosis))
    yield line("summary", words.printable(diagnosis.summary.sentence))
    yield from (line("warning", words.printable(w)) for w in warnings(diagnosis))
    yield from (line("next", step) for step in story.next_steps(diagnosis))
    yield from (line("next", f"{question}: {command}") for question, command in story.commands(diagnosis))
    names = story.Names.of(entries)
    yield from (_head(entry, _place(entry, names)) for entry in entries)
    faulty = [e for e in entries if words.label_names(e[2]) != ("clean",)] or entries[:1]
    for entry in faulty[:_MAX_DETAILS]:
        yield from _facts(entry, _place(entry, names))
    if len(faulty) > _MAX_DETAILS:
        yield line("note", f"facts of {len(faulty) - _MAX_DETAILS} more heads: choose them with --head, or use --json")
    for capture in diagnosis.captures:
        source = words.printable(capture.source)
        yield line("capture", f"{source}: {words.shape(capture)}")
        if capture.assumptions.defaults:
            yield line("capture", f"{source}: assumed: {words.printable(', '.join(capture.assumptions.defaults))}")
        yield line("capture", f"{source}: assumptions: {words.printable(capture.assumptions.message)}")
        for observation in capture.observations:
            yield line("capture", f"{source}: {words.observation_line(observation)}")
    family = diagnosis.family
    yield line("family", f"{family.size} primary tests, one Benjamini-Hochberg family at level {family.level}")
    yield line("note", words.CAVEAT)
    yield line("tool", words.tool_line(diagnosis.tool))


def _place(entry: Entry, names: story.Names) -> str:
    parts = [*reversed(names.where(entry)), words.head_name(entry[2])]
    return "/".join(part.replace(" ", "_") for part in parts)


def _pairs(**figures: float | None) -> str:
    return " ".join(
        f"{name}={'n/a' if value is None else format(value, '.4g')}".ljust(24) for name, value in figures.items()
    )


def _head(entry: Entry, place: str) -> str:
    head = entry[2]
    dq, dw_q = head.propagation.dq, head.propagation.dw_q
    figures = _pairs(
        noise_factor=head.noise_factor,
        conditioning=head.conditioning,
        dq_error=dq.relative_error if dq else None,
        dq_error_by_delta=dq.predicted_relative_error if dq else None,
        dw_q_error=dw_q.relative_error if dw_q else None,
        repeated_maxima=head.row_maxima.exact.fraction,
    )
    return line("head", place, ",".join(words.label_names(head)), figures)


def _facts(entry: Entry, place: str) -> Iterator[str]:
    head = entry[2]
    assert head.verdict is not None
    for reason in head.verdict.reasons:
        yield line("reason", place, words.printable(reason))
    for name in words.TESTS:
        estimate = getattr(head.bias, name)
        if estimate is not None:
            figures = _pairs(
                mean=estimate.mean,
                mean_in_units=estimate.mean_ulp,
                t=estimate.t,
                p_adjusted=estimate.p_adjusted,
                n_eff=estimate.n_eff,
                detectable=estimate.minimum_detectable,
            )
            yield line("test", place, name, figures)
    if head.bias.delta is not None and (drawn := spark(head.bias.delta, 64)) is not None:
        yield line("drift", place, f"error of delta summed over the rows {drift_words(head.bias.delta, drawn)}")
    yield from (line("fact", place, words.printable(text)) for text in numbers(head))
