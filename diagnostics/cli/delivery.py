"""Where a command's result goes: a report on stdout, JSON and pages in files; and what is said on stderr meanwhile."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attn_diag.captures.places import is_remote
from attn_diag.errors import InputError
from attn_diag.printing import inert_json, say

if TYPE_CHECKING:
    from attn_diag.results.base import Result
    from attn_diag.work import Progress

_PROGRESS_AFTER_S = 1.0
# Where nobody watches a bar, as in a job's log, it is a line now and then.
_PROGRESS_LINE_S = 30.0


@dataclass(frozen=True)
class Delivery:
    """Where a result goes."""

    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - for stdout alone.")
    ] = None
    plain: Annotated[
        bool,
        typer.Option("--plain", help="For logs: no colour, no boxes or blocks, ASCII, the same widths everywhere."),
    ] = False

    def require_apart(
        self, inputs: Sequence[Path], also: Sequence[Path | None] = (), what: str = "a capture to be inspected"
    ) -> None:
        """Raise InputError, before any work, where an output cannot be written or would overwrite another or an input.

        Args:
            inputs: The files that are read.
            also: What is written beside the JSON; None where it is not.
            what: An input, in words.
        """
        from attn_diag.captures.files import require_writable

        targets = [path for path in (self._json_file, *also) if path is not None]
        for target in targets:
            require_writable(target)
        if len({target.resolve() for target in targets}) < len(targets):
            raise InputError(f"{_twice(targets)} is to be written twice; give each output a file of its own")
        for target in targets:
            if target.name == "-":
                raise InputError("an output needs the name of a file, got '-'; only --json writes to stdout")
            if target.exists() and any(
                not is_remote(path) and path.exists() and path.samefile(target) for path in inputs
            ):
                raise InputError(f"{target} is {what} and would be overwritten; choose another name")

    def deliver(self, result: Result, html: Path | None = None, *, quiet: bool = False, full: bool = False) -> None:
        """Print the report (not if ``quiet``), or the JSON alone for ``--json -``; write the JSON and the page.

        Args:
            result: What is delivered.
            html: Where the page goes.
            quiet: Print no report.
            full: Write JSON with everything where that is long.
        """
        with _stdout():
            if self.json == "-":
                print(inert_json(b"".join(result.saved_parts(full=full)).decode()))  # noqa: T201
            elif self.plain and not quiet:
                from attn_diag.reports.renderers import plain_text

                print(plain_text(result), end="")  # noqa: T201 - inert already
            elif not quiet:
                _print_report(result)
        if self._json_file is not None:
            from attn_diag.captures.files import write_atomically

            write_atomically(self._json_file, partial(_write_json, result, full))
        if html is not None:
            write_page(html, result)

    @property
    def _json_file(self) -> Path | None:
        return None if self.json in (None, "-") else Path(str(self.json))


def _twice(targets: Sequence[Path]) -> Path:
    """The first that names the same file as one before."""
    found = [target.resolve() for target in targets]
    return next(target for i, target in enumerate(targets) if found[i] in found[:i])


def _write_json(result: Result, full: bool, path: str) -> None:
    with Path(path).open("wb") as file:
        file.writelines(result.saved_parts(full=full))
        file.write(b"\n")


def write_text(target: Path, text: str) -> None:
    """Write a file whole or not at all."""
    from attn_diag.captures.files import write_atomically

    write_atomically(target, lambda temporary: Path(temporary).write_text(text, encoding="utf-8"))


def write_page(target: Path, result: Result) -> None:
    """Write a result's page whole or not at all."""
    from attn_diag.reports.renderers import page

    write_text(target, page(result))


def complain(error: InputError | str) -> None:
    """Say on stderr what could not be used, or what else is to be known."""
    say(f"attn-diag: {error}")


def _print_report(result: Result) -> None:
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # instead of exiting with 1, which would say that there are findings

    console = Piped(soft_wrap=False, emoji=False)
    for renderable in result.renderables():
        console.print(renderable)


@contextmanager
def _stdout() -> Iterator[None]:
    """Writing to stdout: a reader that has seen enough is no error, a full disk is an InputError."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An encoding without dashes or Greek letters shows question marks.
        sys.stdout.reconfigure(errors="replace")
    try:
        yield
        if sys.stdout is not None:  # None: closed from the start
            sys.stdout.flush()
    except OSError as error:
        # What is still buffered would raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise InputError(f"cannot write to stdout: {error.strerror}") from None


@contextmanager
def progress_bar(unit: str = "heads") -> Iterator[Progress]:
    """Counts ``unit`` on stderr, with the time left: a bar after a second; in a log a line every half minute."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    told = started = time.monotonic()
    watched = sys.stderr is not None and sys.stderr.isatty()  # None: closed from the start
    with Bar(console=Console(stderr=True), transient=True, disable=not watched) as bar:
        task = bar.add_task(unit, visible=False)

        def update(done: int, total: int) -> None:
            nonlocal told
            now = time.monotonic()
            bar.update(task, completed=done, total=total, visible=now - started > _PROGRESS_AFTER_S)
            if not watched and now - told > _PROGRESS_LINE_S:
                told = now
                complain(f"{done} of {total} {unit}{_left(now - started, done, total)}")

        yield update


def _left(elapsed_s: float, done: int, total: int) -> str:
    """How much longer it takes if it goes on like this; nothing where that is not known."""
    if not 0 < done < total:
        return ""
    seconds = elapsed_s * (total - done) / done
    return f", some {seconds / 60:.0f} min left" if seconds >= 90 else f", some {seconds:.0f} s left"
