"""``attn-diag replay``: is it the kernel or the head? A capture through every kernel that is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from attn_diag.cli.delivery import Delivery, complain, progress_bar
from attn_diag.cli.hunting import Hunting, refuse_beside_hunt
from attn_diag.cli.linear import refuse_softmax
from attn_diag.cli.options import (
    Device,
    Html,
    Inputs,
    Level,
    ObservationName,
    Overrides,
    Places,
    command,
    labels,
    listed,
)

if TYPE_CHECKING:
    from attn_diag.results.replay import Replay

_FAILURES = ("kernel", "metadata", "head", "undecided", "failed")


@command
def replay(
    *,
    inputs: Inputs,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Kernels, separated by commas or repeated: installed (default), sdpa:flash, flex_attention, "
            "flash_attn_4, …, a recipe, or MODULE:FUNCTION of fn(q, k, v) -> o; of linear attention: recipe, or "
            "MODULE:FUNCTION with flash-linear-attention's arguments.",
        ),
    ] = None,
    observation: ObservationName = None,
    places: Places,
    hunting: Hunting,
    level: Level = 0.01,
    device: Device = "auto",
    delivery: Delivery,
    html: Html = None,
    fail_on: Annotated[
        str | None,
        typer.Option(metavar="ANSWERS", help=f"Exit with 1 if it is one of these: {','.join(_FAILURES)}."),
    ] = None,
    overrides: Overrides,
) -> int:
    """Run a capture's inputs through every installed kernel, each in a process of its own: the kernel, or the head?

    With --hunt each kernel's inputs are changed (head size, lengths, groups, mask, strides, values) until it gets one
    wrong.
    """
    from attn_diag.testing.replaying.replay import DEFAULT_LIMIT_S, replay_captures

    wanted = labels(fail_on, _FAILURES)
    hunting.refuse_without("out", "budget", "axes")
    names = None if against is None else [name for text in against for name in listed(text) or ()]
    if (linear := inputs.linear(places.layer, delivery, [html])) is not None:
        from attn_diag.testing.replaying.linear import replay_linear

        refuse_softmax(
            {"--observation": observation, "--head": places.head, "--batch": places.batch, "--hunt": hunting.hunt,
             **overrides.given()}
        )  # fmt: skip
        with progress_bar("functions") as progress:
            found = replay_linear(
                linear[0], against=names, level=level, limit_s=hunting.limit or DEFAULT_LIMIT_S, device=device,
                progress=progress, unreadable=linear[1],
            )  # fmt: skip
        delivery.deliver(found, html)
        return _exit_code(found, wanted)
    if hunting.hunt:
        refuse_beside_hunt({"--observation": observation, "--head": places.head, "--batch": places.batch})
    captures, unreadable = inputs.open(places.layer, overrides, delivery, [html])
    if hunting.hunt:
        hunted = hunting.run(
            names, lambda: captures, device=device, delivery=delivery, html=html, unreadable=unreadable
        )
        return 2 if unreadable else int("kernel" in wanted and not hunted.passed)
    selection = places.selection(observation)
    limit = DEFAULT_LIMIT_S if hunting.limit is None else hunting.limit
    with progress_bar("kernels") as progress:
        found = replay_captures(
            captures, against=names, selection=selection, limit_s=limit, level=level, device=device,
            progress=progress, unreadable=unreadable, skip=complain,
        )  # fmt: skip
    delivery.deliver(found, html)
    return _exit_code(found, wanted)


def _exit_code(found: Replay, wanted: frozenset[str]) -> int:
    answers = {c.cause for c in found.captures} | ({"failed"} if found.failed else set())
    refused = all(k.outcome == "refused" for c in found.captures for k in c.kernels if not k.captured)
    return 2 if found.unreadable or refused else int(bool(answers & wanted))
