"""``attn-diag what-if``: other recipes and mitigations on one captured head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attn_diag.cli import common


def what_if(
    path: Annotated[Path | None, typer.Argument(help="A capture (.safetensors, .pt, .npz).")] = None,
    example: common.Example = False,
    observation: common.ObservationName = None,
    recipe: Annotated[
        str | None, typer.Option(help="The baseline, instead of the recipe that made the captured O.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this candidate, or a pattern such as 'stabilised-*' (repeatable).")
    ] = None,
    beta: Annotated[
        list[float] | None, typer.Option(help="A beta of the stabilised softmax (repeatable), instead of 1.5 to 8.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each stochastic rounding; 0 for none.")] = 4,
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
    """Rank mitigations and other recipes by the error and bias they leave on one captured head, and by their cost."""
    from attn_diag.analyses.mitigation.mitigations import BETAS
    from attn_diag.analyses.mitigation.what_if import what_if as run

    paths = [] if path is None else [path]
    common.require_apart([t for t in (common.json_target(json),) if t is not None], paths)
    options = common.metadata_options(layout, causal, scale, window, softcap)
    layers = common.numbers("--layer", layer)
    capture, unreadable = common.open_one(paths, example=example, layers=layers, options=options)
    batch_item, place = common.one_place(head, batch)
    with common.progress_bar("rows") as progress:
        result = run(
            capture, observation, recipe=recipe, batch=batch_item, head=place, only=only or (),
            betas=beta or BETAS, seeds=seeds, level=level, device=device, progress=progress,
        )  # fmt: skip
    common.deliver(result, json, plain=plain)
    raise typer.Exit(2 if unreadable else 0)
