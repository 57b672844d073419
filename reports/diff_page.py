"""A comparison as a page: the verdicts and sizes of A and B in the same map side by side, then head by head."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

from attn_diag.reports import glossary
from attn_diag.reports.charts import Axis, Chart, Gallery, Map, Section
from attn_diag.reports.diff import (
    changed_entries,
    entry_name,
    headline,
    least_p,
    mean_words,
    method_line,
    next_command,
    quantity_of,
    side_line,
    size_words,
    test_of,
    tool_lines,
)
from attn_diag.reports.diff_groups import WORDS, changed_heads, factors, labels_words
from attn_diag.reports.diff_trends import figure_title, shared_trends
from attn_diag.reports.head_labels import LETTERS
from attn_diag.reports.html import gallery_document
from attn_diag.reports.quantities import DQ_ERROR, FACTOR, NOISE_FACTOR, Quantity
from attn_diag.reports.timeline import HeadVerdict, Key, Timeline, ordered, verdict_table
from attn_diag.results.comparison import Comparison, HeadComparison
from attn_diag.results.wording import file_name, number

_Side = Literal["a", "b"]
_SIDES: tuple[_Side, _Side] = ("a", "b")
# What the maps are coloured by, and where their colours begin and end at least: as in the page of a diagnosis.
_SHOWN = ((FACTOR, (10**-0.1, 10.0)), (DQ_ERROR, (1e-3, 1.0)), (NOISE_FACTOR, (10**-0.3, 10**1.3)))
# Rows of the table of all heads.
_LISTED = 400
_CHANGES = ("where", "change", "labels", "by how much")
_FIGURES = ("where", "figure", "A -> B")
_TRENDS = ("heads", "B beside A", "over the steps", "first -> last", "beyond chance", "adj. p")


def diff_document(found: Comparison) -> str:
    """A self-contained page."""
    changed = changed_entries(found)
    groups = changed_heads(found, changed)
    following = next_command(groups)
    unread = tuple(f"Not read: {item}" for item in (*found.a.unreadable, *found.b.unreadable))
    # The changed ones first.
    told = {id(e) for e in changed}
    heads = [e for e in (*changed, *(e for e in found.entries if id(e) not in told)) if e.head is not None]
    sections = [
        Section(
            "A and B in the same map",
            (*unread, *(f"{name} {side_line(side)}" for name, side in (("A", found.a), ("B", found.b)))),
            verdicts=tuple(_verdicts(found, heads)),
        )
    ]
    if groups:
        rows = ((g.place, ", ".join(WORDS[o] for o in g.outcomes) or "none", g.labels, g.size) for g in groups)
        sections.append(Section("What changed, the worst first", table=(_CHANGES, *rows)))
        details = tuple(row for group in groups for row in _details(found, group.entries[0]))
        clearest = "Of each row above, the head in which it is clearest."
        sections.append(Section("By how much, and how sure", (clearest,), (_FIGURES, *details) if details else ()))
    if shared := shared_trends(found):
        trends = (
            (s.place, figure_title(s.trend.name), s.trend.outcome, f"{s.value(0)} -> {s.value(-1)}", s.since,
             number(s.trend.p_adjusted, 2)) for s in shared
        )  # fmt: skip
        sections.append(Section("Over the steps", table=(_TRENDS, *trends)))
    if maps := tuple(_maps(heads)):
        sections.append(Section("Their figures in the same map", charts=maps))
    if heads:
        sections.append(_all_heads(found, heads))
    if found.unmatched:
        unmatched = ((item.side, item.what, item.reason) for item in found.unmatched)
        sections.append(Section("Not compared", table=(("side", "what", "why"), *unmatched)))
    matched = f"Matched: {'; '.join(found.matched_by)}."
    sections.append(Section("How it was compared", (matched, *found.notes, method_line(found))))
    lead = f"Next: {following}" if following else found.summary if groups else ""
    footer = ". ".join(tool_lines(found)) + "."
    return gallery_document(Gallery(headline(found, groups), lead, tuple(sections), footer, glossary.GROUPS))


def _all_heads(found: Comparison, heads: Sequence[HeadComparison]) -> Section:
    """The table to which the maps' cells lead."""
    shown = heads[:_LISTED]
    known = [q for q, _ in _SHOWN if any(_value(e, q, side) is not None for e in shown for side in _SIDES)]
    head = ("head", "change", "labels", *(f"{_title(q)}, {side.upper()}" for q in known for side in _SIDES), "adj. p")
    rows = (
        (
            entry_name(found, e), ", ".join(WORDS[o] for o in e.outcomes) or "none", labels_words(e),
            *(q.shown(_value(e, q, side)) for q in known for side in _SIDES), number(least_p(e), 2),
        )
        for e in shown
    )  # fmt: skip
    more = (f"The {len(shown)} that changed most of {len(heads)}; --json has all.",) if len(heads) > _LISTED else ()
    return Section("Every head", more, (head, *rows), places=tuple(_address(i) for i in range(len(shown))))


def _address(index: int) -> str:
    return f"compared-{min(index, _LISTED - 1)}"


def _details(found: Comparison, entry: HeadComparison) -> Iterator[tuple[str, ...]]:
    where = entry_name(found, entry)
    for mean in entry.means:
        if mean.outcome not in ("none", "untested"):
            yield where, f"mean error of {test_of(mean).title}", mean_words(mean)
    for size in entry.sizes:
        if size.outcome not in ("none", "unknown"):
            yield where, quantity_of(size).title, size_words(size)
    yield from ((where, "note", note) for note in entry.notes)


def _title(quantity: Quantity) -> str:
    """As the head of a column, in one line."""
    return quantity.heading.replace("-\n", "-").replace("\n", " ")


def _value(entry: HeadComparison, quantity: Quantity, side: _Side) -> float | None:
    """A figure of one side; of factors over a well-rounded kernel the largest."""
    sizes = factors(entry) if quantity is FACTOR else [s for s in entry.sizes if s.name == quantity.key]
    return max((value for s in sizes if (value := getattr(s, side)) is not None), default=None)


class _Places:
    """Rows and columns of the maps: layers (heads, where there is one layer) over steps; of one step, over heads."""

    def __init__(self, heads: Sequence[HeadComparison]) -> None:
        self.steps = len({e.b_step for e in heads}) > 1
        self.layers = not self.steps or len({e.layer for e in heads}) > 1
        self.row, self.column = "layer" if self.layers else "head", "step" if self.steps else "head"

    def of(self, entry: HeadComparison) -> tuple[int | None, Key]:
        """The row and the column of a head, as B numbers them."""
        return entry.layer if self.layers else entry.head, entry.b_step if self.steps else entry.head


def _by_observation(heads: Sequence[HeadComparison]) -> Iterator[tuple[dict[_Side, str], list[HeadComparison]]]:
    """The heads of each pair of observations, and what tells either side's from others: nothing where all are alike."""
    found: dict[tuple[str, str], list[HeadComparison]] = {}
    for entry in heads:
        found.setdefault((entry.a_observation, entry.b_observation), []).append(entry)
    for pair, own in found.items():
        alike = len(found) == 1 and pair[0] == pair[1]
        yield {side: "" if alike else f", {name}" for side, name in zip(_SIDES, pair, strict=True)}, own


def _verdicts(found: Comparison, heads: Sequence[HeadComparison]) -> Iterator[Timeline]:
    """A table a side, two for each pair of observations."""
    places, addresses = _Places(heads), {id(e): _address(i) for i, e in enumerate(heads)}
    order = list(LETTERS)
    for names, own in _by_observation(heads):
        for side in _SIDES:
            judged = []
            for e in own:
                labels = e.a_labels if side == "a" else e.b_labels
                row, column = places.of(e)
                gravest = min(map(order.index, labels), default=len(order))
                severity = gravest, -(_value(e, DQ_ERROR, side) or 0.0)
                judged.append(HeadVerdict(row, column, labels, addresses[id(e)], severity))
            title, source = side.upper(), file_name((found.a if side == "a" else found.b).source)
            # Of a comparison in Python the sides have no other names.
            title += ("" if source == title else f": {source}") + names[side]
            yield verdict_table(judged, title, places.row, places.column)


def _maps(heads: Sequence[HeadComparison]) -> Iterator[Chart]:
    """Two maps of each figure that is known, coloured alike; none where there is one cell."""
    places = _Places(heads)
    for names, own in _by_observation(heads):
        cells = {places.of(e) for e in own}
        rows, columns = ordered(row for row, _ in cells), ordered(column for _, column in cells)
        for quantity, ends in _SHOWN if len(cells) > 1 else ():
            worst = {side: _worst(own, places, quantity, side) for side in _SIDES}
            known = [value for side in _SIDES for value in worst[side].values() if value > 0]
            if not known:
                continue
            scale = min(*known, ends[0]), max(*known, ends[1])
            for side in _SIDES:
                values = tuple(tuple(worst[side].get((row, column)) for column in columns) for row in rows)
                yield Chart(
                    f"{quantity.key}-{side}{names[side].replace(', ', '-')}",
                    f"{side.upper()}{names[side]}: {_title(quantity)}",
                    "The largest of a cell's heads; the same colours in A and B.",
                    Axis(places.column, names=tuple(map(str, columns))),
                    Axis(places.row, names=tuple("" if row is None else str(row) for row in rows)),
                    map=Map(_title(quantity), values, log=True, ends=scale),
                )


def _worst(
    heads: Sequence[HeadComparison], places: _Places, quantity: Quantity, side: _Side
) -> dict[tuple[Key, Key], float]:
    """The largest value in each cell."""
    found: dict[tuple[Key, Key], float] = {}
    for entry in heads:
        if (value := _value(entry, quantity, side)) is not None and math.isfinite(value):
            found[places.of(entry)] = max(value, found.get(places.of(entry), value))
    return found
