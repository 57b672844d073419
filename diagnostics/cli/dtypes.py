"""``attn-diag dtypes``: run a script, and say where its tensors became wider or narrower than autocast implies."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, get_args

import typer

from attn_diag.cli import common

_UNUSABLE = 2

# What follows the script is the script's own.
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def dtypes(
    script: Annotated[Path, typer.Argument(help="A Python script, run as __main__. Options of attn-diag precede it.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="For the script.")] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            "--fail-on",
            metavar="LABELS",
            help="Exit with 1 on: mixed (q, k and v of a call differ), alike (they are of one dtype, but not "
            "autocast's), elsewhere (silent promotion that reaches no attention call).",
        ),
    ] = None,
    json: common.Json = None,
    plain: common.Plain = False,
    debug: common.Debug = False,  # noqa: ARG001
) -> None:
    """Run a script and list the lines where dtypes drift under autocast, those first that reach q, k or v.

    Exit codes: 1 for what --fail-on names, 2 if the script cannot be read or raises; its own sys.exit(n) otherwise.
    """
    from attn_diag.results.dtypes import Severity
    from attn_diag.watching.drift.script import run_script

    wanted = common.labels(fail_on, get_args(Severity))
    common.require_apart([t for t in [common.json_target(json)] if t is not None], [script])
    # Stdout carries the JSON alone.
    with redirect_stdout(sys.stderr) if json == "-" else nullcontext():
        run = run_script(script, arguments or [])
    common.deliver(run.drift, json, plain=plain)
    if wanted & run.drift.labels:
        raise typer.Exit(1)
    raise typer.Exit(_UNUSABLE if run.raised else run.code)
