"""All heads of a step beside each other on a page: maps of layers and heads, and the rows of its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attn_diag.reports import error_map
from attn_diag.reports.charts import Axis, Chart, Map
from attn_diag.results.attributions import ErrorMap, HeadError
from attn_diag.results.wording import DASH, SYMBOLS, percent

# Where the colours of a map begin at the latest, so that heads which hardly differ look alike.
_LOWEST = 1e-3

Head = tuple[int | None, int]


@dataclass(frozen=True)
class _Cells:
    """Heads that share a cell: several sequences, or ranks."""

    cells: dict[Head, list[HeadError]]
    layers: tuple[int | None, ...]
    heads: tuple[int, ...]

    @classmethod
    def of(cls, found: ErrorMap) -> _Cells:
        cells: dict[Head, list[HeadError]] = {}
        for head in found.heads:
            cells.setdefault((head.layer, head.head), []).append(head)
        return cls(cells, tuple(error_map.by_layer(found.heads)), tuple(sorted({h for _, h in cells})))


def charts(found: ErrorMap, places: Mapping[int, str], *, stepped: bool = False) -> tuple[Chart, ...]:
    """Two maps of layers and heads, with the guilty site in every cell: coloured by part, and by how far off it is.

    Args:
        found: The heads.
        places: By the identity of a head its address on the page.
        stepped: Whether there are maps of other steps.
    """
    grid, name = _Cells.of(found), SYMBOLS[found.quantity]
    of_step = f", step {found.step}" if stepped and found.step is not None else ""
    sites = tuple(tuple(_site_of(grid.cells.get((n, h), [])) for h in grid.heads) for n in grid.layers)
    lead = tuple(tuple(_first_place(grid.cells.get((n, h), []), places) for h in grid.heads) for n in grid.layers)
    x = Axis("head", names=tuple(map(str, grid.heads)))
    y = Axis("layer", names=tuple("" if n is None else str(n) for n in grid.layers))
    # The largest first in a cell.
    off = {place: same[0].relative for place, same in grid.cells.items()}
    part = {place: error_map.part_of(same) for place, same in grid.cells.items()}
    captions = {
        "part": f"How much of the squared error of {name} over all heads is a head's, and the site with the largest "
        "share of it there (dots: not half of it; a dash: not attributed). A name above the map shows or hides its "
        "heads.",
        "off": f"How far off {name} is by its own size, ‖error‖ / ‖{name}‖, with the same sites.",
    }
    # Short: it stands beside the scale of colours on a phone.
    labels = {"part": "part of the error", "off": f"{name} error"}
    titles = {"part": f"Part of {name}'s squared error", "off": f"{name} error"}
    made = []
    for key, values in (("part", part), ("off", off)):
        rows = tuple(tuple(values.get((n, h)) for h in grid.heads) for n in grid.layers)
        known = [v for row in rows for v in row if v]
        if known:
            ends = min(*known, _LOWEST), max(*known, 1.0)
            chart_map = Map(labels[key], rows, log=True, ends=ends, names=sites, places=lead)
            made.append(
                Chart(f"{found.quantity}-{key}{of_step}", f"{titles[key]}{of_step}", captions[key], x, y, map=chart_map)
            )
    return tuple(made)


def _first_place(heads: Sequence[HeadError], places: Mapping[int, str]) -> str | None:
    """Where a cell leads: to its head with the largest part."""
    return next((places[id(h)] for h in heads if id(h) in places), None)


def _site_of(heads: Sequence[HeadError]) -> str | None:
    """The name in a cell: that of its head with the largest part; with dots where no site alone makes it."""
    if not heads or heads[0].site is None:
        return DASH if heads else None
    return heads[0].site if error_map.alone(heads[0]) else f"{heads[0].site} …"


def table_rows(found: ErrorMap, most: int) -> tuple[tuple[str, ...], ...]:
    """The heads as rows of a page's table, the header first."""
    name = SYMBOLS[found.quantity]
    header = ("head", f"part of {name}'s error", f"{name} error", "site", "its part of that", "next", "its part")
    names = error_map.names_of(found)
    why = any(h.reason for h in found.heads[:most])
    rows = (
        (
            names[id(h)], percent(h.share), percent(h.relative), h.site or DASH, percent(h.site_share, ".0f"),
            h.second or DASH, percent(h.second_share, ".0f"), *((h.reason,) if why else ()),
        )
        for h in found.heads[:most]
    )  # fmt: skip
    return ((*header, *(("why not attributed",) if why else ())), *rows)
