"""How a diagnosis begins: PASS or the findings, the one next command, and what is known of each finding."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from attn_diag.reports import words
from attn_diag.reports.finding_words import NAMES, Line, about, brief, style_of, where
from attn_diag.reports.quantities import DQ_ERROR, FACTOR, label_names
from attn_diag.results.diagnosis import Diagnosis
from attn_diag.results.findings import SharedFinding
from attn_diag.results.heads import CaptureDiagnosis, HeadDiagnosis, ObservationDiagnosis
from attn_diag.results.wording import SYMBOLS, file_name, head_name, percent, plural, times, together

Entry = tuple[CaptureDiagnosis, ObservationDiagnosis, HeadDiagnosis]
_MOST_FINDINGS, _MOST_NAMED = 3, 3
# What a capture that was put together of several ranks' files calls itself.
_MERGED = re.compile(r"(.*) \(and ranks? [\d, ]+\)")


def headline(diagnosis: Diagnosis) -> str:
    """PASS, or every finding with its place, the gravest first; in one paragraph."""
    entries, found = _judged(diagnosis), _captured(diagnosis.findings)
    rest = [*_recipes(diagnosis), *_unread(diagnosis)]
    if found:
        said = [f"{_shouted(diagnosis, f)}: {where(f)}{_details(diagnosis, f)}." for f in found[:_MOST_FINDINGS]]
        if more := len(found[_MOST_FINDINGS:]):
            said.append(f"And {plural(more, 'more finding')}.")
        return " ".join([*said, *_others(diagnosis, entries), *rest])
    if not entries:
        return " ".join([_nothing_judged(diagnosis), *_unread(diagnosis)])
    open_ = [e for e in entries if "clean" not in label_names(e[2])]
    if 2 * len(open_) > len(entries):
        heads = "the only head" if len(entries) == 1 else f"{len(open_)} of {_count(entries)}"
        said = [f"NOTHING FOUND, BUT TOO LITTLE TO DECIDE: {heads} could be neither passed nor faulted."]
    else:
        passed = [e for e in entries if "clean" in label_names(e[2])]
        said = [f"PASS: {_good(passed)}."]
        if open_:
            named = ", ".join(_name(e) for e in open_[:_MOST_NAMED]) + " and others" * (len(open_) > _MOST_NAMED)
            said.append(f"Of {_count(entries)} {len(open_)} {'is' if len(open_) == 1 else 'are'} undecided: {named}.")
        said += _not_judged(passed)
    return " ".join([*said, *rest])


def opening(diagnosis: Diagnosis) -> Iterator[Line]:
    """What follows the headline: the one next command, then what is known of each finding."""
    entries, found = _judged(diagnosis), _captured(diagnosis.findings)
    yield next_command(diagnosis)
    if len(found) == 1:
        yield from about(found[0])
    else:
        yield from (brief(f, of_observations(diagnosis, f)) for f in found[:_MOST_FINDINGS])
    if not found and entries:
        yield from _about_nothing(diagnosis, entries)


def style(diagnosis: Diagnosis) -> str:
    """The headline's colour."""
    if found := _captured(diagnosis.findings):
        return style_of(found[0].label)
    text = headline(diagnosis)
    return style_of("clean" if text.startswith("PASS") else "undecided")


def next_command(diagnosis: Diagnosis) -> Line:
    """The one thing to do next, with its options filled in."""
    entries, found = _judged(diagnosis), _captured(diagnosis.findings)
    if found:
        return Line("Next", command(diagnosis, found[0]), command=True, purpose=_purpose(found[0]))
    if not entries:
        return Line("Next", "capture what the kernel returns (o, best with do and dq) too, and inspect that.")
    if all("clean" not in label_names(e[2]) for e in entries):
        return Line("Next", "capture more rows or sequences of these heads, and inspect again.")
    more = (
        " To judge the gradients too, capture do and dq." if all(e[2].propagation.dq is None for e in entries) else ""
    )
    return Line("Next", f"nothing to do here; if training goes wrong, look at other layers and steps.{more}")


def _captured(findings: Sequence[SharedFinding]) -> list[SharedFinding]:
    return [f for f in findings if f.captured]


def _judged(diagnosis: Diagnosis) -> list[Entry]:
    """The heads of captured observations that have a verdict, the worst first."""
    return [e for e in diagnosis.ranked() if e[2].verdict is not None and e[1].outputs]


def _shouted(diagnosis: Diagnosis, finding: SharedFinding) -> str:
    """The finding's name, and in which of several observations it is."""
    name = "NaN OR INF" if finding.label == "nonfinite" else NAMES[finding.label].upper()
    return f"{name}{of_observations(diagnosis, finding)}"


def of_observations(diagnosis: Diagnosis, finding: SharedFinding) -> str:
    """ " in paper": where it is, with a blank before it; empty where that is in all observations."""
    observations = {o.name for c in diagnosis.captures for o in c.observations if o.outputs}
    return (
        f" in {together([repr(n) for n in finding.observations])}"
        if len(observations) > len(finding.observations)
        else ""
    )


def _details(diagnosis: Diagnosis, finding: SharedFinding) -> str:
    """What else tells a finding: its site, what would fit, and which of several kernels it is of."""
    parts = [finding.site] if finding.site else []
    parts += [f"{NAMES[label]} from step {step} on" for label, step in finding.earlier.items()]
    if finding.label == "ill_conditioned":
        parts.append("no fault of the kernel")
    if finding.label == "unjudged":
        fits = _fitting(finding)
        parts.append(f"O fits {together(fits)}" if fits else "no mask or scale tried fits")
    if finding.kernel and len({c.metadata.get("kernel") for c in diagnosis.captures}) > 1:
        parts.append(f"kernel {finding.kernel}")
    return f" ({', '.join(parts)})" if parts else ""


def _fitting(finding: SharedFinding) -> list[str]:
    """The metadata that fit a capture that those stated do not."""
    return [found.rstrip(".") for found in re.findall(r"\b(?:causal|scale|layout|softcap)=[\w.-]+", finding.words)]


def _name(entry: Entry) -> str:
    capture, _, head = entry
    step = capture.metadata.get("step")
    return head_name(head.layer, head.head) + (f" step {step}" if step is not None else "")


def _count(entries: Sequence[Entry]) -> str:
    """How many heads were looked at: "8 heads", "24 (8 heads at 3 steps)"."""
    steps = len({e[0].metadata.get("step") for e in entries})
    heads = len({(e[2].layer, e[2].head) for e in entries})
    return f"{len(entries)} ({plural(heads, 'head')} at {steps} steps)" if steps > 1 else plural(len(entries), "head")


def _others(diagnosis: Diagnosis, entries: Sequence[Entry]) -> Iterator[str]:
    """What the heads are that the findings are not about."""
    clean = sum("clean" in label_names(e[2]) for e in entries)
    open_ = _captured(diagnosis.undecided)
    undecided = sum(f.heads for f in open_)
    steps = len({e[0].metadata.get("step") for e in entries}) > 1
    if not clean + undecided:
        return
    others = plural(clean + undecided, "other head") + " (each step counts)" * (steps and clean + undecided > 1)
    if not undecided:
        yield f"{others} {'passes' if clean == 1 else 'pass'}."
        return
    places = "; ".join(where(f) for f in open_[:_MOST_NAMED]) + "; …" * (len(open_) > _MOST_NAMED)
    passed = "" if not clean else f"{clean} {'passes' if clean == 1 else 'pass'}, "
    yield f"Of {others} {passed}{undecided} {'is' if undecided == 1 else 'are'} undecided ({places})."


def _recipes(diagnosis: Diagnosis) -> Iterator[str]:
    """What was run here beside a kernel's output."""
    for name in dict.fromkeys(o.name for c in diagnosis.captures for o in c.observations if not o.outputs):
        found = [f for f in diagnosis.findings if not f.captured and name in f.observations]
        said = "; ".join(f"{NAMES[f.label]} in {where(f)}" for f in found[:_MOST_FINDINGS])
        yield f"Emulated beside it, not captured: recipe {name.removesuffix(' (emulated)')}, {said or 'clean'}."


def _unread(diagnosis: Diagnosis) -> Iterator[str]:
    if left := len(diagnosis.summary.unreadable):
        yield f"{plural(left, 'input')} could not be read."


def _nothing_judged(diagnosis: Diagnosis) -> str:
    run = [e for e in diagnosis.ranked() if e[2].verdict is not None]
    if not run:
        refused = next((c for c in diagnosis.captures if c.unjudged), None)
        if refused is None:
            return "NOTHING JUDGED: nothing could be compared with the exact result."
        return f"NOTHING JUDGED: {file_name(refused.source)}: {refused.assumptions.message}"
    said = []
    for name in dict.fromkeys(o.name for _, o, _ in run):
        found = [f for f in diagnosis.findings if name in f.observations]
        places = "; ".join(f"{NAMES[f.label]} in {where(f)}" for f in found[:_MOST_FINDINGS])
        said.append(f"recipe {name.removesuffix(' (emulated)')}, emulated on these inputs, is {places or 'clean'}")
    return f"NO KERNEL JUDGED, as no output of one was captured: {'; '.join(said)}."


def _good(entries: Sequence[Entry]) -> str:
    """What is good in these heads."""
    heads = [head for _, _, head in entries]
    good = [[SYMBOLS[q.quantity] for q in head.quantities if q.answer == "good"] for head in heads]
    everywhere = [name for name in SYMBOLS.values() if all(name in names for names in good)]
    count = head_name(heads[0].layer, heads[0].head) if len(heads) == 1 else _count(entries)
    if not everywhere:
        return f"no mean error beyond chance in {count}"
    are = "are" if len(everywhere) > 1 else "is"
    return f"{together(everywhere)} {are} as good as a well-rounded kernel's in {count}, and no bias was found"


def _not_judged(entries: Sequence[Entry]) -> list[str]:
    """What was judged of none of these heads."""
    first, *others = [head.not_judged for _, _, head in entries]
    said = words.not_judged([name for name in first if all(name in other for other in others)])
    return [] if said is None else [said]


def _about_nothing(diagnosis: Diagnosis, entries: Sequence[Entry]) -> Iterator[Line]:
    """Where nothing was found: what was left open, and how well the rest is known."""
    for finding in _captured(diagnosis.undecided)[:1]:
        yield Line("Undecided", f"{where(finding)}. {finding.words}", label="undecided")
    nearest = [DQ_ERROR.nearest(head) for _, _, head in entries]
    if errors := [(value, predicted) for value, predicted in nearest if value is not None]:
        largest, guessed = max(errors)
        how = " (as predicted from delta)" if guessed else ""
        yield Line(
            "Matters", f"dQ is up to {percent(largest)} off{how}: what rounding costs any kernel of this format."
        )
    clean = [e[2] for e in entries if "clean" in label_names(e[2])]
    known = []
    if factors := [value for head in clean if (value := FACTOR.value(head)) is not None]:
        known.append(f"errors are at most {times(max(factors))} times a well-rounded kernel's (lossy is above 1.25)")
    if clean and (size := diagnosis.family.size):
        known.append(f"{plural(size, 'test')} of a mean error, and none speaks against the kernel")
    if known:
        yield Line("Sure", f"{'; '.join(known)}.")


def commands(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """(what it answers, command) for a closer look at the gravest finding; none where no rounding makes it."""
    found = [*diagnosis.findings, *diagnosis.undecided]
    if not found or found[0].label in ("wrong", "nonfinite", "unjudged"):
        return []
    if (arguments := _arguments(diagnosis, found[0])) is None:
        return []
    questions = [("Which rounding makes it", "attribute"), ("What would remove it", "what-if")]
    if found[0].biased_mean is not None:
        questions.append(("Where it goes wrong, bit by bit", "microscope"))
    return [(question, " ".join(["attn-diag", command, *arguments])) for question, command in questions]


def command(diagnosis: Diagnosis, finding: SharedFinding) -> str:
    """What to run next about a finding, with its options filled in."""
    worst, arguments = finding.worst, _arguments(diagnosis, finding)
    layer = "" if worst.layer is None else f" --layer {worst.layer}"
    if (merged := _MERGED.fullmatch(worst.source)) is not None:
        return f"attn-diag inspect {shlex.quote(str(PurePosixPath(merged[1]).parent))} --no-merge-ranks{layer}"
    if arguments is None:
        place = ("" if worst.head is None else f", {worst.head}") + layer.replace(" --layer ", ", layer=")
        return f"print(attn_diag.explain(found{place})), where found is what inspect returned"
    if finding.label == "unjudged":
        options = [part for found in _fitting(finding) for part in f"--{found}".split("=")]
        return " ".join(["attn-diag inspect", *arguments, *options])
    if finding.label in ("wrong", "nonfinite"):
        return " ".join(["attn-diag inspect", *arguments, "--html page.html"])
    return " ".join(["attn-diag", "what-if" if finding.label == "ill_conditioned" else "attribute", *arguments])


def _purpose(finding: SharedFinding) -> str:
    """What the next command shows."""
    if _MERGED.fullmatch(finding.worst.source) is not None:
        return "each rank by itself"
    if finding.label == "unjudged":
        return "judged under what fits"
    if finding.label in ("wrong", "nonfinite"):
        return "where and how, in pictures"
    return "what would remove it" if finding.label == "ill_conditioned" else "which rounding makes it"


def _arguments(diagnosis: Diagnosis, finding: SharedFinding) -> list[str] | None:
    """The file and options that name the worst head of a finding; None where it is in no file of its own."""
    worst = finding.worst
    if not worst.source.endswith((".safetensors", ".pt", ".npz")):
        return None
    arguments = ["--example"] if worst.source.startswith("example ") else [shlex.quote(worst.source)]
    if worst.head is not None:
        arguments += ["--head", str(worst.head)]
    if worst.batch is not None:
        arguments += ["--batch", str(worst.batch)]
    capture = next((c for c in diagnosis.captures if c.source == worst.source), None)
    if capture is not None and len([o for o in capture.observations if o.outputs]) > 1 and worst.observation:
        arguments += ["--observation", shlex.quote(worst.observation)]
    return arguments
