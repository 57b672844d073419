"""Which functions show which kind of result. ``attn_diag.results.base`` finds this table by name, nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rich.console import RenderableType

from attn_diag.results.base import Result


@dataclass(frozen=True)
class Renderer:
    """The functions that show one kind of result, each as "module:function" of this folder, loaded when needed.

    What is None follows from the terminal's report; a kind without ``page`` has no HTML page.
    """

    terminal: str | None = None
    """result -> the report, piece by piece, for a rich console; None: it is shown at a prompt alone."""
    plain: str | None = None
    """result -> the report for a log, line by line."""
    prompt: str | None = None
    """result -> what a debugger's prompt shows."""
    notebook: str | None = None
    """result -> the HTML of a notebook's cell."""
    page: str | None = None
    """result -> a self-contained HTML page."""


_RENDERERS = {
    "addition": Renderer("microscope:addition_renderables"),
    "attribution": Renderer("attribution:attribution_renderables"),
    "check": Renderer("check:check_renderables"),
    "closed-form": Renderer("microscope:whole_closed_form_renderables"),
    "comparison": Renderer("diff:diff_renderables", plain="diff:diff_lines"),
    "diagnosis": Renderer(
        "terminal:terminal_renderables",
        plain="plain:diagnosis_lines",
        prompt="brief:brief",
        notebook="html:html_fragment",
        page="html:html_document",
    ),
    "dtypes": Renderer("drift:drift_renderables"),
    "explanation": Renderer(
        "explanation:explanation_renderables",
        prompt="explanation:explanation_text",
        notebook="explanation:explanation_html",
    ),
    "finding": Renderer(prompt="brief:finding_text"),
    "hardware-profile": Renderer("selftest:profile_renderables"),
    "identification": Renderer("identification:identification_renderables"),
    "identifications": Renderer("identification:identifications_renderables"),
    "microscope": Renderer("microscope:microscope_renderables"),
    "paper-figures": Renderer("paper:paper_renderables", page="paper:paper_document"),
    "probe": Renderer("probe:probe_renderables"),
    "selftest": Renderer("selftest:installation_renderables"),
    "what-if": Renderer("what_if:what_if_renderables"),
}


def renderables(result: Result) -> Iterator[RenderableType]:
    """The report of any result, piece by piece, for a rich console."""
    name = _renderer(result).terminal
    assert name is not None
    yield from _load(name)(result)


def plain_lines(result: Result) -> Iterator[str] | None:
    """Its report for a log, line by line; None where that is the terminal's."""
    name = _renderer(result).plain
    return None if name is None else _load(name)(result)


def prompt(result: Any) -> str | None:
    """What a debugger's prompt shows of it; None where that is one line of no report."""
    name = _renderer(result).prompt
    return None if name is None else _load(name)(result)


def notebook(result: Result) -> str | None:
    """The HTML that a notebook's cell shows of it; None where that is the terminal's report."""
    name = _renderer(result).notebook
    return None if name is None else _load(name)(result)


def page(result: Result) -> str:
    """Its self-contained HTML page. Raises ValueError for a kind of result that has none."""
    name = _renderer(result).page
    if name is None:
        raise ValueError(f"a {result.schema} document has no HTML page")
    text: str = _load(name)(result)
    return text


def _renderer(result: Any) -> Renderer:
    return _RENDERERS[result.schema.removeprefix("attn-diag-")]


def _load(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"{__package__}.{module}"), function)
    return found
