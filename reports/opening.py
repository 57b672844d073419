"""How a diagnosis begins: PASS or the findings, the one next command, and what is known of each finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from attn_diag.reports import words
from attn_diag.reports.finding_words import NAMES, Line, about, brief, fault, style_of, where
from attn_diag.reports.following import fitting, next_of
from attn_diag.reports.quantities import DQ_ERROR, FACTOR, label_names
from attn_diag.results.diagnosis import Diagnosis
from attn_diag.results.findings import SharedFinding
from attn_diag.results.heads import CaptureDiagnosis, HeadDiagnosis, ObservationDiagnosis
from attn_diag.results.quality import KEPT_OPEN, NO_GRADIENT
from attn_diag.results.wording import SYMBOLS, file_name, head_name, percent, plural, times, together, yardstick

__all__ = ["headline", "next_command", "of_observations", "opening", "style"]
Entry = tuple[CaptureDiagnosis, ObservationDiagnosis, HeadDiagnosis]
_WHOSE = {"fa2": "FlashAttention-2", "flex": "FlexAttention", "qiu2025": "the paper's code"}
_RULE = "lossy: the whole 95 % interval above 1.25"
_MOST_FINDINGS, _MOST_NAMED = 3, 3
_NO_DQ = 1e6  # so many times its size an error is only of a dQ that is none, as where all rows of V are one
# How the check of a capture's metadata ends where no other ones fit; else it names what does.
_NOTHING_FITS = "tried fits either"


def headline(diagnosis: Diagnosis) -> str:
    """PASS, or every finding with its place, the gravest first; in one paragraph."""
    entries, found = _judged(diagnosis), _captured(diagnosis.findings)
    rest = [*_recipes(diagnosis), *_unread(diagnosis)]
    if found:
        alone = len(found) == 1
        details = [_details(diagnosis, f, alone=alone) for f in found[:_MOST_FINDINGS]]
        said = [
            f"{_shouted(diagnosis, f)}: {where(f)}{' (likewise)' if own and own in details[:n] else own}."
            for n, (f, own) in enumerate(zip(found, details, strict=False))
        ]
        if more := len(found[_MOST_FINDINGS:]):
            said.append(f"And {plural(more, 'more finding')}.")
        return " ".join([*said, *_others(diagnosis, entries, found), *rest])
    if not entries:
        return " ".join([_nothing_judged(diagnosis), *_unread(diagnosis)])
    open_ = [e for e in entries if "clean" not in label_names(e[2])]
    if 2 * len(open_) > len(entries):
        heads = "the only head" if len(entries) == 1 else f"{len(open_)} of {_all(entries)}"
        known = all(_kept_open(e[2]) for e in open_)
        what = f"NOTHING FOUND{' BUT A KNOWN ROUNDING' if known else ', BUT TOO LITTLE TO DECIDE'}"
        said = [f"{what}: {heads} could be neither passed nor faulted."]
    else:
        passed = [e for e in entries if "clean" in label_names(e[2])]
        said = [f"PASS: {_good(passed)}."]
        if open_:
            named = ", ".join(_name(e) for e in open_[:_MOST_NAMED]) + " and others" * (len(open_) > _MOST_NAMED)
            said.append(f"Of {_all(entries)} {len(open_)} {'is' if len(open_) == 1 else 'are'} undecided: {named}.")
        said += _not_judged(passed)
    return " ".join([*said, *_not_as_declared(entries), *rest])


def _not_as_declared(entries: Sequence[Entry]) -> list[str]:
    """What O's bits show that a declared kernel does otherwise, though O is none the worse for it here."""
    of_head = [[p.words for q in e[2].quantities if q.quantity == "o" for p in q.patterns if p.kind == "scale"]
               for e in entries]  # fmt: skip
    counted = Counter(words for several in of_head for words in several[:1])
    if not counted:
        return []
    (words, count), *others = counted.most_common()
    heads = f"{count} of {_count(entries)}" if len(entries) > 1 else "the only head"
    more = f"; and so, otherwise, in {sum(n for _, n in others)} more" if others else ""
    return [f"Not as declared: O's bits in {heads} are those of a kernel {words.removeprefix('as ')}{more}."]


def opening(diagnosis: Diagnosis) -> Iterator[Line]:
    """What follows the headline: what to do next, and what is known of each finding, for each of several in short."""
    entries, found = _judged(diagnosis), _captured(diagnosis.findings)
    if len(found) < 2:
        yield next_command(diagnosis)
        for finding in found:
            yield from about(finding)
    for number, finding in enumerate(found[:_MOST_FINDINGS] if len(found) > 1 else []):
        observations = of_observations(diagnosis, finding)
        if len(found) > 2 and number > 0:
            yield brief(finding, observations, following=next_of(diagnosis, finding).said, crowded=True)
        else:
            yield brief(finding, observations, crowded=len(found) > 2)
            yield next_of(diagnosis, finding)
    if not found and entries:
        yield from _about_nothing(diagnosis, entries)
    if not found and not entries:
        yield from _about_emulated(diagnosis)


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
        return next_of(diagnosis, found[0])
    if not entries:
        return Line("Next", "capture what the kernel returns (o, best with do and dq) too, and inspect that.")
    if all("clean" not in label_names(e[2]) for e in entries):
        if all(not {"o", "delta"} & set(e[1].outputs) for e in entries):
            return Line("Next", "capture o of these heads too, and inspect again: without it no bias can be tested.")
        if all(_kept_open(e[2]) for e in entries):
            return Line(
                "Next", "nothing is needed; to be rid of the rounding, keep in fp32 what it casts, or fuse the kernel."
            )
        return Line("Next", "capture more rows or sequences of these heads, and inspect again.")
    if all(any(NO_GRADIENT in missing for missing in e[2].not_judged) for e in entries):
        return Line("Next", words.LOST_GRADIENT)
    more = " To judge the gradients too, capture do and dq." * all(e[2].propagation.dq is None for e in entries)
    return Line("Next", f"nothing to do here; if training goes wrong, look at other layers and steps.{more}")


def _kept_open(head: HeadDiagnosis) -> bool:
    """Whether a known rounding alone keeps it undecided."""
    return head.verdict is not None and KEPT_OPEN in head.verdict.suggestions


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
        if len(observations) > len(finding.observations) > 0
        else ""
    )


def _details(diagnosis: Diagnosis, finding: SharedFinding, *, alone: bool) -> str:
    """What else tells a finding: who is at fault (``alone``: of one finding; several have it below), its site, what
    would fit, and which of several kernels it is of."""
    # Documents before version 3 call lossy what was compared with nothing.
    shown = bool(finding.factors) if finding.label == "lossy" else finding.label == "biased"
    parts = [fault(finding)] if alone and shown else []
    if finding.site:
        parts = [": ".join([*parts, finding.site])]
    parts += [f"{NAMES[label]} from step {step} on" for label, step in finding.earlier.items()]
    if finding.label == "ill_conditioned":
        parts.append("no fault of the kernel")
    if finding.label == "unjudged":
        fits = fitting(finding)
        if fits:
            output = "LSE" if finding.words.startswith("LSE") else "O"
            parts.append(f"{_judged_as(diagnosis, finding, fits)}{output} fits {together(fits)}")
        elif _NOTHING_FITS in finding.words:
            parts.append("no mask or scale tried fits")
    if finding.kernel and len({c.metadata.get("kernel") for c in diagnosis.captures}) > 1:
        parts.append(f"kernel {finding.kernel}")
    return f" ({', '.join(parts)})" if parts else ""


def _judged_as(diagnosis: Diagnosis, finding: SharedFinding, fits: Sequence[str]) -> str:
    """Under what a capture was judged that something else fits: "judged as causal=top-left, "; empty if unknown."""
    metadata = next((c.metadata for c in diagnosis.captures if c.source == finding.worst.source), {})
    keys = dict.fromkeys(found.partition("=")[0] for found in fits)
    known = [f"{key}={metadata[key]}" for key in keys if metadata.get(key) is not None]
    return f"judged as {together(known)}, " if known else ""


def _name(entry: Entry) -> str:
    capture, _, head = entry
    step = capture.metadata.get("step")
    return head_name(head.layer, head.head) + (f" step {step}" if step is not None else "")


def _count(entries: Sequence[Entry]) -> str:
    """How many heads were looked at: "8 heads", "8 heads at 3 steps", "8 heads at 3 steps (23 in all)"."""
    steps = len({e[0].metadata.get("step") for e in entries})
    heads = len({(e[2].layer, e[2].head) for e in entries})
    if steps < 2:
        return plural(len(entries), "head")
    in_all = "" if len(entries) == heads * steps else f" ({len(entries)} in all)"
    return f"{plural(heads, 'head')} at {steps} steps{in_all}"


def _all(entries: Sequence[Entry]) -> str:
    """How many judgements a number is of: "8 heads", "24 (8 heads at 3 steps)"."""
    several = len({e[0].metadata.get("step") for e in entries}) > 1
    return f"{len(entries)} ({_count(entries).partition(' (')[0]})" if several else _count(entries)


def _others(diagnosis: Diagnosis, entries: Sequence[Entry], found: Sequence[SharedFinding]) -> Iterator[str]:
    """What the heads are that the findings are not about; where there are several findings, in short."""
    clean = sum("clean" in label_names(e[2]) for e in entries)
    open_ = _captured(diagnosis.undecided)
    undecided = sum(f.heads for f in open_)
    steps = len({e[0].metadata.get("step") for e in entries}) > 1
    if not clean + undecided:
        return
    if (same := _same_heads_pass(entries, found)) and not undecided:
        yield f"The same heads pass in {same}."
        return
    counted = steps and clean + undecided > 1
    if len(found) > 1 and undecided:
        yield f"Others{' (heads × steps)' * counted}: {clean} pass, {undecided} undecided."
        return
    others = plural(clean + undecided, "other" if counted else "other head") + " (heads × steps)" * counted
    if not undecided:
        yield f"{others} {'passes' if clean == 1 else 'pass'}."
        return
    places = "; ".join(where(f, terse=True) for f in open_[:_MOST_NAMED]) + "; …" * (len(open_) > _MOST_NAMED)
    passed = "" if not clean else f"{clean} {'passes' if clean == 1 else 'pass'}, "
    yield f"Of {others} {passed}{undecided} {'is' if undecided == 1 else 'are'} undecided ({places})."


def _same_heads_pass(entries: Sequence[Entry], found: Sequence[SharedFinding]) -> str:
    """The observations in which all heads pass, and no others, that a finding is about; empty where that is not so."""
    if len(found) != 1:
        return ""
    own = {(c.source, h.head, h.batch) for c, o, h in entries if o.name in found[0].observations}
    named: dict[str, set[tuple[str, int | None, int | None]]] = {}
    for capture, observation, head in entries:
        if observation.name not in found[0].observations:
            if "clean" not in label_names(head):
                return ""
            named.setdefault(observation.name, set()).add((capture.source, head.head, head.batch))
    alike = found[0].heads == len(own) and all(places == own for places in named.values())
    return together([repr(name) for name in named]) if named and alike else ""


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
        said.append(f"recipe {_recipe(name)}, emulated on these inputs, is {places or 'clean'}")
    return f"NO KERNEL JUDGED, as no output of one was captured: {'; '.join(said)}."


def _recipe(name: str) -> str:
    """A recipe's name, and whose roundings it declares where the name does not tell."""
    name = name.removesuffix(" (emulated)")
    return f"{name} ({_WHOSE[name]})" if name in _WHOSE else name


def _good(entries: Sequence[Entry]) -> str:
    """What is good in these heads."""
    heads = [head for _, _, head in entries]
    good = [[SYMBOLS[q.quantity] for q in head.quantities if q.answer == "good"] for head in heads]
    everywhere = [name for name in SYMBOLS.values() if all(name in names for names in good)]
    count = head_name(heads[0].layer, heads[0].head) if len(heads) == 1 else _count(entries)
    if not everywhere:
        return f"no mean error of the kernel's own in {count}"
    are = "are" if len(everywhere) > 1 else "is"
    return f"{together(everywhere)} {are} as good as {_held_against(heads)}'s in {count}, and no bias was found"


def _not_judged(entries: Sequence[Entry]) -> list[str]:
    """What was judged of none of these heads."""
    first, *others = [head.not_judged for _, _, head in entries]
    said = words.not_judged([name for name in first if all(name in other for other in others)])
    return [] if said is None else [said]


def _about_nothing(diagnosis: Diagnosis, entries: Sequence[Entry]) -> Iterator[Line]:
    """Where nothing was found: what was left open, and how well the rest is known."""
    undecided = _captured(diagnosis.undecided)
    for finding in undecided[:1]:
        yield Line("Open", f"{where(finding, terse=True)}: {_lower(finding.words)}", label="undecided")
    if (errors := _dq_errors(entries)) is not None:
        all_pass = all("clean" in label_names(e[2]) for e in entries)
        yield Line("Matters", f"not, beyond ordinary rounding: {errors}" if all_pass else errors)
    clean = [e[2] for e in entries if "clean" in label_names(e[2])]
    known = []
    if factors := [value for head in clean if (value := FACTOR.value(head)) is not None]:
        those = "errors" if len(clean) == len(entries) else "errors of heads that pass"
        known.append(f"{those} are at most {times(max(factors))} times {_held_against(clean)}'s ({_RULE})")
    if clean and (size := diagnosis.family.size):
        known.append(f"{plural(size, 'test')} of a mean error, and none speaks against the kernel")
    if not clean:
        known.append("of nothing: no fault was shown, nor that there is none")
    if known:
        yield Line("Sure", f"{'; '.join(known)}.")


def _about_emulated(diagnosis: Diagnosis) -> Iterator[Line]:
    """Where no kernel's output was looked at: what is known nevertheless."""
    run = [e for e in diagnosis.ranked() if e[2].verdict is not None]
    if not run:
        return
    names = together([_recipe(name) for name in dict.fromkeys(o.name for _, o, _ in run)])
    yield Line("Since", "nothing to date: no kernel's output was looked at.")
    yield Line("Sure", f"of what rounding as {names} does on these inputs; of your kernel nothing is known.")
    if (errors := _dq_errors(run)) is not None:
        yield Line("Matters", f"not known of your kernel; with these roundings {errors}")


def _held_against(heads: Sequence[HeadDiagnosis]) -> str:
    """The yardstick of these heads; of several the first's."""
    return yardstick(next((q.declared for head in heads for q in head.quantities), None))


def _dq_errors(entries: Sequence[Entry]) -> str | None:
    """How far dQ is off in the worst head, beside a well-rounded kernel's there; None where it is not known."""
    nearest = [(*DQ_ERROR.nearest(head), head) for _, _, head in entries]
    known = [(value, guessed, head) for value, guessed, head in nearest if value is not None and value < _NO_DQ]
    if not known:
        return None
    largest, guessed, head = max(known, key=lambda item: item[0])
    how = " (as predicted from delta)" if guessed else ""
    other = next((q.relative_error_well_rounded for q in head.quantities if q.quantity == "dq"), None)
    beside = "" if other is None or guessed else f"; {_held_against([head])}'s is {percent(other)} off there"
    return f"the gradient dQ is up to {percent(largest)} off{how}{beside}."


def _lower(text: str) -> str:
    """As the rest of a sentence; a symbol such as dQ keeps its letters."""
    return text if text[1:2].isupper() or text[1:2] == " " else text[:1].lower() + text[1:]
