"""``attn-diag microscope``: one element of O, rounding by rounding."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from attn_diag.cli import common


def microscope(
    paths: common.Paths = None,
    example: common.Example = False,
    row: Annotated[int | None, typer.Option(help="Query row T, counted from 0 within the capture.")] = None,
    feature: Annotated[int | None, typer.Option(help="Feature I of O, counted from 0.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe to walk (default: the one that makes the O).")] = None,
    observation: common.ObservationName = None,
    head: common.Heads = None,
    layer: common.Layers = None,
    batch: common.Batches = None,
    json: common.Json = None,
    plain: common.Plain = False,
    device: common.Device = "auto",
    layout: common.Layout = None,
    causal: common.Causal = None,
    scale: common.Scale = None,
    window: common.Window = None,
    softcap: common.Softcap = None,
    debug: common.Debug = False,  # noqa: ARG001
) -> None:
    """Show how one element of O came about: operands, ties, residual, and the prefix error.

    Without --row or --feature: where the captured O is furthest from its correctly rounded value.
    """
    from attn_diag.analyses.microscopy.microscope import microscope as look

    common.require_apart([t for t in (common.json_target(json),) if t is not None], paths or [])
    options = common.metadata_options(layout, causal, scale, window, softcap)
    layers = common.numbers("--layer", layer)
    capture, unreadable = common.open_one(paths or [], example=example, layers=layers, options=options)
    batch_item, place = common.one_place(head, batch)
    with common.progress_bar("steps") as progress:
        result = look(
            capture, row, feature, recipe, observation=observation, device=device, batch=batch_item, head=place,
            progress=progress,
        )  # fmt: skip
    if not result.bit_equal:
        print(
            f"attn-diag: the walk gives {result.walked!r} where the emulation has {result.emulated!r}: they add in "
            "different orders",
            file=sys.stderr,
        )
    common.deliver(result, json, plain=plain)
    raise typer.Exit(2 if unreadable else 0)
