"""``attn-diag mismatch``: where two runs of the same tokens part, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from attn_diag.cli.delivery import Delivery, progress_bar
from attn_diag.cli.options import Device, Html, command, labels


@command
def mismatch(
    *,
    train: Annotated[
        Path, typer.Argument(metavar="TRAIN", help="Captures of the trainer's forward: a folder or file.")
    ],
    rollout: Annotated[
        Path, typer.Argument(metavar="ROLLOUT", help="Captures of the engine on the same tokens, in any layout.")
    ],
    logprobs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A .npz or .safetensors with train_logprobs and rollout_logprobs [B, T] of the sampled tokens, and "
            "mask, where they count.",
        ),
    ] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(metavar="LABELS", help="Exit with 1 if there is a cause of one: semantics,rounding,unnamed."),
    ] = None,
    delivery: Delivery,
    html: Html = None,
    device: Device = "auto",
) -> int:
    """Say where trainer and engine part on the same tokens, why, who is nearer float64, and what would be left.

    Each layer's difference of O is split into what came in, another semantics, and rounding.
    """
    from attn_diag.analyses.mismatch.logprobs import read_logprobs
    from attn_diag.analyses.mismatch.mismatch import mismatch as run
    from attn_diag.results.mismatch import MismatchLabel

    wanted = labels(fail_on, get_args(MismatchLabel))
    inputs = [train, rollout, *([logprobs] if logprobs is not None else [])]
    delivery.require_apart(inputs, [html], what="one of the inputs")
    known = None if logprobs is None else read_logprobs(logprobs)
    with progress_bar("layers") as progress:
        found = run(train, rollout, logprobs=known, device=device, progress=progress)
    delivery.deliver(found, html)
    return 1 if wanted & found.labels else 0
