"""Findings as the cards of a page: what, where and since when, how much it matters, how sure, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attn_diag.reports import finding_words as said
from attn_diag.reports.timeline import NAMES
from attn_diag.results.diagnosis import Diagnosis
from attn_diag.results.findings import FindingAtStep, SharedFinding, WorstHead, step_of

# Bars of a card: further steps are joined, the last of each group is shown.
_BARS = 24


@dataclass(frozen=True)
class Bar:
    """One step of a finding."""

    step: int
    height: int
    """In percent of the tallest that it can be: the heads that have it."""
    words: str


@dataclass(frozen=True)
class Card:
    """One finding."""

    labels: tuple[tuple[str, str], ...]
    """Its labels, as the style sheet and as a reader name them."""
    title: str
    """Where, and since when."""
    meaning: str
    """In plain words."""
    facts: tuple[tuple[str, str], ...]
    """What is asked, and the answer."""
    bars: tuple[Bar, ...]
    """Step by step; empty where there is one step."""
    commands: tuple[tuple[str, str], ...]
    """What a command answers, and the command."""
    worst: str
    """The head to look at."""
    place: str | None
    """Its address; None where it is not on the page."""


def cards(diagnosis: Diagnosis, places: Mapping[int, str]) -> tuple[Card, ...]:
    """One a finding, in their order.

    Args:
        diagnosis: What was found.
        places: Addresses by the identity of a head's diagnosis.
    """
    addresses = {}
    for capture, observation, head in diagnosis.entries():
        # With one batch item a finding names none.
        for batch in {head.batch, None}:
            found = WorstHead(capture.source, observation.name, head.layer, head.head, batch, step_of(capture))
            addresses.setdefault(found, places[id(head)])
    return tuple(_card(finding, addresses.get(finding.worst), diagnosis) for finding in diagnosis.findings)


def _card(finding: SharedFinding, place: str | None, diagnosis: Diagnosis) -> Card:
    labels = [finding.label, *(label for label in finding.also if label not in ("undecided", "clean"))]
    return Card(
        labels=tuple((label, NAMES.get(label, "no verdict")) for label in labels),  # type: ignore[call-overload]
        title=said.where(finding),
        meaning=said.meaning(finding),
        facts=said.facts(finding),
        bars=_bars(finding.by_step),
        commands=said.commands(finding, diagnosis),
        worst=said.worst(finding),
        place=place,
    )


def _bars(steps: tuple[FindingAtStep, ...]) -> tuple[Bar, ...]:
    if len(steps) < 2:
        return ()
    size = -(-len(steps) // _BARS)
    shown = [steps[min(i + size, len(steps)) - 1] for i in range(0, len(steps), size)]
    return tuple(Bar(s.step, round(100 * s.heads / s.of), f"step {s.step}: {s.heads} of {s.of} heads") for s in shown)
