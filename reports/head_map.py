"""Many heads at a glance: maps of layer x head in characters, as many side by side as the width holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.text import Text

from attn_diag.reports import layout
from attn_diag.reports.quantities import (
    CONDITIONING,
    DQ_ERROR,
    DW_Q_ERROR,
    LETTERS,
    NOISE_FACTOR,
    STYLES,
    Quantity,
    worst_label,
)
from attn_diag.reports.story import Entry
from attn_diag.results.diagnosis import HeadDiagnosis, severity
from attn_diag.results.wording import between

_GAP = 3
_HEIGHT = " (height: logarithm)"
_LEVELS = len(layout.BLOCKS)
Place = tuple[int | None, int]


@dataclass(frozen=True)
class HeadMap:
    """The maps of one observation: the worst verdict by letter, then each figure that is known by height of a block.

    A cell stands for the worst of all entries of its layer and head (several steps or batch items).
    """

    entries: tuple[Entry, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        cells: dict[Place, HeadDiagnosis] = {}
        for _, _, head in sorted(self.entries, key=lambda entry: severity(entry[2])):
            assert head.head is not None
            cells.setdefault((head.layer, head.head), head)
        layers = sorted({layer for layer, _ in cells}, key=lambda layer: -1 if layer is None else layer)
        heads = sorted({head for _, head in cells})
        label = max(len(_layer(layer)) for layer in layers) + 1
        room = max((options.max_width - label) // 2, 8)
        figures = _figures(cells)
        for start in range(0, len(heads), room):
            grid = _Grid(cells, layers, heads[start : start + room])
            maps = [_verdicts(grid, ascii_only=options.ascii_only)]
            maps += [_heights(grid, q, known, layout.blocks(options)) for q, known in figures.items()]
            yield from _side_by_side(console, maps, grid, label, options.max_width)


@dataclass(frozen=True)
class _Grid:
    """The heads that stand side by side, layer by layer."""

    cells: dict[Place, HeadDiagnosis]
    layers: list[int | None]
    heads: list[int]

    def rows(self, character: Callable[[Place], str]) -> list[Text]:
        """A line a layer: two columns for every head, in the colour of its verdict."""
        rows = []
        for layer in self.layers:
            row = Text()
            for place in ((layer, head) for head in self.heads):
                drawn = character(place) if place in self.cells else ""
                worst = worst_label(self.cells[place]) if drawn else None
                row.append(" " * (2 - len(drawn)))
                row.append(drawn, style="dim" if worst is None else STYLES[worst])
            rows.append(row)
        return rows


@dataclass(frozen=True)
class _Map:
    title: str
    legend: str
    rows: list[Text]
    heights: bool = False
    """Whether it is drawn by heights of blocks, not by letters."""


def _layer(layer: int | None) -> str:
    return "" if layer is None else f"L{layer}"


def _figures(cells: dict[Place, HeadDiagnosis]) -> dict[Quantity, dict[Place, float | None]]:
    """The figures to draw, with their values; dQ's error only where that of dW_Q, which is made of it, is unknown."""
    known = {}
    for q in (DW_Q_ERROR, DQ_ERROR, NOISE_FACTOR, CONDITIONING):
        values = {place: q.nearest(head)[0] if q is DQ_ERROR else q.value(head) for place, head in cells.items()}
        if any(value is not None for value in values.values()) and not (q is DQ_ERROR and DW_Q_ERROR in known):
            known[q] = values
    return known


def _verdicts(grid: _Grid, *, ascii_only: bool) -> _Map:
    letters = LETTERS | ({"clean": "."} if ascii_only else {})
    worst = {place: worst_label(head) for place, head in grid.cells.items()}
    rows = grid.rows(lambda place: " x" if (name := worst[place]) is None else f" {letters[name]}")
    seen = {name for (_, head), name in worst.items() if head in grid.heads}
    legend = ", ".join(f"{letter} {name}" for name, letter in letters.items() if name in seen)
    return _Map("worst verdict", legend + (", x no verdict" if None in seen else ""), rows)


def _heights(grid: _Grid, quantity: Quantity, values: dict[Place, float | None], characters: str) -> _Map:
    levels = dict(zip(values, log_levels(list(values.values())), strict=True))
    rows = grid.rows(lambda place: " " if (level := levels[place]) is None else characters[level])
    known = [value for value in values.values() if value is not None]
    return _Map(quantity.title, between(quantity.shown(min(known)), quantity.shown(max(known))), rows, heights=True)


def log_levels(values: Sequence[float | None]) -> list[int | None]:
    """A level 0 to 7 for each positive value, in equal steps of its logarithm between the extremes.

    Steps are at least a factor of 1.25, so that values which hardly differ look alike. Zero is level 0, None stays.
    """
    logs = [math.nan if v is None else -math.inf if v <= 0 else math.log(v) for v in values]
    finite = [x for x in logs if math.isfinite(x)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    step = max((high - low) / _LEVELS, math.log(1.25))
    return [None if math.isnan(x) else int(min(max((x - low) / step, 0.0), _LEVELS - 1.0)) for x in logs]


def _side_by_side(console: Console, maps: list[_Map], grid: _Grid, label: int, width: int) -> Iterator[Text]:
    heads = grid.heads
    span = max(2 * len(heads), *(len(m.title) + 1 for m in maps))
    fit = max((width - label + _GAP) // (span + _GAP), 1)
    for start in range(0, len(maps), fit):
        group = maps[start : start + fit]
        yield Text(" " * label + (" " * _GAP).join(f" {m.title}".ljust(span) for m in group).rstrip(), style="bold")
        # Two columns a head: from 10 on only every other number has room.
        step = 1 if heads[-1] < 10 else 2
        numbers = "".join(f"{head:>2}".ljust(2 * step) for head in heads[::step])
        yield Text(" " * label + (" " * _GAP).join(numbers.ljust(span) for _ in group).rstrip(), style="dim")
        for i, layer in enumerate(grid.layers):
            rows = [drawn.rows[i] + " " * (span - len(drawn.rows[i])) for drawn in group]
            line = Text(_layer(layer).ljust(label)) + Text(" " * _GAP).join(rows)
            line.rstrip()
            yield line
        legend = "; ".join(f"{m.title}: {m.legend}" for m in group) + _HEIGHT * any(m.heights for m in group)
        yield from layout.Hanging(" " * (label + 1), layout.note(legend)).lines(console, width)
        yield Text("")
