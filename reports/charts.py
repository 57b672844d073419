"""Charts as plain data: what a page's script draws, saves as SVG and exports as CSV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Value = float | None
# Names of colours in the style sheet, told apart in light, dark and print.
Tone = Literal["accent", "second", "third", "good", "fourth", "fifth", "sixth"]


@dataclass(frozen=True)
class Axis:
    """One axis. ``names``: of categories, where positions are their indices; ``log``: logarithmic.

    ``fit``: a linear one only as long as the values need, which may leave out 0.
    """

    label: str
    log: bool = False
    names: tuple[str, ...] = ()
    fit: bool = False


@dataclass(frozen=True)
class Series:
    """Values ``y`` over ``x``, of one length; None is a gap. ``line`` and ``step`` join them in order.

    ``tone``: its colour, None for the next one; series of one tone are of one kind, such as repetitions of a run.
    ``look``: "faint" is thin and pale, behind the others, "broad" is pale too, a ground for what lies on it; None:
    plain, but for the first of several lines without tones, which is broad.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[Value, ...]
    kind: Literal["line", "step", "bars", "points"] = "line"
    tone: Tone | None = None
    look: Literal["faint", "broad"] | None = None


@dataclass(frozen=True)
class Band:
    """A region of y between ``low`` and ``high`` over the whole width, such as a confidence band."""

    name: str
    low: float
    high: float


@dataclass(frozen=True)
class Mark:
    """A vertical line over the whole height at ``x``, with its label above: when something happened."""

    x: float
    label: str


@dataclass(frozen=True)
class Map:
    """Coloured cells: ``values[row][column]``, rows along y, columns along x; None is an empty cell.

    ``diverging``: coloured by sign around 0.
    """

    label: str
    values: tuple[tuple[Value, ...], ...]
    diverging: bool = False


@dataclass(frozen=True)
class Chart:
    """One figure: series (with bands and marks) or a map. ``name`` is the stem of the files it is saved as."""

    name: str
    title: str
    caption: str
    x: Axis
    y: Axis
    series: tuple[Series, ...] = ()
    bands: tuple[Band, ...] = ()
    map: Map | None = None
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs of plain text, a table (its first row the header), and charts."""

    title: str
    paragraphs: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    charts: tuple[Chart, ...] = ()


@dataclass(frozen=True)
class Gallery:
    """A page of charts. ``footer``: versions and backend of what made the numbers."""

    title: str
    lead: str
    sections: tuple[Section, ...]
    footer: str = ""
