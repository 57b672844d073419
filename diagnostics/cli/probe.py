"""``attn-diag probe``: signed defects of a recipe, or of a Python function, on inputs with known answers."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from attn_diag.cli.delivery import Delivery, complain, progress_bar
from attn_diag.cli.limits import Limits
from attn_diag.cli.options import Device, Level, command, labels, listed, shape_of
from attn_diag.errors import InputError


@command
def probe(
    *,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="MODULE:FUNCTION of fn(q, k, v) -> o, sdpa, sdpa:flash (efficient, cudnn, math), or a recipe.",
        ),
    ],
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    shape: Annotated[str | None, typer.Option(metavar="B,H,T,D", help="Of one call (default 4,4,384,64).")] = None,
    causal: Annotated[str, typer.Option(help="What fn masks: none, top-left or bottom-right.")] = "none",
    scale: Annotated[float | None, typer.Option(help="What fn uses (default 1/sqrt(D)).")] = None,
    limits: Limits,
    probes: Annotated[str | None, typer.Option(metavar="NAMES", help="Only these, separated by commas.")] = None,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    fail_on: Annotated[
        str | None, typer.Option("--fail-on", metavar="LABELS", help="Exit with 1 on these too.")
    ] = None,
    delivery: Delivery,
    level: Level = 0.01,
    device: Device = "auto",
) -> int:
    """Run an attention on inputs with known answers, and say where it is biased, too far off or not invariant.

    Exit codes: 0 if it rounds as a sound kernel does, 1 if not (NaN and Inf among it) or on what --fail-on names, 2 if
    it is another function than was asked for (the command that is right is printed).
    """
    from attn_diag.results.probe import Label
    from attn_diag.testing.probing.probe import probe as run
    from attn_diag.testing.target import DTYPES

    wanted = labels(fail_on, get_args(Label))
    dtypes = {name: found for found, name in DTYPES.items()}
    if dtype not in dtypes:
        raise InputError(f"--dtype must be one of {', '.join(dtypes)}, got {dtype!r}")
    delivery.require_apart([])
    with progress_bar("probes") as progress:
        found = run(
            target, name=target, dtype=dtypes[dtype], causal=causal,
            shape=None if shape is None else shape_of(shape), scale=scale, probes=listed(probes), seed=seed,
            **limits.stated(), level=level, device=device, progress=progress,
        )  # fmt: skip
    delivery.deliver(found)
    if found.outcome == "other-function":
        complain(f"no verdict: {found.summary[0]}")
        return 2
    return 1 if found.outcome == "fail" or wanted & found.labels else 0
