"""What changed between two diagnoses, heads of layers and steps that changed alike together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from attn_diag.reports.finding_words import NAMES
from attn_diag.reports.places import places_words
from attn_diag.reports.quantities import TESTS
from attn_diag.results.comparison import Comparison, HeadComparison, Outcome, SizeChange
from attn_diag.results.estimates import Label
from attn_diag.results.findings import KINDS, FindingPlace, Kind
from attn_diag.results.wording import SYMBOLS, ranges, signed, times, together

WORDS: dict[Outcome, str] = {
    "became-biased": "became biased",
    "bias-reversed": "bias reversed",
    "bias-grew": "bias grew",
    "bias-moved": "mean error moved",
    "grew": "errors grew",
    "cured": "cured of bias",
    "bias-shrank": "bias shrank",
    "shrank": "errors shrank",
    "relabelled": "other labels",
}
"""What an outcome is called in a sentence, the worst first."""
_ORDER = list(WORDS)
# Labels that say that errors are too large.
_SIZED: set[Kind] = {"nonfinite", "wrong", "lossy"}


@dataclass(frozen=True)
class ChangedHeads:
    """Heads that changed alike."""

    entries: tuple[HeadComparison, ...]
    """Each of them, the clearest first."""
    place: str
    """Layers, heads and steps: "layer 3, all 4 heads, from step 200 on"."""

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """All their outcomes, the worst first."""
        found = {outcome for entry in self.entries for outcome in entry.outcomes}
        return tuple(outcome for outcome in _ORDER if outcome in found)

    @property
    def labels(self) -> str:
        """The labels before and after that most of them have."""
        said = Counter(labels_words(entry) for entry in self.entries)
        return said.most_common(1)[0][0]

    @property
    def change(self) -> str:
        """What they are now that they were not, and what else changed."""
        gained, lost = (_most([getattr(e, side) for e in self.entries]) for side in ("gained", "lost"))
        said = [f"now {together([NAMES[label] for label in gained])}"] if gained else []
        if lost:
            said.append(f"no longer {together([NAMES[label] for label in lost])}")
        told = {
            "became-biased": "biased" in gained, "cured": "biased" in lost, "relabelled": bool(said),
            "grew": bool(_SIZED & {*gained}), "shrank": bool(_SIZED & {*lost}),
        }  # fmt: skip
        said += [WORDS[outcome] for outcome in self.outcomes if not told.get(outcome)]
        return together(said) if said else "told below"

    @property
    def size(self) -> str:
        """By how much, of the one in which it is clearest: "O 1.86 times a well-rounded kernel's error, was 1.00"."""
        clearest = self.entries[0]
        moved = [m for m in clearest.means if m.outcome not in ("none", "untested") and m.p_adjusted is not None]
        if moved:
            mean = min(moved, key=lambda m: m.p_adjusted or 0.0)
            test = TESTS.get(mean.name)
            unit = "" if test is None else f" {'noise floors' if test.unit == 'floor' else 'ulp'}"
            name = mean.name if test is None else test.title
            return f"mean error of {name} {signed(mean.b_units)}{unit}, was {signed(mean.a_units)}"
        changed = [
            (abs(s.ratio - 1), s) for s in factors(clearest) if s.outcome in ("grew", "shrank") and s.ratio is not None
        ]
        if not changed:
            return ""
        _, most = max(changed, key=lambda item: item[0])
        name = SYMBOLS[most.name.removesuffix("_factor")]
        return f"{name} {times(most.b)} times a well-rounded kernel's error, was {times(most.a)}"


def factors(entry: HeadComparison) -> list[SizeChange]:
    """Its quantities' errors over a well-rounded kernel's."""
    return [s for s in entry.sizes if s.name.removesuffix("_factor") in SYMBOLS and s.name.endswith("_factor")]


def labels_words(entry: HeadComparison) -> str:
    """The verdict's labels before and after."""
    before, after = ", ".join(entry.a_labels), ", ".join(entry.b_labels)
    return before if before == after else f"{before} -> {after}"


def changed_heads(found: Comparison, changed: Sequence[HeadComparison]) -> list[ChangedHeads]:
    """The changed entries in groups, in the order of their worst; those of all heads together only where they alone
    changed."""
    single = [entry for entry in changed if entry.head is not None]
    told = {(e.b_observation, e.layer, e.b_step) for e in single}
    pooled = [e for e in changed if e.head is None and (e.b_observation, e.layer, e.b_step) not in told]
    by_layer: dict[tuple[object, ...], list[HeadComparison]] = {}
    for entry in (*single, *pooled):
        key = entry.head is None, entry.a_observation, entry.b_observation, entry.layer, _kind(entry)
        by_layer.setdefault(key, []).append(entry)
    alike: dict[tuple[object, ...], list[tuple[FindingPlace, list[HeadComparison]]]] = {}
    for (*of, layer, kind), own in by_layer.items():
        place = _place(found, own)
        steps = place.steps, place.steps_looked
        alike.setdefault((*of, kind, place.all_heads or place.heads, *steps, layer is None), []).append((place, own))
    several = len({(e.a_observation, e.b_observation) for e in found.entries}) > 1
    order = {id(entry): place for place, entry in enumerate(changed)}
    groups = []
    for members in alike.values():
        first = members[0][0]
        whole = replace(first, layers=tuple(sorted({layer for place, _ in members for layer in place.layers})))
        entries = tuple(sorted((e for _, own in members for e in own), key=lambda e: order[id(e)]))
        said = places_words([whole]) if first.heads else _of_all(whole)
        groups.append(ChangedHeads(entries, said + (_observation(entries[0]) if several else "")))
    return sorted(groups, key=lambda group: order[id(group.entries[0])])


def _most(labels: Sequence[tuple[Label, ...]]) -> list[Kind]:
    """The labels that at least half of them have, the gravest first; doubt and its absence are none."""
    count: Counter[Kind] = Counter(label for own in labels for label in own)
    return [kind for kind in KINDS if kind not in ("unjudged", "undecided") and 2 * count[kind] >= len(labels)]


def _kind(entry: HeadComparison) -> object:
    """By what entries are grouped: the label that came or went, else what changed."""
    gained, lost = _most([entry.gained]), _most([entry.lost])
    return (True, gained[0]) if gained else (False, lost[0]) if lost else entry.outcomes[:1]


def _place(found: Comparison, entries: Sequence[HeadComparison]) -> FindingPlace:
    first = entries[0]
    looked = [
        e
        for e in found.entries
        if (e.layer, e.a_observation, e.b_observation) == (first.layer, first.a_observation, first.b_observation)
    ]
    heads = tuple(sorted({e.head for e in entries if e.head is not None}))
    every = {e.head for e in looked if e.head is not None}
    return FindingPlace(
        layers=() if first.layer is None else (first.layer,),
        heads=heads,
        all_heads=len(heads) > 1 and {*heads} == every,
        steps=_steps(entries),
        steps_looked=_steps(looked),
    )


def _steps(entries: Iterable[HeadComparison]) -> tuple[int, ...]:
    return tuple(sorted({e.b_step for e in entries if e.b_step is not None}))


def _of_all(place: FindingPlace) -> str:
    """Where only all heads together changed."""
    layers = f"layer{'s' if len(place.layers) > 1 else ''} {ranges(place.layers)}, " if place.layers else ""
    steps = f", step{'s' if len(place.steps) > 1 else ''} {ranges(place.steps)}" if place.steps else ""
    return f"{layers}its heads taken together{steps}"


def _observation(entry: HeadComparison) -> str:
    same = entry.a_observation == entry.b_observation
    return f" in {entry.b_observation!r}" if same else f" in {entry.b_observation!r} beside {entry.a_observation!r}"
