"""``attn-diag invariance``: one call of a kernel in every arrangement that should not matter."""

from __future__ import annotations

from typing import Annotated

import typer

from attn_diag.cli.delivery import Delivery, complain, progress_bar
from attn_diag.cli.limits import Limits
from attn_diag.cli.linear import Operator, refuse_softmax
from attn_diag.cli.options import Device, Html, command, listed, shape_of
from attn_diag.errors import InputError


@command
def invariance(
    *,
    kernel: Annotated[
        str,
        typer.Argument(
            metavar="KERNEL",
            help="MODULE:FUNCTION of fn(q, k, v) -> o (with --operator of fla's arguments), "
            "sdpa:flash (efficient, cudnn, math), flex_attention, "
            "flash_attn_4, …, or a recipe.",
        ),
    ],
    operator: Operator = None,
    recurrent: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Of linear attention the function that decodes.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    shape: Annotated[
        str | None,
        typer.Option(metavar="B,H,T,D", help="Of the call (default 3,4,333,64; of linear attention 3,2,100,32)."),
    ] = None,
    causal: Annotated[str, typer.Option(help="What the kernel masks: none, top-left or bottom-right.")] = "none",
    scale: Annotated[float | None, typer.Option(help="What it uses (default 1/sqrt(D)).")] = None,
    limits: Limits,
    backward: Annotated[
        bool | None,
        typer.Option("--backward/--no-backward", help="Demand gradients, or leave them out (default: if any)."),
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="NAMES", help="Only these arrangements.")] = None,
    allow: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Arrangements that may change bits, by rounding alone.")
    ] = None,
    repeats: Annotated[
        int, typer.Option(help="How often the same call is made again: more find what goes wrong now and then.")
    ] = 2,
    schedules: Annotated[
        bool, typer.Option("--schedules/--no-schedules", help="Name the order of keys of paths with other bits.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    delivery: Delivery,
    html: Html = None,
    device: Device = "auto",
) -> int:
    """Make the same call in every arrangement that should not matter, and say which does.

    Run to run, batch size and place, other items and heads, later tokens, padding, memory that was never written, a row
    alone, chunks, GQA, layouts, splits, torch.compile; forward and backward.

    Exit codes: 0 if nothing but rounding differs, and that only where it may; 1 if not; 2 if the kernel is another
    function than was asked for.
    """
    import torch

    from attn_diag.testing.invariance.invariance import invariance as run

    if dtype not in ("bf16", "fp16"):
        raise InputError(f"--dtype must be one of bf16, fp16, got {dtype!r}")
    delivery.require_apart([], [html])
    kind = torch.bfloat16 if dtype == "bf16" else torch.float16
    if operator is not None:
        from attn_diag.testing.linear.invariance import invariance_linear

        softmax = {"--causal": causal != "none", "--scale": scale, "--no-schedules": not schedules}
        refuse_softmax(softmax | limits.given())
        with progress_bar("arrangements") as progress:
            found = invariance_linear(
                kernel, operator, recurrent=recurrent, name=kernel, dtype=kind,
                shape=None if shape is None else shape_of(shape), backward=backward, only=listed(only),
                allow=listed(allow) or (), repeats=repeats, seed=seed, device=device, progress=progress,
            )  # fmt: skip
        delivery.deliver(found, html)
        return 0 if found.passed else 1
    if recurrent is not None:
        raise InputError("--recurrent is of linear attention: name its operator (--operator kda)")
    with progress_bar("arrangements") as progress:
        found = run(
            kernel, name=kernel, dtype=kind,
            shape=None if shape is None else shape_of(shape), causal=causal, scale=scale, **limits.stated(),
            backward=backward,
            only=listed(only), allow=listed(allow) or (), repeats=repeats, schedules=schedules, seed=seed,
            device=device, progress=progress,
        )  # fmt: skip
    delivery.deliver(found, html)
    if found.outcome == "other-function":
        complain(f"no verdict: {found.headline}")
        return 2
    return 0 if found.passed else 1
