"""The report of ``explain``: titles and paragraphs."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from attn_diag.reports.words import printable

if TYPE_CHECKING:
    from attn_diag.results.explanation import Explanation


def _title(found: Explanation) -> str:
    place = f"head {found.head}" if found.layer is None else f"layer {found.layer} head {found.head}"
    verdict = "no verdict" if found.labels is None else ", ".join(found.labels)
    return printable(f"{found.observation}, {place}: {verdict}")


def explanation_renderables(found: Explanation) -> Iterator[RenderableType]:
    """The explanation, piece by piece, for a rich console."""
    yield Text(_title(found), style="bold")
    for paragraph in found.paragraphs:
        yield Text(paragraph.title, style="bold dim")
        yield Padding(Text(printable(paragraph.text)), (0, 0, 0, 2))


def explanation_text(found: Explanation) -> str:
    """For a prompt: the words are what was asked for."""
    # rich fills lines up with blanks.
    return "\n".join(line.rstrip() for line in found.report(width=80).splitlines())


def explanation_html(found: Explanation) -> str:
    """For a notebook cell. All names and texts are escaped."""
    parts = [f"<h4>{html.escape(_title(found))}</h4>"]
    parts += [f"<p><b>{html.escape(p.title)}</b> {html.escape(p.text)}</p>" for p in found.paragraphs]
    return f'<div class="attn-diag">{"".join(parts)}</div>'
