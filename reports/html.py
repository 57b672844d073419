"""The HTML report: one self-contained file, or a fragment for a notebook."""

from __future__ import annotations

from functools import cache
from html.parser import HTMLParser

from jinja2 import Environment, PackageLoader, StrictUndefined

from attn_diag.diagnosis import Diagnosis
from attn_diag.errors import InputError
from attn_diag.reports import words


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("attn_diag.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": words.number, "percent": words.percent, "signed": words.signed}
    environment.globals["words"] = words
    return environment


def html_document(diagnosis: Diagnosis) -> str:
    """A complete page with its style inside; needs no network. All names and texts are escaped."""
    return _environment().get_template("document.html.j2").render(diagnosis=diagnosis)


def html_fragment(diagnosis: Diagnosis) -> str:
    """The report's body for a notebook cell."""
    return _environment().get_template("report.html.j2").render(diagnosis=diagnosis)


def embedded_diagnosis(text: str) -> str:
    """The JSON of the diagnosis that a report's page holds. Raises InputError where it holds none."""
    finder = _Finder()
    finder.feed(text)
    if not finder.found:
        raise InputError("expected a report of attn-diag inspect --html, got a page without a diagnosis; make it anew")
    return "".join(finder.found)


class _Finder(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag == "script" and dict(attrs).get("id") == "attn-diag-diagnosis"

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002 - a script holds no other tags
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.found.append(data)
