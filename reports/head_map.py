"""Many heads at a glance: maps of layer x head in characters, as many side by side as the width holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.text import Text

from attn_diag.reports import words
from attn_diag.reports.sparks import ASCII, BLOCKS, log_levels
from attn_diag.reports.story import Entry, dq_error
from attn_diag.results.diagnosis import HeadDiagnosis, severity

LETTERS = {"biased": "B", "lossy": "L", "ill_conditioned": "c", "undecided": "?", "clean": "·"}
STYLES = {"clean": "green", "lossy": "bold red", "ill_conditioned": "bold yellow", "biased": "bold red"}
_GAP = 3
_HEIGHT = " (height: logarithm)"


def _dw_q(head: HeadDiagnosis) -> float | None:
    return head.propagation.dw_q.relative_error if head.propagation.dw_q else None


_MEASURES: dict[str, Callable[[HeadDiagnosis], float | None]] = {
    "dW_Q error": _dw_q,
    "dQ error": lambda head: dq_error(head)[0],
    "noise factor": lambda head: head.noise_factor,
    "conditioning": lambda head: head.conditioning,
}
_PERCENT = {"dW_Q error", "dQ error"}


@dataclass(frozen=True)
class HeadMap:
    """The maps of one observation: the worst verdict by letter, then each figure that is known by height of a block.

    A cell stands for the worst of all entries of its layer and head (several steps or batch items).
    """

    entries: tuple[Entry, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        cells: dict[tuple[int | None, int], HeadDiagnosis] = {}
        for _, _, head in sorted(self.entries, key=lambda entry: severity(entry[2])):
            assert head.head is not None
            cells.setdefault((head.layer, head.head), head)
        layers = sorted({layer for layer, _ in cells}, key=lambda layer: -1 if layer is None else layer)
        heads = sorted({head for _, head in cells})
        label = max(len(_layer(layer)) for layer in layers) + 1
        room = max((options.max_width - label) // 2, 8)
        for start in range(0, len(heads), room):
            part = heads[start : start + room]
            maps = [_verdicts(cells, layers, part, ascii_only=options.ascii_only)]
            for title, measure in _MEASURES.items():
                values = {place: measure(head) for place, head in cells.items()}
                shown = any(value is not None for value in values.values())
                if shown and not (title == "dQ error" and any(m.title == "dW_Q error" for m in maps)):
                    characters = ASCII if options.ascii_only else BLOCKS
                    maps.append(_shades(title, values, cells, layers, part, characters))
            yield from _side_by_side(console, maps, layers, part, label, options.max_width)


@dataclass(frozen=True)
class _Map:
    title: str
    legend: str
    rows: list[Text]


def _layer(layer: int | None) -> str:
    return "" if layer is None else f"L{layer}"


def _style(head: HeadDiagnosis) -> str:
    names = words.label_names(head)
    return next((STYLES.get(name, "cyan") for name in LETTERS if name in names), "dim")


def _verdicts(
    cells: dict[tuple[int | None, int], HeadDiagnosis],
    layers: list[int | None],
    heads: list[int],
    *,
    ascii_only: bool,
) -> _Map:
    rows, seen = [], set()
    for layer in layers:
        row = Text()
        for head in heads:
            found = cells.get((layer, head))
            letter = " "
            if found is not None:
                worst = next((name for name in LETTERS if name in words.label_names(found)), None)
                letter = "x" if worst is None else LETTERS[worst]
                seen.add(worst)
            letter = "." if ascii_only and letter == "·" else letter
            row.append(f" {letter}", style="" if found is None else _style(found))
        rows.append(row)
    named = {name: LETTERS[name] for name in LETTERS if name in seen}
    legend = ", ".join(f"{'.' if ascii_only and c == '·' else c} {name}" for name, c in named.items())
    return _Map("worst verdict", legend + (", x no verdict" if None in seen else ""), rows)


def _shades(
    title: str,
    values: dict[tuple[int | None, int], float | None],
    cells: dict[tuple[int | None, int], HeadDiagnosis],
    layers: list[int | None],
    heads: list[int],
    characters: str,
) -> _Map:
    levels = dict(zip(values, log_levels(list(values.values())), strict=True))
    rows = []
    for layer in layers:
        row = Text()
        for head in heads:
            level = levels.get((layer, head))
            found = cells.get((layer, head))
            row.append(" ")
            row.append(" " if level is None else characters[level], style="" if found is None else _style(found))
        rows.append(row)
    known = [value for value in values.values() if value is not None]
    show = words.percent if title in _PERCENT else words.number
    return _Map(title, f"{show(min(known))} to {show(max(known))}", rows)


def _side_by_side(
    console: Console, maps: list[_Map], layers: list[int | None], heads: list[int], label: int, width: int
) -> Iterator[Text]:
    span = max(2 * len(heads), *(len(m.title) + 1 for m in maps))
    fit = max((width - label + _GAP) // (span + _GAP), 1)
    for start in range(0, len(maps), fit):
        group = maps[start : start + fit]
        yield Text(" " * label + (" " * _GAP).join(f" {m.title}".ljust(span) for m in group).rstrip(), style="bold")
        # Two columns a head: from 10 on only every other number has room.
        step = 1 if heads[-1] < 10 else 2
        numbers = "".join(f"{head:>2}".ljust(2 * step) for head in heads[::step])
        yield Text(" " * label + (" " * _GAP).join(numbers.ljust(span) for _ in group).rstrip(), style="dim")
        for i, layer in enumerate(layers):
            line = Text(_layer(layer).ljust(label))
            for j, drawn in enumerate(group):
                line.append_text(drawn.rows[i])
                line.append(" " * (span - len(drawn.rows[i]) + (_GAP if j + 1 < len(group) else 0)))
            line.rstrip()
            yield line
        legend = Text(
            "; ".join(f"{m.title}: {m.legend}" for m in group) + _HEIGHT * any(m.title in _MEASURES for m in group),
            style="dim",
        )
        yield from words.Hanging(" " * (label + 1), legend).lines(console, width)
        yield Text("")
