"""``attn-diag inspect``: captures in, a report out."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from attn_diag.errors import InputError

if TYPE_CHECKING:
    from attn_diag.analysis import Progress
    from attn_diag.capture import Capture
    from attn_diag.diagnosis import Diagnosis
    from attn_diag.ranges import Ranges

_PROGRESS_AFTER_S = 1.0


def inspect(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Captures (.safetensors, .pt, .npz) or directories of them.")
    ] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Inspect the capture that ships with the package.")
    ] = False,
    observation: Annotated[str | None, typer.Option(help="Only this observation.")] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Also run this recipe on the same inputs (repeatable).")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="What runs recipes: emulation, or triton (kernels, on CUDA).")
    ] = "emulation",
    head: Annotated[str | None, typer.Option(help="Heads, such as 0,3-5 (the model's numbers).")] = None,
    layer: Annotated[str | None, typer.Option(help="Only captures of these layers.")] = None,
    batch: Annotated[str | None, typer.Option(help="Batch items.")] = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the diagnosis as JSON; - for stdout alone.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a self-contained HTML page.")] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(metavar="LABELS", help="Exit with 1 if a verdict has one of these: biased,lossy,…"),
    ] = None,
    level: Annotated[float, typer.Option(help="Significance level after Benjamini-Hochberg.")] = 0.01,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    layout: Annotated[str | None, typer.Option(help="BHTD or BTHD, instead of what the file says.")] = None,
    causal: Annotated[
        str | None, typer.Option(help="none, top-left or bottom-right, instead of what the file says.")
    ] = None,
    scale: Annotated[float | None, typer.Option(help="Softmax scale, instead of what the file says.")] = None,
    window: Annotated[
        str | None, typer.Option(metavar="LEFT,RIGHT", help="Sliding window, inclusive; -1 for unlimited.")
    ] = None,
    softcap: Annotated[float | None, typer.Option(help="Softcap, instead of what the file says.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,  # noqa: ARG001 - read by main()
) -> None:
    """Say whether captured attention is biased, lossy or ill-conditioned, and what it does to the gradients."""
    from attn_diag.analysis import inspect_captures
    from attn_diag.capture_job import Selection
    from attn_diag.diagnosis import Label
    from attn_diag.files import require_writable, write_atomically
    from attn_diag.metadata import parse_window

    wanted = _labels(fail_on, get_args(Label))
    json_file = None if json in (None, "-") else Path(json)
    targets = [target for target in (json_file, html) if target is not None]
    for target in targets:
        require_writable(target)
    _require_apart(targets, paths or [])
    try:
        parsed_window = None if window is None else parse_window(window)
    except ValueError:
        raise InputError(f"--window must be LEFT,RIGHT (two integers), got {window!r}") from None
    options: dict[str, Any] = {
        "layout": layout,
        "causal": causal,
        "scale": scale,
        "window": parsed_window,
        "softcap": softcap,
    }
    captures, unreadable = _open(paths or [], example=example, layers=_numbers("--layer", layer), options=options)
    selection = Selection(observation, _numbers("--head", head), _numbers("--batch", batch))
    with _progress_bar() as progress:
        diagnosis = inspect_captures(
            captures, selection=selection, recipes=recipe or (), engine=engine, level=level, device=device,
            progress=progress, unreadable=unreadable, skip=_complain,
        )  # fmt: skip
    for warning in diagnosis.summary.warnings:
        print(f"attn-diag: {warning}", file=sys.stderr)
    if json == "-":
        with _stdout():
            print(diagnosis.to_json())
    else:
        with _stdout():
            _print_report(diagnosis)
        if json_file is not None:
            write_atomically(
                json_file, lambda temporary: Path(temporary).write_text(diagnosis.to_json() + "\n", encoding="utf-8")
            )
    if html is not None:
        from attn_diag.reports import html_document

        page = html_document(diagnosis)
        write_atomically(html, lambda temporary: Path(temporary).write_text(page, encoding="utf-8"))
    raise typer.Exit(_exit_code(diagnosis, wanted))


def _exit_code(diagnosis: Diagnosis, wanted: frozenset[str]) -> int:
    wrong = [c for c in diagnosis.captures if c.assumptions.ok is False]
    for capture in wrong:
        print(f"attn-diag: {capture.source}: no verdict: {capture.assumptions.message}", file=sys.stderr)
    if wrong or diagnosis.summary.unreadable:
        return 2
    return 1 if wanted & diagnosis.labels else 0


def _open(
    paths: list[Path], *, example: bool, layers: Ranges | None, options: dict[str, Any]
) -> tuple[list[Capture], list[str]]:
    """Open every capture; what is missing or cannot be read is named on stderr, and is an error if nothing can."""
    from attn_diag.loading import find_captures, load, load_example
    from attn_diag.metadata import Metadata

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
        _complain(failure)
    if not captures:
        raise InputError("none of the captures could be read")
    chosen = [c for c in captures if layers is None or c.metadata.layer in layers]
    if not chosen:
        stated = sorted({c.metadata.layer for c in captures if c.metadata.layer is not None})
        known = f"they are of {', '.join(map(str, stated))}" if stated else "none of them states its layer"
        raise InputError(f"no capture is of the layers asked for: {known} (got {layers})")
    return chosen, [str(failure) for failure in failures]


def _require_apart(targets: list[Path], inputs: list[Path]) -> None:
    """Raise InputError where one output would overwrite the other, or a capture."""
    if len({target.resolve() for target in targets}) < len(targets):
        raise InputError(f"--json and --html both name {targets[0]}; give each a file of its own")
    for target in targets:
        if target.name == "-":
            raise InputError("--html needs the name of a file, got '-'; only --json writes to stdout")
        if target.exists() and any(path.exists() and path.samefile(target) for path in inputs):
            raise InputError(f"{target} is a capture to be inspected and would be overwritten; choose another name")


def _complain(error: InputError) -> None:
    print(f"attn-diag: {error}", file=sys.stderr)


def _print_report(diagnosis: Diagnosis) -> None:
    from rich.console import Console

    class Report(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # instead of exiting with 1, which would say that there are findings

    console = Report(soft_wrap=False)
    for renderable in diagnosis.__rich_console__(console, console.options):
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
def _progress_bar() -> Iterator[Progress]:
    """A bar on stderr, shown only once the work has taken a second."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    started = time.monotonic()
    with Bar(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("heads", visible=False)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=time.monotonic() - started > _PROGRESS_AFTER_S)

        yield update


def _labels(text: str | None, known: tuple[str, ...]) -> frozenset[str]:
    names = frozenset(name.strip() for name in (text or "").split(",") if name.strip())
    if text is not None and not names:
        raise InputError(f"--fail-on needs at least one label, got {text!r}; known: {', '.join(known)}")
    if unknown := sorted(names - set(known)):
        raise InputError(f"--fail-on: no label {', '.join(unknown)}; known: {', '.join(known)}")
    return names


def _numbers(option: str, value: str | None) -> Ranges | None:
    from attn_diag.ranges import Ranges

    return None if value is None else Ranges.parse(option, value)
