"""Findings as the cards of a page: what, where and since when, how much it matters, how sure, and what to do next."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from attn_diag.reports.finding_words import about, where
from attn_diag.reports.following import next_of
from attn_diag.reports.head_labels import LETTERS, NAMES
from attn_diag.reports.opening import next_command, of_observations, opening
from attn_diag.results.diagnosis import Diagnosis
from attn_diag.results.finding_places import step_of
from attn_diag.results.findings import FindingAtStep, Kind, SharedFinding, WorstHead
from attn_diag.results.quality import TRIED
from attn_diag.results.wording import head_name

# Bars of a card: further steps are joined, the last of each group is shown.
_BARS = 24
# What a finding means for who wrote the kernel or runs the training, without a number.
_MEANING: dict[Kind, str] = {
    "nonfinite": "The kernel returned NaN or Inf where the exact result is an ordinary number.",
    "wrong": "This is no rounding error: something else was computed (mask, scale, layout, a bug) or captured.",
    "unjudged": "What the capture states of itself does not fit its tensors: find out first which of the two is wrong.",
    "lossy": "An output is further off than a well-rounded kernel leaves it.",
    "biased": "The errors lean to one side: over many rows they add up instead of cancelling.",
    "ill_conditioned": "These inputs amplify any rounding: other well-rounded kernels do no better.",
}
# A word of a command, an option together with what follows it.
_OPTIONS = re.compile(r"--[\w-]+ (?!-)\S+|\S+")
_ASKED = {
    "What": "Measured",
    "Since": "Since when",
    "Matters": "For training",
    "Sure": "How sure",
    "Others": "Other heads",
}


@dataclass(frozen=True)
class Bar:
    """One step of a finding."""

    step: int
    height: int
    """In percent of the tallest that it can be: the heads that have it."""
    words: str
    label: Kind | None
    """The gravest label of its heads there."""


@dataclass(frozen=True)
class Card:
    """One finding."""

    labels: tuple[tuple[Kind, str, str], ...]
    """Its labels, their letters, and what a reader calls them."""
    title: str
    """Where, and since when."""
    meaning: str
    """In plain words."""
    facts: tuple[tuple[str, str], ...]
    """What is asked, and the answer."""
    bars: tuple[Bar, ...]
    """Step by step; empty where there is one step."""
    of: str
    """Of how many heads a bar tells: "its 4 heads"; without a number where that changes."""
    purpose: str
    """What the command shows; empty where that is not known."""
    command: tuple[str, ...]
    """What to run next, in parts that stay on one line: an option with its value."""
    worst: str
    """The head to look at."""
    place: str | None
    """Its address; None where it is not on the page."""


def cards(diagnosis: Diagnosis, places: Mapping[int, str]) -> tuple[Card, ...]:
    """One a finding, in their order.

    Args:
        diagnosis: What was found.
        places: Addresses by the identity of a head's diagnosis; none for a text without links.
    """
    addresses: dict[WorstHead, str | None] = {}
    unjudged: dict[str, str | None] = {}
    for capture, observation, head in diagnosis.entries():
        # Where there is one batch item a finding names none.
        for batch in {head.batch, None}:
            found = WorstHead(capture.source, observation.name, head.layer, head.head, batch, step_of(capture))
            addresses.setdefault(found, places.get(id(head)))
        # Of a capture that could not be judged no head is the worst.
        unjudged.setdefault(capture.source, places.get(id(head)))
    return tuple(
        _card(f, unjudged.get(f.worst.source) if f.worst.head is None else addresses.get(f.worst), diagnosis)
        for f in diagnosis.findings
    )


def nothing(diagnosis: Diagnosis) -> tuple[tuple[str, str], ...]:
    """What is asked, and the answer, where there is no finding."""
    lines = list(opening(diagnosis))
    return tuple((_ASKED.get(line.about, line.about), _capital(line.said)) for line in [*lines[1:], *lines[:1]])


def _card(finding: SharedFinding, place: str | None, diagnosis: Diagnosis) -> Card:
    labels: list[Kind] = [finding.label, *(label for label in finding.also if label != "undecided")]
    facts = [(_ASKED[line.about], _capital(line.said)) for line in about(finding)]
    if not finding.captured:
        facts.append(("Seen in", "An emulated recipe, run on these inputs; not in what a kernel returned."))
    following = next_of(diagnosis, finding) if finding.captured else next_command(diagnosis)
    run = following.said if finding.captured and following.command else ""
    if not following.command:
        facts.append(("Next", _capital(following.said)))
    worst = finding.worst
    heads = {s.of for s in finding.by_step}
    return Card(
        labels=tuple((label, LETTERS[label], NAMES[label]) for label in labels),
        title=_capital(where(finding)) + (of_observations(diagnosis, finding) if finding.captured else ""),
        meaning=_meaning(finding),
        facts=tuple(facts),
        bars=_bars(finding.by_step),
        of=f"the {heads.pop()} heads" if len(heads) == 1 and heads != {1} else "the heads",
        purpose=_capital(following.purpose) if run else "",
        command=tuple(_OPTIONS.findall(run)),
        worst=_head(worst) + ("" if worst.step is None else f", step {worst.step}"),
        place=place,
    )


def _meaning(finding: SharedFinding) -> str:
    if finding.label == "wrong" and finding.formats:
        return "Numbers lost so many bits that the result is another function's."
    said = _MEANING.get(finding.label, "")
    what = "no rounding error that was tried" if TRIED in finding.words else "no FP8 rounding error"
    return said.replace("no rounding error", what) if finding.of_few_bits else said


def _head(worst: WorstHead) -> str:
    if worst.head is not None:
        return head_name(worst.layer, worst.head)
    return "the capture" if worst.layer is None else f"layer {worst.layer}"


def _capital(text: str) -> str:
    """As a sentence; a symbol such as dQ keeps its small letter."""
    return text if text[1:2].isupper() else text[:1].upper() + text[1:]


def _bars(steps: tuple[FindingAtStep, ...]) -> tuple[Bar, ...]:
    if len(steps) < 2:
        return ()
    size = -(-len(steps) // _BARS)
    shown = [steps[min(i + size, len(steps)) - 1] for i in range(0, len(steps), size)]
    return tuple(Bar(s.step, round(100 * s.heads / s.of), _in_words(s), s.label) for s in shown)


def _in_words(step: FindingAtStep) -> str:
    name = f" {NAMES[step.label]}" if step.label else ""
    return f"step {step.step}: {step.heads} of {step.of} heads{name}"
