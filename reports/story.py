"""What a reader must learn first: what is wrong, in one sentence, and what to do about it."""

from __future__ import annotations

import shlex
from collections import Counter

from attn_diag.reports.quantities import DQ_ERROR, LETTERS, label_names, tested
from attn_diag.results.diagnosis import CaptureDiagnosis, Diagnosis, HeadDiagnosis, Label, ObservationDiagnosis
from attn_diag.results.quality import Answer, QuantityVerdict
from attn_diag.results.wording import SYMBOLS, file_name, head_name, percent, printable, together

Entry = tuple[CaptureDiagnosis, ObservationDiagnosis, HeadDiagnosis]


def judged_entries(diagnosis: Diagnosis) -> list[Entry]:
    """All heads with a verdict, the worst first."""
    return [entry for entry in diagnosis.ranked() if entry[2].verdict is not None]


def headline(diagnosis: Diagnosis) -> str:
    """The verdict in one sentence: the worst label that any head carries, how many heads, and the worst of them."""
    judged = judged_entries(diagnosis)
    for label in LETTERS:
        if found := [entry for entry in judged if label in label_names(entry[2])]:
            return _SENTENCES[label](found, judged)
    return f"No verdict: {'no head carries a label' if judged else 'nothing could be judged'}."


def _heads(found: list[Entry], judged: list[Entry], worst: Entry) -> str:
    name = Names(judged).name(worst)
    if len(judged) == 1:
        return name
    count = f"all {len(judged)}" if len(found) == len(judged) else f"{len(found)} of {len(judged)}"
    return f"{count} heads ({name if len(found) == 1 else f'worst: {name}'})"


def _biased(found: list[Entry], judged: list[Entry]) -> str:
    known = [(test, e) for test, e in tested(found[0][2]) if e.p_adjusted is not None]
    worst = ""
    if known:
        test, estimate = min(known, key=lambda item: (item[1].p_adjusted, item[1].p_value))
        mean = test.in_units(estimate).replace(" floor", " noise floors")
        worst = f": {test.error} averages {mean} (adjusted p = {estimate.p_adjusted:.2g})"
    return f"BIASED: the error's mean is beyond chance in {_heads(found, judged, found[0])}{worst}."


def _first(entry: Entry, answer: Answer) -> QuantityVerdict | None:
    """The quantity with that answer that is furthest off."""
    found = [q for q in entry[2].quantities if q.answer == answer]
    return max(found, key=lambda q: q.factor or 0.0) if found else None


def _said(words: str) -> str:
    return printable(words).rstrip(".")


def _nonfinite(found: list[Entry], judged: list[Entry]) -> str:
    worst = _first(found[0], "nonfinite")
    said = "NaN or Inf where the mathematics is finite" if worst is None else _said(worst.words)
    return f"NOT FINITE: {said}, in {_heads(found, judged, found[0])}."


def _wrong(found: list[Entry], judged: list[Entry]) -> str:
    entry = max(found, key=lambda e: w.factor or 0.0 if (w := _first(e, "wrong")) else 0.0)
    worst = _first(entry, "wrong")
    said = "an error that no rounding makes" if worst is None else _said(worst.words)
    right = [SYMBOLS[q.quantity] for q in entry[2].quantities if q.answer == "good"]
    beside = f" {together(right)} {'are' if len(right) > 1 else 'is'} right." if right else ""
    return f"WRONG: {said}; in {_heads(found, judged, entry)}.{beside}"


def _lossy(found: list[Entry], judged: list[Entry]) -> str:
    factors = [(q, e) for e in found if (q := _first(e, "lossy")) is not None]
    if factors:
        quantity, entry = max(factors, key=lambda item: item[0].factor or 0.0)
        return f"LOSSY: {_said(quantity.words)}, in {_heads(found, judged, entry)}."
    noise = [(e[2].noise_factor, e) for e in found if e[2].noise_factor is not None]
    if not noise:
        return f"LOSSY: errors that no correct rounding makes in {_heads(found, judged, found[0])}."
    factor, entry = max(noise, key=lambda item: item[0])
    return (
        f"LOSSY: delta's error is up to {factor:.3g} times what one correct rounding of O makes, "
        f"in {_heads(found, judged, entry)}."
    )


def _ill_conditioned(found: list[Entry], judged: list[Entry]) -> str:
    error, entry = max(((DQ_ERROR.nearest(e[2])[0] or 0.0, e) for e in found), key=lambda item: item[0])
    return (
        f"ILL-CONDITIONED: dQ is up to {percent(error)} off in {_heads(found, judged, entry)}, and so would a "
        "well-rounded kernel's be: these inputs amplify the rounding of O."
    )


def _undecided(found: list[Entry], judged: list[Entry]) -> str:
    verdict = found[0][2].verdict
    reason = verdict.reasons[0] if verdict is not None and verdict.reasons else "too little data."
    return f"UNDECIDED in {_heads(found, judged, found[0])}: {printable(reason)}"


def _clean(found: list[Entry], judged: list[Entry]) -> str:
    some = "" if len(found) == len(judged) else f"{len(found)} of "
    heads = f"{some}{len(judged)} heads" if len(judged) > 1 else Names(judged).name(found[0])
    good = dict.fromkeys(SYMBOLS[q.quantity] for e in found for q in e[2].quantities)
    if not good:
        return f"CLEAN: no mean error beyond chance in {heads}."
    names = together(list(good))
    are = "are" if len(good) > 1 else "is"
    return f"CLEAN: {names} {are} as good as a well-rounded kernel's in {heads}, and without bias."


_SENTENCES = {
    "nonfinite": _nonfinite,
    "wrong": _wrong,
    "biased": _biased,
    "lossy": _lossy,
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
        steps.append(who + printable(suggestion))
    return steps


def commands(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """(what it answers, command) for a closer look at the worst head; none where it is clean or not in a file."""
    judged = judged_entries(diagnosis)
    if not judged or "clean" in label_names(judged[0][2]):
        return []
    capture, observation, head = judged[0]
    source = printable(capture.source)
    if not source.endswith((".safetensors", ".pt", ".npz")):
        return []
    arguments = ["--example"] if source.startswith("example ") else [shlex.quote(source)]
    arguments += ["--head", str(head.head)]
    if head.batch is not None and capture.shape.get("B", 1) > 1:
        arguments += ["--batch", str(head.batch)]
    if len(capture.observations) > 1 and not observation.emulated:
        arguments += ["--observation", shlex.quote(printable(observation.name))]
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
        parts = [printable(observation.name)] if self._observations else []
        if self._steps and "step" in capture.metadata:
            parts.append(f"step {printable(capture.metadata['step'])}")
        return [*parts, file_name(capture.source).removesuffix(".safetensors")] if self._files else parts

    def name(self, entry: Entry) -> str:
        """The head and where it is."""
        return " ".join([head_name(entry[2].layer, entry[2].head), *self.where(entry)])
