"""Which head of B is which head of A: captures first, then observations, then heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Literal, TypeVar

from attn_diag.errors import InputError
from attn_diag.results.comparison import Unmatched
from attn_diag.results.diagnosis import CaptureDiagnosis, Diagnosis, HeadDiagnosis, ObservationDiagnosis
from attn_diag.results.wording import head_name, plural

T = TypeVar("T")


@dataclass(frozen=True)
class HeadPlace:
    """One head of one side."""

    capture: CaptureDiagnosis
    observation: ObservationDiagnosis
    head: HeadDiagnosis


@dataclass(frozen=True)
class Matched:
    """The pairs (A, B), in words how they were found, and what is left."""

    pairs: tuple[tuple[HeadPlace, HeadPlace], ...]
    how: tuple[str, ...]
    unmatched: tuple[Unmatched, ...]


def match(a: Diagnosis, b: Diagnosis) -> Matched:
    """Pair the heads of two diagnoses.

    Captures: the only one of each; else by the file's name without its suffix, or by layer, step and rank, whichever
    pairs more. Observations by name; where each side has one left, these. Heads by layer, head and batch item. A key
    that one side has twice pairs nothing: which is meant cannot be known.
    """
    captures, how, left = _captures(a.captures, b.captures)
    pairs: list[tuple[HeadPlace, HeadPlace]] = []
    renamed: dict[str, None] = {}
    for one, other in captures:
        found, without = _paired(one.observations, other.observations, lambda o: o.name)
        rest = {side: [o for where, o in without if where == side] for side in ("A", "B")}
        if len(rest["A"]) == len(rest["B"]) == 1:
            first, second = rest["A"][0], rest["B"][0]
            found.append((first, second))
            renamed[f"observation {first.name} of A with {second.name} of B, the only ones left"] = None
            without = []
        left += [_unmatched(side, f"{one.source if side == 'A' else other.source}, {o.name}") for side, o in without]
        for first, second in found:
            heads, unpaired = _heads(first, second)
            pairs += [(HeadPlace(one, first, h), HeadPlace(other, second, g)) for h, g in heads]
            left += unpaired if one.source == other.source else [_named(u, one.source, other.source) for u in unpaired]
    return Matched(tuple(pairs), (*how, *renamed), tuple(left))


def only(diagnosis: Diagnosis, observation: str, source: str) -> Diagnosis:
    """The diagnosis with one observation of each capture that has it. Raises InputError where none has."""
    chosen = [(c, tuple(o for o in c.observations if o.name == observation)) for c in diagnosis.captures]
    kept = [replace(capture, observations=found) for capture, found in chosen if found]
    if not kept:
        names = sorted({o.name for c in diagnosis.captures for o in c.observations})
        raise InputError(f"{source}: no observation {observation!r}; it has {', '.join(names)}")
    heads = [h for c in kept for o in c.observations for h in o.heads if h.head is not None and h.verdict is not None]
    counts = Counter(label for head in heads if head.verdict is not None for label in head.verdict.labels)
    listed = ", ".join(f"{count} {label}" for label, count in counts.most_common())
    sentence = f"observation {observation}, {plural(len(heads), 'head')} judged: {listed}."
    summary = replace(diagnosis.summary, sentence=sentence, labels=dict(counts))
    return replace(diagnosis, captures=tuple(kept), summary=summary)


def _captures(
    a: Sequence[CaptureDiagnosis], b: Sequence[CaptureDiagnosis]
) -> tuple[list[tuple[CaptureDiagnosis, CaptureDiagnosis]], list[str], list[Unmatched]]:
    if len(a) == len(b) == 1:
        return [(a[0], b[0])], ["the only capture of each"], []
    keys: dict[str, Callable[[CaptureDiagnosis], Hashable]] = {
        "captures by file name": lambda c: PurePath(c.source).stem,
        "captures by layer, step and rank": lambda c: tuple(c.metadata.get(k) for k in ("layer", "step", "rank")),
    }
    tried = {how: _paired(a, b, key) for how, key in keys.items()}
    how = max(tried, key=lambda name: len(tried[name][0]))
    pairs, left = tried[how]
    return pairs, [how], [_unmatched(side, capture.source) for side, capture in left]


def _heads(
    a: ObservationDiagnosis, b: ObservationDiagnosis
) -> tuple[list[tuple[HeadDiagnosis, HeadDiagnosis]], list[Unmatched]]:
    def place(head: HeadDiagnosis) -> Hashable:
        return head.layer, head.head, head.batch

    single = [[h for h in o.heads if h.head is not None] for o in (a, b)]
    pairs, left = _paired(single[0], single[1], place)
    unmatched = [_unmatched(side, f"{(a if side == 'A' else b).name} {_name(head)}") for side, head in left]
    judged = []
    for one, other in pairs:
        if one.verdict is not None and other.verdict is not None:
            judged.append((one, other))
            continue
        side: Literal["A", "B", "both"] = "B" if one.verdict else ("A" if other.verdict else "both")
        reason = "no verdict there: the assumptions about the capture do not hold"
        unmatched.append(Unmatched(side, f"{a.name} {_name(one)}", reason))
    if not left and len(judged) == len(pairs) > 1 and a.pooled.verdict is not None and b.pooled.verdict is not None:
        judged.append((a.pooled, b.pooled))
    return judged, unmatched


def _paired(a: Sequence[T], b: Sequence[T], key: Callable[[T], Hashable]) -> tuple[
    list[tuple[T, T]], list[tuple[Literal["A", "B"], T]]
]:  # fmt: skip
    """Pairs of equal keys that each side has once, in A's order, and the rest with its side."""
    counts = Counter(map(key, a)), Counter(map(key, b))
    once = {k for k in counts[0] if counts[0][k] == counts[1][k] == 1}
    others = {key(item): item for item in b}
    pairs = [(item, others[key(item)]) for item in a if key(item) in once]
    left: list[tuple[Literal["A", "B"], T]] = [("A", item) for item in a if key(item) not in once]
    return pairs, [*left, *(("B", item) for item in b if key(item) not in once)]


def _unmatched(side: Literal["A", "B"], what: str) -> Unmatched:
    return Unmatched(side, what, f"nothing in {'B' if side == 'A' else 'A'} is unmistakably the same")


def _named(unmatched: Unmatched, a: str, b: str) -> Unmatched:
    return Unmatched(unmatched.side, f"{b if unmatched.side == 'B' else a}, {unmatched.what}", unmatched.reason)


def _name(head: HeadDiagnosis) -> str:
    return head_name(head.layer, head.head) + ("" if head.batch is None else f" batch {head.batch}")
