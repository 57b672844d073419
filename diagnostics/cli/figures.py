"""``attn-diag figures``: the paper's figures from captures, of one step or of many."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from attn_diag.cli import common


def figures(
    paths: common.Paths = None,
    example: common.Example = False,
    observation: common.ObservationName = None,
    head: Annotated[int | None, typer.Option(help="This head (the model's number; default: the worst).")] = None,
    layer: common.Layers = None,
    json: common.Json = None,
    plain: common.Plain = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a self-contained HTML page.")] = None,
    device: common.Device = "auto",
    layout: common.Layout = None,
    causal: common.Causal = None,
    scale: common.Scale = None,
    window: common.Window = None,
    softcap: common.Softcap = None,
    debug: common.Debug = False,  # noqa: ARG001
) -> None:
    """Redraw the figures of Qiu & Yao (arXiv 2510.04212): W_Q's norms, rank-1 atoms, sums of delta's error, triggers.

    Figures over steps need captures of several steps of one run (a directory of them) that state their step.
    """
    from attn_diag.analyses.paper.figures import paper_figures

    common.require_apart([t for t in (common.json_target(json), html) if t is not None], paths or [])
    options = common.metadata_options(layout, causal, scale, window, softcap)
    captures, unreadable = common.open_captures(
        paths or [], example=example, layers=common.numbers("--layer", layer), options=options
    )
    with common.progress_bar("captures") as progress:
        found = paper_figures(captures, head=head, observation=observation, device=device, progress=progress)
    for note in found.notes:
        print(f"attn-diag: {note}", file=sys.stderr)
    common.deliver(found, json, plain=plain)
    common.write_page(found, html)
    raise typer.Exit(2 if unreadable else 0)
