"""What to do about a diagnosis, and how its heads are told apart; how it begins is ``attn_diag.reports.opening``'s."""

from __future__ import annotations

import shlex
from collections import Counter

from attn_diag.reports.opening import headline
from attn_diag.reports.quantities import LETTERS, label_names
from attn_diag.results.diagnosis import CaptureDiagnosis, Diagnosis, HeadDiagnosis, Label, ObservationDiagnosis
from attn_diag.results.wording import file_name, head_name

__all__ = ["Entry", "Names", "commands", "headline", "judged_entries", "next_steps", "worst_of_findings"]
Entry = tuple[CaptureDiagnosis, ObservationDiagnosis, HeadDiagnosis]


def judged_entries(diagnosis: Diagnosis) -> list[Entry]:
    """All heads with a verdict, the worst first."""
    return [entry for entry in diagnosis.ranked() if entry[2].verdict is not None]


def worst_of_findings(diagnosis: Diagnosis) -> list[Entry]:
    """The head that shows each finding best, the findings in their order; then what stayed undecided, likewise."""
    entries = {(c.source, o.name, h.head, h.batch): (c, o, h) for c, o, h in reversed(judged_entries(diagnosis))}
    found = []
    for finding in (*diagnosis.findings, *diagnosis.undecided):
        w = finding.worst
        found += [e for (*place, _), e in entries.items() if place == [w.source, w.observation, w.head]][-1:]
    return found


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
