"""The options that several commands have, each declared once, in groups that a command names; and what they mean."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from attn_diag.captures.places import place
from attn_diag.cli.delivery import Delivery, complain, progress_bar
from attn_diag.cli.limits import window_of
from attn_diag.errors import InputError

if TYPE_CHECKING:
    from attn_diag.captures.capture import Capture
    from attn_diag.captures.linear import LinearCapture
    from attn_diag.captures.selection import Ranges, Selection

ObservationName = Annotated[str | None, typer.Option("--observation", help="Only this observation.")]
Layers = Annotated[str | None, typer.Option("--layer", help="Only captures of these layers.")]
Example = Annotated[bool, typer.Option("--example", help="Use the capture that ships with the package.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a self-contained HTML page.")]
Level = Annotated[float, typer.Option("--level", help="Significance level after Benjamini-Hochberg.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
# Where some inputs have no use for it: None is not given.
SomeLevel = Annotated[
    float | None, typer.Option("--level", help="Significance level after Benjamini-Hochberg (default 0.01).")
]
SomeDevice = Annotated[str | None, typer.Option("--device", help="auto (the default), cpu or cuda.")]
Devices = Annotated[
    str,
    typer.Option("--device", help="auto, cpu or cuda; long heads over several GPUs: cuda:0,cuda:1 or cuda:all."),
]
Declared = Annotated[
    str | None,
    typer.Option("--declared", metavar="RECIPE", help="The kernel below 16 bits that it is meant to be: fa3-fp8, …"),
]
_Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]  # read by main()


def command(function: Callable[..., int | None]) -> Callable[..., None]:
    """Make a function a command that typer takes.

    A parameter whose type is one of the groups below stands for that group's options, at this place of the help page;
    the function is given the group. ``--debug`` is added at the end. What the function returns is the exit code.

    Args:
        function: Its parameters are keyword-only and typed as typer wants them.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        of_group = get_type_hints(groups[name], include_extras=True)
        parameters += [_keyword(f.name, of_group[f.name], f.default) for f in fields(groups[name])]
    parameters.append(_keyword("debug", _Debug, default=False))

    @wraps(function)
    def run(**given: Any) -> None:
        del given["debug"]
        for name, kind in groups.items():
            given[name] = kind(**{f.name: given.pop(f.name) for f in fields(kind)})
        raise typer.Exit(function(**given) or 0)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    # typer breaks the lines of a help page where the docstring does, but for the first paragraph.
    run.__doc__ = "\n\n".join(" ".join(part.split()) for part in (function.__doc__ or "").split("\n\n"))
    return run


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@dataclass(frozen=True)
class Overrides:
    """What the command line says instead of a capture's metadata."""

    layout: Annotated[str | None, typer.Option("--layout", help="BHTD or BTHD, instead of what the file says.")] = None
    causal: Annotated[
        str | None, typer.Option("--causal", help="none, top-left or bottom-right, instead of what the file says.")
    ] = None
    scale: Annotated[float | None, typer.Option("--scale", help="Softmax scale, instead of what the file says.")] = None
    window: Annotated[
        str | None, typer.Option("--window", metavar="LEFT,RIGHT", help="Sliding window, inclusive; -1 for unlimited.")
    ] = None
    softcap: Annotated[float | None, typer.Option("--softcap", help="Softcap, instead of what the file says.")] = None
    lse_base: Annotated[
        str | None, typer.Option("--lse-base", help="e or 2, the LSE's logarithm, instead of what the file says.")
    ] = None
    declared: Declared = None

    def metadata(self) -> dict[str, Any]:
        """Keywords of Metadata.override. Raises InputError for a window that is none."""
        return {
            "layout": self.layout, "causal": self.causal, "scale": self.scale, "window": window_of(self.window),
            "softcap": self.softcap, "lse_base": self.lse_base, "declared": self.declared,
        }  # fmt: skip

    def given(self) -> dict[str, object]:
        """What the command line says, by the option's name."""
        return {f"--{f.name.replace('_', '-')}": getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Inputs:
    """The captures that a command reads."""

    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            parser=place,
            metavar="[PATHS]...",
            help="Captures (.safetensors, .pt, .npz) or directories of them; also s3://, gs://, hf://.",
        ),
    ] = None
    example: Example = False

    def open(
        self, layer: str | None, overrides: Overrides, delivery: Delivery, also: Sequence[Path | None] = ()
    ) -> tuple[list[Capture], list[str]]:
        """As ``open_captures``, once it is known that what is to be written can be written, and overwrites none.

        Args:
            layer: Only captures of these.
            overrides: What is said instead of the files' metadata.
            delivery: Where the JSON goes.
            also: What is written besides; None where it is not.
        """
        delivery.require_apart(self.paths or [], also)
        options = overrides.metadata()
        return open_captures(self.paths or [], example=self.example, layers=numbers("--layer", layer), options=options)

    def open_one(self, layer: str | None, overrides: Overrides, delivery: Delivery) -> tuple[Capture, list[str]]:
        """As ``open``, for commands that look at one capture. Raises InputError where several are left."""
        captures, unreadable = self.open(layer, overrides, delivery)
        if len(captures) > 1:
            named = ", ".join(capture.source for capture in captures[:3])
            raise InputError(f"this command looks at one capture, got {len(captures)} ({named}, …); name one")
        return captures[0], unreadable

    def linear(
        self, layer: str | None, delivery: Delivery, also: Sequence[Path | None] = ()
    ) -> tuple[list[LinearCapture], list[str]] | None:
        """Captures of linear attention, and what was said of those that cannot be read; None: the paths hold others.

        Args:
            layer, delivery, also: As for ``open``.

        Raises:
            InputError: There are both kinds, or none of linear attention can be read or is of these layers.
        """
        from attn_diag.captures.linear import linear_among, load_linear

        files, others = linear_among(self.paths or [])
        if not files:
            return None
        if others or self.example:
            kind = "capture" if len(files) == 1 else "captures"
            raise InputError(
                f"{len(files)} {kind} of linear attention beside others: look at them in a run of their own"
            )
        delivery.require_apart(files, also)
        captures, unreadable = [], []
        for file in files:
            try:
                captures.append(load_linear(file))
            except InputError as error:
                complain(error)
                unreadable.append(str(error))
        layers = numbers("--layer", layer)
        captures = [c for c in captures if layers is None or c.metadata.layer in layers]
        if not captures:
            raise InputError("none of the captures of linear attention could be read, or is of these layers")
        return captures, unreadable

    def one_linear(
        self, places: Places, delivery: Delivery, *, refused: Mapping[str, object]
    ) -> tuple[LinearCapture, int | None, list[str]] | None:
        """As ``linear``, for commands that look at one: with the head that is asked for.

        Args:
            places: Which head.
            delivery: As for ``open``.
            refused: Options that linear attention does not have, with what they are given; None or False: nothing.

        Raises:
            InputError: Several captures or heads are left, or such an option is given.
        """
        found = self.linear(places.layer, delivery)
        if found is None:
            return None
        captures, unreadable = found
        given = [name for name, value in refused.items() if value not in (None, False, [])]
        given += ["--batch"] if places.batch is not None else []
        if given:
            raise InputError(f"captures of linear attention take no {', '.join(given)}: leave it out")
        if len(captures) > 1:
            raise InputError(f"this command looks at one capture, got {len(captures)}; name one")
        return captures[0], places.one()[1], unreadable


@dataclass(frozen=True)
class Places:
    """Which heads, layers and batch items a command looks at."""

    head: Annotated[str | None, typer.Option("--head", help="Heads, such as 0,3-5 (the model's numbers).")] = None
    layer: Layers = None
    batch: Annotated[str | None, typer.Option("--batch", help="Batch items.")] = None

    def selection(self, observation: str | None) -> Selection:
        """All that the options name."""
        from attn_diag.captures.selection import Selection

        return Selection(observation, numbers("--head", self.head), numbers("--batch", self.batch))

    def one(self) -> tuple[int, int | None]:
        """The batch item (0 by default) and the model's number of the head (None by default) that a command looks at.

        Raises:
            InputError: An option names several.
        """
        head, batch = numbers("--head", self.head), numbers("--batch", self.batch)
        for what, named in (("head", head), ("batch item", batch)):
            if named is not None and len(named) != 1:
                raise InputError(f"this command looks at one {what}, got {named}; name one")
        return 0 if batch is None else next(iter(batch)), None if head is None else next(iter(head))


@dataclass(frozen=True)
class OnePlace(Places):
    """The same of a command that looks at one head."""

    head: Annotated[str | None, typer.Option("--head", help="This head (the model's number; default: the first).")] = (
        None
    )
    batch: Annotated[str | None, typer.Option("--batch", help="This batch item (default 0).")] = None


def open_captures(
    paths: list[Path], *, example: bool = False, layers: Ranges | None = None, options: dict[str, Any] | None = None
) -> tuple[list[Capture], list[str]]:
    """Open every capture of the paths.

    Args:
        paths: Files, and directories of them.
        example: Open the one that ships with the package, too.
        layers: Only captures of these.
        options: What is said instead of the files' metadata.

    Returns:
        The captures, and what was said on stderr of those that are missing or cannot be read.

    Raises:
        InputError: Nothing is named, can be read, or is of these layers.
    """
    from attn_diag.captures.loading import find_captures, half_written, load_each, load_example
    from attn_diag.captures.metadata import Metadata

    options = options or {}
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
    with progress_bar("captures opened") as progress:
        opened, unopened = load_each(once.values(), progress, **options)
    captures += opened
    failures += unopened
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


def numbers(option: str, value: str | None) -> Ranges | None:
    """The numbers and ranges that an option names; None for all."""
    from attn_diag.captures.selection import Ranges

    return None if value is None else Ranges.parse(option, value)


def number_or_all(option: str, value: str) -> int | Literal["all"]:
    """How many, or all, as an option says. Raises InputError for anything else."""
    if value == "all":
        return "all"
    try:
        return int(value)
    except ValueError:
        raise InputError(f"{option} must be a number or all, got {value!r}") from None


def listed(text: str | None) -> list[str] | None:
    """The names in a text with commas; None for no text."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def shape_of(text: str) -> tuple[int, int, int, int]:
    """The shape that ``--shape`` names. Raises InputError for one that is none."""
    try:
        b, h, t, d = (int(n) for n in text.split(","))
    except ValueError:
        raise InputError(f"--shape must be B,H,T,D (four integers), got {text!r}") from None
    return b, h, t, d


def labels(text: str | None, known: tuple[str, ...]) -> frozenset[str]:
    """The labels that ``--fail-on`` names. Raises InputError for unknown ones, or none."""
    names = frozenset(listed(text) or ())
    if text is not None and not names:
        raise InputError(f"--fail-on needs at least one label, got {text!r}; known: {', '.join(known)}")
    if unknown := sorted(names - set(known)):
        raise InputError(f"--fail-on: no label {', '.join(unknown)}; known: {', '.join(known)}")
    return names
