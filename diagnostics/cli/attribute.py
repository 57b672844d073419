"""``attn-diag attribute``: which rounding site makes the errors."""

from __future__ import annotations

from typing import Annotated

import typer

from attn_diag.cli import common


def attribute(
    paths: common.Paths = None,
    example: common.Example = False,
    observation: common.ObservationName = None,
    recipe: Annotated[
        str | None, typer.Option(help="Recipe to take apart (default: the one that makes the captured O).")
    ] = None,
    head: common.Heads = None,
    layer: common.Layers = None,
    batch: common.Batches = None,
    json: common.Json = None,
    plain: common.Plain = False,
    level: common.Level = 0.01,
    device: common.Device = "auto",
    layout: common.Layout = None,
    causal: common.Causal = None,
    scale: common.Scale = None,
    window: common.Window = None,
    softcap: common.Softcap = None,
    debug: common.Debug = False,  # noqa: ARG001
) -> None:
    """Say which rounding site makes the errors of O, delta, dQ and dW_Q, head by head."""
    from attn_diag.analyses.attribution.attribute import attribute as take_apart
    from attn_diag.captures.selection import Selection

    common.require_apart([t for t in (common.json_target(json),) if t is not None], paths or [])
    options = common.metadata_options(layout, causal, scale, window, softcap)
    layers = common.numbers("--layer", layer)
    capture, unreadable = common.open_one(paths or [], example=example, layers=layers, options=options)
    selection = Selection(observation, common.numbers("--head", head), common.numbers("--batch", batch))
    with common.progress_bar("rows") as progress:
        found = take_apart(capture, recipe=recipe, selection=selection, level=level, device=device, progress=progress)
    common.deliver(found, json, plain=plain)
    raise typer.Exit(2 if unreadable else 0)
