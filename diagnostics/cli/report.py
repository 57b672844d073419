"""``attn-diag report``: a saved diagnosis, shown again; needs neither its capture nor torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attn_diag.cli import common


def report(
    file: Annotated[Path, typer.Argument(help="A diagnosis: JSON (inspect --json) or an HTML report.")],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a self-contained HTML page instead.")] = None,
    json: common.Json = None,
    plain: common.Plain = False,
    debug: common.Debug = False,  # noqa: ARG001
) -> None:
    """Show a saved diagnosis again, in the terminal or as an HTML page."""
    from attn_diag.analyses.comparison.read import read_diagnosis

    targets = [t for t in (common.json_target(json), html) if t is not None]
    common.require_apart(targets, [file], what="the diagnosis to be shown")
    diagnosis = read_diagnosis(file)
    common.write_page(diagnosis, html)
    common.deliver(diagnosis, json, plain=plain, quiet=html is not None)
