"""What commands that run kernels do where these are of linear attention."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attn_diag.errors import InputError

if TYPE_CHECKING:
    from attn_diag.captures.linear import LinearCapture

Operator = Annotated[
    str | None,
    typer.Option("--operator", metavar="NAME", help="The kernel is linear attention: gated_delta_rule, kda, mamba2, …"),
]


def linear_asked(operator: str | None, paths: Sequence[str | Path]) -> bool:
    """Whether a run is of linear attention: an operator is named, or the first path is a capture of one."""
    if operator is not None:
        return True
    from attn_diag.captures.linear import linear_among

    there = [Path(path) for path in paths if os.path.exists(path)]  # noqa: PTH110 - Path.exists raises for long names
    return bool(there and linear_among(there)[0])


def linear_captures(paths: Sequence[str | Path]) -> list[LinearCapture]:
    """The captures of linear attention among paths; none where a path is no file or folder.

    Raises:
        InputError: There are others beside them, or one cannot be read.
    """
    from attn_diag.captures.linear import linear_among, load_linear

    there = [Path(path) for path in paths if os.path.exists(path)]  # noqa: PTH110 - as above
    if not there:
        return []
    files, others = linear_among(there)
    if others:
        raise InputError(
            f"{others} of these are no captures of linear attention (metadata kind=linear): leave them out"
        )
    return [load_linear(file) for file in files]


def refuse_softmax(given: Mapping[str, object]) -> None:
    """Raise InputError for options that linear attention does not have; None and False: not given."""
    if named := [name for name, value in given.items() if value not in (None, False, [])]:
        cases = " (`check --operator` runs its own cases, and --cases chooses among them)" if "--hunt" in named else ""
        raise InputError(f"linear attention takes no {', '.join(named)}: leave it out{cases}")
