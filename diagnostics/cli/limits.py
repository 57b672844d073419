"""``--window`` and ``--softcap`` of the commands that call a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from attn_diag.errors import InputError


@dataclass(frozen=True)
class Limits:
    """What a kernel leaves out of its softmax, besides what causality masks."""

    window: Annotated[
        str | None,
        typer.Option(
            "--window", metavar="LEFT,RIGHT", help="Of row t it sees the keys t-LEFT to t+RIGHT alone (-1: all there)."
        ),
    ] = None
    softcap: Annotated[
        float | None, typer.Option("--softcap", metavar="C", help="Its scores are C tanh(scale q.k / C).")
    ] = None

    def band(self) -> tuple[int, int] | None:
        """The window. Raises InputError for one that is none."""
        return window_of(self.window)

    def given(self) -> dict[str, object]:
        """What the command line says, by the option's name."""
        return {"--window": self.window, "--softcap": self.softcap}


def window_of(given: str | None) -> tuple[int, int] | None:
    """LEFT,RIGHT as two integers. Raises InputError where it is not."""
    from attn_diag.captures.metadata import parse_window

    if given is None:
        return None
    try:
        return parse_window(given)
    except ValueError:
        keys = int(given) if given.strip().isdecimal() else 0
        hint = f": {keys} keys, a row's own among them, are {keys - 1},0 under a causal mask" if keys else ""
        raise InputError(f"--window must be LEFT,RIGHT (two integers), got {given!r}{hint}") from None
