"""Charts as plain data: what a page's script draws, saves as SVG and exports as CSV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from attn_diag.reports.glossary import Word
from attn_diag.reports.timeline import Timeline

Value = float | None
# Names of colours in the style sheet, told apart in light, dark and print.
Tone = Literal["accent", "second", "third", "good", "fourth", "fifth", "sixth"]


@dataclass(frozen=True)
class Axis:
    """One axis."""

    label: str
    log: bool = False
    """Whether it is logarithmic."""
    names: tuple[str, ...] = ()
    """Of categories; their positions are their indices."""
    fit: bool = False
    """Whether a linear one is only as long as the values need, which may leave out 0."""


@dataclass(frozen=True)
class Series:
    """Values ``y`` over ``x``, of one length."""

    name: str
    x: tuple[float, ...]
    y: tuple[Value, ...]
    """None is a gap."""
    kind: Literal["line", "step", "bars", "points"] = "line"
    """Lines and steps join the values in order."""
    tone: Tone | None = None
    """Its colour, None for the next one; series of one tone are of one kind, such as repetitions of a run."""
    look: Literal["faint", "broad"] | None = None
    """Faint is thin and pale, behind the others; broad is pale too, a ground for what lies on it; None is plain, but
    for the first of several lines without tones, which is broad."""


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
    """Coloured cells, rows along y, columns along x."""

    label: str
    values: tuple[tuple[Value, ...], ...]
    """By row, then column; None is an empty cell."""
    diverging: bool = False
    """Whether they are coloured by sign around 0."""
    log: bool = False
    """Whether they are coloured by their logarithm."""
    ends: tuple[float, float] | None = None
    """Where the colours begin and end, so that maps side by side are read alike; None: at the extremes."""
    names: tuple[tuple[str | None, ...], ...] = ()
    """What is written in each cell, likewise; the cells of a name are shown and hidden together. Empty: nothing."""
    places: tuple[tuple[str | None, ...], ...] = ()
    """Addresses on the page to which cells lead, likewise. Empty: nowhere."""


@dataclass(frozen=True)
class Chart:
    """One figure: series (with bands and marks) or a map."""

    name: str
    """The stem of the files it is saved as."""
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
    """A heading, paragraphs of plain text, tables of verdicts, a table (its first row the header), and charts."""

    title: str
    paragraphs: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    charts: tuple[Chart, ...] = ()
    verdicts: tuple[Timeline, ...] = ()
    """Side by side; their cells lead to rows of a table."""
    places: tuple[str, ...] = ()
    """The addresses of the table's rows, those of the header left out."""


@dataclass(frozen=True)
class Gallery:
    """A page of charts."""

    title: str
    lead: str
    sections: tuple[Section, ...]
    footer: str = ""
    """Versions and backend of what made the numbers."""
    glossary: Mapping[str, tuple[Word, ...]] = field(default_factory=dict)
    """Words that are explained where they stand and at its end, by heading."""
