"""Which functions show which kind of result: in a terminal, a log, at a prompt, in a notebook and as a page.

``attn_diag.results.base`` finds this table by name, so that a result is read without its reports.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from attn_diag.printing import inert, made_printable
from attn_diag.results.base import Result

PLAIN_WIDTH = 120
"""What a report for a log is wrapped to, whatever the terminal's width."""
_OURS = str.maketrans(
    {
        "–": "-", "—": "-", "−": "-", "─": "-", "│": "|",
        "…": "...", "’": "'", "·": ".", "•": "*", "×": "x", "±": "+-", "≥": ">=",
        "²": "^2", "‖": "||", "⊗": "(x)", "✗": "x", "→": "->",
        "∘": "o", "Ō": "O_bar", "\N{COMBINING MACRON}": "_bar", "\N{REPLACEMENT CHARACTER}": "?",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Renderer:
    """The functions that show one kind of result, each as "module:function" of this folder, loaded when needed."""

    terminal: str | None = None
    """result -> the report, piece by piece, for a rich console; None: it is shown at a prompt alone."""
    plain: str | None = None
    """result -> the report for a log, line by line; None: the terminal's, drawn in ASCII."""
    prompt: str | None = None
    """result -> what a debugger's prompt shows; None: one line that names the result."""
    notebook: str | None = None
    """result -> the HTML of a notebook's cell; None: the terminal's report."""
    page: str | None = None
    """result -> a self-contained HTML page; None: there is none."""


_RENDERERS = {
    "addition": Renderer("microscope:addition_renderables"),
    "attribution": Renderer("attribution:attribution_renderables", page="attributions:attribution_document"),
    "attributions": Renderer("attributions:attributions_renderables", page="attributions:attributions_document"),
    "check": Renderer("check:check_renderables"),
    "closed-form": Renderer("microscope:whole_closed_form_renderables"),
    "comparison": Renderer("diff:diff_renderables", plain="diff:diff_lines", page="diff_page:diff_document"),
    "diagnosis": Renderer(
        "terminal:terminal_renderables",
        plain="terminal:diagnosis_lines",
        prompt="brief:brief",
        notebook="html:html_fragment",
        page="html:html_document",
    ),
    "dtypes": Renderer("drift:drift_renderables"),
    "explanation": Renderer("explanation:renderables", prompt="explanation:text", notebook="explanation:cell"),
    "finding": Renderer(prompt="brief:finding_text"),
    "hardware-profile": Renderer("selftest:profile_renderables"),
    "hunt": Renderer("hunt:hunt_renderables", page="hunt:hunt_document"),
    "identification": Renderer("identification:identification_renderables"),
    "identifications": Renderer("identification:identifications_renderables"),
    "invariance": Renderer("invariance:invariance_renderables", page="invariance:invariance_document"),
    "linear": Renderer("linear:linear_renderables", page="linear:linear_document"),
    "linear-attribution": Renderer("linear_recipes:attribution_renderables"),
    "linear-comparison": Renderer(
        "linear_comparison:comparison_renderables", page="linear_comparison:comparison_document"
    ),
    "linear-identification": Renderer("linear_recipes:identification_renderables"),
    "linear-what-if": Renderer("linear_recipes:what_if_renderables"),
    "microscope": Renderer("microscope:microscope_renderables"),
    "mismatch": Renderer("mismatch:mismatch_renderables", page="mismatch:mismatch_document"),
    "paper-figures": Renderer("paper_words:paper_renderables", page="paper:paper_document"),
    "probe": Renderer("probe:probe_renderables"),
    "quant": Renderer("quant:quant_renderables", page="quant:quant_document"),
    "replay": Renderer("replay:replay_renderables", page="replay:replay_document"),
    "selftest": Renderer("selftest:installation_renderables"),
    "what-if": Renderer("what_if:what_if_renderables"),
}


@dataclass(frozen=True)
class _Inert:
    """A piece of a report: no text in it is markup, and no line that it is drawn in a CI system's command."""

    piece: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        # A name in brackets would be a style to rich.
        for line in console.render_lines(self.piece, options.update(markup=False), pad=False):
            text = "".join(segment.text for segment in line)
            yield from line if inert(text) == text else [Segment(inert(text))]
            yield Segment.line()


def renderables(result: Result) -> Iterator[RenderableType]:
    """The report of any result, piece by piece, for a rich console."""
    yield from map(_Inert, _shown("terminal", result))


def plain_text(result: Result) -> str:
    """Its report for a log: no colour, no boxes, the same width everywhere, ASCII wherever the text is ours.

    Letters of other scripts, as in a file's name, stay.
    """
    lines = _shown("plain", result) or _drawn_in_ascii(result).splitlines()
    return "".join(f"{inert(line.translate(_OURS)).rstrip()}\n" for line in lines)


def prompt(result: Any) -> str | None:
    """What a debugger's prompt shows of it; None where that is one line of no report."""
    text: str | None = _shown("prompt", result)
    return text and inert(text)


def notebook(result: Result) -> str | None:
    """The HTML that a notebook's cell shows of it; None where that is the terminal's report."""
    text: str | None = _shown("notebook", result)
    return text


def page(result: Result) -> str:
    """Its self-contained HTML page. Raises ValueError for a kind of result that has none."""
    text: str | None = _shown("page", result)
    if text is None:
        raise ValueError(f"a {result.schema} document has no HTML page")
    return text


def _shown(face: str, result: Any) -> Any:
    """What one of a kind's functions makes of a result; None where the kind has no such function."""
    name: str | None = getattr(_RENDERERS[result.schema.removeprefix("attn-diag-")], face)
    if name is None:
        return None
    module, _, function = name.partition(":")
    given = made_printable(result) if isinstance(result, Result) else result
    return getattr(import_module(f"{__package__}.{module}"), function)(given)


class _Ascii(io.StringIO):
    """Says that it takes ASCII only, so that rich draws rules and boxes with it."""

    encoding = "ascii"


def _drawn_in_ascii(result: Result) -> str:
    buffer = _Ascii()
    console = Console(
        file=buffer, width=PLAIN_WIDTH, color_system=None, legacy_windows=False, safe_box=True, emoji=False,
        force_jupyter=False,
    )  # fmt: skip
    for renderable in renderables(result):
        console.print(renderable)
    return buffer.getvalue()
