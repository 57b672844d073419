"""Which head of B is which head of A: captures first, then observations, then heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Literal, TypeVar

from attn_diag.errors import InputError
from attn_diag.results.comparison import Unmatched
from attn_diag.results.diagnosis import CaptureDiagnosis, Diagnosis, HeadDiagnosis, ObservationDiagnosis
from attn_diag.results.finding_places import step_of
from attn_diag.results.wording import head_name, plural

T = TypeVar("T")


@dataclass(frozen=True)
class HeadPlace:
    """One head of one side."""

    capture: CaptureDiagnosis
    observation: ObservationDiagnosis
    head: HeadDiagnosis

    @property
    def step(self) -> int | None:
        """The training step of the capture; None where it states none."""
        return step_of(self.capture)


@dataclass(frozen=True)
class Matched:
    """The pairs (A, B), in words how they were found, and what is left."""

    pairs: tuple[tuple[HeadPlace, HeadPlace], ...]
    how: tuple[str, ...]
    unmatched: tuple[Unmatched, ...]


def match(a: Diagnosis, b: Diagnosis, by: Sequence[str] = ()) -> Matched:
    """Pair the heads of two diagnoses; by names of ``KEYS``, see ``match_by``, or without them as follows.

    Captures: the only one of each; else by the file's name without its suffix, or by layer, step and rank, whichever
    pairs more. Observations by name; where each side has one left, these. Heads by layer, head and batch item. A key
    that one side has twice pairs nothing: which is meant cannot be known.
    """
    if by:
        return match_by(a, b, by)
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


KEYS: dict[str, Callable[[HeadPlace], Hashable]] = {
    "layer": lambda p: p.head.layer,
    "head": lambda p: p.head.head,
    "batch": lambda p: p.head.batch,
    "step": lambda p: p.step,
    "rank": lambda p: p.capture.metadata.get("rank"),
    "file": lambda p: PurePath(p.capture.source).stem,
}
"""What heads can be matched by."""


def match_by(a: Diagnosis, b: Diagnosis, by: Sequence[str]) -> Matched:
    """Pair the heads that agree in what is named, whatever else of them differs; observations by name.

    Where a head is there at several steps: the only step of one side with each of the other; where both have several,
    those of equal steps; where there are none, in order, if they are as many.

    Raises:
        InputError: A name is not known.
    """
    if unknown := [name for name in by if name not in KEYS]:
        raise InputError(f"heads cannot be matched by {unknown[0]!r}; known: {', '.join(KEYS)}")
    places = [_places(a), _places(b)]
    names = [{p.observation.name for p in side} for side in places]
    # Two kernels' only observations are meant for each other, whatever they are called.
    named = bool(names[0] & names[1]) or max(map(len, names)) > 1
    found: dict[Hashable, tuple[list[HeadPlace], list[HeadPlace]]] = {}
    for side, of_side in enumerate(places):
        for place in of_side:
            key = (*(KEYS[name](place) for name in by), place.observation.name if named else None)
            found.setdefault(key, ([], []))[side].append(place)
    pairs: list[tuple[HeadPlace, HeadPlace]] = []
    left: list[Unmatched] = []
    how = {f"heads by {', '.join(by)}": None}
    for one, other in found.values():
        together, words = _over_steps(one, other)
        pairs += together
        paired = {id(place) for pair in together for place in pair}
        for letter, of_side in (("A", one), ("B", other)):
            reason = "this step is not there" if together else words
            left += [_left(letter, place, reason) for place in of_side if id(place) not in paired]
        if together and words:
            how[words] = None
    judged = [pair for pair in pairs if all(place.head.verdict is not None for place in pair)]
    left += [_unjudged(*pair) for pair in pairs if any(place.head.verdict is None for place in pair)]
    return Matched(tuple(judged), tuple(how), tuple(left))


def _places(diagnosis: Diagnosis) -> list[HeadPlace]:
    return [HeadPlace(*entry) for entry in diagnosis.entries()]


def _over_steps(a: list[HeadPlace], b: list[HeadPlace]) -> tuple[list[tuple[HeadPlace, HeadPlace]], str]:
    """The pairs of places that agree in all that was named, and how they were found (or why not)."""
    if not a or not b:
        return [], f"nothing in {'B' if a else 'A'} agrees with it"
    if len(a) == len(b) == 1:
        return [(a[0], b[0])], ""
    if any(len({p.step for p in side}) < len(side) for side in (a, b)):
        return [], "it is there more than once at one step, and which is meant cannot be known: match by more"
    one, other = ({p.step: p for p in side} for side in (a, b))
    if 1 in (len(a), len(b)):
        return [(p, g) for p in a for g in b], f"the one step of {'A' if len(a) == 1 else 'B'} with each of the other's"
    if common := [step for step in one if step is not None and step in other]:
        return [(one[step], other[step]) for step in common], "those at several steps by step"
    if len(a) != len(b) or None in one or None in other:
        return [], "it is there at several steps in both, at none of them in both"
    ordered = [sorted(side, key=lambda p: p.step or 0) for side in (a, b)]
    return list(zip(*ordered, strict=True)), "those at several steps in the order of their steps"


def _left(side: str, place: HeadPlace, words: str) -> Unmatched:
    step = "" if place.step is None else f" step {place.step}"
    what = f"{place.capture.source}, {place.observation.name} {_name(place.head)}{step}"
    return Unmatched("A" if side == "A" else "B", what, words)


def _unjudged(a: HeadPlace, b: HeadPlace) -> Unmatched:
    side: Literal["A", "B", "both"] = "B" if a.head.verdict else ("A" if b.head.verdict else "both")
    return Unmatched(side, f"{a.observation.name} {_name(a.head)}", _NO_VERDICT)


_NO_VERDICT = "no verdict there: the assumptions about the capture do not hold"


def none_of(observation: str, source: str, names: Iterable[str]) -> InputError:
    """What is raised where no capture has the observation."""
    return InputError(f"{source}: no observation {observation!r}; it has {', '.join(sorted(set(names)))}")


def only(diagnosis: Diagnosis, observation: str, source: str) -> Diagnosis:
    """The diagnosis with one observation of each capture that has it. Raises InputError where none has."""
    chosen = [(c, tuple(o for o in c.observations if o.name == observation)) for c in diagnosis.captures]
    kept = [replace(capture, observations=found) for capture, found in chosen if found]
    if not kept:
        raise none_of(observation, source, [o.name for c in diagnosis.captures for o in c.observations])
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
        unmatched.append(Unmatched(side, f"{a.name} {_name(one)}", _NO_VERDICT))
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
