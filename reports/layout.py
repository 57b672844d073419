"""What reports are laid out with: titles, wrapped paragraphs, tables, lines of blocks, and lines for a log."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from attn_diag.results.diagnosis import BiasEstimate

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-~=+*#"
"""The same eight levels where only ASCII can be written."""

# Columns of a line of bars.
_BARS = 56

_T = TypeVar("_T")


def heading(text: str) -> RenderableType:
    """The rule above a report; what does not fit of a long path is left out."""
    return Rule(Text(text, overflow="ellipsis"), align="left")


def section(text: str) -> RenderableType:
    """The rule above a part of a report."""
    return Rule(Text(text), align="left", style="dim")


def title(text: str) -> Iterator[RenderableType]:
    """An underlined title and the blank line above it."""
    yield Text("")
    yield paragraph(text, style="bold underline")


def note(text: str) -> Text:
    """What is read last: legends, versions."""
    return Text(text, style="dim")


def paragraph(text: str, style: str = "") -> RenderableType:
    """Text wrapped to the console's width."""
    return Hanging("", Text(text, style=style))


def bullet(mark: str, text: str | Text) -> RenderableType:
    """A line with a mark before it, wrapped beside the mark."""
    return Hanging(f"{mark:>3} ", text if isinstance(text, Text) else Text(text))


def bullets(mark: str, texts: Sequence[str], most: int, left: str) -> Iterator[RenderableType]:
    """At most so many of the texts, then ``left`` with the number of the others for its {}."""
    yield from (bullet(mark, text) for text in texts[:most])
    if len(texts) > most:
        yield bullet("", left.format(len(texts) - most))


def indented(renderable: RenderableType, *, expand: bool = True) -> Padding:
    """Two columns to the right; ``expand``: filled up with blanks to the console's width."""
    return Padding(renderable, (0, 0, 0, 2), expand=expand)


@dataclass(frozen=True)
class Sized:
    """What is drawn according to the room there is."""

    draw: Callable[[ConsoleOptions], Iterable[RenderableType]]
    """options -> pieces; ``options.max_width`` is the room in columns."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        return self.draw(options)


@dataclass(frozen=True)
class Hanging:
    """Text wrapped to the console's width, nothing cut off."""

    mark: str
    """Stands before the first line; the later ones are indented by its width."""
    text: Text

    def lines(self, console: Console, width: int) -> Iterator[Text]:
        """The lines, at most ``width`` columns wide."""
        for i, line in enumerate(self.text.wrap(console, max(width - len(self.mark), 16))):
            line.rstrip()
            yield Text.assemble(" " * len(self.mark) if i else self.mark, line)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield from self.lines(console, options.max_width)


def table(*columns: str | Column, rows: Iterable[Iterable[RenderableType]] = (), collapse: bool = False) -> Table:
    """A table without lines. A column given by its title alone holds text that wraps.

    Args:
        columns: Titles, or ``column``, ``figure`` and rich's own.
        rows: What it holds; more may be added to it.
        collapse: One blank between columns, not two.
    """
    made = Table(*columns, box=None, pad_edge=False, padding=(0, 1), collapse_padding=collapse, header_style="dim")
    for row in rows:
        made.add_row(*row)
    return made


def figure(name: str) -> Column:
    """A column of numbers: flush right, never wrapped."""
    return Column(name, justify="right", no_wrap=True)


def figures(names: Sequence[str]) -> list[Column]:
    """Columns of numbers."""
    return [figure(name) for name in names]


def blocks(options: ConsoleOptions) -> str:
    """The eight levels in characters that the console can write."""
    return ASCII if options.ascii_only else BLOCKS


@dataclass(frozen=True)
class Spark:
    """A running sum in characters."""

    levels: tuple[int, ...]
    """A level 0 to 7 for every cell; zero lies between 3 and 4."""
    outside: tuple[bool, ...]
    """Which cells lie outside the band."""
    first_row: int | None
    """The first row drawn that is outside; None where none of those drawn is."""

    def text(self, characters: str = BLOCKS) -> str:
        """The line."""
        return "".join(characters[level] for level in self.levels)

    def marks(self) -> str:
        """An exclamation mark below every cell outside the band; empty where there is none."""
        return "".join("!" if out else " " for out in self.outside).rstrip()


def spark(estimate: BiasEstimate, cells: int) -> Spark | None:
    """A signed error's running sum over the rows in at most ``cells`` cells; None where there is nothing to draw.

    Full height is the larger of the flat 99 % band and the largest sum drawn, so that a line that stays low stays
    within the band. A cell shows the sum farthest from zero among its points.
    """
    points = [p for p in estimate.drift if math.isfinite(p["sum"])]
    if len(points) < 2 or not any(p["sum"] for p in points):
        return None
    band = estimate.drift_band99 or 0.0
    band = 0.0 if math.isnan(band) else band
    reach = max(band, max(abs(p["sum"]) for p in points))
    sums = [max((p["sum"] for p in group), key=abs) for group in _groups(points, cells)]
    beyond = [p["row"] for p in points if abs(p["sum"]) > band]
    return Spark(
        levels=tuple(min(int((s / reach + 1) * 4), 7) for s in sums),
        outside=tuple(bool(estimate.drift_outside) and abs(s) > band for s in sums),
        first_row=beyond[0] if beyond and estimate.drift_outside else None,
    )


def bars(values: Sequence[float], *, zero: bool = False) -> Sized:
    """Values in order as a line of bars, in the characters that the console can write."""
    # In ASCII the dot for no number would look like a low bar.
    return Sized(lambda o: [Text(bar_line(values, zero=zero, bars=blocks(o), gap=" " if o.ascii_only else "·"))])


def bar_line(values: Sequence[float], *, zero: bool = False, bars: str = BLOCKS, gap: str = "·") -> str:
    """A line of bars over at most 56 columns, the largest in magnitude of each, with its range.

    Args:
        values: What is drawn, in order.
        zero: Whether bars start at 0, not at the smallest value.
        bars: One character a height, the lowest first.
        gap: The character of a column without a finite number.
    """
    columns = _groups(values, _BARS)
    shown = [max((v for v in column if math.isfinite(v)), key=abs, default=math.nan) for column in columns]
    finite = [v for v in shown if math.isfinite(v)]
    if not finite:
        return gap * len(columns)
    low, high = (min(0.0, *finite) if zero else min(finite)), max(finite)
    # Of halves: the difference of two finite numbers need not be finite.
    half = (high / 2 - low / 2) / (len(bars) - 1) or 1.0
    drawn = "".join(gap if math.isnan(v) else bars[round((v / 2 - low / 2) / half)] for v in shown)
    return f"{drawn}  {low:.2g} … {high:.2g}"


def _groups(values: Sequence[_T], most: int) -> list[Sequence[_T]]:
    """Consecutive values in at most ``most`` groups, as even as can be."""
    count = min(most, len(values))
    return [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]


def line(kind: str, *columns: str) -> str:
    """One fact for a log: its kind, columns of fixed widths (a longer entry pushes the next ones), and the rest."""
    widths = (12, 24, 16)
    padded = [c.ljust(w) for c, w in zip((kind, *columns[:-1]), widths, strict=False)]
    return " ".join([*padded, *columns[-1:]])
