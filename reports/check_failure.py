"""What a failing check says where there is little room: a test's failure text, a log."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attn_diag.reports.words import printable

if TYPE_CHECKING:
    from attn_diag.regression.result import CheckReport, Failure

# The gravest first: what is not this attention at all needs no words on its bias.
_ORDER = ("fit", "determinism", "growth", "bias", "bits")
_TITLES = {
    "fit": "not this attention",
    "determinism": "two runs differ",
    "growth": "error grew",
    "bias": "bias",
    "bits": "bits changed",
}
_QUANTITIES = {"o": "O", "lse": "L", "dq": "dQ", "dk": "dK", "dv": "dV"}
_LABEL = 12  # columns of "look closer "
_MESSAGE_LINES = 4
_MOST_GROUPS = 4


def failure_lines(
    report: CheckReport, *, accept: str | None = None, look_closer: str | None = None, width: int = 80, limit: int = 25
) -> list[str]:
    """Where, how much against what, the suspect, how to look closer, how to accept; at most ``limit`` lines.

    Failures that differ only in the case are one group, told by the first. ``accept``: the command that takes the new
    numbers as the baseline; ``look_closer``: a command, by default that of the gravest failure.
    """
    groups = _grouped(report.failures)
    head = _header(report, width)
    command = look_closer or next((f.look_closer for g in groups for f in g if f.look_closer), None)
    foot = [
        *_labelled("compared", _compared(report), width),
        *(_labelled("look closer", command, width) if command else ()),
        *(_labelled("accept", accept, width) if accept else ()),
    ]
    # One line tells of the groups that did not fit.
    room = limit - len(head) - len(foot) - 1
    body: list[str] = []
    shown = 0
    told: set[str] = set()
    for number, group in enumerate(groups[:_MOST_GROUPS], 1):
        lines = _group_lines(number, group, told, width)
        if len(body) + len(lines) > room:
            break
        body += lines
        shown += 1
        told.update(f.suspect for f in group if f.suspect)
    if left := sum(len(g) for g in groups[shown:]):
        body.append(textwrap.shorten(f"... and {_count(left, 'failure')} more: {_titles(groups[shown:])}", width))
    return [*head, *body, *foot]


def _grouped(failures: Sequence[Failure]) -> list[list[Failure]]:
    groups: dict[tuple[str, str], list[Failure]] = {}
    for failure in failures:
        groups.setdefault((failure.kind, failure.quantity), []).append(failure)
    return sorted(groups.values(), key=lambda g: _ORDER.index(g[0].kind))


def _header(report: CheckReport, width: int) -> list[str]:
    cases = len({f.case for f in report.failures})
    text = (
        f"attn-diag: {printable(report.source)} fails {cases} of {_count(len(report.cases), 'case')} "
        f"({report.backend}, level {report.level:g})"
    )
    return textwrap.wrap(text, width, max_lines=2, placeholder=" ...")


def _group_lines(number: int, group: Sequence[Failure], told: set[str], width: int) -> list[str]:
    first = group[0]
    lines = [f"{number}. {_TITLES[first.kind]}: {_QUANTITIES.get(first.quantity, first.quantity)}, case {first.case}"]
    lines += _wrapped(first.message, width, _MESSAGE_LINES)
    if others := [f.case for f in group[1:]]:
        lines += _wrapped(f"likewise in {', '.join(others)}", width, 1)
    suspects = [f for f in group if f.suspect and f.suspect not in told]
    if suspects:
        lines += _wrapped(f"suspect: {suspects[0].suspect}", width, 2)
    return [printable(line) for line in lines]


def _compared(report: CheckReport) -> str:
    if report.baseline is None:
        return "with what correct rounding allows (no baseline)"
    if report.baseline_key is None:
        return f"with what correct rounding allows: {report.baseline} has no entry for {report.key}"
    return f"with {report.baseline}, entry {report.baseline_key}"


def _titles(groups: Sequence[Sequence[Failure]]) -> str:
    return ", ".join(f"{_TITLES[g[0].kind]} ({_QUANTITIES.get(g[0].quantity, g[0].quantity)})" for g in groups)


def _wrapped(text: str, width: int, most: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent="   ",
        subsequent_indent="   ",
        max_lines=most,
        placeholder=" ...",
        break_on_hyphens=False,
    )


def _labelled(label: str, text: str, width: int) -> list[str]:
    """A command keeps its words whole, so that it can be copied."""
    return textwrap.wrap(
        printable(text),
        width,
        initial_indent=f"{label:{_LABEL}}",
        subsequent_indent=" " * _LABEL,
        break_long_words=False,
        break_on_hyphens=False,
        max_lines=3,
        placeholder=" ...",
    )


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
