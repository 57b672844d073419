"""``attn-diag inspect``: captures in, a report out."""

from __future__ import annotations

import io
import os
from contextlib import nullcontext, redirect_stderr
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from attn_diag.cli.delivery import Delivery, complain, progress_bar, write_page
from attn_diag.cli.linear import refuse_softmax
from attn_diag.cli.options import (
    Devices,
    Html,
    Inputs,
    Level,
    ObservationName,
    Overrides,
    Places,
    command,
    labels,
    number_or_all,
    numbers,
)
from attn_diag.cli.tables import Tables
from attn_diag.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from attn_diag.captures.linear import LinearCapture
    from attn_diag.results.diagnosis import Diagnosis


@command
def inspect(
    *,
    inputs: Inputs,
    observation: ObservationName = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Also run this recipe on the same inputs (repeatable).")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="What runs recipes: emulation, or triton (kernels, on CUDA).")
    ] = "emulation",
    places: Places,
    delivery: Delivery,
    tables: Tables,
    html: Html = None,
    fail_on: Annotated[
        str | None,
        typer.Option(metavar="LABELS", help="Exit with 1 if a head has one of these labels: nonfinite,wrong,lossy,…"),
    ] = None,
    details: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Attribution and microscope of the N worst heads, or all; 1 with --html, else 0."
        ),
    ] = None,
    certify: Annotated[
        int, typer.Option(metavar="N", help="Recompute N rows of every head in mpmath: is the reference right?")
    ] = 0,
    certify_rows: Annotated[str | None, typer.Option(help="Recompute these rows too, such as 0,17,100-120.")] = None,
    certify_bits: Annotated[
        int | None, typer.Option(help="Working precision of --certify, in bits (default 128).")
    ] = None,
    merge_ranks: Annotated[
        bool, typer.Option(help="Captures that differ only in their rank become one, with all their batch items.")
    ] = True,
    level: Level = 0.01,
    device: Devices = "auto",
    overrides: Overrides,
) -> int:
    """Say of captured attention what is wrong, coarser than a well-rounded kernel, biased or fragile, and where.

    Under torchrun the captures are shared out over its processes: torchrun --nproc-per-node 8 -m attn_diag inspect …
    """
    from attn_diag.analyses.inspection.forked import forked_ranks, processes_worth
    from attn_diag.analyses.inspection.inspect import inspect_captures
    from attn_diag.analyses.inspection.ranks import ranks_of_torchrun
    from attn_diag.head.certification import DEFAULT_ORACLE_BITS, Certify
    from attn_diag.results.diagnosis import Label

    wanted = labels(fail_on, get_args(Label))
    if (linear := inputs.linear(places.layer, delivery, [html])) is not None:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise InputError("captures of linear attention are inspected by one process: leave torchrun out")
        refuse_softmax(
            {"--observation": observation, "--recipe": recipe, "--batch": places.batch, "--json-full": tables.json_full,
             "--csv": tables.csv, "--parquet": tables.parquet, "--details": details, "--certify": certify > 0,
             "--certify-rows": certify_rows, "--certify-bits": certify_bits, "--engine": engine != "emulation",
             "--no-merge-ranks": not merge_ranks, **overrides.given()}
        )  # fmt: skip
        return _linear(linear, places, delivery, html, wanted, level, device)
    if certify_bits is not None and not certify and certify_rows is None:
        raise InputError("--certify-bits is for --certify alone: add --certify N, or leave it out")
    bits = DEFAULT_ORACLE_BITS if certify_bits is None else certify_bits
    certified = Certify(certify, numbers("--certify-rows", certify_rows), bits)
    with ranks_of_torchrun() as ranks:
        # What is wrong with the files is said once.
        with nullcontext() if ranks.rank == 0 else redirect_stderr(io.StringIO()):
            captures, unreadable = inputs.open(
                places.layer, overrides, delivery, [html, *tables.targets(delivery.json)]
            )
        if engine == "triton" and not recipe and all(capture.observations for capture in captures):
            raise InputError("--engine triton is for --recipe alone: add --recipe NAME, or leave it out")
        # By default the head that the first screen of a page is about.
        count = int(html is not None) if details is None else number_or_all("--details", details)
        processes = processes_worth(captures, device) if ranks.count == 1 else 1
        with forked_ranks(processes) if processes > 1 else nullcontext(ranks) as ranks:
            with progress_bar() if ranks.rank == 0 else nullcontext() as progress:
                diagnosis = inspect_captures(
                    captures, selection=places.selection(observation), recipes=recipe or (), engine=engine, level=level,
                    device=device, progress=progress, unreadable=unreadable, skip=complain, certify=certified,
                    merge_ranks=merge_ranks, details=count, ranks=ranks,
                )  # fmt: skip
            forked = processes > 1 and ranks.count > 1
            if ranks.rank == 0:
                for warning in diagnosis.summary.warnings:
                    complain(warning)
                try:
                    delivery.deliver(diagnosis, None if forked else html, full=tables.json_full)
                    tables.write(diagnosis)
                except InputError:
                    if forked:
                        ranks.gather([])  # the page is written all the same
                    raise
            if forked:
                if ranks.rank == 1 and html is not None:
                    write_page(html, diagnosis)
                ranks.gather([])
    return _exit_code(diagnosis, wanted) if ranks.rank == 0 else 0


def _linear(
    opened: tuple[list[LinearCapture], list[str]], places: Places, delivery: Delivery, html: Path | None,
    wanted: frozenset[str], level: float, device: str,
) -> int:  # fmt: skip
    from attn_diag.analyses.linear.inspect import inspect_linear_captures

    captures, unreadable = opened
    heads = numbers("--head", places.head)
    with progress_bar() as progress:
        found = inspect_linear_captures(
            captures, level=level, device=device, heads=None if heads is None else heads.__contains__,
            progress=progress, unreadable=unreadable, explained=True,
        )  # fmt: skip
    delivery.deliver(found, html)
    if unreadable:
        return 2
    return 1 if wanted & found.labels else 0


def _exit_code(diagnosis: Diagnosis, wanted: frozenset[str]) -> int:
    wrong = [c for c in diagnosis.captures if c.unjudged]
    for capture in wrong:
        complain(f"{capture.source}: no verdict: {capture.assumptions.message}")
    if wrong or diagnosis.summary.unreadable:
        return 2
    hidden = [label for label in ("nonfinite", "wrong") if wanted and label in diagnosis.labels - wanted]
    for label in hidden:
        complain(f"heads are {label}, for which --fail-on does not fail: add {label}")
    return 1 if wanted & diagnosis.labels else 0
