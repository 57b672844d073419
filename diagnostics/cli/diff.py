"""``attn-diag diff``: what changed between two diagnoses, beyond chance."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from attn_diag.captures.places import place
from attn_diag.cli.delivery import Delivery, complain, progress_bar
from attn_diag.cli.options import Html, Level, SomeDevice, command, labels, listed
from attn_diag.errors import InputError

if TYPE_CHECKING:
    from attn_diag.results.diagnosis import Diagnosis

_HELP = "A diagnosis (JSON or HTML report), a capture, or a folder of captures."
# Beside the outcomes of heads.
_UNMATCHED = "unmatched"


@command
def diff(
    *,
    a: Annotated[Path, typer.Argument(metavar="A", parser=place, help=f"Before: {_HELP[0].lower()}{_HELP[1:]}")],
    b: Annotated[Path, typer.Argument(metavar="B", parser=place, help="After: the same.")],
    a_observation: Annotated[str | None, typer.Option(help="Only this observation of A.")] = None,
    b_observation: Annotated[
        str | None, typer.Option(help="Only this observation of B (two kernels of one file).")
    ] = None,
    match: Annotated[
        str | None,
        typer.Option(metavar="KEYS", help="Match heads by these alone, such as layer,head across steps."),
    ] = None,
    delivery: Delivery,
    html: Html = None,
    fail_on: Annotated[
        str | None,
        typer.Option(metavar="CHANGES", help="Exit with 1 if a head has one of these: became-biased,grew,…"),
    ] = None,
    level: Level = 0.01,
    device: SomeDevice = None,
) -> int:
    """Say what became biased from A to B, what was cured, and what grew or shrank, beyond chance."""
    from attn_diag.analyses.comparison.diff import as_diagnosis, compare
    from attn_diag.analyses.comparison.matching import KEYS, only
    from attn_diag.results.comparison import Outcome
    from attn_diag.statistics.means import require_level

    require_level(level)
    if _both_linear(a, b):
        if match is not None:
            raise InputError("captures of linear attention take no --match: leave it out")
        delivery.require_apart([a, b], [html], what="one of the two")
        return _linear(a, b, (a_observation, b_observation), delivery, html, fail_on, level, device or "auto")
    if device is not None and not any(_is_inspected(side) for side in (a, b)):
        raise InputError("two saved diagnoses are compared on no device; leave --device out")
    wanted = labels(fail_on, (*get_args(Outcome), _UNMATCHED))
    by = listed(match) or []
    if unknown := [name for name in by if name not in KEYS] or (["nothing"] if match is not None and not by else []):
        raise InputError(f"--match takes some of {', '.join(KEYS)}, got {unknown[0]}")
    delivery.require_apart([a, b], [html], what="one of the two")
    made: dict[Path, Diagnosis] = {}  # two observations of one file are inspected together
    for path, observation in ((a, a_observation), (b, b_observation)):
        with progress_bar() as progress:
            made[path] = made.get(path) or as_diagnosis(
                str(path), level=level, device=device or "auto", progress=progress, skip=complain,
                observation=observation,
            )  # fmt: skip
    sides = [
        made[path] if observation is None else only(made[path], observation, str(path))
        for path, observation in ((a, a_observation), (b, b_observation))
    ]
    found = compare(sides[0], sides[1], level=level, sources=(str(a), str(b)), by=by)
    delivery.deliver(found, html)
    if found.a.unreadable or found.b.unreadable:
        return 2
    happened = {*found.outcomes, *([_UNMATCHED] if found.unmatched else [])}
    return 1 if wanted & happened else 0


def _both_linear(a: Path, b: Path) -> bool:
    """Whether both are captures of linear attention. Raises InputError where one is."""
    if not any(_is_inspected(side) for side in (a, b)):
        return False  # diagnoses are compared without torch
    from attn_diag.captures.linear import linear_among

    linear = [bool(linear_among([path])[0]) for path in (a, b)]
    if linear[0] != linear[1]:
        raise InputError(f"{(a, b)[linear.index(True)]} is a capture of linear attention, and the other side is not")
    return linear[0]


def _is_inspected(side: Path) -> bool:
    """Whether a side is captures, and not a saved diagnosis."""
    from attn_diag.captures.files import CAPTURE_SUFFIXES

    return side.suffix in CAPTURE_SUFFIXES or side.is_dir()


def _linear(
    a: Path, b: Path, observations: tuple[str | None, str | None], delivery: Delivery, html: Path | None,
    fail_on: str | None, level: float, device: str,
) -> int:  # fmt: skip
    from attn_diag.analyses.linear.diff import diff_linear
    from attn_diag.results.linear_comparison import DifferenceAnswer

    wanted = labels(fail_on, get_args(DifferenceAnswer))
    found = diff_linear(a, b, a_observation=observations[0], b_observation=observations[1], level=level, device=device)
    delivery.deliver(found, html)
    return 1 if wanted & found.answers else 0
