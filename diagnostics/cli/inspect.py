"""``attn-diag inspect``: captures in, a report out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from attn_diag.cli import common

if TYPE_CHECKING:
    from attn_diag.captures.selection import Ranges
    from attn_diag.head.certification import Certify
    from attn_diag.results.diagnosis import Diagnosis


def inspect(
    paths: common.Paths = None,
    example: common.Example = False,
    observation: common.ObservationName = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Also run this recipe on the same inputs (repeatable).")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="What runs recipes: emulation, or triton (kernels, on CUDA).")
    ] = "emulation",
    head: common.Heads = None,
    layer: common.Layers = None,
    batch: common.Batches = None,
    json: common.Json = None,
    plain: common.Plain = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a self-contained HTML page.")] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(metavar="LABELS", help="Exit with 1 if a verdict has one of these: biased,lossy,…"),
    ] = None,
    details: Annotated[
        int | None,
        typer.Option(metavar="N", help="Attribution and microscope of the N worst heads; 1 with --html, else 0."),
    ] = None,
    certify: Annotated[
        int, typer.Option(metavar="N", help="Recompute N rows of every head in mpmath: is the reference right?")
    ] = 0,
    certify_rows: Annotated[str | None, typer.Option(help="Recompute these rows too, such as 0,17,100-120.")] = None,
    certify_bits: Annotated[int, typer.Option(help="Working precision of --certify, in bits.")] = 128,
    merge_ranks: Annotated[
        bool, typer.Option(help="Captures that differ only in their rank become one, with all their batch items.")
    ] = True,
    level: common.Level = 0.01,
    device: common.Device = "auto",
    layout: common.Layout = None,
    causal: common.Causal = None,
    scale: common.Scale = None,
    window: common.Window = None,
    softcap: common.Softcap = None,
    debug: common.Debug = False,  # noqa: ARG001
) -> None:
    """Say whether captured attention is biased, lossy or ill-conditioned, and what it does to the gradients."""
    from attn_diag.analyses.inspection.inspect import inspect_captures
    from attn_diag.captures.selection import Selection
    from attn_diag.results.diagnosis import Label

    wanted = common.labels(fail_on, get_args(Label))
    common.require_apart([t for t in (common.json_target(json), html) if t is not None], paths or [])
    options = common.metadata_options(layout, causal, scale, window, softcap)
    certified = _certify(certify, common.numbers("--certify-rows", certify_rows), certify_bits)
    captures, unreadable = common.open_captures(
        paths or [], example=example, layers=common.numbers("--layer", layer), options=options
    )
    selection = Selection(observation, common.numbers("--head", head), common.numbers("--batch", batch))
    with common.progress_bar() as progress:
        diagnosis = inspect_captures(
            captures, selection=selection, recipes=recipe or (), engine=engine, level=level, device=device,
            progress=progress, unreadable=unreadable, skip=common.complain, certify=certified,
            merge_ranks=merge_ranks, details=_details(details, html),
        )  # fmt: skip
    for warning in diagnosis.summary.warnings:
        print(f"attn-diag: {warning}", file=sys.stderr)
    common.deliver(diagnosis, json, plain=plain)
    common.write_page(diagnosis, html)
    raise typer.Exit(_exit_code(diagnosis, wanted))


def _details(asked: int | None, html: Path | None) -> int:
    """How many heads to take apart: as asked, else the one that the first screen of a page is about."""
    return (0 if html is None else 1) if asked is None else asked


def _certify(count: int, rows: Ranges | None, bits: int) -> Certify:
    """What the three options ask for. Raises InputError for what cannot be done."""
    from attn_diag.head.certification import Certify

    return Certify(count, rows, bits)


def _exit_code(diagnosis: Diagnosis, wanted: frozenset[str]) -> int:
    wrong = [c for c in diagnosis.captures if c.assumptions.ok is False]
    for capture in wrong:
        print(f"attn-diag: {capture.source}: no verdict: {capture.assumptions.message}", file=sys.stderr)
    if wrong or diagnosis.summary.unreadable:
        return 2
    return 1 if wanted & diagnosis.labels else 0
