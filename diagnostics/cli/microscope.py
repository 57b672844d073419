"""``attn-diag microscope``: one element of O, rounding by rounding."""

from __future__ import annotations

from typing import Annotated

import typer

from attn_diag.cli.delivery import Delivery, complain, progress_bar
from attn_diag.cli.options import Device, Inputs, ObservationName, OnePlace, Overrides, command


@command
def microscope(
    *,
    inputs: Inputs,
    row: Annotated[int | None, typer.Option(help="Query row T, counted from 0 within the capture.")] = None,
    feature: Annotated[int | None, typer.Option(help="Feature I of O, counted from 0.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe to walk (default: the one that makes the O).")] = None,
    observation: ObservationName = None,
    places: OnePlace,
    delivery: Delivery,
    device: Device = "auto",
    overrides: Overrides,
) -> int:
    """Show how one element of O came about: operands, ties, residual, and the prefix error.

    Without --row or --feature: where the captured O is furthest from its correctly rounded value.
    """
    from attn_diag.analyses.microscopy.microscope import microscope as look

    capture, unreadable = inputs.open_one(places.layer, overrides, delivery)
    batch, head = places.one()
    with progress_bar("steps") as progress:
        result = look(
            capture, row=row, feature=feature, recipe=recipe, observation=observation, device=device, batch=batch,
            head=head, progress=progress,
        )  # fmt: skip
    if not result.bit_equal:
        complain(
            f"the walk gives {result.walked!r} where the emulation has {result.emulated!r}: they add in different "
            "orders"
        )
    delivery.deliver(result)
    return 2 if unreadable else 0
