"""Since when a finding is, and whether it grows, in words."""

from __future__ import annotations

from attn_diag.results.findings import Kind, SharedFinding
from attn_diag.results.wording import percent

NAMES: dict[Kind, str] = {
    "nonfinite": "NaN or Inf", "wrong": "wrong", "unjudged": "mask or scale not as stated", "lossy": "lossy",
    "biased": "biased", "ill_conditioned": "ill-conditioned", "undecided": "undecided",
}  # fmt: skip
"""What the findings of a label are called."""


def since(finding: SharedFinding) -> str:
    """Since when, in half a line."""
    there = [s for s in finding.by_step if s.heads]
    looked_at = _steps_looked_at(finding)
    if not looked_at:
        return "Since when: no step is stated"
    if len(looked_at) == 1 or not there:
        return f"Since when: only step {looked_at[0]} was looked at"
    before = [s.step for s in finding.by_step if s.step < there[0].step]
    onset = f"not {before[-1]}" if before else "the first looked at"
    graver = _graver(finding)
    first = f"step {there[0].step}{'' if graver is None else f' ({NAMES[finding.label]} since {graver})'}"
    return f"Since {first} ({onset}){'; it grows' if grows(finding) else ''}"


def when(finding: SharedFinding) -> str:
    """Its onset, what was before, and whether it grows; what would tell where that is not known."""
    steps, there = finding.by_step, [s for s in finding.by_step if s.heads]
    looked_at = _steps_looked_at(finding)
    if not looked_at:
        return "not known: no step is stated; inspect captures that state theirs."
    if len(looked_at) == 1:
        return f"not known: only step {looked_at[0]} was looked at; inspect an earlier step too."
    if not there:
        return ""
    before = [s.step for s in steps if s.step < there[0].step]
    looked = f"{len(steps)} steps looked at"
    onset = f"not found at {before[-1]}, {looked}" if before else f"the first of {looked}; inspect an earlier one too"
    graver, label = _graver(finding), there[0].label
    if graver is not None and label is not None:
        said = [f"step {there[0].step} as {NAMES[label]}, {graver} as {NAMES[finding.label]} ({onset})."]
    else:
        said = [f"step {there[0].step} ({onset})."]
    first_error, last_error = there[0].dq_error, there[-1].dq_error
    if len(there) > 1 and first_error and last_error and _of_dq(finding):
        errors = f"dQ is {percent(first_error)} off at {there[0].step}, {percent(last_error)} at {there[-1].step}"
        trend = "It grows" if grows(finding) else "It fades" if 2 * last_error < first_error else "No clear trend"
        said.append(f"{trend}: {errors}.")
    return " ".join(said)


def _of_dq(finding: SharedFinding) -> bool:
    """Whether dQ's error is the finding's: of lossy heads whose dQ is as good as can be, the inputs make it."""
    return finding.label != "lossy" or "dq" not in finding.right


def grows(finding: SharedFinding) -> bool:
    """Whether dQ's error more than doubles from the first step of the finding to the last, where it is dQ's finding."""
    errors = [s.dq_error for s in finding.by_step if s.heads and s.dq_error is not None and _of_dq(finding)]
    return len(errors) > 1 and errors[-1] > 2 * errors[0] > 0


def _graver(finding: SharedFinding) -> int | None:
    """The step since which it is what it is, where it was something lesser before."""
    there = [s for s in finding.by_step if s.heads]
    first = next((s.step for s in there if s.label == finding.label), None)
    return first if finding.earlier and first is not None and first > there[0].step else None


def _steps_looked_at(finding: SharedFinding) -> list[int]:
    return sorted({step for place in finding.places for step in place.steps_looked})
