"""Since when, and where: the verdicts of layers (of heads, where there is one layer) over steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from attn_diag.reports.finding_words import NAMES as FINDINGS
from attn_diag.reports.quantities import LETTERS, label_names
from attn_diag.reports.story import Entry
from attn_diag.results.diagnosis import Diagnosis, HeadDiagnosis, Label, severity

# More columns than these are joined, neighbours together: a cell has to be seen, and hit by a finger.
_COLUMNS = 40
# From so many rows on, neighbours in which nothing was found are joined.
_ROWS = 16
# So many columns have room for a letter on a phone, and so many labels of columns on a screen and on a phone.
_NARROW, _LABELS, _FEW_LABELS = 14, 14, 6
# No finding.
_CALM: frozenset[Label | None] = frozenset({"undecided", "clean"})
NAMES: dict[Label, str] = {label: "clean" if label == "clean" else FINDINGS[label] for label in LETTERS}
"""The labels as they are read."""

Key = int | str | None


@dataclass(frozen=True)
class Cell:
    """The heads of one place at one time."""

    label: Label | None
    """The gravest of their labels; None: no verdict."""
    letters: str
    """Of every finding there, the gravest first."""
    few: bool
    """Whether fewer than half of the heads have that label."""
    place: str
    """The address of the worst head."""
    words: str
    """The cell in words."""


@dataclass(frozen=True)
class TimelineRow:
    """A row: its name, and its cells; None where nothing was captured."""

    name: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Timeline:
    """The verdicts of one observation."""

    title: str
    """What tells it from the others; empty where there is one."""
    columns: tuple[tuple[str, str], ...]
    """The steps (of several together the first), and where there is room for the label: everywhere (""), on a screen
    ("wide") or nowhere ("never")."""
    lines: tuple[TimelineRow, ...]

    @property
    def dense(self) -> bool:
        """Whether a phone has no room for letters."""
        return len(self.columns) > _NARROW


def timelines(diagnosis: Diagnosis, places: Mapping[int, str]) -> tuple[Timeline, ...]:
    """One an observation; none where captures do not state several steps.

    Args:
        diagnosis: What was found.
        places: Addresses by the identity of a head's diagnosis.
    """
    entries = [e for e in diagnosis.entries() if _step(e)]
    if len({_step(e) for e in entries}) < 2:
        return ()
    row = _layer if len({_layer(e) for e in entries}) > 1 else _head
    kinds = list(dict.fromkeys(e[1].name for e in entries))
    return tuple(
        _timeline([e for e in entries if e[1].name == kind], kind if len(kinds) > 1 else "", row, places)
        for kind in kinds
    )


def legend(found: Iterable[Timeline]) -> list[tuple[Label, str, str]]:
    """The labels that are drawn: label, letter, name."""
    drawn = {cell.label for t in found for line in t.lines for cell in line.cells if cell}
    letters = {letter for t in found for line in t.lines for cell in line.cells if cell for letter in cell.letters}
    return [(n, letter, NAMES[n]) for n, letter in LETTERS.items() if n in drawn or letter in letters]


def _timeline(
    entries: list[Entry], title: str, row: Callable[[Entry], int | None], places: Mapping[int, str]
) -> Timeline:
    heads: dict[tuple[Key, Key], list[HeadDiagnosis]] = {}
    for entry in entries:
        heads.setdefault((row(entry), _step(entry)), []).append(entry[2])
    columns = _binned(_ordered(c for _, c in heads))
    rows: list[tuple[Key, ...]] = [(r,) for r in _ordered(r for r, _ in heads)]

    def at(rows: Sequence[Key], columns: Sequence[Key]) -> list[HeadDiagnosis]:
        return [head for r in rows for c in columns for head in heads.get((r, c), ())]

    if len(rows) > _ROWS:
        calm = {r: all(_worst(h) in _CALM for c in columns for h in at(r, c)) for r in rows}
        runs = [(found, [r for (r,) in run]) for found, run in groupby(rows, key=lambda r: calm[r])]
        rows = [part for found, run in runs for part in ([tuple(run)] if found else [(r,) for r in run])]
    word = "layer" if row is _layer else "head"
    lines = []
    for r in rows:
        cells = (_cell(at(r, c), f"{word} {_range(r)}, step {_range(c)}", places) for c in columns)
        lines.append(TimelineRow(f"{word[0].upper()}{_range(r)}", tuple(cells)))
    return Timeline(title, _labels([str(c[0]) for c in columns]), tuple(lines))


def _cell(heads: list[HeadDiagnosis], where: str, places: Mapping[int, str]) -> Cell | None:
    if not heads:
        return None
    judged = [h for h in heads if h.verdict is not None]
    # Where something was found, what stayed open besides is not said.
    counts = Counter(label for h in judged for label in label_names(h) if label not in _CALM or label == _worst(h))
    label = next(
        (name for name in LETTERS if counts[name] and (name != "undecided" or 2 * counts[name] >= len(heads))), None
    )
    letters = "".join(LETTERS[name] for name in LETTERS if counts[name] and name not in _CALM)
    if not letters and label is not None:
        letters = LETTERS[label]
    found = [name for name in LETTERS if counts[name]]
    if len(heads) > 1:
        said = ", ".join(f"{counts[name]} of {len(heads)} heads {NAMES[name]}" for name in found)
    else:
        said = ", ".join(NAMES[name] for name in found)
    said = said or "no verdict"
    few = label is not None and label not in _CALM and 2 * counts[label] < len(heads)
    return Cell(label, letters, few, places[id(min(heads, key=severity))], f"{where}: {said}")


def _worst(head: HeadDiagnosis) -> Label | None:
    return next((name for name in LETTERS if name in label_names(head)), None)


def _layer(entry: Entry) -> int | None:
    return entry[2].layer


def _head(entry: Entry) -> int | None:
    return entry[2].head


def _step(entry: Entry) -> str:
    return entry[0].metadata.get("step", "")


def _ordered(keys: Iterable[Key]) -> list[Key]:
    """Each once: numbers by size, what is no number before them."""
    return sorted(set(keys), key=lambda key: (int(key) if str(key).isdecimal() else -1, str(key)))  # type: ignore[arg-type]


def _binned(keys: list[Key]) -> list[tuple[Key, ...]]:
    size = -(-len(keys) // _COLUMNS)
    return [tuple(keys[i : i + size]) for i in range(0, len(keys), size)]


def _range(keys: Sequence[Key]) -> str:
    """One, or the first and the last; "?" where it is not stated."""
    first, last = ("?" if key is None else str(key) for key in (keys[0], keys[-1]))
    return first if first == last else f"{first}\u2013{last}"


def _labels(names: list[str]) -> tuple[tuple[str, str], ...]:
    wide, narrow = -(-len(names) // _LABELS), -(-len(names) // _FEW_LABELS)
    # The rarer labels are among the more frequent ones.
    narrow = -(-narrow // wide) * wide
    return tuple((n, "" if i % narrow == 0 else "wide" if i % wide == 0 else "never") for i, n in enumerate(names))
