"""Where a finding is, in words: layers, heads, steps as ranges with their onset, and ranks."""

from __future__ import annotations

from collections.abc import Sequence

from attn_diag.results.findings import FindingPlace, SharedFinding
from attn_diag.results.wording import ranges, together

_MOST_PLACES = 3


def where(finding: SharedFinding, *, terse: bool = False) -> str:
    """Layers, heads, steps and ranks: "layer 3, all 4 heads, from step 200 on".

    Args:
        finding: What was found.
        terse: Without a step where only one was looked at.
    """
    return places_words(finding.places, terse=terse) + _on_ranks(finding)


def places_words(places: Sequence[FindingPlace], *, terse: bool = False) -> str:
    """The same of places, without ranks."""
    # One range of steps for all is said once.
    spans = {"" if terse and len(place.steps_looked) == 1 else _span(place) for place in places}
    said = [_heads(place) + (_span(place) if len(spans) > 1 else "") for place in places[:_MOST_PLACES]]
    if left := places[_MOST_PLACES:]:
        layers = sorted({layer for place in left for layer in place.layers})
        some = "" if all(place.all_heads for place in left) else "heads of "
        said.append(f"{some}layers {ranges(layers)}" if len(layers) > 1 else "others")
    return "; ".join(said) + (spans.pop() if len(spans) == 1 else "")


def _on_ranks(finding: SharedFinding) -> str:
    """On which ranks alone it is, and what is known of the others."""
    if not finding.ranks:
        return ""
    alone = f"{_ranks(finding.ranks)} alone"
    if finding.other_ranks:
        return f", on {alone}; not found in the same heads on {_ranks(finding.other_ranks)}"
    if finding.other_ranks is None:
        return f", on {alone}"
    return f"; {alone} {'hold' if len(finding.ranks) > 1 else 'holds'} these heads"


def _ranks(names: tuple[str, ...]) -> str:
    return f"rank{'s' if len(names) > 1 else ''} {together(names)}"


def _heads(place: FindingPlace) -> str:
    layers = f"layer{'s' if len(place.layers) > 1 else ''} {ranges(place.layers)}, " if place.layers else ""
    if place.all_heads:
        return f"{layers}{'both' if len(place.heads) == 2 else f'all {len(place.heads)}'} heads"
    return f"{layers}head{'s' if len(place.heads) > 1 else ''} {ranges(place.heads)}"


def _span(place: FindingPlace) -> str:
    """The steps of a place, as a range with its onset."""
    steps, looked = place.steps, place.steps_looked
    if not steps:
        return ""
    if len(looked) == 1:
        return f", step {steps[0]}"
    if steps == looked:
        every = "both" if len(steps) == 2 else f"all {len(steps)}"
        return f", at {every} steps ({steps[0]} to {steps[-1]})"
    if len(steps) == 1:
        return f", at step {steps[0]}{', the last looked at' if steps == looked[-1:] else ' alone'}"
    if len([step for step in looked if steps[0] <= step <= steps[-1]]) > len(steps):
        return f", at {len(steps)} of {len(looked)} steps from {steps[0]} on"
    return f", from step {steps[0]} on" if steps[-1] == looked[-1] else f", steps {steps[0]} to {steps[-1]}"
