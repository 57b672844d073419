"""A self-contained page: our scripts and styles, ECharts, and the data, under a strict Content-Security-Policy."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from attn_diag.reports import words

# In the order in which they are joined: each uses only what stands before it.
_SCRIPTS = ("core", "numbers", "theme", "export", "options", "charts", "table")
_REPORT_SCRIPTS = ("entries", "figures", "map", "microscope", "head", "report")
_GALLERY_SCRIPTS = ("gallery",)
_STYLES = ("base", "report", "print")
# What could end a script element or be read as markup, and what older JavaScript takes for a line's end.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


@cache
def environment() -> Environment:
    """The templates' environment: everything is escaped, unknown names are errors."""
    found = Environment(
        loader=PackageLoader("attn_diag.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"number": words.number, "percent": words.percent, "signed": words.signed}
    found.globals["words"] = words
    return found


def json_element(identifier: str, data: Any) -> Markup:
    """``data`` as a JSON script element in which no character can be taken for markup."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).translate(_ESCAPES)
    return Markup('<script type="application/json" id="{}">{}</script>').format(identifier, Markup(text))


def page(template: str, *, kind: str, **values: Any) -> str:
    """Render ``template`` with ``policy``, ``styles``, ``library`` and ``script`` for a page of this ``kind``."""
    scripts = _GALLERY_SCRIPTS if kind == "gallery" else _REPORT_SCRIPTS
    library, script = _static("vendor/echarts/echarts.min.js"), _joined("js", (*_SCRIPTS, *scripts))
    styles = _joined("css", _STYLES)
    policy = "; ".join([
        "default-src 'none'",
        f"script-src {_source(library)} {_source(script)}",
        f"style-src {_source(styles)}",
        "base-uri 'none'",
        "form-action 'none'",
    ])  # fmt: skip
    return (
        environment()
        .get_template(template)
        # The files are ours, or checked against their checksum; nothing of a reader's or a capture's is in them.
        .render(policy=policy, styles=Markup(styles), library=Markup(library), script=Markup(script), **values)
    )


@cache
def _static(name: str) -> str:
    return files("attn_diag.reports").joinpath("static", *name.split("/")).read_text(encoding="utf-8")


@cache
def _joined(suffix: str, names: tuple[str, ...]) -> str:
    return "\n".join(_static(f"{name}.{suffix}") for name in names)


@cache
def _source(text: str) -> str:
    """The text's hash, as a Content-Security-Policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
