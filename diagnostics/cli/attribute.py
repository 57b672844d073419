"""``attn-diag attribute``: which rounding site makes the errors."""

from __future__ import annotations

from typing import Annotated

import typer

from attn_diag.cli.delivery import Delivery, complain, progress_bar
from attn_diag.cli.options import Device, Html, Inputs, ObservationName, Overrides, Places, SomeLevel, command


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
    html: Html = None,
    level: SomeLevel = None,
    device: Device = "auto",
    overrides: Overrides,
) -> int:
    """Say which rounding site makes the errors of O, delta, dQ and dW_Q, head by head.

    Of several captures, such as all layers of a step: which layers, heads and sites carry dW_Q's error.
    """
    from attn_diag.analyses.attribution.of_captures import attribute_captures

    refused = {"--html": html, "--level": level, **overrides.given()}
    if (linear := inputs.one_linear(places, delivery, refused=refused)) is not None:
        from attn_diag.analyses.linear.attribute import attribute_linear

        one, head, unreadable = linear
        with progress_bar("runs") as progress:
            shares = attribute_linear(
                one, recipe=recipe, observation=observation, head=head, device=device, progress=progress
            )
        delivery.deliver(shares)
        return 2 if unreadable else 0
    captures, unreadable = inputs.open(places.layer, overrides, delivery, [html])
    at = 0.01 if level is None else level
    with progress_bar("heads" if len(captures) > 1 else "rows") as progress:
        found = attribute_captures(
            captures, recipe=recipe, selection=places.selection(observation), level=at, device=device,
            progress=progress, unreadable=unreadable, skip=complain if len(captures) > 1 else None,
        )  # fmt: skip
    for warning in found.warnings:
        complain(warning)
    # One capture is told of in full.
    delivery.deliver(found if len(captures) > 1 else found.results[0], html)
    return 2 if found.unreadable else 0
