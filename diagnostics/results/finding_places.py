"""Where findings are: layers, heads, steps and ranks of the entries of a group, beside all that were looked at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from attn_diag.results.findings import FindingPlace, Kind
from attn_diag.results.heads import CaptureDiagnosis, HeadDiagnosis, ObservationDiagnosis

Entry = tuple[CaptureDiagnosis, ObservationDiagnosis, HeadDiagnosis]


def step_of(capture: CaptureDiagnosis) -> int | None:
    """The training step of a capture; None where it states none."""
    stated = capture.metadata.get("step", "")
    return int(stated) if stated.isdecimal() else None


def numbers(values: Iterable[int | None]) -> tuple[int, ...]:
    """Those that are known, each once, in order."""
    return tuple(sorted({v for v in values if v is not None}))


def places_of(group: Sequence[Entry], looked: Sequence[Entry]) -> tuple[FindingPlace, ...]:
    """Where a group is, layers with the same heads and steps together, the earliest first."""
    alike: dict[tuple[object, ...], FindingPlace] = {}
    by_layer: dict[int | None, list[Entry]] = {}
    for entry in group:
        by_layer.setdefault(entry[2].layer, []).append(entry)
    for layer, found in sorted(by_layer.items(), key=lambda item: -1 if item[0] is None else item[0]):
        there = [e for e in looked if e[2].layer == layer]
        heads = numbers(h.head for _, _, h in found)
        place = FindingPlace(
            layers=() if layer is None else (layer,),
            heads=heads,
            all_heads=len(heads) > 1 and heads == numbers(h.head for _, _, h in there),
            steps=numbers(step_of(c) for c, _, _ in found),
            steps_looked=numbers(step_of(c) for c, _, _ in there),
        )
        key = (layer is None, place.all_heads or heads, place.steps, place.steps_looked)
        same = alike.get(key)
        alike[key] = place if same is None else replace(same, layers=same.layers + place.layers)
    return tuple(sorted(alike.values(), key=lambda p: (p.steps[:1], p.layers)))


def ranks_of(label: Kind, group: Sequence[Entry], looked: Sequence[Entry]) -> tuple[str, ...]:
    """The ranks of a finding, where there are others without it."""
    found: set[str] = set()
    for capture, _, head in group:
        in_part = [q.ranks for q in head.answered(label)]
        found |= {rank for ranks in in_part for rank in ranks} if all(in_part) else _ranks_with(capture, head)
    if found >= {rank for capture, _, head in looked for rank in _ranks_with(capture, head)}:
        return ()
    return _in_order(found)


def other_ranks(ranks: Sequence[str], group: Sequence[Entry], looked: Sequence[Entry]) -> tuple[str, ...]:
    """Ranks that hold heads of a finding that is in ``ranks`` alone."""
    heads = {(h.layer, h.head) for _, _, h in group}
    held = {rank for c, _, h in looked if (h.layer, h.head) in heads for rank in _ranks_with(c, h)}
    return _in_order(held - {*ranks}) if ranks else ()


def _in_order(ranks: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(ranks, key=lambda rank: (len(rank), rank)))


def _ranks_with(capture: CaptureDiagnosis, head: HeadDiagnosis) -> set[str]:
    """The ranks that hold a head of a capture; none where it states none."""
    m = capture.metadata
    if "rank_of_heads" in m and head.head is not None:
        return {m["rank_of_heads"].split(",")[head.head - int(m.get("head_offset", 0))]}
    stated = m.get("rank", m.get("ranks", ""))
    return set(stated.split(",")) if stated else set()
