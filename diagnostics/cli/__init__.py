"""The command line. One command per file; nothing here imports torch before a command runs."""

from __future__ import annotations

import sys
import traceback
from importlib.metadata import version
from typing import Annotated

import typer

from attn_diag.cli.attribute import attribute
from attn_diag.cli.check import check
from attn_diag.cli.convert import convert
from attn_diag.cli.diff import diff
from attn_diag.cli.dtypes import SETTINGS, dtypes
from attn_diag.cli.env import env
from attn_diag.cli.figures import figures
from attn_diag.cli.identify import identify
from attn_diag.cli.inspect import inspect
from attn_diag.cli.microscope import microscope
from attn_diag.cli.probe import probe
from attn_diag.cli.report import report
from attn_diag.cli.selftest import selftest
from attn_diag.cli.what_if import what_if
from attn_diag.errors import InputError

_UNUSABLE = 2
_INTERNAL = 3

app = typer.Typer(
    name="attn-diag",
    help="Signed rounding-error diagnostics for low-precision attention.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# As the help page lists them.
for _command in (
    inspect, report, diff, identify, attribute, what_if, microscope, figures, probe, check, convert,
):  # fmt: skip
    app.command()(_command)
app.command(context_settings=SETTINGS)(dtypes)
app.command()(selftest)
app.command()(env)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("attn-diag"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it and stop.")
    ] = False,
) -> None:
    """Signed rounding-error diagnostics for low-precision attention."""


def main() -> None:
    """Run the command line; errors become one line on stderr and an exit code (tracebacks with --debug)."""
    try:
        app()
    except Exception as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        elif isinstance(error, InputError):
            print(f"attn-diag: {error}", file=sys.stderr)
        else:
            print(f"attn-diag: internal error: {type(error).__name__}: {error} (--debug shows where)", file=sys.stderr)
        sys.exit(_UNUSABLE if isinstance(error, InputError) else _INTERNAL)
