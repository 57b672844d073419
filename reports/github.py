"""A check on GitHub: workflow commands that annotate a run, and the Markdown of its summary."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from attn_diag.reports import words
from attn_diag.reports.check import against, suspects, verdict

if TYPE_CHECKING:
    from attn_diag.results.check import CheckReport

# GitHub shows ten annotations of a step.
_ANNOTATIONS = 10


def workflow_commands(found: CheckReport) -> list[str]:
    """``::error title=…::…``, one a failure, escaped as actions/toolkit's command.ts does."""
    lines = []
    for failure in found.failures[:_ANNOTATIONS]:
        title = _property(f"attn-diag check {found.source}: {failure.case}: {failure.kind}")
        suspect = f"\nlooks like: {failure.suspect}" if failure.suspect else ""
        lines.append(f"::error title={title}::{_data(failure.message + suspect)}")
    return lines


def step_summary(found: CheckReport) -> str:
    """Markdown for $GITHUB_STEP_SUMMARY; names and messages are text, whatever they hold."""
    mark = "✅" if found.passed else "❌"
    lines = [
        f"### {mark} attn-diag check of {_text(found.source)}",
        "",
        _text(verdict(found)),
        "",
        _text(against(found)),
    ]
    if found.failures:
        lines += ["", "| case | kind | what |", "|---|---|---|"]
        lines += [f"| {_text(f.case)} | {f.kind} | {_text(f.message)} |" for f in found.failures]
        lines += ["", *(f"- {_text(suspect)}" for suspect in suspects(found))]
    if found.notes:
        lines += ["", *(f"- {_text(note)}" for note in found.notes)]
    return "\n".join(lines) + "\n"


def _data(text: str) -> str:
    return _clean(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _clean(text: str) -> str:
    """Control characters but line breaks out: a log shows them, or obeys them."""
    return "".join(c if c.isprintable() or c in "\r\n" else "�" for c in text)


def _text(text: str) -> str:
    """As text in a table's cell: no HTML, no Markdown, no line break."""
    plain = html.escape(words.printable(text), quote=False)
    return "".join(f"&#{ord(c)};" if c in "\\`*_{}[]()#+!|~@:" else c for c in plain)
