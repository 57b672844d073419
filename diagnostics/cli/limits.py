"""``--window``, ``--softcap``, ``--alibi-slopes`` and ``--sinks`` of the commands that call a kernel."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from attn_diag.errors import InputError


@dataclass(frozen=True)
class Limits:
    """What a kernel makes of its scores, besides what causality masks."""

    window: Annotated[
        str | None,
        typer.Option(
            "--window", metavar="LEFT,RIGHT", help="Of row t it sees the keys t-LEFT to t+RIGHT alone (-1: all there)."
        ),
    ] = None
    softcap: Annotated[
        float | None, typer.Option("--softcap", metavar="C", help="Its scores are C tanh(scale q.k / C).")
    ] = None

    alibi_slopes: Annotated[
        str | None, typer.Option(metavar="S,S,…", help="Of a kernel with ALiBi: its slopes, one a head.")
    ] = None
    sinks: Annotated[
        str | None, typer.Option(metavar="S,S,…", help="Of a kernel with attention sinks: their logits, one a head.")
    ] = None

    def band(self) -> tuple[int, int] | None:
        """The window. Raises InputError for one that is none."""
        return window_of(self.window)

    def given(self) -> dict[str, object]:
        """What the command line says, by the option's name."""
        return {f"--{f.name.replace('_', '-')}": getattr(self, f.name) for f in fields(self)}

    def stated(self) -> dict[str, Any]:
        """As functions take them. Raises InputError for what is no window, or no numbers."""
        each = {"alibi_slopes": self.alibi_slopes, "sinks": self.sinks}
        return {
            "window": self.band(), "softcap": self.softcap, **{n: _numbers(n, given) for n, given in each.items()}
        }  # fmt: skip


def _numbers(name: str, given: str | None) -> list[float] | None:
    """Numbers between commas. Raises InputError where one is none."""
    if given is None:
        return None
    try:
        return [float(part) for part in given.split(",")]
    except ValueError:
        option = f"--{name.replace('_', '-')}"
        raise InputError(f"{option} must be numbers between commas, one a head, got {given!r}") from None


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
