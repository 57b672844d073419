"""A finding in words: where and since when, how much it matters for training, how sure, and what to ask next."""

from __future__ import annotations

import shlex

from attn_diag.results.diagnosis import Diagnosis
from attn_diag.results.findings import FindingPlace, Kind, SharedFinding
from attn_diag.results.wording import head_name, number, percent, plural, ranges, times

# Places that are named; further ones are counted.
_NAMED = 3
# An error that has grown so much over the steps is said to grow.
_GROWN = 1.5
# Chances below one in a million are not counted out.
_NEVER = 1e-6
# What each label means for who wrote the kernel or runs the training.
_MEANING: dict[Kind, str] = {
    "nonfinite": "The kernel returned NaN or Inf where the exact result is an ordinary number.",
    "wrong": "This is no rounding error: something else was computed (mask, scale, layout, a bug), or the capture "
    "is damaged.",
    "unjudged": "What the capture states of itself does not fit its tensors: correct that first.",
    "lossy": "Something inside the kernel is rounded more coarsely than it has to be.",
    "biased": "The errors lean to one side: over many rows and steps they add up instead of cancelling.",
    "ill_conditioned": "These inputs amplify any rounding: another kernel of this format would do no better.",
}
_FILES = (".safetensors", ".pt", ".npz")


def where(finding: SharedFinding) -> str:
    """ "Layer 7, all heads, from step 300": the places, the earliest first."""
    said = [_place(place) for place in finding.places[:_NAMED]]
    more = sum(max(len(place.layers), 1) for place in finding.places[_NAMED:])
    said += [f"{plural(more, 'more layer')}"] * (more > 0)
    text = "; ".join(part for part in said if part) or "All heads"
    if finding.ranks:
        text += f"; {'rank' if len(finding.ranks) == 1 else 'ranks'} {', '.join(finding.ranks)} alone"
    return text[0].upper() + text[1:]


def _place(place: FindingPlace) -> str:
    layers = f"layer{'s' * (len(place.layers) > 1)} {ranges(place.layers)}" if place.layers else ""
    heads = "all heads" if place.all_heads else f"head{'s' * (len(place.heads) > 1)} {ranges(place.heads)}"
    return ", ".join(part for part in (layers, heads if place.heads else "", _when(place)) if part)


def _when(place: FindingPlace) -> str:
    steps, looked = place.steps, place.steps_looked
    if len(looked) < 2:
        return ""
    if steps == looked:
        return f"at all {len(looked)} steps, {looked[0]} to {looked[-1]}"
    since = looked[looked.index(steps[0]) :]
    if steps == since:
        return f"from step {steps[0]} on" if len(steps) > 1 else f"at step {steps[0]}, the last one"
    if steps == since[: len(steps)]:
        span = f"at steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"at step {steps[0]}"
        return f"{span}, not after"
    return f"at {len(steps)} of the {len(since)} steps from {steps[0]} on"


def meaning(finding: SharedFinding) -> str:
    """What it says of the kernel, in plain words."""
    return _MEANING.get(finding.label, "")


def facts(finding: SharedFinding) -> tuple[tuple[str, str], ...]:
    """What is asked of a finding, and the answer."""
    what = " ".join(part for part in (finding.words, f"{finding.pattern}." if finding.pattern else "") if part)
    answers = (
        ("Measured", what.replace("..", ".")),
        ("For training", _training(finding)),
        ("How sure", _sure(finding)),
        (
            "Seen in",
            "" if finding.captured else "An emulated recipe run on these inputs, not in what a kernel returned.",
        ),
    )
    return tuple((question, answer) for question, answer in answers if answer)


def _training(finding: SharedFinding) -> str:
    if finding.label == "unjudged":
        return ""
    if finding.dq_error is None:
        return "Not known: without dO the error's way into the gradients cannot be followed."
    said = f"dQ is up to {percent(finding.dq_error)} off"
    if (usual := finding.dq_error_well_rounded) is not None:
        said += f" (a well-rounded kernel's on the same inputs: {percent(usual)})"
    if finding.dw_q_error is not None:
        said += f", dW_Q up to {percent(finding.dw_q_error)}"
    known = [(s.step, s.dq_error) for s in finding.by_step if s.heads and s.dq_error is not None]
    if len(known) > 1 and known[-1][1] > _GROWN * known[0][1]:
        said += f"; it grows, from {percent(known[0][1])} at step {known[0][0]}"
    return f"{said}."


def _sure(finding: SharedFinding) -> str:
    if finding.label == "unjudged":
        return ""
    parts = []
    if finding.label == "lossy" and finding.factor_ci95 is not None:
        low, high = finding.factor_ci95
        parts.append(f"The worst head's factor has the 95 % interval {times(low)} to {times(high)}")
    if "biased" in (finding.label, *finding.also) and finding.p_adjusted is not None:
        parts.append(f"An unbiased kernel shows such a mean {_odds(finding.p_adjusted)}")
    steps = {step for place in finding.places for step in place.steps}
    there = f" at {plural(len(steps), 'step')}" if len(steps) > 1 else ""
    heads = {(layer, head) for p in finding.places for layer in p.layers or (None,) for head in p.heads}
    if len(heads) > 1 or there:
        parts.append(f"The same in {plural(len(heads), 'head')}{there}")
    return f"{'. '.join(parts)}." if parts else ""


def _odds(p: float) -> str:
    said = "almost never" if p < _NEVER else f"about once in {1 / p:,.0f} runs"
    return f"{said} (adjusted p = {number(p, 2)})"


def worst(finding: SharedFinding) -> str:
    """The head that shows it best: "L7H2, step 400"."""
    head = finding.worst
    return head_name(head.layer, head.head) + ("" if head.step is None else f", step {head.step}")


def commands(finding: SharedFinding, diagnosis: Diagnosis) -> tuple[tuple[str, str], ...]:
    """What to ask next of the worst head, and the command; none where no rounding makes it, or it is not in a file."""
    head = finding.worst
    if not head.source.endswith(_FILES) or finding.label in ("nonfinite", "wrong", "unjudged"):
        return ()
    arguments = ["--example"] if head.source.startswith("example ") else [shlex.quote(head.source)]
    arguments += [] if head.head is None else ["--head", str(head.head)]
    arguments += [] if head.batch is None else ["--batch", str(head.batch)]
    capture = next((c for c in diagnosis.captures if c.source == head.source), None)
    if capture is not None and len(capture.observations) > 1 and finding.captured:
        arguments += ["--observation", shlex.quote(head.observation)]
    question, command = ("Which rounding makes it", "attribute")
    if finding.label == "biased":
        question, command = ("Where it goes wrong, bit by bit", "microscope")
    if finding.label == "ill_conditioned":
        question, command = ("What would remove it", "what-if")
    return ((question, f"attn-diag {command} {' '.join(arguments)}"),)
