"""What every command shares: reading captures, progress on stderr, reports and JSON on stdout or in files."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attn_diag.errors import InputError

if TYPE_CHECKING:
    from attn_diag.captures.capture import Capture
    from attn_diag.captures.ranges import Ranges
    from attn_diag.results.base import Result
    from attn_diag.work import Progress

_PROGRESS_AFTER_S = 1.0

Paths = Annotated[list[Path] | None, typer.Argument(help="Captures (.safetensors, .pt, .npz) or directories of them.")]
Example = Annotated[bool, typer.Option("--example", help="Use the capture that ships with the package.")]
ObservationName = Annotated[str | None, typer.Option("--observation", help="Only this observation.")]
Heads = Annotated[str | None, typer.Option("--head", help="Heads, such as 0,3-5 (the model's numbers).")]
Layers = Annotated[str | None, typer.Option("--layer", help="Only captures of these layers.")]
Batches = Annotated[str | None, typer.Option("--batch", help="Batch items.")]
Json = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - for stdout alone.")
]
Plain = Annotated[
    bool, typer.Option("--plain", help="For logs: no colour, no boxes or blocks, ASCII, the same widths everywhere.")
]
Level = Annotated[float, typer.Option("--level", help="Significance level after Benjamini-Hochberg.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Layout = Annotated[str | None, typer.Option("--layout", help="BHTD or BTHD, instead of what the file says.")]
Causal = Annotated[
    str | None, typer.Option("--causal", help="none, top-left or bottom-right, instead of what the file says.")
]
Scale = Annotated[float | None, typer.Option("--scale", help="Softmax scale, instead of what the file says.")]
Window = Annotated[
    str | None,
    typer.Option("--window", metavar="LEFT,RIGHT", help="Sliding window, inclusive; -1 for unlimited."),
]
Softcap = Annotated[float | None, typer.Option("--softcap", help="Softcap, instead of what the file says.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]  # read by main()


def metadata_options(
    layout: str | None, causal: str | None, scale: float | None, window: str | None, softcap: float | None
) -> dict[str, Any]:
    """What the command line says instead of a capture's metadata. Raises InputError for a window that is none."""
    from attn_diag.captures.metadata import parse_window

    try:
        parsed = None if window is None else parse_window(window)
    except ValueError:
        raise InputError(f"--window must be LEFT,RIGHT (two integers), got {window!r}") from None
    return {"layout": layout, "causal": causal, "scale": scale, "window": parsed, "softcap": softcap}


def json_target(json: str | None) -> Path | None:
    """The file that ``--json`` names; None where there is none, or stdout."""
    return None if json in (None, "-") else Path(str(json))


def deliver(result: Result, json: str | None, *, plain: bool = False, quiet: bool = False) -> None:
    """Print the report, or the JSON alone for ``--json -``; write the JSON to the file that ``--json`` names.

    ``plain``: the report as a log takes it; ``quiet``: no report.
    """
    from attn_diag.captures.files import write_atomically

    with _stdout():
        if json == "-":
            print(result.to_json())
        elif quiet:
            pass
        elif plain:
            from attn_diag.reports.renderers import plain_text

            print(plain_text(result), end="")
        else:
            _print_report(result)
    if (target := json_target(json)) is not None:
        write_atomically(
            target, lambda temporary: Path(temporary).write_text(result.to_json() + "\n", encoding="utf-8")
        )


def write_page(result: Result, html: Path | None) -> None:
    """Write the result's HTML page to the file that ``--html`` names."""
    if html is None:
        return
    from attn_diag.captures.files import write_atomically
    from attn_diag.reports.renderers import page

    text = page(result)
    write_atomically(html, lambda temporary: Path(temporary).write_text(text, encoding="utf-8"))


def open_captures(
    paths: list[Path], *, example: bool, layers: Ranges | None, options: dict[str, Any]
) -> tuple[list[Capture], list[str]]:
    """Open every capture; what is missing or cannot be read is named on stderr, and is an error if nothing can."""
    from attn_diag.captures.loading import find_captures, half_written, load, load_example
    from attn_diag.captures.metadata import Metadata

    # Said once, not of every file.
    Metadata().override(**options)
    if not paths and not example:
        raise InputError("nothing to inspect: name a capture or a directory, or try --example")
    captures = [load_example()] if example else []
    files: list[Path] = []
    failures: list[InputError] = []
    for path in paths:
        try:
            files += find_captures([path])
        except InputError as error:
            failures.append(error)
        else:
            failures += half_written([path])
    # A file that is named twice, as itself and through its directory, counts once.
    once: dict[Path, Path] = {}
    for file in files:
        once.setdefault(file.resolve(), file)
    for path in once.values():
        try:
            captures.append(load(path, **options))
        except InputError as error:
            failures.append(error)
    if len(failures) == 1 and not captures:
        raise failures[0]
    for failure in failures:
        complain(failure)
    if not captures:
        raise InputError("none of the captures could be read")
    chosen = [c for c in captures if layers is None or c.metadata.layer in layers]
    if not chosen:
        stated = sorted({c.metadata.layer for c in captures if c.metadata.layer is not None})
        known = f"they are of {', '.join(map(str, stated))}" if stated else "none of them states its layer"
        raise InputError(f"no capture is of the layers asked for: {known} (got {layers})")
    return chosen, [str(failure) for failure in failures]


def open_one(
    paths: list[Path], *, example: bool, layers: Ranges | None, options: dict[str, Any]
) -> tuple[Capture, list[str]]:
    """As ``open_captures``, for commands that look at one capture. Raises InputError where several are left."""
    captures, unreadable = open_captures(paths, example=example, layers=layers, options=options)
    if len(captures) > 1:
        named = ", ".join(capture.source for capture in captures[:3])
        raise InputError(f"this command looks at one capture, got {len(captures)} ({named}, …); name one")
    return captures[0], unreadable


def one_place(head: str | None, batch: str | None) -> tuple[int, int | None]:
    """The batch item (0 by default) and the model's number of the head (None by default) that a command looks at.

    Raises InputError where an option names several.
    """
    wanted = {"--head": numbers("--head", head), "--batch": numbers("--batch", batch)}
    for option, named in wanted.items():
        if named is not None and len(named) != 1:
            raise InputError(f"this command looks at one {option.removeprefix('--')}, got {named}; name one")
    place, item = (None if named is None else next(iter(named)) for named in wanted.values())
    return item or 0, place


def require_apart(targets: list[Path], inputs: list[Path], what: str = "a capture to be inspected") -> None:
    """Raise InputError, before any work, where an output cannot be written or would overwrite another or an input.

    ``what``: an input, in words.
    """
    from attn_diag.captures.files import require_writable

    for target in targets:
        require_writable(target)
    if len({target.resolve() for target in targets}) < len(targets):
        raise InputError(f"--json and --html both name {targets[0]}; give each a file of its own")
    for target in targets:
        if target.name == "-":
            raise InputError("--html needs the name of a file, got '-'; only --json writes to stdout")
        if target.exists() and any(path.exists() and path.samefile(target) for path in inputs):
            raise InputError(f"{target} is {what} and would be overwritten; choose another name")


def complain(error: InputError) -> None:
    """Say on stderr what could not be used."""
    print(f"attn-diag: {error}", file=sys.stderr)


def _print_report(result: Result) -> None:
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # instead of exiting with 1, which would say that there are findings

    console = Piped(soft_wrap=False)
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
    """A bar on stderr that counts ``unit``, shown only once the work has taken a second."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    started = time.monotonic()
    with Bar(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(unit, visible=False)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=time.monotonic() - started > _PROGRESS_AFTER_S)

        yield update


def numbers(option: str, value: str | None) -> Ranges | None:
    """The numbers and ranges that an option names; None for all."""
    from attn_diag.captures.ranges import Ranges

    return None if value is None else Ranges.parse(option, value)


def labels(text: str | None, known: tuple[str, ...]) -> frozenset[str]:
    """The labels that ``--fail-on`` names. Raises InputError for unknown ones, or none."""
    names = frozenset(name.strip() for name in (text or "").split(",") if name.strip())
    if text is not None and not names:
        raise InputError(f"--fail-on needs at least one label, got {text!r}; known: {', '.join(known)}")
    if unknown := sorted(names - set(known)):
        raise InputError(f"--fail-on: no label {', '.join(unknown)}; known: {', '.join(known)}")
    return names
