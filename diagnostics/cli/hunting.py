"""``--hunt`` of ``replay`` and ``check``: which inputs break a kernel, and the smallest of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attn_diag.cli.delivery import Delivery, progress_bar
from attn_diag.cli.options import listed
from attn_diag.errors import InputError

if TYPE_CHECKING:
    from attn_diag.captures.capture import Capture
    from attn_diag.results.hunt import Hunt


@dataclass(frozen=True)
class Hunting:
    """What a hunt is asked for."""

    hunt: Annotated[
        bool,
        typer.Option("--hunt", help="Change the inputs until a kernel gets one wrong; save the smallest such cases."),
    ] = False
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Where --hunt saves cases and the scripts that run them (default attn-diag-hunt); check without "
            "--hunt: where it saves the cases that fail, as captures (default nowhere).",
        ),
    ] = None
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="How long --hunt searches for each kernel and capture (default 300); it then reduces what it found, "
            "for as long again at most.",
        ),
    ] = None
    axes: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="What --hunt changes, separated by commas: head size, group, mask, length, values, layout, dtype, "
            "batch, key heads (default all).",
        ),
    ] = None
    limit: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="How long each kernel (300), or each case of --hunt (120), may take."),
    ] = None

    def refuse_without(self, *options: str) -> None:
        """Raise InputError for options that --hunt alone reads, where there is no hunt."""
        given = [f"--{name}" for name in options if getattr(self, name) is not None]
        if given and not self.hunt:
            raise InputError(f"{', '.join(given)} is for --hunt alone: add --hunt, or leave it out")

    def run(
        self,
        kernels: str | Sequence[str] | None,
        captures: Callable[[], Sequence[Capture]],
        *,
        device: str,
        delivery: Delivery,
        html: Path | None = None,
        unreadable: Sequence[str] = (),
    ) -> Hunt:
        """Hunt and deliver; ``captures`` are made once the imports are."""
        from attn_diag.testing.hunting.hunt import DEFAULT_BUDGET_S, DEFAULT_LIMIT_S, hunt_captures

        with progress_bar("cases") as progress:
            found = hunt_captures(
                kernels, captures(), folder=self.out or Path("attn-diag-hunt"), only=listed(self.axes),
                budget_s=DEFAULT_BUDGET_S if self.budget is None else self.budget,
                limit_s=DEFAULT_LIMIT_S if self.limit is None else self.limit, device=device, progress=progress,
                unreadable=unreadable,
            )  # fmt: skip
        delivery.deliver(found, html)
        return found


def refuse_beside_hunt(given: Mapping[str, object]) -> None:
    """Raise InputError for options that a hunt would not read; None and False: not given."""
    if beside := [name for name, value in given.items() if value is not None and value is not False]:
        raise InputError(f"--hunt has no {', '.join(beside)}")
