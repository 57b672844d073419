"""What a reader must learn first: what is wrong, in one sentence, and what to do about it."""

from __future__ import annotations

import shlex
from collections import Counter

from attn_diag.reports import words
from attn_diag.reports.quantities import DQ_ERROR, LETTERS, label_names, tested
from attn_diag.results.diagnosis import CaptureDiagnosis, Diagnosis, HeadDiagnosis, Label, ObservationDiagnosis
from attn_diag.results.quality import Answer, QuantityVerdict
from attn_diag.results.wording import SYMBOLS, file_name, head_name, percent, times, together

# Where an interval begins of a quantity that is lossy by its own size, not by that of its typical row.
_LOSSY = 1.25

Entry = tuple[CaptureDiagnosis, ObservationDiagnosis, HeadDiagnosis]


def judged_entries(diagnosis: Diagnosis) -> list[Entry]:
    """All heads with a verdict, the worst first."""
    return [entry for entry in diagnosis.ranked() if entry[2].verdict is not None]


def headline(diagnosis: Diagnosis) -> str:
    """The finding, of the first head with the gravest label, and how many heads have that label."""
    judged = judged_entries(diagnosis)
    for label in LETTERS:
        if found := [entry for entry in judged if label in label_names(entry[2])]:
            return _SENTENCES[label](found, judged)
    if judged:
        return "No verdict: no head carries a label."
    refused = next((c for c in diagnosis.captures if c.unjudged), None)
    if refused is None:
        return "No verdict: nothing could be judged."
    return f"No verdict: {file_name(refused.source)}: {refused.assumptions.message}"


def _count(found: list[Entry], judged: list[Entry], adjective: str) -> str:
    """How many heads are like the one that was told; of a single head nothing."""
    if len(judged) == 1:
        return ""
    every = "Both" if len(judged) == 2 else f"All {len(judged)}"
    count = every if len(found) == len(judged) else f"{len(found)} of {len(judged)}"
    return f" {count} heads {'is' if len(found) == 1 else 'are'} {adjective}."


def _answered(entry: Entry, answer: Answer) -> list[QuantityVerdict]:
    """The quantities with that answer, the furthest off first."""
    found = [q for q in entry[2].quantities if q.answer == answer]
    return sorted(found, key=lambda q: -(q.factor or 0.0))


def _said(words: str) -> str:
    return words.rstrip(".")


def _right(entry: Entry) -> str:
    """What is right beside something that is not."""
    right = [SYMBOLS[q.quantity] for q in entry[2].quantities if q.answer == "good"]
    unsure = [SYMBOLS[q.quantity] for q in entry[2].quantities if q.answer == "undecided"]
    said = [
        f"{together(names)} {'are' if len(names) > 1 else 'is'} {what}"
        for names, what in ((right, "right"), (unsure, "undecided"))
        if names
    ]
    return f" {'; '.join(said)}." if said else ""


def _nonfinite(found: list[Entry], judged: list[Entry]) -> str:
    broken = _answered(found[0], "nonfinite")
    said = "NaN or Inf where the mathematics is finite" if not broken else "; ".join(_said(q.words) for q in broken)
    where = Names(judged).name(found[0])
    return f"NOT FINITE in {where}: {said}.{_right(found[0])}{_count(found, judged, 'not finite')}"


def _wrong(found: list[Entry], judged: list[Entry]) -> str:
    wrong = _answered(found[0], "wrong")
    said = "an error that no rounding makes" if not wrong else _said(wrong[0].words)
    others = [SYMBOLS[q.quantity] for q in wrong[1:]]
    too = f" {together(others)} {'are' if len(others) > 1 else 'is'} wrong too." if others else ""
    where = Names(judged).name(found[0])
    return f"WRONG in {where}: {said}.{too}{_right(found[0])}{_count(found, judged, 'wrong')}"


def _biased(found: list[Entry], judged: list[Entry]) -> str:
    known = [(test, e) for test, e in tested(found[0][2]) if e.p_adjusted is not None]
    said = "the error's mean is beyond chance"
    if known:
        test, estimate = min(known, key=lambda item: (item[1].p_adjusted, item[1].p_value))
        mean = test.in_units(estimate).replace(" floor", " noise floors")
        said = f"{test.error} averages {mean}, which is beyond chance (adjusted p = {estimate.p_adjusted:.2g})"
    return f"BIASED in {Names(judged).name(found[0])}: {said}.{_count(found, judged, 'biased')}"


def _coarse(entry: Entry) -> str:
    """What of a lossy head is how much worse than a well-rounded kernel's."""
    coarse = _answered(entry, "lossy")
    plain = [q for q in coarse if q.site is None and q.factor_ci95 is not None and q.factor_ci95[0] > _LOSSY]
    if len(plain) < len(coarse):
        return _said(coarse[0].words)
    if coarse:
        (first, *others) = coarse
        factors = [f"{SYMBOLS[first.quantity]} has {times(first.factor)}"]
        factors += [f"{SYMBOLS[q.quantity]} {times(q.factor)}" for q in others]
        return f"{together(factors)} times the error of a well-rounded kernel"
    if entry[2].noise_factor is not None:
        return f"delta's error is {times(entry[2].noise_factor)} times what one correct rounding of O makes"
    return "errors that no correct rounding makes"


def _lossy(found: list[Entry], judged: list[Entry]) -> str:
    worst = max(
        found, key=lambda e: max((q.factor or 0.0 for q in _answered(e, "lossy")), default=e[2].noise_factor or 0)
    )
    said = {q.quantity: p.words for q in _answered(worst, "lossy") for p in q.patterns[:1]}
    why = "".join(f" {SYMBOLS[quantity]}: {words}." for quantity, words in said.items())
    biased = " It is biased too." if "biased" in label_names(worst[2]) else ""
    return f"LOSSY in {Names(judged).name(worst)}: {_coarse(worst)}.{why}{biased}{_count(found, judged, 'lossy')}"


def _ill_conditioned(found: list[Entry], judged: list[Entry]) -> str:
    error, entry = max(((DQ_ERROR.nearest(e[2])[0] or 0.0, e) for e in found), key=lambda item: item[0])
    dq = next((q for q in entry[2].quantities if q.quantity == "dq"), None)
    other = None if dq is None else dq.relative_error_well_rounded
    alike = "" if other is None else f", and a well-rounded kernel's is {percent(other)} off as well"
    predicted = "predicted to be " if DQ_ERROR.nearest(entry[2])[1] else ""
    return (
        f"ILL-CONDITIONED in {Names(judged).name(entry)}: dQ is {predicted}{percent(error)} off{alike}. These inputs "
        f"amplify small rounding errors.{_count(found, judged, 'ill-conditioned')}"
    )


def _undecided(found: list[Entry], judged: list[Entry]) -> str:
    verdict = found[0][2].verdict
    reason = verdict.reasons[0] if verdict is not None and verdict.reasons else "too little data."
    open_ = _answered(found[0], "undecided")
    if open_ and verdict is not None and reason == open_[0].words:
        reason = f"{_said(reason)}: not clearly as good as one (up to 1.1 times), nor clearly lossy (above 1.25)."
    return f"UNDECIDED in {Names(judged).name(found[0])}: {reason}{_count(found, judged, 'undecided')}"


def _clean(found: list[Entry], judged: list[Entry]) -> str:
    some = "" if len(found) == len(judged) else f"{len(found)} of "
    heads = f"{some}{len(judged)} heads" if len(judged) > 1 else Names(judged).name(found[0])
    good = [[SYMBOLS[q.quantity] for q in e[2].quantities if q.answer == "good"] for e in found]
    everywhere = [name for name in SYMBOLS.values() if all(name in names for names in good)]
    elsewhere = [name for name in SYMBOLS.values() if any(name in names for names in good) and name not in everywhere]
    if not everywhere:
        return f"CLEAN: no mean error beyond chance in {heads}. {_open(found)}"
    more = f" (and, where known, {together(elsewhere)})" if elsewhere else ""
    are = "are" if len(everywhere) > 1 or elsewhere else "is"
    said = f"{together(everywhere)}{more} {are} as good as a well-rounded kernel's in {heads}, and no bias was found."
    return f"CLEAN: {said} {_open(found)}".rstrip()


def _open(found: list[Entry]) -> str:
    """What was judged of none of these heads."""
    first, *others = [e[2].not_judged for e in found]
    missing = [said for said in first if all(said in other for other in others)]
    return words.not_judged(missing) or ""


_SENTENCES = {
    "nonfinite": _nonfinite,
    "wrong": _wrong,
    "lossy": _lossy,
    "biased": _biased,
    "ill_conditioned": _ill_conditioned,
    "undecided": _undecided,
    "clean": _clean,
}


def next_steps(diagnosis: Diagnosis) -> list[str]:
    """What to do, the worst heads' advice first; advice that several heads share is said once, with their number."""
    judged = judged_entries(diagnosis)
    names = Names(judged)
    advised: dict[str, list[tuple[Label, Entry]]] = {}
    for entry in judged:
        verdict = entry[2].verdict
        assert verdict is not None
        for label, suggestion in zip(verdict.labels, verdict.suggestions, strict=False):
            advised.setdefault(suggestion, []).append((label, entry))
    severest = list(LETTERS)
    steps = []
    for suggestion, given in sorted(advised.items(), key=lambda item: severest.index(item[1][0][0])):
        (label, entry), *others = given
        if label == "clean" and len(advised) > 1:
            continue
        more = f" and {len(others)} more" if others else ""
        who = "" if len(judged) == 1 or label == "clean" else f"{label} ({names.name(entry)}{more}): "
        steps.append(who + suggestion)
    return steps


def commands(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """(what it answers, command) for a closer look at the worst head; none where it is clean or not in a file."""
    judged = judged_entries(diagnosis)
    if not judged or "clean" in label_names(judged[0][2]):
        return []
    capture, observation, head = judged[0]
    source = capture.source
    if not source.endswith((".safetensors", ".pt", ".npz")):
        return []
    arguments = ["--example"] if source.startswith("example ") else [shlex.quote(source)]
    arguments += ["--head", str(head.head)]
    if head.batch is not None and capture.shape.get("B", 1) > 1:
        arguments += ["--batch", str(head.batch)]
    if len(capture.observations) > 1 and not observation.emulated:
        arguments += ["--observation", shlex.quote(observation.name)]
    if {"wrong", "nonfinite"} & set(label_names(head)):
        return []  # no rounding makes it
    questions = [("Which rounding makes it", "attribute"), ("What would remove it", "what-if")]
    if "biased" in label_names(head):
        questions.append(("Where it goes wrong, bit by bit", "microscope"))
    return [(question, f"attn-diag {command} {' '.join(arguments)}") for question, command in questions]


class Names:
    """What tells entries apart, besides the head, that are shown together; what all share is not said."""

    def __init__(self, among: list[Entry]) -> None:
        places = Counter((h.layer, h.head, h.batch, o.name, c.metadata.get("step")) for c, o, h in among)
        self._observations = len({o.name for _, o, _ in among}) > 1
        self._steps = len({c.metadata.get("step") for c, _, _ in among}) > 1
        self._files = any(count > 1 for count in places.values())

    def where(self, entry: Entry) -> list[str]:
        """Observation, step and file of an entry, as far as they tell it apart."""
        capture, observation, _ = entry
        parts = [observation.name] if self._observations else []
        if self._steps and "step" in capture.metadata:
            parts.append(f"step {capture.metadata['step']}")
        return [*parts, file_name(capture.source).removesuffix(".safetensors")] if self._files else parts

    def name(self, entry: Entry) -> str:
        """The head and where it is."""
        return " ".join([head_name(entry[2].layer, entry[2].head), *self.where(entry)])
