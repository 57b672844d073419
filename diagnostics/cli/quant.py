"""``attn-diag quant``: what a fake quantiser does to a weight."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attn_diag.cli.delivery import Delivery, progress_bar
from attn_diag.cli.options import Device, Html, Level, command


@command
def quant(
    *,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A safetensors file: w, [OUT, IN], and, if there are, observed (what it became), x, dy, engine, amax.",
        ),
    ],
    quantizer: Annotated[
        str | None,
        typer.Option(help="What it should be: int4, int8, fp8, mxfp8, mxfp4, nvfp4, … (default: found out)."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="Another block, target, scale, elements, … of it; repeatable."
        ),
    ] = None,
    weight: Annotated[str, typer.Option(metavar="NAME", help="The weight's name in the file.")] = "w",
    level: Level = 0.01,
    delivery: Delivery,
    html: Html = None,
    device: Device = "auto",
) -> int:
    """Say whether a fake-quantised weight is what was declared, how its error is biased, and what others would leave.

    The declared quantiser is held against the values in every bit; where they are not its own, those that differ from
    it in one thing or two are tried: blocks, rounding, the rule and the format of the scales, zero point, a stale amax,
    scales of another block or row, codes that wrap. Scales that are learned or a history's are declared by amax.

    With x and dy the straight-through gradient is held against that of the smoothed forward; with engine, what an
    inference engine makes of the same weight, against the trainer's.

    Exit codes: 0 if the values are the declared quantiser's, or it is undecided; 1 if they are not, dithered ones are
    biased, or the engine's are others.
    """
    from attn_diag.testing.quantizing.files import read_layer
    from attn_diag.testing.quantizing.quant import quant as run

    delivery.require_apart([file], [html], what="the file to be read")
    layer = read_layer(file, weight, quantizer, changes or [], device)
    with progress_bar("steps") as progress:
        found = run(
            layer.w, layer.by, observed=layer.observed, x=layer.x, dy=layer.dy, engine=layer.engine, amax=layer.amax,
            level=level, source=str(file), progress=progress,
        )  # fmt: skip
    delivery.deliver(found, html)
    return 0 if found.passed else 1
