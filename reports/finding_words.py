"""A finding in words: where, what, since when, what it does to training, and how sure it is.

The finding itself is computed elsewhere (``attn_diag.results.grouping``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attn_diag.reports.quantities import STYLES, TESTS
from attn_diag.results.estimates import Label
from attn_diag.results.findings import FindingPlace, Kind, SharedFinding
from attn_diag.results.wording import SYMBOLS, chance, head_name, percent, ranges, times, together

NAMES: dict[Kind, str] = {
    "nonfinite": "NaN or Inf", "wrong": "wrong", "unjudged": "mask or scale not as stated", "lossy": "lossy",
    "biased": "biased", "ill_conditioned": "ill-conditioned", "undecided": "undecided",
}  # fmt: skip
"""What the findings of a label are called."""
_MOST_PLACES = 3
# Of dW_Q in the worst head: training runs that blew up had 11 to 42 % 100 to 200 steps before (benchmarks/failing_run).
_LITTLE, _LARGE = 0.01, 0.1


@dataclass(frozen=True)
class Line:
    """What is said first, a line at a time."""

    about: str
    """What it is about: What, Since, Matters, Sure, Next."""
    said: str
    command: bool = False
    """Whether ``said`` can be typed as it stands."""
    purpose: str = ""
    """What it shows, of a command."""
    label: Kind | None = None
    """The finding's label, for its colour; None: no finding."""

    @property
    def whole(self) -> str:
        """What is said, a command after what it shows."""
        return f"{self.purpose}: {self.said}" if self.purpose else self.said


def style_of(label: Kind | Label) -> str:
    """The colour in which a label is written, or what is said of it."""
    plain = "bold red" if label == "unjudged" else STYLES[label]
    return f"bold {plain.removeprefix('bold ')}"


def about(finding: SharedFinding) -> Iterator[Line]:
    """What a finding is, since when, what it does to training, and how sure it is."""
    yield Line("What", f"{what(finding)}{_site(finding)}", label=finding.label)
    if since := when(finding):
        yield Line("Since", since)
    yield Line("Sure", sure(finding))
    if effect := matters(finding):
        yield Line("Matters", effect)


def brief(finding: SharedFinding, observations: str = "") -> Line:
    """The same in a paragraph, for one of several findings; ``observations``: " in paper", where that tells it."""
    said = f"In{observations.removeprefix(' in')}: {what(finding)}" if observations else what(finding)
    said += f" Sure: {sure(finding)}"
    said += f" {grown}" if finding.earlier and (grown := when(finding)) else ""
    said += f" Matters: {effect}" if (effect := matters(finding)) else ""
    title = {"nonfinite": "NaN", "unjudged": "Metadata", "ill_conditioned": "Fragile"}
    return Line(title.get(finding.label, finding.label.capitalize()), said, label=finding.label)


def where(finding: SharedFinding) -> str:
    """Layers, heads, steps and ranks: "layer 3, all 4 heads, from step 200 on"."""
    places = finding.places[:_MOST_PLACES]
    # One range of steps for all is said once.
    spans = {_span(place) for place in finding.places}
    said = [_heads(place) + (_span(place) if len(spans) > 1 else "") for place in places]
    if left := finding.places[_MOST_PLACES:]:
        layers = sorted({layer for place in left for layer in place.layers})
        said.append(f"layers {ranges(layers)}" if len(layers) > 1 else "others")
    ranks = f", rank {', '.join(finding.ranks)} alone (not what other ranks computed)" if finding.ranks else ""
    return "; ".join(said) + (spans.pop() if len(spans) == 1 else "") + ranks


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
        return f", at all {len(steps)} steps ({steps[0]} to {steps[-1]})"
    if len(steps) == 1:
        return f", at step {steps[0]}{', the last looked at' if steps == looked[-1:] else ' alone'}"
    if len([step for step in looked if steps[0] <= step <= steps[-1]]) > len(steps):
        return f", at {len(steps)} of {len(looked)} steps from {steps[0]} on"
    return f", from step {steps[0]} on" if steps[-1] == looked[-1] else f", steps {steps[0]} to {steps[-1]}"


def what(finding: SharedFinding) -> str:
    """The finding in a sentence or two, of its worst head."""
    worst = finding.worst
    step = f" at step {worst.step}" if worst.step is not None and len(finding.by_step) > 1 else ""
    place = f" ({head_name(worst.layer, worst.head)}{step})" if finding.heads > 1 and worst.head is not None else ""
    if finding.label == "unjudged":
        return finding.words
    if finding.label == "biased" and finding.biased_mean is not None:
        return f"{_bias(finding)}{place}."
    if finding.label == "ill_conditioned":
        other = finding.dq_error_well_rounded
        alike = "" if other is None else f", and a well-rounded kernel's would be {percent(other)} off as well"
        return f"dQ is {percent(finding.dq_error)} off{place}{alike}: these inputs amplify ordinary rounding."
    said = finding.words.rstrip(".")
    if finding.label == "lossy" and finding.factors:
        (first, factor), *others = finding.factors.items()
        factors = [f"{SYMBOLS[first]} has {times(factor)}", *(f"{SYMBOLS[q]} {times(f)}" for q, f in others)]
        said = f"{together(factors)} times the error of a well-rounded kernel"
    pattern = f" {finding.pattern.rstrip('.')}." if finding.label == "lossy" and finding.pattern else ""
    too = f" Biased too: {_bias(finding)}." if "biased" in finding.also and finding.biased_mean is not None else ""
    if finding.label in ("wrong", "nonfinite"):
        for names, are in ((finding.quantities[1:], f"{NAMES[finding.label]} too"), (finding.right, "right")):
            if names:
                too += f" {together([SYMBOLS[n] for n in names])} {'are' if len(names) > 1 else 'is'} {are}."
    return f"{said}{place}.{pattern}{too}"


def _site(finding: SharedFinding) -> str:
    if finding.site is None:
        return ""
    return f" Its bits show {finding.site}; good kernels keep fp32 there."


def _bias(finding: SharedFinding) -> str:
    """The mean that is beyond chance, in its unit, and what the unit is."""
    assert finding.biased_mean is not None
    test, mean = TESTS[finding.biased_mean], finding.biased_by or 0.0
    if test.unit == "floor":
        return f"{test.error} averages {mean:+.2g} of what one correct rounding of O makes"
    towards = f", {'towards' if mean < 0 else 'away from'} zero" if test.key == "o_away_excess" else ""
    return f"{test.error} averages {mean:+.2g} of O's last bit (ulp){towards}"


def when(finding: SharedFinding) -> str:
    """Its onset, what was before, and whether it grows; empty where that cannot be."""
    steps, there = finding.by_step, [s for s in finding.by_step if s.heads]
    looked_at = sorted({step for place in finding.places for step in place.steps_looked})
    if len(looked_at) == 1:
        return f"not known: step {looked_at[0]} alone was looked at."
    if not looked_at and finding.worst.source.endswith(".safetensors"):
        return "not known: the captures state no step."
    if len(steps) < 2 or not there:
        return ""
    before = [s.step for s in steps if s.step < there[0].step]
    looked = f"{len(steps)} steps looked at, {steps[0].step} to {steps[-1].step}"
    onset = f"not found at step {before[-1]}; {looked}" if before else f"the first looked at; {looked}"
    first = next((s.step for s in there if s.label == finding.label), there[0].step)
    graver = f", {NAMES[finding.label]} since {first}" if finding.earlier and first > there[0].step else ""
    lesser = f"{NAMES[there[0].label]} since " if graver and there[0].label is not None else ""
    said = [f"{lesser}step {there[0].step}{graver} ({onset})."]
    first_error, last_error = there[0].dq_error, there[-1].dq_error
    if len(there) > 1 and first_error and last_error:
        errors = f"dQ is {percent(first_error)} off at {there[0].step}, {percent(last_error)} at {there[-1].step}"
        trend = "It grows" if grows(finding) else "It fades" if 2 * last_error < first_error else "It does not grow"
        said.append(f"{trend}: {errors}.")
    return " ".join(said)


def grows(finding: SharedFinding) -> bool:
    """Whether dQ's error more than doubles from the first step of the finding to the last."""
    errors = [s.dq_error for s in finding.by_step if s.heads and s.dq_error is not None]
    return len(errors) > 1 and errors[-1] > 2 * errors[0] > 0


def matters(finding: SharedFinding) -> str:
    """What it does to the gradients that train; empty where nothing could be judged."""
    if finding.label == "unjudged":
        return "much if the kernel is not what was meant; not at all if the metadata alone are wrong."
    if finding.label == "nonfinite":
        return "NaN spreads to every weight within a step that is not skipped: the run stops learning."
    if finding.gradients is None and finding.dw_q_error is None:
        return "not known; without dO (and dQ) the gradients cannot be judged."
    size = max(finding.dq_error or 0.0, finding.dw_q_error or 0.0)
    other = finding.dq_error_well_rounded
    said = f"dQ is {'(as predicted from delta) ' if finding.gradients == 'predicted' else ''}"
    said += f"up to {percent(finding.dq_error)} off"
    said += "" if other is None else f" (a well-rounded kernel's: {percent(other)})"
    said += "" if finding.dw_q_error is None else f", dW_Q up to {percent(finding.dw_q_error)}"
    if (finding.dw_q_error or 0.0) >= _LARGE:
        said += ". In runs that blew up (benchmarks/failing_run) dW_Q was 11 to 42 % off shortly before"
    if finding.label == "wrong" and "o" in finding.quantities:
        return f"much: O is wrong, so that the model computes another function than was meant ({said})."
    return f"{'much: ' if size >= _LARGE else 'little: ' if size < _LITTLE else ''}{said}."


def sure(finding: SharedFinding) -> str:
    """How certain it is, in plain words."""
    if finding.label == "nonfinite":
        return "certain: the exact result is finite there, so that the kernel is at fault."
    if finding.label == "wrong":
        return "certain: no rounding can do that; the kernel is at fault, or the capture is damaged."
    if finding.label == "unjudged":
        return "certain that either the metadata or the kernel is wrong; nothing else is judged until they fit."
    if finding.label == "biased" and finding.p_adjusted is not None:
        return f"an unbiased kernel shows that {chance(finding.p_adjusted)}."
    if finding.label == "lossy" and finding.factor_ci95 is not None:
        low, high = finding.factor_ci95
        beside = "FlashAttention-2's roundings on the same inputs"
        return f"{times(low)} to {times(high)} times {beside} (95 % interval); up to 1.1 passes, above 1.25 is lossy."
    if finding.label == "ill_conditioned":
        return "a well-rounded kernel, run on the same inputs, is as far off: the kernel is not at fault."
    return "seen, not tested."
