"""Verdicts as a table of letters and colours: layers (heads, where there is one layer) over steps, or over heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from attn_diag.reports.head_labels import CALM, LETTERS, NAMES, kinds, ranks, several_ranks
from attn_diag.reports.story import Entry
from attn_diag.results.diagnosis import Diagnosis, severity
from attn_diag.results.findings import Kind

# More columns than these are joined, neighbours together: a cell has to be seen, and hit by a finger.
_COLUMNS = 40
# Of more rows than these, neighbours in which nothing was found are joined; of several findings a first screen has to
# hold the table and what is known of each.
_ROWS, _ROWS_OF_SEVERAL = 16, 5
# So many columns have room for a letter on a phone, and so many labels of columns on a screen and on a phone.
_NARROW, _LABELS, _FEW_LABELS = 14, 14, 6
# So many ranks are named in a cell.
_RANKS = 2

Key = int | str | None


@dataclass(frozen=True)
class HeadVerdict:
    """What one head is found to be, and where it stands in a table."""

    row: int | None
    """The number of its row."""
    column: Key
    """What its column is called."""
    kinds: tuple[Kind, ...]
    """What it is found to be."""
    place: str
    """Its address."""
    severity: tuple[float, ...]
    """Sorts the worst first among heads of one label."""
    ranks: tuple[str, ...] = ()
    """Whose it is, where captures are of several ranks."""

    @property
    def worst(self) -> Kind | None:
        """The gravest of what it is found to be; None where there is none."""
        return next((kind for kind in LETTERS if kind in self.kinds), None)


@dataclass(frozen=True)
class Cell:
    """The heads of one place at one time."""

    label: Kind | None
    """The gravest of their labels, open ones before clean ones; None: no verdict."""
    letters: str
    """Of every finding there, the gravest first."""
    ranks: str
    """Whose it is, "r2", where captures are of several ranks and the cell is of few; else empty."""
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
    """The verdicts of one observation, or of one side of a comparison."""

    title: str
    """What tells it from the others; empty where there is one."""
    columns: tuple[tuple[str, str], ...]
    """The steps or heads (of several together the first), and where there is room for the label: everywhere (""), on a
    screen ("wide") or nowhere ("never")."""
    lines: tuple[TimelineRow, ...]
    across: str = "step"
    """What a column is."""

    @property
    def ranks(self) -> bool:
        """Whether a cell names ranks."""
        return any(cell.ranks for line in self.lines for cell in line.cells if cell)

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
    word, row = ("layer", _layer) if len({_layer(e) for e in entries}) > 1 else ("head", _head)
    names = list(dict.fromkeys(e[1].name for e in entries))
    ranked = several_ranks(diagnosis)
    most = _ROWS_OF_SEVERAL if len(diagnosis.findings) > 1 else _ROWS

    def judged(entry: Entry) -> HeadVerdict:
        capture, _, head = entry
        whose = ranks(capture, head) if ranked else ()
        return HeadVerdict(row(entry), _step(entry), kinds(capture, head), places[id(head)], severity(head), whose)

    return tuple(
        verdict_table([judged(e) for e in entries if e[1].name == n], n if len(names) > 1 else "", word, most=most)
        for n in names
    )


def legend(found: Iterable[Timeline]) -> list[tuple[Kind, str, str]]:
    """The labels that are drawn: label, letter, name."""
    drawn = {cell.label for t in found for line in t.lines for cell in line.cells if cell}
    letters = {letter for t in found for line in t.lines for cell in line.cells if cell for letter in cell.letters}
    return [(n, letter, NAMES[n]) for n, letter in LETTERS.items() if n in drawn or letter in letters]


def verdict_table(
    judged: Iterable[HeadVerdict], title: str, word: str, across: str = "step", *, most: int = _ROWS
) -> Timeline:
    """The table of these heads.

    Args:
        judged: The heads; several of one row and column share a cell.
        title: What tells the table from others beside it.
        word: What a row is: layer or head.
        across: What a column is: step or head.
        most: Of more rows, neighbours in which nothing was found are joined.
    """
    heads: dict[tuple[Key, Key], list[HeadVerdict]] = {}
    for one in judged:
        heads.setdefault((one.row, one.column), []).append(one)
    columns = _binned(ordered(c for _, c in heads))
    rows: list[tuple[Key, ...]] = [(r,) for r in ordered(r for r, _ in heads)]

    def at(rows: Sequence[Key], columns: Sequence[Key]) -> list[HeadVerdict]:
        return [one for r in rows for c in columns for one in heads.get((r, c), ())]

    if len(rows) > most:
        calm = {r: all(one.worst in CALM for c in columns for one in at(r, c)) for r in rows}
        runs = [(found, [r for (r,) in run]) for found, run in groupby(rows, key=lambda r: calm[r])]
        rows = [part for found, run in runs for part in ([tuple(run)] if found else [(r,) for r in run])]
    lines = []
    for r in rows:
        # Where no layer is stated there is one row.
        name, said = ("", "") if r == (None,) else (f"{word[0].upper()}{_range(r)}", f"{word} {_range(r)}, ")
        lines.append(TimelineRow(name, tuple(_cell(at(r, c), f"{said}{across} {_range(c)}") for c in columns)))
    return Timeline(title, _labels([str(c[0]) for c in columns]), tuple(lines), across)


def _cell(there: list[HeadVerdict], where: str) -> Cell | None:
    if not there:
        return None
    # Where something was found, what stayed open besides is not said.
    counts = Counter(kind for one in there for kind in one.kinds if kind not in CALM or kind == one.worst)
    label = next((kind for kind in LETTERS if counts[kind]), None)
    letters = "".join(LETTERS[kind] for kind in LETTERS if counts[kind] and kind not in CALM)
    if not letters and label is not None:
        letters = LETTERS[label]
    found = [kind for kind in LETTERS if counts[kind]]
    if len(there) > 1:
        said = ", ".join(f"{counts[kind]} of {len(there)} heads {NAMES[kind]}" for kind in found)
    else:
        said = ", ".join(NAMES[kind] for kind in found)
    said = said or "no verdict"
    named = list(dict.fromkeys(r for one in there if label not in CALM and one.worst == label for r in one.ranks))
    if named:
        said += f", rank{'s' if len(named) > 1 else ''} {', '.join(named)}"
    few = label is not None and label != "clean" and 2 * counts[label] < len(there)
    worst = min(there, key=lambda one: (one.worst != label, one.severity))
    short = "r" + ",".join(named) if 0 < len(named) <= _RANKS else ""
    return Cell(label, letters, short, few, worst.place, f"{where}: {said}")


def _layer(entry: Entry) -> int | None:
    return entry[2].layer


def _head(entry: Entry) -> int | None:
    return entry[2].head


def _step(entry: Entry) -> str:
    return entry[0].metadata.get("step", "")


def ordered(keys: Iterable[Key]) -> list[Key]:
    """Each key once: numbers by size, what is no number before them."""
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
