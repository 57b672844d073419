"""What a failing check says where there is little room: the failure text of a test, a log."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from attn_diag.reports.words import printable

if TYPE_CHECKING:
    from attn_diag.results.check import CheckReport, Failure

# The gravest first: what is not this attention at all needs no words on its bias.
_ORDER = ("fit", "determinism", "bias", "growth", "bits")
_LABEL = 12  # columns of "look closer "
_MESSAGE_LINES = 4
_MOST_GROUPS, _MOST_SUSPECTS = 4, 2


def failure_lines(
    report: CheckReport, *, accept: str | None = None, look_closer: str | None = None, width: int = 80, limit: int = 25
) -> list[str]:
    """The suspect, where, how much against what, how to look closer, how to accept: at most ``limit`` lines.

    Failures that differ only in the case are told by the first of them. ``accept``: the command that makes the new
    numbers the baseline; ``look_closer``: a command, by default that of the gravest failure. Only these two
    may be wider than ``width``.
    """
    groups = _grouped(report.failures)
    closer = look_closer or next((f.look_closer for g in groups for f in g if f.look_closer), None)
    head = textwrap.wrap(_header(report), width, max_lines=2, placeholder=" ...")
    for suspect in suspected(f for group in groups for f in group)[:_MOST_SUSPECTS]:
        head += _labelled("suspect", suspect, width)
    foot = _labelled("compared", _compared(report), width)
    # Commands stay on one line, to be copied.
    foot += [f"{'look closer':{_LABEL}}{printable(closer)}"] if closer else []
    foot += [f"{'accept':{_LABEL}}{printable(accept)}"] if accept else []
    # One line tells of the groups that did not fit.
    room = limit - len(head) - len(foot) - 1
    body: list[str] = []
    shown = 0
    for number, group in enumerate(groups[:_MOST_GROUPS], 1):
        lines = _told(number, group, width)
        if len(body) + len(lines) > room:
            break
        body += lines
        shown += 1
    if left := groups[shown:]:
        kinds = ", ".join(f"{g[0].kind} of {printable(g[0].quantity)}" for g in left)
        body.append(
            textwrap.shorten(
                f"... and {_count(sum(map(len, left)), 'more failure')}: {kinds}", width, placeholder=" ..."
            )
        )
    return [*head, *body, *foot]


def gravest(report: CheckReport) -> Failure:
    """The failure that ``failure_lines`` tells first; the report must have one."""
    return _grouped(report.failures)[0][0]


def _grouped(failures: Sequence[Failure]) -> list[list[Failure]]:
    groups: dict[tuple[str, str], list[Failure]] = {}
    for failure in failures:
        groups.setdefault((failure.kind, failure.quantity), []).append(failure)
    return sorted(groups.values(), key=lambda g: _ORDER.index(g[0].kind))


def suspected(failures: Iterable[Failure]) -> list[str]:
    """Each suspected change once, as the first failure words it; the numbers behind it are that case's."""
    found: dict[str, str] = {}
    for suspect in (f.suspect for f in failures if f.suspect):
        found.setdefault(suspect.partition(" (")[0], suspect)
    return list(found.values())


def _header(report: CheckReport) -> str:
    failing = len({f.case for f in report.failures})
    where = f"{report.backend}, level {report.level:g}"
    return f"attn-diag: {printable(report.source)} fails {failing} of {_count(len(report.cases), 'case')} ({where})"


def _told(number: int, group: Sequence[Failure], width: int) -> list[str]:
    lines = _wrapped(f"{number}. [{group[0].kind}] ", group[0].message, width, _MESSAGE_LINES)
    if others := list(dict.fromkeys(f.case for f in group[1:])):
        lines += _wrapped("   ", f"likewise in {', '.join(others)}", width, 1)
    return lines


def _compared(report: CheckReport) -> str:
    if report.baseline_key is None:
        return "with published recipes on the same inputs (no baseline)"
    # A key of this machine says nothing new.
    entry = "" if report.baseline_key == report.key else f", entry {report.baseline_key}"
    return f"with {report.baseline}{entry}"


def _wrapped(start: str, text: str, width: int, most: int) -> list[str]:
    return textwrap.wrap(
        printable(text),
        width,
        initial_indent=start,
        subsequent_indent="   ",
        max_lines=most,
        placeholder=" ...",
        break_on_hyphens=False,
    )


def _labelled(label: str, text: str, width: int) -> list[str]:
    """Words stay whole, so that a command or path can be copied."""
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
