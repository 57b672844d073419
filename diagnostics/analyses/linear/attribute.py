"""Which rounding sites of a recipe make the errors of o, of the state and of every gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from attn_diag.analyses.attribution.shapley import Subset, SubsetPlan
from attn_diag.analyses.linear.identify import recipe_of
from attn_diag.analyses.linear.recipes import (
    SITES,
    head_index,
    opened,
    site_formats,
    squares_of,
    with_sites,
)
from attn_diag.captures.linear import LinearCapture
from attn_diag.head.linear import recipe_name
from attn_diag.head.machine import describe_tool
from attn_diag.head.quality import LOSSY
from attn_diag.results.linear_recipes import LinearAttribution, LinearHeadAttribution, LinearSite, LinearSiteEffect
from attn_diag.results.wording import LINEAR_SYMBOLS, between, percent, together

# A site that makes this part of a squared error is named for it.
_GUILTY = 0.5
# Where a site takes away more than this, errors of sites cancel, and no one of them makes the error.
_CANCELS = 0.1


def attribute_linear(
    source: LinearCapture | str | Path, *, recipe: str | None = None, observation: str | None = None,
    head: int | None = None, device: str = "auto", progress: Callable[[int, int], object] | None = None,
) -> LinearAttribution:  # fmt: skip
    """Say which rounding sites of a recipe make the errors of o, of the last state and of every gradient.

    Args:
        source: A LinearCapture, or its file.
        recipe: Such as "chunk=32,state=bf16", what differs from a well-rounded kernel; None: what is identified.
        observation: Its name, not needed where there is one only.
        head: The model's number of the head; None: all.
        device: auto, cpu or cuda.
        progress: Called with (done, total) after each variant.

    Raises:
        InputError: The recipe cannot be read, or the inputs are neither BF16 nor FP16.
    """
    run, capture = opened(source, device)
    used, used_from = recipe_of(run, recipe, observation, head, device)
    formats = site_formats(used, run)
    players = tuple(site for site, fmt in formats.items() if fmt != "fp32")
    plan = SubsetPlan.make(players)
    whole = frozenset(players)
    wanted = dict.fromkeys([*plan.subsets, *(frozenset({p}) for p in players), *(whole - {p} for p in players), whole])
    heads = range(capture.tensors["v"].shape[2]) if head is None else [head_index(capture, head)]
    squares: dict[Subset, dict[int, dict[str, float]]] = {}
    for done, subset in enumerate(wanted, 1):
        squares[subset] = squares_of(run, run.emulated(with_sites(used, formats, subset)), heads)
        if progress is not None:
            progress(done, len(wanted))
    name, outputs = capture.observation(observation) if capture.observations else (None, {})
    found, reasons = [], []
    for h in heads:
        named = [q for q in squares[whole][h] if squares[whole][h][q] > 0]
        shares = plan.values({s: np.array([squares[s][h][q] for q in named]) for s in plan.subsets})
        totals = {q: squares[whole][h][q] for q in named}
        sites = tuple(
            LinearSite(
                player, SITES[player], formats[player],
                {
                    q: LinearSiteEffect(
                        float(shares[player][0][i]) / totals[q], math.sqrt(squares[frozenset({player})][h][q]),
                        math.sqrt(squares[whole - {player}][h][q]),
                    )
                    for i, q in enumerate(named)
                },
            )
            for player in players
        )  # fmt: skip
        captured = squares_of(run, {n: t.to(run.device).double() for n, t in outputs.items()}, [h])[h]
        otherwise = [q for q in named if captured.get(q, 0.0) > LOSSY**2 * totals[q]]
        guilty = {}
        for q in named:
            if q in otherwise:
                continue
            first = max(sites, key=lambda site: site.effects[q].share, default=None)
            lowest = min((site.effects[q].share for site in sites), default=0.0)
            if first is not None and first.effects[q].share >= _GUILTY and lowest > -_CANCELS:
                guilty[q] = first.site
        number_of = h + capture.metadata.head_offset
        found.append(
            LinearHeadAttribution(
                number_of,
                {q: math.sqrt(t) for q, t in totals.items()},
                {q: math.sqrt(t) for q, t in captured.items()},
                {q: squares[frozenset()][h][q] / totals[q] for q in named},
                sites,
                guilty,
            )
        )
        reasons += [f"Head {number_of}: {words}" for words in _blamed(found[-1])]
        if otherwise:
            of = together([LINEAR_SYMBOLS.get(q, q) for q in otherwise])
            reasons.append(
                f"Head {number_of}: {of} of the capture errs more than the recipe: no site is named for that."
            )
    if used_from == "assumed":
        reasons.insert(0, "No recipe was recognised: this is about a well-rounded kernel, not about the captured one.")
    return LinearAttribution(
        describe_tool(run.device), capture.source, name, capture.operator, capture.metadata.layer,
        recipe_name(used, run), used_from, len(squares), tuple(found), tuple(reasons),
    )  # fmt: skip


def _blamed(head: LinearHeadAttribution) -> list[str]:
    by_site: dict[str, list[str]] = {}
    for quantity, site in head.guilty.items():
        by_site.setdefault(site, []).append(quantity)
    said = []
    for site, quantities in by_site.items():
        effects = next(s for s in head.sites if s.site == site).effects
        shares = [effects[q].share for q in quantities]
        part = between(percent(min(shares)), percent(max(shares)))
        named = together([LINEAR_SYMBOLS.get(q, q) for q in quantities])
        said.append(f"{part} of the squared error of {named} comes from {SITES[site]}.")
    return said
