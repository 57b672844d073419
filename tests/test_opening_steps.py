"""When a finding began, in the first lines of a diagnosis: ranges of steps, onsets, and what became graver."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from builders import inspected, some, with_findings

from attn_diag.reports.finding_words import grows, when
from attn_diag.reports.opening import headline, opening
from attn_diag.results.diagnosis import Diagnosis
from attn_diag.results.estimates import Label

pytestmark = pytest.mark.slow


@cache
def several_steps(labels: str) -> Diagnosis:
    """A head of one layer at steps 0, 10, …: l lossy, w wrong, b biased, u undecided, . clean."""
    kinds = {
        "l": inspected("failing_step500_L2H7"),
        ".": inspected("gpt2_step637_L2H6"),
    }
    (lossy,), (clean,) = kinds["l"].captures, kinds["."].captures
    captures = []
    for place, letter in enumerate(labels):
        model = clean if letter in ".u" else lossy
        head = replace(model.observations[0].heads[0], layer=2, head=0)
        if letter in "wbu":
            label: dict[str, Label] = {"w": "wrong", "b": "biased", "u": "undecided"}
            verdict = replace(some(head.verdict), labels=(label[letter],))
            head = replace(head, verdict=verdict)
        observation = replace(clean.observations[0], heads=(head, replace(head, head=None)))
        stated = clean.metadata | {"step": str(10 * place)}
        captures.append(replace(clean, source=f"s{place}.pt", metadata=stated, observations=(observation,)))
    return with_findings(kinds["l"], captures)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ("..ll", "layer 2, head 0, from step 20 on"),
        ("llll", "layer 2, head 0, at all 4 steps (0 to 30)"),
        (".ll.", "layer 2, head 0, steps 10 to 20"),
        ("l.l.", "layer 2, head 0, at 2 of 4 steps from 0 on"),
        (".l..", "layer 2, head 0, at step 10 alone"),
        ("...l", "layer 2, head 0, at step 30, the last"),
        ("l", "layer 2, head 0, step 0"),
        (".lww", "layer 2, head 0, from step 20 on (lossy from step 10 on)"),
        ("wlww", "layer 2, head 0, at 3 of 4 steps from 0 on."),
    ],
)
def test_steps_are_ranges_with_their_onset(labels: str, said: str) -> None:
    diagnosis = several_steps(labels)
    assert len(diagnosis.findings) == 1
    assert headline(diagnosis).partition(": ")[2].startswith(said)


@pytest.mark.parametrize(
    ("labels", "said"), [("uuu.", "3 of 4 (1 head at 4 steps) could"), ("u...", "Of 4 (1 head at 4 steps) 1 is")]
)
def test_heads_at_several_steps_are_counted_at_each(labels: str, said: str) -> None:
    assert said in headline(several_steps(labels))


@pytest.mark.parametrize(("labels", "of"), [("....", ""), ("u...", " of heads that pass")])
def test_how_large_errors_are_is_said_of_the_heads_that_pass(labels: str, of: str) -> None:
    known = next(line for line in opening(several_steps(labels)) if line.about == "Sure")
    assert known.said.startswith(f"errors{of} are at most ")


def test_what_became_graver_is_one_finding() -> None:
    (finding,) = several_steps(".lww").findings
    assert (finding.label, finding.onset, finding.earlier) == ("wrong", 20, {"lossy": 10})
    assert [(s.step, s.label) for s in finding.by_step] == [(0, None), (10, "lossy"), (20, "wrong"), (30, "wrong")]


def test_the_errors_over_steps_are_those_of_the_findings_own_heads() -> None:
    diagnosis = several_steps("ll")
    captures = []
    for place, capture in enumerate(diagnosis.captures):
        (observation,) = capture.observations
        own, whole = observation.heads
        fragile = replace(some(own.verdict), labels=("ill_conditioned",))
        gradient = replace(some(own.propagation.dq), relative_error=10.0**place)
        beside = replace(own, head=1, verdict=fragile, propagation=replace(own.propagation, dq=gradient))
        observation = replace(observation, heads=(own, beside, whole))
        captures.append(replace(capture, observations=(observation,)))
    lossy = with_findings(diagnosis, captures).findings[0]
    assert (lossy.label, lossy.heads, [s.heads for s in lossy.by_step]) == ("lossy", 2, [1, 1])
    assert [s.dq_error for s in lossy.by_step] == [lossy.dq_error] * 2
    assert "No clear trend" in when(lossy)


def test_the_growth_of_a_right_dq_is_not_that_of_a_lossy_dv() -> None:
    (finding,) = several_steps("ll").findings
    errors = [replace(s, dq_error=10.0**place) for place, s in enumerate(finding.by_step)]
    finding = replace(finding, by_step=tuple(errors))
    assert "It grows: dQ is" in when(finding)
    right = replace(finding, quantities=("dv",), right=("dq",))
    assert "dQ" not in when(right)
    assert not grows(right)
