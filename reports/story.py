"""What to do about a diagnosis, and how its heads are told apart; how it begins is ``attn_diag.reports.opening``'s."""

from __future__ import annotations

from collections import Counter

from attn_diag.reports.following import commands
from attn_diag.reports.opening import headline
from attn_diag.reports.quantities import LETTERS
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
            if label == "undecided" and len(verdict.labels) > 1:
                continue  # what is found is said
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
