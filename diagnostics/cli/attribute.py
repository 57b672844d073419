"""``attn-diag attribute``: which rounding site makes the errors."""

from __future__ import annotations

from typing import Annotated

import typer

from attn_diag.cli.delivery import Delivery, progress_bar
from attn_diag.cli.options import Device, Inputs, Level, ObservationName, Overrides, Places, command


@command
def attribute(
    *,
    inputs: Inputs,
    observation: ObservationName = None,
    recipe: Annotated[
        str | None, typer.Option(help="Recipe to take apart (default: the one that makes the captured O).")
    ] = None,
    places: Places,
    delivery: Delivery,
    level: Level = 0.01,
    device: Device = "auto",
    overrides: Overrides,
) -> int:
    """Say which rounding site makes the errors of O, delta, dQ and dW_Q, head by head."""
    from attn_diag.analyses.attribution.attribute import attribute as take_apart

    if (linear := inputs.one_linear(places, delivery, refused=overrides.given())) is not None:
        from attn_diag.analyses.linear_recipes.attribute import attribute_linear

        one, head, unreadable = linear
        with progress_bar("runs") as progress:
            shares = attribute_linear(
                one, recipe=recipe, observation=observation, head=head, device=device, progress=progress
            )
        delivery.deliver(shares)
        return 2 if unreadable else 0
    capture, unreadable = inputs.open_one(places.layer, overrides, delivery)
    selection = places.selection(observation)
    with progress_bar("rows") as progress:
        found = take_apart(capture, recipe=recipe, selection=selection, level=level, device=device, progress=progress)
    delivery.deliver(found)
    return 2 if unreadable else 0
