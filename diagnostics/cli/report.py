"""``attn-diag report``: a saved diagnosis, shown again; needs neither its capture nor torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attn_diag.cli.delivery import Delivery, complain
from attn_diag.cli.options import command
from attn_diag.cli.tables import Tables


@command
def report(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A diagnosis: JSON (inspect --json) or an HTML report.")],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a self-contained HTML page instead.")] = None,
    delivery: Delivery,
    tables: Tables,
) -> None:
    """Show a saved diagnosis again, in the terminal or as an HTML page."""
    from attn_diag.analyses.comparison.read import read_diagnosis

    delivery.require_apart([file], [html, *tables.targets(delivery.json)], what="the diagnosis to be shown")
    diagnosis = read_diagnosis(file)
    if diagnosis.left_out is not None:
        complain(f"{file} was saved without {diagnosis.left_out}; inspect --json FILE --json-full keeps them")
    delivery.deliver(diagnosis, html, quiet=html is not None, full=tables.json_full)
    tables.write(diagnosis)
