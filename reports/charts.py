"""Charts as plain data: what a page's script draws, saves as SVG and exports as CSV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Value = float | None


@dataclass(frozen=True)
class Axis:
    """One axis. ``names``: of categories, where positions are their indices; ``log``: logarithmic."""

    label: str
    log: bool = False
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Series:
    """Values ``y`` over ``x``, of one length; None is a gap. ``line`` and ``step`` join them in order."""

    name: str
    x: tuple[float, ...]
    y: tuple[Value, ...]
    kind: Literal["line", "step", "bars", "points"] = "line"


@dataclass(frozen=True)
class Band:
    """A region of y between ``low`` and ``high`` over the whole width, such as a confidence band."""

    name: str
    low: float
    high: float


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
    """One figure: series (and bands) or a map. ``name`` is the stem of the files it is saved as."""

    name: str
    title: str
    caption: str
    x: Axis
    y: Axis
    series: tuple[Series, ...] = ()
    bands: tuple[Band, ...] = ()
    map: Map | None = None


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
