"""The command line. One command per file; nothing here imports torch before a command runs."""

from __future__ import annotations

import atexit
import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from attn_diag.cli.attribute import attribute
from attn_diag.cli.check import check
from attn_diag.cli.convert import convert
from attn_diag.cli.diff import diff
from attn_diag.cli.dtypes import SETTINGS, dtypes
from attn_diag.cli.env import env
from attn_diag.cli.figures import figures
from attn_diag.cli.identify import identify
from attn_diag.cli.inspect import inspect
from attn_diag.cli.invariance import invariance
from attn_diag.cli.microscope import microscope
from attn_diag.cli.mismatch import mismatch
from attn_diag.cli.probe import probe
from attn_diag.cli.quant import quant
from attn_diag.cli.replay import replay
from attn_diag.cli.report import report
from attn_diag.cli.selftest import selftest
from attn_diag.cli.what_if import what_if
from attn_diag.errors import InputError
from attn_diag.printing import printable_lines, say

_UNUSABLE = 2
_INTERNAL = 3
# New objects that make a garbage collection due. A command imports and makes hundreds of thousands that stay: to look
# at them after every 700, as Python does, takes a tenth of its time.
_NEW_OBJECTS = 50_000


# What the docs call by a name that is no command's.
_ELSEWHERE = {
    "hunt": "attn-diag check KERNEL --hunt",
    "capture": "attn_diag.capture(model, folder) around a training loop, in Python",
    "monitor": "attn_diag.Monitor(model), in Python",
    "break-if": "attn_diag.break_if(wrong=True, model=model), in Python",
    "explain": "attn_diag.explain(attn_diag.inspect(file), head), in Python",
}


class _Group(TyperGroup):
    """The commands; what typer itself complains of is quoted from the command line, and may be a file's name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if (instead := _ELSEWHERE.get(args[0].lower().replace("_", "-"))) is not None:
            raise InputError(f"there is no command {args[0]!r}: {instead}")
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _printable_complaints():
            return super().make_context(*args, **kwargs)

    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        with _printable_complaints():
            return super().invoke(*args, **kwargs)


@contextmanager
def _printable_complaints() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # click's, or typer's copy of click's.
        if isinstance(message := getattr(error, "message", None), str):
            error.message = printable_lines(message)  # type: ignore[attr-defined]
        raise


app = typer.Typer(
    name="attn-diag",
    cls=_Group,
    help="Signed rounding-error diagnostics for low-precision attention.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
# As the help page lists them.
for _command in (
    inspect, report, diff, identify, attribute, what_if, microscope, figures, replay, probe, check, invariance,
    mismatch, quant, convert,
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


def _keep_memory() -> None:
    """Leave a last look for cycles out: it takes half a second where there are many results, and nobody needs their
    memory then. From 3.9 on Triton complains, in thirty lines, of what has not been freed."""
    triton = getattr(sys.modules.get("triton"), "__version__", "0.0")
    if tuple(int(part) for part in triton.split(".")[:2]) < (3, 9):
        gc.freeze()


def main() -> None:
    """Run the command line; errors become one line on stderr and an exit code (tracebacks with --debug)."""
    atexit.register(_keep_memory)
    collected_after = gc.get_threshold()
    gc.set_threshold(max(collected_after[0], _NEW_OBJECTS) if collected_after[0] else 0)
    try:
        app()
    except Exception as error:
        if "--debug" in sys.argv:
            say(traceback.format_exc())
        elif isinstance(error, InputError):
            say(f"attn-diag: {error}")
        else:
            say(f"attn-diag: internal error: {type(error).__name__}: {error} (--debug shows where)")
        sys.exit(_UNUSABLE if isinstance(error, InputError) else _INTERNAL)
    finally:
        gc.set_threshold(*collected_after)
