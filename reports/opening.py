"""How a diagnosis begins: PASS or the findings, where, since when, what they do to training, how sure, what next.

The findings are those of the diagnosis; here they are only put into words.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from attn_diag.reports import words
from attn_diag.reports.quantities import DQ_ERROR, FACTOR, TESTS, label_names
from attn_diag.results.diagnosis import Diagnosis, SharedFinding
from attn_diag.results.findings import FindingPlace, Kind
from attn_diag.results.heads import CaptureDiagnosis, HeadDiagnosis, ObservationDiagnosis
from attn_diag.results.wording import SYMBOLS, chance, file_name, head_name, percent, plural, ranges, times, together

NAMES: dict[Kind, str] = {
    "nonfinite": "NaN or Inf", "wrong": "wrong", "unjudged": "not judged", "lossy": "lossy", "biased": "biased",
    "ill_conditioned": "ill-conditioned", "undecided": "undecided",
}  # fmt: skip
_MOST_FINDINGS, _MOST_PLACES = 3, 3
# Runs that were reproduced and blew up had this much of dW_Q wrong, 100 to 200 steps before (docs/failing-run.md).
_LARGE, _LITTLE = 0.1, 0.01
Entry = tuple[CaptureDiagnosis, ObservationDiagnosis, HeadDiagnosis]


@dataclass(frozen=True)
class Line:
    """A line of the opening: what it is about, and what is said."""

    about: str
    said: str
    command: bool = False
    """Whether it can be typed as it stands."""
    label: Kind | None = None
    """The finding's label, for its colour; None: no finding."""


def headline(diagnosis: Diagnosis) -> str:
    """PASS, or every finding with its place, the gravest first; in one paragraph."""
    entries = _judged(diagnosis)
    found = [f for f in diagnosis.findings if f.captured]
    if found:
        kernels = len({c.metadata.get("kernel") for c in diagnosis.captures}) > 1
        said = [
            f"{NAMES[f.label].upper()}: {where(f)}{_cause(f, with_kernel=kernels)}." for f in found[:_MOST_FINDINGS]
        ]
        if more := len(found) - _MOST_FINDINGS:
            said += [f"And {plural(more, 'more finding')}."] if more > 0 else []
        return " ".join([*said, *_others(diagnosis, entries)])
    if not entries:
        return _nothing_judged(diagnosis)
    open_ = [e for e in entries if "clean" not in label_names(e[2])]
    if 2 * len(open_) > len(entries):
        heads = "the only head" if len(entries) == 1 else f"{len(open_)} of {len(entries)} heads"
        said = [f"NOTHING FOUND, BUT TOO LITTLE TO DECIDE: {heads} could be neither passed nor faulted."]
    else:
        said = [f"PASS: {_good([e for e in entries if e not in open_])}."]
        if open_:
            named = ", ".join(_name(e) for e in open_[:3]) + (" and others" if len(open_) > 3 else "")
            said.append(f"Of {_count(entries)} {len(open_)} {'is' if len(open_) == 1 else 'are'} undecided: {named}.")
    return " ".join([*said, *_recipes(diagnosis), *_unread(diagnosis)])


def opening(diagnosis: Diagnosis) -> Iterator[Line]:
    """What follows the headline: the one next command, then what is known of each finding."""
    entries = _judged(diagnosis)
    found = [f for f in diagnosis.findings if f.captured]
    yield from _next(diagnosis, found, entries)
    for finding in found[:_MOST_FINDINGS]:
        yield from about(finding) if len(found) == 1 else [brief(finding)]
    if not found and entries:
        yield from _about_nothing(diagnosis, entries)
    for finding in [f for f in diagnosis.findings if not f.captured][: max(_MOST_FINDINGS - len(found), 0)]:
        yield brief(finding)


def about(finding: SharedFinding) -> Iterator[Line]:
    """What a finding is, since when, what it does to training, and how sure it is."""
    title = NAMES[finding.label].capitalize() if finding.label != "nonfinite" else "NaN or Inf"
    yield Line(title, what(finding), label=finding.label)
    if since := when(finding):
        yield Line("Since", since)
    if finding.label != "unjudged":
        yield Line("Matters", matters(finding))
    yield Line("Sure", sure(finding))


def brief(finding: SharedFinding) -> Line:
    """The same in one paragraph, for one of several findings."""
    first, *others = about(finding)
    order = sorted(others, key=lambda line: line.about != "Sure")
    said = [first.said, *(f"{line.about}: {line.said}" for line in order if line.about != "Since" or finding.earlier)]
    return Line(first.about, " ".join(said), label=finding.label)


def where(finding: SharedFinding) -> str:
    """Layers, heads and steps: "layer 3, all 4 heads, from step 200 on; layer 5, head 1, at step 300"."""
    said = [_place(place) for place in finding.places[:_MOST_PLACES]]
    if left := finding.places[_MOST_PLACES:]:
        layers = sorted({layer for place in left for layer in place.layers})
        said.append(f"and {'layers ' + ranges(layers) if len(layers) > 1 else 'elsewhere'}")
    # One range of steps for all is said once.
    spans = {_span(place) for place in finding.places}
    if len(spans) == 1 and len(said) > 1:
        said = [*(_heads(place) for place in finding.places[:_MOST_PLACES]), *said[_MOST_PLACES:]]
        said[-1] += _span(finding.places[0])
    ranks = f", rank {', '.join(finding.ranks)} alone" if finding.ranks else ""
    maker = ""
    if not finding.captured:
        maker = f"recipe {finding.observations[0]}, run here, "
    return f"{maker}{'; '.join(said)}{ranks}"


def _place(place: FindingPlace) -> str:
    return _heads(place) + _span(place)


def _heads(place: FindingPlace) -> str:
    layers = f"layer{'s' if len(place.layers) > 1 else ''} {ranges(place.layers)}, " if place.layers else ""
    if place.all_heads:
        return f"{layers}all {len(place.heads)} heads"
    return f"{layers}head{'s' if len(place.heads) > 1 else ''} {ranges(place.heads)}"


def _span(place: FindingPlace) -> str:
    """The steps of a place, as a range with its onset."""
    steps, looked = place.steps, place.steps_looked
    if not steps:
        return ""
    if len(looked) == 1:
        return f", step {steps[0]}"
    if steps == looked:
        return f", at all steps ({steps[0]} to {steps[-1]})"
    after = [step for step in looked if step > steps[-1]]
    between = [step for step in looked if steps[0] <= step <= steps[-1]]
    if len(steps) == 1:
        return f", {'from' if not after else 'at'} step {steps[0]}{' on' if not after else ' alone'}"
    if len(between) == len(steps):
        return f", from step {steps[0]} on" if not after else f", steps {steps[0]} to {steps[-1]}"
    return f", at {len(steps)} of {len(looked)} steps from {steps[0]} on"


def _cause(finding: SharedFinding, *, with_kernel: bool) -> str:
    parts = [finding.site] if finding.site else []
    if finding.kernel and with_kernel:
        parts.append(f"kernel {finding.kernel}")
    return f" ({', '.join(parts)})" if parts else ""


def what(finding: SharedFinding) -> str:
    """The finding in a sentence or two, of its worst head."""
    name = head_name(finding.worst.layer, finding.worst.head)
    step = f" at step {finding.worst.step}" if finding.worst.step is not None and len(finding.by_step) > 1 else ""
    place = f" ({name}{step})" if finding.heads > 1 else ""
    if finding.label == "unjudged":
        return finding.words
    if finding.label == "lossy" and finding.factors:
        (first, factor), *others = finding.factors.items()
        factors = [f"{SYMBOLS[first]} has {times(factor)}", *(f"{SYMBOLS[q]} {times(f)}" for q, f in others)]
        said = f"{together(factors)} times the error of a well-rounded kernel{place}"
        if finding.site:
            said += f"; its bits are those of a kernel that keeps {finding.site}, which good kernels keep in fp32"
    elif finding.label == "biased" and finding.biased_mean is not None:
        said = f"{bias_words(finding)}{place}: it does not cancel, but adds up over rows and steps"
    elif finding.label == "ill_conditioned":
        other = finding.dq_error_well_rounded
        alike = "" if other is None else f", and a well-rounded kernel's would be {percent(other)} off as well"
        said = f"dQ is {percent(finding.dq_error)} off{place}{alike}: these inputs amplify ordinary rounding"
    else:
        said = finding.words.rstrip(".") + place
    if finding.label == "lossy" and finding.pattern:
        said += f". {finding.pattern.rstrip('.')}"
    too = [bias_words(finding) if label == "biased" else NAMES[label] for label in finding.also if label == "biased"]
    return f"{said}.{f' Biased too: {too[0]}.' if too else ''}"


def bias_words(finding: SharedFinding) -> str:
    """The mean that is beyond chance, in its unit, and what the unit is."""
    assert finding.biased_mean is not None
    test, mean = TESTS[finding.biased_mean], finding.biased_by or 0.0
    if test.unit == "floor":
        return f"{test.error} averages {mean:+.2g} of what one correct rounding of O makes of it"
    towards = ""
    if test.key == "o_away_excess":
        towards = ", towards zero" if mean < 0 else ", away from zero"
    return f"{test.error} averages {mean:+.2g} of its last bit (ulp){towards}"


def when(finding: SharedFinding) -> str:
    """Its onset, what was before, and whether it grows; empty where a single step, or none, is known."""
    steps = finding.by_step
    if len(steps) < 2 or finding.onset is None:
        return ""
    there = [s for s in steps if s.heads]
    before = [s.step for s in steps if s.step < there[0].step]
    said = [f"step {there[0].step}"]
    if before:
        said[0] += f"; {'passed' if len(before) == 1 else 'passed last'} at step {before[-1]}"
    else:
        said[0] += ", the first step looked at"
    said[0] += f" ({len(steps)} steps looked at, {steps[0].step} to {steps[-1].step})"
    if finding.earlier:
        first = min(finding.earlier.items(), key=lambda item: item[1])
        said.append(f"{NAMES[first[0]]} from {first[1]} on, {NAMES[finding.label]} from {finding.onset} on")
    first_error, last_error = there[0].dq_error, there[-1].dq_error
    if len(there) > 1 and first_error and last_error:
        if last_error > 2 * first_error:
            said.append(
                f"it grows: dQ {percent(first_error)} off at {there[0].step}, {percent(last_error)} at {there[-1].step}"
            )
        elif last_error < first_error / 2:
            said.append("it fades")
        else:
            said.append("it does not grow")
    return f"{'. '.join(s[0].upper() + s[1:] if i else s for i, s in enumerate(said))}."


def matters(finding: SharedFinding) -> str:
    """What it does to the gradients that train."""
    if finding.gradients is None and finding.dw_q_error is None:
        return "not known: the gradients cannot be judged without dO (best with dQ)."
    if finding.label == "nonfinite":
        return "NaN in an output reaches every weight within one step: the run stops learning."
    size = max(finding.dq_error or 0.0, finding.dw_q_error or 0.0)
    predicted = "would be (predicted from delta) " if finding.gradients == "predicted" else "is "
    other = finding.dq_error_well_rounded
    said = f"dQ {predicted}up to {percent(finding.dq_error)} off"
    said += "" if other is None else f" (a well-rounded kernel's: {percent(other)})"
    if finding.dw_q_error is not None:
        said += f", dW_Q up to {percent(finding.dw_q_error)}"
    if size >= _LARGE:
        return f"much. {said[0].upper()}{said[1:]}; runs that blew up had 11 to 42 % of dW_Q off shortly before."
    return f"{'little so far: ' if size < _LITTLE else ''}{said}."


def sure(finding: SharedFinding) -> str:
    """How certain it is, in plain words."""
    steps = " (each step counts)" if len(finding.by_step) > 1 else ""
    count = "" if finding.of == 1 else f" It is in {finding.heads} of {finding.of} heads looked at{steps}."
    if finding.label == "nonfinite":
        return f"certain: the exact result is finite there.{count}"
    if finding.label == "wrong":
        return f"certain: beyond anything that rounding can do.{count}"
    if finding.label == "unjudged":
        return "that the metadata are wrong, or the kernel is: nothing else is judged until this fits."
    if finding.label == "biased" and finding.p_adjusted is not None:
        return f"yes: an unbiased kernel shows such a mean {chance(finding.p_adjusted)}.{count}"
    if finding.label == "lossy" and finding.factor_ci95 is not None:
        low, high = finding.factor_ci95
        return f"yes: the factor's 95 % interval is {times(low)} to {times(high)}; good kernels stay below 1.1.{count}"
    if finding.label == "ill_conditioned":
        return f"yes: a well-rounded kernel, run on the same inputs, is as far off. The kernel is not at fault.{count}"
    return f"seen, not tested.{count}"


def _judged(diagnosis: Diagnosis) -> list[Entry]:
    """The heads of captured observations that have a verdict, the worst first."""
    return [e for e in diagnosis.ranked() if e[2].verdict is not None and e[1].outputs]


def _name(entry: Entry) -> str:
    capture, _, head = entry
    step = capture.metadata.get("step")
    return head_name(head.layer, head.head) + (f" step {step}" if step is not None else "")


def _count(entries: list[Entry]) -> str:
    """How many heads were looked at: "24 (8 heads at 3 steps)"."""
    steps = len({e[0].metadata.get("step") for e in entries})
    heads = len({(e[2].layer, e[2].head) for e in entries})
    return f"{len(entries)} ({plural(heads, 'head')} at {steps} steps)" if steps > 1 else plural(len(entries), "head")


def _others(diagnosis: Diagnosis, entries: list[Entry]) -> Iterator[str]:
    """How many heads the findings are about, and what the others are."""
    clean = sum("clean" in label_names(e[2]) for e in entries)
    open_ = sum(f.heads for f in diagnosis.undecided if f.captured)
    if len(entries) > 1:
        undecided = f", {open_} {'is' if open_ == 1 else 'are'} undecided" if open_ else ""
        verb = "passes" if clean == 1 else "pass"
        yield f"{clean or 'None'} of {_count(entries)} {verb}{undecided}."
    yield from _recipes(diagnosis)
    yield from _unread(diagnosis)


def _recipes(diagnosis: Diagnosis) -> Iterator[str]:
    """What was run here beside a kernel's output."""
    run = {o.name for c in diagnosis.captures for o in c.observations if not o.outputs}
    for name in sorted(run):
        found = [f for f in diagnosis.findings if not f.captured and name in f.observations]
        labels = together([NAMES[f.label] for f in found]) if found else "clean"
        yield f"Emulated beside it, not captured: {name.removesuffix(' (emulated)')}, {labels}."


def _unread(diagnosis: Diagnosis) -> Iterator[str]:
    if left := len(diagnosis.summary.unreadable):
        yield f"{plural(left, 'input')} could not be read."


def _nothing_judged(diagnosis: Diagnosis) -> str:
    run = [e for e in diagnosis.ranked() if e[2].verdict is not None]
    if not run:
        refused = next((c for c in diagnosis.captures if c.unjudged), None)
        if refused is None:
            return "NOTHING JUDGED: nothing could be compared with the exact result."
        return f"NOT JUDGED: {file_name(refused.source)}: {refused.assumptions.message}"
    said = []
    for name in dict.fromkeys(o.name for _, o, _ in run):
        found = [f for f in diagnosis.findings if name in f.observations]
        recipe = name.removesuffix(" (emulated)")
        where_ = "; ".join(f"{NAMES[f.label]} in {where(f).partition('run here, ')[2]}" for f in found[:_MOST_FINDINGS])
        said.append(f"recipe {recipe}, emulated on these inputs, is {where_ or 'clean'}")
    return f"NO KERNEL JUDGED, no output of one was captured: {'; '.join(said)}."


def _good(entries: list[Entry]) -> str:
    """What is good in these heads."""
    heads = [head for _, _, head in entries]
    good = [[SYMBOLS[q.quantity] for q in head.quantities if q.answer == "good"] for head in heads]
    everywhere = [name for name in SYMBOLS.values() if all(name in names for names in good)]
    count = head_name(heads[0].layer, heads[0].head) if len(heads) == 1 else _count(entries)
    missing = [said for said in heads[0].not_judged if all(said in head.not_judged for head in heads)]
    left = (words.not_judged(missing) or "").rstrip(".")
    if not everywhere:
        return f"no mean error beyond chance in {count}. {left}".rstrip(" .")
    are = "are" if len(everywhere) > 1 else "is"
    said = f"{together(everywhere)} {are} as good as a well-rounded kernel's in {count}, and no bias was found"
    return f"{said}. {left}" if left else said


def _about_nothing(diagnosis: Diagnosis, entries: list[Entry]) -> Iterator[Line]:
    """Where nothing was found: how well that is known, and what was left open."""
    clean = [e[2] for e in entries if "clean" in label_names(e[2])]
    for finding in diagnosis.undecided[:1]:
        if finding.captured:
            yield Line("Undecided", f"{where(finding)}. {finding.words}", label="undecided")
    errors = [(value, predicted) for e in entries for value, predicted in [DQ_ERROR.nearest(e[2])] if value is not None]
    if errors:
        value, predicted = max(errors)
        by = "(predicted from delta) " if predicted else ""
        yield Line("Matters", f"dQ is {by}up to {percent(value)} off: what its format's rounding costs any kernel.")
    if clean:
        factors = [value for head in clean if (value := FACTOR.value(head)) is not None]
        known = []
        if factors:
            known.append(f"errors are up to {times(max(factors))} times a well-rounded kernel's (above 1.25: lossy)")
        if size := diagnosis.family.size:
            known.append(f"{plural(size, 'test')} of a mean error, and none speaks against the kernel")
        yield Line("Sure", f"{'; '.join(known)}." if known else "nothing was tested.")


def next_command(diagnosis: Diagnosis) -> Line:
    """The one thing to do next, with its options filled in."""
    return next(_next(diagnosis, [f for f in diagnosis.findings if f.captured], _judged(diagnosis)))


def _next(diagnosis: Diagnosis, found: list[SharedFinding], entries: list[Entry]) -> Iterator[Line]:
    if found:
        yield _command(diagnosis, found[0])
    elif not entries:
        yield Line("Next", "capture what the kernel returns (o, best with do and dq), and inspect that.")
    elif any("clean" in label_names(e[2]) for e in entries):
        without = all(e[2].propagation.dq is None for e in entries)
        more = " To judge the gradients too, capture do and dq." if without else ""
        yield Line("Next", f"nothing to do here; if training goes wrong, look at other layers and steps.{more}")
    else:
        yield Line("Next", "capture more rows or sequences of these heads, and inspect again.")


def _command(diagnosis: Diagnosis, finding: SharedFinding) -> Line:
    worst = finding.worst
    joined = re.fullmatch(r"(.*) \(and ranks? [\d, ]+\)", worst.source)
    source = joined[1] if joined else worst.source
    if not source.endswith((".safetensors", ".pt", ".npz")):
        asked = f"attn_diag.explain(found, {worst.head}" + ("" if worst.layer is None else f", layer={worst.layer}")
        return Line("Next", f"{asked})  # found: what inspect returned", command=True)
    if joined:
        folder = shlex.quote(str(PurePosixPath(source).parent))
        layer = "" if worst.layer is None else f" --layer {worst.layer}"
        return Line("Next", f"attn-diag inspect {folder} --no-merge-ranks{layer}", command=True)
    arguments = ["--example"] if source.startswith("example ") else [shlex.quote(source)]
    if finding.label == "unjudged":
        fits = re.findall(r"\b(causal|scale|layout|softcap)=([\w.-]+)", finding.words)
        options = [f"--{name} {value.rstrip('.')}" for name, value in fits]
        return Line("Next", " ".join(["attn-diag inspect", *arguments, *options]), command=True)
    arguments += ["--head", str(worst.head)]
    if worst.batch is not None:
        arguments += ["--batch", str(worst.batch)]
    capture = next((c for c in diagnosis.captures if c.source == worst.source), None)
    if capture is not None and len(capture.observations) > 1:
        arguments += ["--observation", shlex.quote(worst.observation)]
    if finding.label in ("wrong", "nonfinite"):
        return Line("Next", " ".join(["attn-diag inspect", *arguments, "--html", "wrong.html"]), command=True)
    command = "what-if" if finding.label == "ill_conditioned" else "attribute"
    return Line("Next", f"attn-diag {command} {' '.join(arguments)}", command=True)
