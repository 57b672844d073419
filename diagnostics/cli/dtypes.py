"""``attn-diag dtypes``: run a script, and say where its tensors became wider or narrower than autocast implies."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, get_args

import typer

from attn_diag.cli.delivery import Delivery
from attn_diag.cli.options import command, labels

_UNUSABLE = 2

# What follows the script is the script's own.
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@command
def dtypes(
    *,
    script: Annotated[
        Path,
        typer.Argument(metavar="SCRIPT", help="A Python script, run as __main__. Options of attn-diag precede it."),
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="For the script.")] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            "--fail-on",
            metavar="LABELS",
            help="Exit with 1 on: mixed (q, k and v of a call differ), alike (they are of one dtype, but not "
            "autocast's), elsewhere (silent promotion that reaches no attention call, and rounding in place).",
        ),
    ] = None,
    delivery: Delivery,
) -> int:
    """Run a script and list the lines where dtypes drift under autocast, those first that reach q, k or v.

    Exit codes: 1 for what --fail-on names, 2 if the script cannot be read or raises; its own sys.exit(n) otherwise.
    """
    from attn_diag.results.dtypes import Severity
    from attn_diag.watching.drift.script import run_script

    wanted = labels(fail_on, get_args(Severity))
    delivery.require_apart([script])
    # Stdout carries the JSON alone.
    with redirect_stdout(sys.stderr) if delivery.json == "-" else nullcontext():
        run = run_script(script, arguments or [])
    delivery.deliver(run.drift)
    if wanted & run.drift.labels:
        return 1
    return _UNUSABLE if run.raised else run.code
