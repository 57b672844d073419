"""``attn-diag identify``: which recipe and schedule made the captured outputs."""

from __future__ import annotations

from typing import Annotated

import typer

from attn_diag.cli.delivery import Delivery, complain, progress_bar
from attn_diag.cli.options import Device, Inputs, ObservationName, Overrides, Places, command


@command
def identify(
    *,
    inputs: Inputs,
    observation: ObservationName = None,
    places: Places,
    rows: Annotated[
        int | None, typer.Option(help="Query rows to compare (default: as many as have 2^20 scores, at least 128).")
    ] = None,
    delivery: Delivery,
    device: Device = "auto",
    overrides: Overrides,
) -> int:
    """Say which known recipe and order of keys reproduce a captured O bit for bit (first head unless --head)."""
    from attn_diag.analyses.identify import identify_captures

    linear = inputs.one_linear(places, delivery, refused={"--rows": rows, **overrides.given()})
    if linear is not None:
        from attn_diag.analyses.linear.identify import identify_linear

        one, head, unreadable = linear
        with progress_bar("recipes") as progress:
            delivery.deliver(identify_linear(one, observation=observation, head=head, device=device, progress=progress))
        return 2 if unreadable else 0
    captures, unreadable = inputs.open(places.layer, overrides, delivery)
    selection = places.selection(observation)
    with progress_bar("recipes") as progress:
        found = identify_captures(
            captures, selection=selection, rows=rows, device=device, progress=progress, unreadable=unreadable,
            skip=complain,
        )  # fmt: skip
    delivery.deliver(found)
    return 2 if found.unreadable else 0
