"""How the difference of A and B goes on over the steps, head by head: does it grow, and since when is it there?

At each step a figure's difference is judged as in any comparison (``comparison.diff``), beyond chance in the whole
run; and for itself alone. Where a head was compared at three steps or more, and a figure of it differs beyond chance at
one of them at least, its onset is the first step from which on it differs for itself alone, in that direction, at every
step to the last one: whether there is a difference is as sure as in the whole run, since when is an estimate. From four
steps on Kendall's rank correlation of the steps with the differences is tested, over all figures of all heads together
(Benjamini-Hochberg): it assumes that the errors of different steps are independent, and nothing of their distribution.
Below seven steps it can hardly be significant at 0.01: 2 / n! is its least p-value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from attn_diag.analyses.comparison.matching import HeadPlace
from attn_diag.results.comparison import Comparison, HeadComparison, HeadTrend, TrendOutcome
from attn_diag.results.wording import head_names, plural
from attn_diag.statistics.means import PRIMARY, adjust
from attn_diag.statistics.orders import kendall
from attn_diag.statistics.sizes import Sizes, size_changes

_FEWEST_STEPS = 3
_MOST_ONSETS = 3
# Sizes that are of the inputs.
_OF_INPUTS = ("conditioning", "repeated_maxima", "nonfinite_rows")


class _Seen(NamedTuple):
    """A figure's difference at one step."""

    step: int
    value: float
    """B / A of a size, B - A of a mean."""
    alone: int
    """Its direction, 1 or -1, where it is significant for itself; else 0."""
    beyond: bool
    """Whether it is beyond chance in the whole run."""


def find_trends(
    pairs: Sequence[tuple[HeadPlace, HeadPlace]], entries: Sequence[HeadComparison], level: float
) -> tuple[HeadTrend, ...]:
    """The trends of all heads that were compared at several steps, the clearest first.

    Args:
        pairs: The heads compared.
        entries: What was found of each.
        level: Of the family of all trends.
    """
    found: dict[tuple[object, ...], dict[str, list[_Seen]]] = {}
    whose: dict[tuple[object, ...], HeadTrend] = {}
    # A run of B beside one step of A goes on with B's steps, and the other way round.
    fixed = len({b.step for _, b in pairs}) == 1
    for (a, b), entry in zip(pairs, entries, strict=True):
        if entry.head is None or a.step is None or b.step is None:
            continue
        rank = b.capture.metadata.get("rank")
        key = (entry.layer, entry.head, entry.batch, rank, entry.a_observation, entry.b_observation)
        whose[key] = HeadTrend(entry.layer, entry.head, entry.batch, rank, entry.b_observation, "", (), (), (), "none")
        for name, seen in _differences(entry, a, b, level):
            one = seen._replace(step=a.step if fixed else b.step)
            found.setdefault(key, {}).setdefault(name, []).append(one)
    trends = [
        _trend(replace(whose[key], name=name), sorted(seen))
        for key, figures in found.items()
        for name, seen in figures.items()
        if len({one.step for one in seen}) == len(seen) >= _FEWEST_STEPS
    ]
    adjusted = zip(trends, adjust([t.p_value for t in trends]), strict=True)
    judged = [_judged(replace(t, p_adjusted=p), level) for t, p in adjusted]
    return tuple(sorted(judged, key=_clarity))


def trend_words(found: Comparison) -> str:
    """The trends in a sentence, with a blank before it; empty where there is none."""
    first: dict[tuple[int | None, int], int] = {}
    for t in found.trends:
        if t.outcome in ("since", "grows") and t.onset is not None and t.onset != t.steps[0]:
            first[_place(t)] = min(t.onset, first.get(_place(t), t.onset))
    onsets = sorted(set(first.values()))
    said = []
    if grown := {_place(t) for t in found.trends if t.outcome == "grows"}:
        said.append(f"the difference grows in {head_names(grown)}")
    for step in onsets[:_MOST_ONSETS]:
        heads = [place for place, onset in first.items() if onset == step]
        said.append(f"they differ from step {step} on in {head_names(heads)}")
    if later := [place for place, onset in first.items() if onset not in onsets[:_MOST_ONSETS]]:
        said.append(f"from later steps on in {plural(len(later), 'more head')}")
    return f" Over the steps {'; '.join(said)}." if said else ""


def _place(trend: HeadTrend) -> tuple[int | None, int]:
    return trend.layer, trend.head


def _differences(entry: HeadComparison, a: HeadPlace, b: HeadPlace, level: float) -> Iterator[tuple[str, _Seen]]:
    directions = {"grew": 1, "shrank": -1}
    alone = {s.name: directions.get(s.outcome, 0) for s in size_changes(Sizes.of(a.head), Sizes.of(b.head), level / 2)}
    for size in entry.sizes:
        if size.name not in _OF_INPUTS and size.ratio is not None and 0 < size.ratio < math.inf:
            yield size.name, _Seen(0, size.ratio, alone[size.name], size.outcome in directions)
    for mean in entry.means:
        if mean.a_units is not None and mean.b_units is not None and math.isfinite(mean.b_units - mean.a_units):
            difference = mean.b_units - mean.a_units
            significant = mean.p_value is not None and mean.p_value <= level
            direction = int(math.copysign(1, difference)) if significant else 0
            yield mean.name, _Seen(0, difference, direction, mean.outcome not in ("none", "untested"))


def _trend(trend: HeadTrend, seen: Sequence[_Seen]) -> HeadTrend:
    held = list(takewhile(lambda one: one.alone and one.alone == seen[-1].alone, reversed(seen)))
    onset = held[-1].step if any(one.beyond for one in held) else None
    tau, p = kendall([s.step for s in seen], [_size(trend.name, s.value) for s in seen])
    return replace(
        trend,
        steps=tuple(s.step for s in seen),
        values=tuple(s.value for s in seen),
        beyond=tuple(s.beyond for s in seen),
        onset=onset,
        tau=tau,
        p_value=p,
    )


def _size(name: str, value: float) -> float:
    """What grows where the difference does."""
    return abs(value) if name in PRIMARY else value


def _judged(trend: HeadTrend, level: float) -> HeadTrend:
    outcome: TrendOutcome = "none"
    if trend.onset is not None:
        outcome = "throughout" if trend.onset == trend.steps[0] else "since"
    if trend.p_adjusted is not None and trend.p_adjusted <= level and trend.tau is not None:
        outcome = "grows" if trend.tau > 0 else "shrinks"
    return replace(trend, outcome=outcome)


def _clarity(trend: HeadTrend) -> tuple[int, float, float]:
    """Sorts what grows, and then what came, the earliest first."""
    order: tuple[TrendOutcome, ...] = ("grows", "since", "throughout", "shrinks", "none")
    p = 1.0 if trend.p_adjusted is None else trend.p_adjusted
    return order.index(trend.outcome), math.inf if trend.onset is None else trend.onset, p
