"""``attn-diag what-if``: other recipes and mitigations on one captured head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attn_diag.captures.places import place
from attn_diag.cli.delivery import Delivery, progress_bar
from attn_diag.cli.options import Device, Example, Inputs, ObservationName, OnePlace, Overrides, SomeLevel, command


@command
def what_if(
    *,
    path: Annotated[
        Path | None, typer.Argument(parser=place, metavar="[PATH]", help="A capture (.safetensors, .pt, .npz).")
    ] = None,
    example: Example = False,
    observation: ObservationName = None,
    recipe: Annotated[
        str | None, typer.Option(help="The baseline, instead of the recipe that made the captured O.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this candidate, or a pattern such as 'stabilised-*' (repeatable).")
    ] = None,
    beta: Annotated[
        list[float] | None, typer.Option(help="A beta of the stabilised softmax (repeatable), instead of 1.5 to 8.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each stochastic rounding; 0 for none (default 4).")] = None,
    places: OnePlace,
    delivery: Delivery,
    level: SomeLevel = None,
    device: Device = "auto",
    overrides: Overrides,
) -> int:
    """Rank mitigations and other recipes by the error and bias they leave on one captured head, and by their cost."""
    from attn_diag.analyses.mitigation.mitigations import BETAS, SEEDS
    from attn_diag.analyses.mitigation.what_if import what_if as run

    inputs = Inputs([] if path is None else [path], example)
    refused = {"--only": only, "--beta": beta, "--seeds": seeds, "--level": level, **overrides.given()}
    if (linear := inputs.one_linear(places, delivery, refused=refused)) is not None:
        from attn_diag.analyses.linear.what_if import what_if_linear

        one, head, unreadable = linear
        with progress_bar("recipes") as progress:
            other = what_if_linear(
                one, recipe=recipe, observation=observation, head=head, device=device, progress=progress
            )
        delivery.deliver(other)
        return 2 if unreadable else 0
    capture, unreadable = inputs.open_one(places.layer, overrides, delivery)
    batch, head = places.one()
    at = 0.01 if level is None else level
    with progress_bar("rows") as progress:
        result = run(
            capture, observation=observation, recipe=recipe, batch=batch, head=head, only=only or (),
            betas=beta or BETAS, seeds=SEEDS if seeds is None else seeds, level=at, device=device, progress=progress,
        )  # fmt: skip
    delivery.deliver(result)
    return 2 if unreadable else 0
