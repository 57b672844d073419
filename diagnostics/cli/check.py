"""``attn-diag check``: a kernel against its baseline, for CI."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attn_diag.captures.files import CAPTURE_SUFFIXES
from attn_diag.cli.delivery import Delivery, progress_bar, write_text
from attn_diag.cli.hunting import Hunting, refuse_beside_hunt
from attn_diag.cli.limits import Limits
from attn_diag.cli.linear import Operator, linear_asked, linear_captures, refuse_softmax
from attn_diag.cli.options import Declared, Device, ObservationName, command, listed, open_captures
from attn_diag.errors import InputError

if TYPE_CHECKING:
    from attn_diag.results.check import CheckReport

_DTYPES = ("bf16", "fp16")


@command
def check(
    *,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="MODULE:FUNCTION of fn(q, k, v) -> o (with --operator of fla's arguments), sdpa, sdpa:flash "
            "(efficient, cudnn, math), a recipe, or a capture or folder of stored observations.",
        ),
    ],
    operator: Operator = None,
    baseline: Annotated[Path | None, typer.Option(metavar="FILE", help="What was accepted before (JSON).")] = None,
    save: Annotated[bool, typer.Option("--save", help="Add this kernel's entry to the baseline.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Replace it.")] = False,
    cases: Annotated[str | None, typer.Option(metavar="NAMES", help="Only these, separated by commas.")] = None,
    capture: Annotated[
        list[Path] | None, typer.Option("--capture", metavar="PATH", help="Inputs of a capture too; repeatable.")
    ] = None,
    observation: ObservationName = None,
    exact: Annotated[bool, typer.Option("--exact", help="Other bits than the baseline's fail.")] = False,
    declared: Declared = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    causal: Annotated[str, typer.Option(help="What the kernel masks: none, top-left or bottom-right.")] = "none",
    head_dim: Annotated[
        int | None, typer.Option(help="D of the suite's inputs (default 64, of linear attention 32).")
    ] = None,
    length: Annotated[int | None, typer.Option(help="T of the suite's inputs (default 192).")] = None,
    scale: Annotated[float | None, typer.Option(help="What the kernel uses (default 1/sqrt(D)).")] = None,
    limits: Limits,
    backward: Annotated[
        bool | None,
        typer.Option("--backward/--no-backward", help="Demand gradients, or leave them out (default: if any)."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    level: Annotated[float, typer.Option(help="Chance of a false alarm of bias in a run (Holm).")] = 0.01,
    hunting: Hunting,
    device: Device = "auto",
    delivery: Delivery,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.")] = None,
    github: Annotated[
        bool | None,
        typer.Option("--github/--no-github", help="Annotations and step summary (default: on in GitHub Actions)."),
    ] = None,
) -> int:
    """Run a kernel on structured and random inputs: is it biased, less accurate than before, or other in its bits?

    With --hunt its inputs (those of --capture, or normal numbers) are changed until it gets one wrong.
    """
    import torch

    from attn_diag.testing.regression.cases import LENGTH
    from attn_diag.testing.regression.check import check as run

    if dtype not in _DTYPES:
        raise InputError(f"--dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    hunting.refuse_without("budget", "axes", "limit")
    delivery.require_apart(capture or [], [junit, baseline if save or update else None])
    kind = torch.bfloat16 if dtype == "bf16" else torch.float16
    if linear_asked(operator, [target]):
        from attn_diag.testing.linear.cases import SHAPE
        from attn_diag.testing.linear.check import check_linear

        softmax = {"--causal": causal != "none", "--scale": scale, "--declared": declared, "--out": hunting.out}
        refuse_softmax(softmax | limits.given() | {"--length": length, "--hunt": hunting.hunt})
        with progress_bar("cases") as progress:
            found = check_linear(
                linear_captures([target]) or target, operator, baseline=baseline, save=save, update=update,
                cases=listed(cases), captures=linear_captures(capture or []), observation=observation, exact=exact,
                dtype=kind, head_dim=SHAPE[3] if head_dim is None else head_dim, backward=backward,
                seed=seed, level=level, device=device, progress=progress,
            )  # fmt: skip
        return _told(found, delivery, junit, github=github)
    head_dim = 64 if head_dim is None else head_dim
    inputs = open_captures(capture)[0] if capture else []
    if hunting.hunt:
        from attn_diag.testing.hunting.hunt import declaring, drawn_capture
        from attn_diag.testing.stated import Stated

        refuse_beside_hunt(
            {"--baseline": baseline, "--cases": cases, "--observation": observation, "--junit": junit, "--save": save,
             "--update": update, "--exact": exact, "--length": length,
             "--backward or --no-backward": backward is not None}
        )  # fmt: skip
        stated = Stated.of(causal, scale, head_dim, **limits.stated())
        drawn = drawn_capture(stated, dtype=kind, head_dim=head_dim, seed=seed)
        started = [declaring(capture, declared) for capture in inputs or [drawn]]
        hunted = hunting.run(target, lambda: started, device=device, delivery=delivery)
        return 0 if hunted.passed else 1
    with progress_bar("cases") as progress:
        found = run(
            _subject(target), baseline=baseline, save=save, update=update, cases=listed(cases), captures=inputs,
            observation=observation, exact=exact, dtype=kind, causal=causal, head_dim=head_dim,
            length=LENGTH if length is None else length, scale=scale, **limits.stated(),
            backward=backward, seed=seed, level=level,
            device=device, declared=declared, folder=hunting.out, progress=progress,
        )  # fmt: skip
    return _told(found, delivery, junit, github=github)


def _told(found: CheckReport, delivery: Delivery, junit: Path | None, *, github: bool | None) -> int:
    """Deliver the report everywhere; the exit code."""
    delivery.deliver(found)
    if junit is not None:
        from attn_diag.reports.ci import junit_document

        write_text(junit, junit_document(found))
    if github or (github is None and os.environ.get("GITHUB_ACTIONS") == "true"):
        _tell_github(found, annotate=delivery.json != "-")
    return 0 if found.passed else 1


def _subject(target: str) -> Any:
    """The captures of a path, or the name of what is run."""
    if target.partition(":")[0] == "sdpa":
        return target
    path = Path(target)
    # Path.exists raises for a name too long to be a file's.
    if os.path.exists(path) or path.suffix in CAPTURE_SUFFIXES:  # noqa: PTH110
        return open_captures([path])[0]
    return target


def _tell_github(found: CheckReport, *, annotate: bool) -> None:
    """Workflow commands go to stdout (to stderr where JSON alone is asked for there), the summary to its file."""
    from attn_diag.reports.ci import step_summary, workflow_commands

    for line in workflow_commands(found):
        print(line, file=sys.stdout if annotate else sys.stderr)
    if target := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with Path(target).open("a", encoding="utf-8") as file:
                file.write(step_summary(found))
        except OSError as error:
            raise InputError(f"cannot write the step summary {target}: {error.strerror}") from None
