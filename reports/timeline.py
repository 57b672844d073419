"""Since when, and where: the verdicts of layers (of heads, where there is one layer) over steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from attn_diag.reports.head_labels import CALM, LETTERS, NAMES, kinds, ranks, several_ranks, worst_kind
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
    """The verdicts of one observation."""

    title: str
    """What tells it from the others; empty where there is one."""
    columns: tuple[tuple[str, str], ...]
    """The steps (of several together the first), and where there is room for the label: everywhere (""), on a screen
    ("wide") or nowhere ("never")."""
    lines: tuple[TimelineRow, ...]

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
    row = _layer if len({_layer(e) for e in entries}) > 1 else _head
    names = list(dict.fromkeys(e[1].name for e in entries))
    ranked = several_ranks(diagnosis)
    most = _ROWS_OF_SEVERAL if len(diagnosis.findings) > 1 else _ROWS
    return tuple(
        _timeline([e for e in entries if e[1].name == n], n if len(names) > 1 else "", row, places, most, ranked=ranked)
        for n in names
    )


def legend(found: Iterable[Timeline]) -> list[tuple[Kind, str, str]]:
    """The labels that are drawn: label, letter, name."""
    drawn = {cell.label for t in found for line in t.lines for cell in line.cells if cell}
    letters = {letter for t in found for line in t.lines for cell in line.cells if cell for letter in cell.letters}
    return [(n, letter, NAMES[n]) for n, letter in LETTERS.items() if n in drawn or letter in letters]


def _timeline(
    entries: list[Entry],
    title: str,
    row: Callable[[Entry], int | None],
    places: Mapping[int, str],
    most: int,
    *,
    ranked: bool,
) -> Timeline:
    heads: dict[tuple[Key, Key], list[Entry]] = {}
    for entry in entries:
        heads.setdefault((row(entry), _step(entry)), []).append(entry)
    columns = _binned(_ordered(c for _, c in heads))
    rows: list[tuple[Key, ...]] = [(r,) for r in _ordered(r for r, _ in heads)]

    def at(rows: Sequence[Key], columns: Sequence[Key]) -> list[Entry]:
        return [entry for r in rows for c in columns for entry in heads.get((r, c), ())]

    if len(rows) > most:
        calm = {r: all(_worst(e) in CALM for c in columns for e in at(r, c)) for r in rows}
        runs = [(found, [r for (r,) in run]) for found, run in groupby(rows, key=lambda r: calm[r])]
        rows = [part for found, run in runs for part in ([tuple(run)] if found else [(r,) for r in run])]
    word = "layer" if row is _layer else "head"
    lines = []
    for r in rows:
        cells = (_cell(at(r, c), f"{word} {_range(r)}, step {_range(c)}", places, ranked=ranked) for c in columns)
        lines.append(TimelineRow(f"{word[0].upper()}{_range(r)}", tuple(cells)))
    return Timeline(title, _labels([str(c[0]) for c in columns]), tuple(lines))


def _cell(there: list[Entry], where: str, places: Mapping[int, str], *, ranked: bool) -> Cell | None:
    if not there:
        return None
    # Where something was found, what stayed open besides is not said.
    counts = Counter(kind for e in there for kind in kinds(e[0], e[2]) if kind not in CALM or kind == _worst(e))
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
    of_ranks = ranked and label not in CALM
    named = list(dict.fromkeys(r for e in there if of_ranks and _worst(e) == label for r in ranks(e[0], e[2])))
    if named:
        said += f", rank{'s' if len(named) > 1 else ''} {', '.join(named)}"
    few = label is not None and label != "clean" and 2 * counts[label] < len(there)
    _, _, worst = min(there, key=lambda e: (_worst(e) != label, severity(e[2])))
    short = "r" + ",".join(named) if 0 < len(named) <= _RANKS else ""
    return Cell(label, letters, short, few, places[id(worst)], f"{where}: {said}")


def _worst(entry: Entry) -> Kind | None:
    return worst_kind(entry[0], entry[2])


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
