"""``attn-diag convert``: other tools' dumps in, captures out."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attn_diag.cli.delivery import complain, progress_bar
from attn_diag.cli.options import Overrides, command


class _Kind(StrEnum):
    """Whose dump it is."""

    auto = "auto"
    flashinfer = "flashinfer"
    sglang = "sglang"
    torch = "torch"


@command
def convert(
    *,
    path: Annotated[
        Path, typer.Argument(metavar="DUMP", help="A dump: its folder, or a file written with torch.save.")
    ],
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="A folder for one capture a call; or a .safetensors file for one call."),
    ],
    kind: Annotated[
        _Kind,
        typer.Option(
            "--from",
            metavar="KIND",
            help="Whose dump: auto, flashinfer (its flight recorder), sglang (its dumper), or torch (torch.save).",
        ),
    ] = _Kind.auto,
    names: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="NAME=KEY", help="Which tensor is which, such as q=layers.*.query (repeatable)."),
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="Only this layer; or the layer of the only call, where the dump states none.")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option("--head-dim", help="Features of a head, where heads and features share one axis.")
    ] = None,
    overrides: Overrides,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files.")] = False,
) -> int:
    """Convert dumps of FlashInfer, SGLang or torch.save to captures that inspect reads; every guess is printed."""
    from attn_diag.analyses.conversion import MISFIT, UNCONFIRMED
    from attn_diag.analyses.conversion import convert as run
    from attn_diag.captures.dumps.names import parse_map
    from attn_diag.errors import InputError
    from attn_diag.printing import printable, say
    from attn_diag.results.wording import plural

    options = overrides.metadata()
    failed: list[InputError] = []

    def skip(error: InputError) -> None:
        failed.append(error)
        complain(error)

    lines: list[str] = []
    files = misfits = guesses = 0

    def told(written: Path, notes: tuple[str, ...]) -> None:
        nonlocal files, misfits, guesses
        files += 1
        misfits += any(MISFIT in note for note in notes)
        guesses += any(UNCONFIRMED in note for note in notes)
        lines.append(printable(str(written)))
        lines.extend(f"  {printable(note)}" for note in notes)

    try:
        with progress_bar("files") as progress:
            run(
                path, out, kind=kind.value, names=parse_map(names or ()), layer=layer, head_dim=head_dim,
                force=force, skip=skip, told=told, progress=progress, **options,
            )  # fmt: skip
    finally:
        # How many there are is known at the end, and said first; what was written is told even if a later call fails.
        if files:
            left = f", {plural(len(failed), 'call')} left out" if failed else ""
            left += f", in {misfits} of which an output does not agree with q, k and v (see below)" if misfits else ""
            left += f", in {guesses} of which a guess is confirmed by nothing (see below)" if guesses else ""
            word = "FAIL" if failed else "UNDECIDED" if misfits or guesses else "OK"
            named = f"{word} {plural(files, 'capture')} of {printable(str(path))}{left}"
            say(f"{named}; next: attn-diag inspect {printable(str(out))}", sys.stdout)
        for line in lines:
            say(line, sys.stdout)
    return 2 if failed else 0
