"""An explanation of a head: as a report, at a debugger's prompt and in a notebook's cell."""

from __future__ import annotations

import html
from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from attn_diag.reports import layout
from attn_diag.results.explanation import Explanation


def renderables(found: Explanation) -> Iterator[RenderableType]:
    """The explanation, piece by piece, for a rich console."""
    yield Text(_explained(found), style="bold")
    for paragraph in found.paragraphs:
        yield Text(paragraph.title, style="bold dim")
        yield layout.indented(Text(paragraph.text))


def text(found: Explanation) -> str:
    """For a prompt: the report, without the blanks that rich fills lines up with."""
    return "\n".join(line.rstrip() for line in found.report(width=80).splitlines())


def cell(found: Explanation) -> str:
    """For a notebook cell. All names and texts are escaped."""
    paragraphs = "".join(f"<p><b>{html.escape(p.title)}</b> {html.escape(p.text)}</p>" for p in found.paragraphs)
    return f'<div class="attn-diag"><h4>{html.escape(_explained(found))}</h4>{paragraphs}</div>'


def _explained(found: Explanation) -> str:
    place = f"head {found.head}" if found.layer is None else f"layer {found.layer} head {found.head}"
    verdict = "no verdict" if found.labels is None else ", ".join(found.labels)
    return f"{found.observation}, {place}: {verdict}"
