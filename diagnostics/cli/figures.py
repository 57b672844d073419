"""``attn-diag figures``: the paper's figures from captures, of one step or of many."""

from __future__ import annotations

from typing import Annotated

import typer

from attn_diag.cli.delivery import Delivery, complain, progress_bar
from attn_diag.cli.options import Device, Html, Inputs, Layers, ObservationName, Overrides, command


@command
def figures(
    *,
    inputs: Inputs,
    observation: ObservationName = None,
    head: Annotated[int | None, typer.Option(help="This head (the model's number; default: the worst).")] = None,
    layer: Layers = None,
    delivery: Delivery,
    html: Html = None,
    device: Device = "auto",
    overrides: Overrides,
) -> int:
    """Redraw the figures of Qiu & Yao (arXiv 2510.04212): W_Q's norms, rank-1 atoms, sums of delta's error, triggers.

    Figures over steps need captures of several steps of one run (a directory of them) that state their step.
    """
    from attn_diag.analyses.paper.figures import paper_figures

    captures, unreadable = inputs.open(layer, overrides, delivery, [html])
    with progress_bar("captures") as progress:
        found = paper_figures(captures, head=head, observation=observation, device=device, progress=progress)
    for note in found.notes:
        complain(note)
    delivery.deliver(found, html)
    return 2 if unreadable else 0
