"""What a page calls the verdict of a head: kind, letter and name, and the rank whose head it is."""

from __future__ import annotations

from attn_diag.reports.finding_words import NAMES as FINDINGS
from attn_diag.reports.quantities import LETTERS as JUDGED
from attn_diag.reports.quantities import label_names
from attn_diag.results.diagnosis import CaptureDiagnosis, Diagnosis, HeadDiagnosis
from attn_diag.results.findings import Kind

# No finding.
CALM: frozenset[Kind | None] = frozenset({"undecided", "clean"})


def _letters() -> dict[Kind, str]:
    letters: dict[Kind, str] = {}
    for label, letter in JUDGED.items():
        letters[label] = letter
        if label == "wrong":
            letters["unjudged"] = "M"
    return letters


LETTERS: dict[Kind, str] = _letters()
"""The kinds with their letters, the gravest first; M: the mask, or what else is stated, does not fit."""
NAMES: dict[Kind, str] = {kind: "clean" if kind == "clean" else FINDINGS[kind] for kind in LETTERS}
"""The kinds as they are read."""


def kinds(capture: CaptureDiagnosis, head: HeadDiagnosis) -> tuple[Kind, ...]:
    """What a head is found to be; none where it could not be compared at all."""
    return ("unjudged",) if head.verdict is None and capture.assumptions.ok is False else label_names(head)


def several_ranks(diagnosis: Diagnosis) -> bool:
    """Whether the captures are of more than one rank."""
    return len({rank for c in diagnosis.captures for rank in _all_ranks(c)}) > 1


def ranks(capture: CaptureDiagnosis, head: HeadDiagnosis) -> tuple[str, ...]:
    """The ranks at fault, where others computed the head too; else the one that holds it. None where all share it."""
    # Of two findings only one may be of these ranks.
    found = [kind for kind in kinds(capture, head) if kind not in CALM]
    at_fault = [q.ranks for q in head.quantities if [q.answer] == found]
    if at_fault and all(at_fault):
        return tuple(dict.fromkeys(rank for part in at_fault for rank in part))
    if "rank_of_heads" in capture.metadata and head.head is not None:
        owners = capture.metadata["rank_of_heads"].split(",")
        place = head.head - int(capture.metadata.get("head_offset", 0))
        return tuple(owners[place : place + 1]) if place >= 0 else ()
    return (capture.metadata["rank"],) if "rank" in capture.metadata else ()


def _all_ranks(capture: CaptureDiagnosis) -> list[str]:
    stated = capture.metadata.get("ranks", capture.metadata.get("rank", ""))
    return stated.split(",") if stated else []
