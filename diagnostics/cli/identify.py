"""``attn-diag identify``: which recipe and schedule made the captured outputs."""

from __future__ import annotations

from typing import Annotated

import typer

from attn_diag.cli import common


def identify(
    paths: common.Paths = None,
    example: common.Example = False,
    observation: common.ObservationName = None,
    head: common.Heads = None,
    layer: common.Layers = None,
    batch: common.Batches = None,
    rows: Annotated[
        int | None, typer.Option(help="Query rows to compare (default: as many as have 2^20 scores, at least 128).")
    ] = None,
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
    """Say which known recipe and order of keys reproduce a captured O bit for bit (first head unless --head)."""
    from attn_diag.analyses.identify import identify_captures
    from attn_diag.captures.selection import Selection

    common.require_apart([t for t in [common.json_target(json)] if t is not None], paths or [])
    options = common.metadata_options(layout, causal, scale, window, softcap)
    captures, unreadable = common.open_captures(
        paths or [], example=example, layers=common.numbers("--layer", layer), options=options
    )
    selection = Selection(observation, common.numbers("--head", head), common.numbers("--batch", batch))
    with common.progress_bar("recipes") as progress:
        found = identify_captures(
            captures, selection=selection, rows=rows, device=device, progress=progress, unreadable=unreadable,
            skip=common.complain,
        )  # fmt: skip
    common.deliver(found, json, plain=plain)
    raise typer.Exit(2 if found.unreadable else 0)
