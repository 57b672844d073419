"""The part of a comparison's report that goes over the steps: what grows, and since when it is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import ConsoleOptions, RenderableType
from rich.table import Column
from rich.text import Text

from attn_diag.reports import layout
from attn_diag.reports.quantities import QUANTITIES, TESTS
from attn_diag.results.comparison import Comparison, HeadTrend, TrendOutcome
from attn_diag.results.wording import SYMBOLS, number, plural, ranges, signed

_STYLES: dict[TrendOutcome, str] = {
    "grows": "bold red",
    "since": "bold red",
    "throughout": "yellow",
    "shrinks": "green",
}
# Columns from which the table has room for the course of the difference.
_WIDE = 96


def figure_title(name: str) -> str:
    """What a mean or size of a comparison is called in a table."""
    if name in TESTS:
        return f"mean of {TESTS[name].title}"
    if name in QUANTITIES:
        return QUANTITIES[name].title
    quantity = name.removesuffix("_factor")
    # A document may have been edited: names are texts there.
    return f"{SYMBOLS[quantity]} / well-rounded" if quantity in SYMBOLS and name != quantity else name


@dataclass(frozen=True)
class SharedTrend:
    """Heads of one layer in which one figure goes on alike."""

    trend: HeadTrend
    """That of the head in which it is clearest."""
    heads: tuple[int, ...]
    """All of them."""

    @property
    def place(self) -> str:
        """The heads, such as "L3H0-11"."""
        trend = self.trend
        layer = "" if trend.layer is None else f"L{trend.layer}"
        return f"{layer}H{ranges(self.heads)}{'' if trend.rank is None else f' rank {trend.rank}'}"

    @property
    def since(self) -> str:
        """Since when it differs."""
        trend = self.trend
        if trend.onset is None:
            return "not at the end"
        return f"all {plural(len(trend.steps), 'step')}" if trend.onset == trend.steps[0] else f"step {trend.onset} on"

    def value(self, at: int) -> str:
        """The difference at one of the steps."""
        value = self.trend.values[at]
        if self.trend.name not in TESTS:
            return f"{value:.3g} times"
        return f"{signed(value)} {TESTS[self.trend.name].unit}"

    def words(self) -> str:
        """In a line: what, where from and to, since when, how sure."""
        trend = self.trend
        p = "not tested" if trend.p_adjusted is None else f"adjusted p = {number(trend.p_adjusted, 2)}"
        tau = "" if trend.tau is None else f", tau = {trend.tau:+.2f}"
        return (
            f"{trend.outcome}: {self.value(0)} at step {trend.steps[0]}, {self.value(-1)} at step {trend.steps[-1]}; "
            f"beyond chance {self.since}{tau}, {p}"
        )


def shared_trends(found: Comparison) -> list[SharedTrend]:
    """What grows, came, stays or shrinks, heads of a layer together, the clearest first."""
    groups: dict[tuple[object, ...], list[HeadTrend]] = {}
    for trend in found.trends:
        if trend.outcome != "none":
            key = trend.layer, trend.batch, trend.rank, trend.b_observation, trend.name, trend.outcome, trend.onset
            groups.setdefault(key, []).append(trend)
    return [SharedTrend(group[0], tuple(sorted({t.head for t in group}))) for group in groups.values()]


def trend_table(trends: Sequence[SharedTrend], options: ConsoleOptions) -> Iterator[RenderableType]:
    """A row a group of heads; where there is room, with the course over the steps."""
    wide = options.max_width >= _WIDE
    table = layout.table(
        Column("heads", overflow="fold"),
        Column("B beside A", overflow="fold"),
        Column("over the steps"),
        Column("first -> last", overflow="fold"),
        Column("beyond chance", overflow="fold"),
        *layout.figures(["adj.\np"]),
        *([Column("course", no_wrap=True)] if wide else []),
    )
    for shared in trends:
        trend = shared.trend
        drawn = layout.bar_line(trend.values, bars=layout.blocks(options)).partition("  ")[0]
        table.add_row(
            Text(shared.place),
            Text(figure_title(trend.name)),
            Text(trend.outcome, style=_STYLES[trend.outcome]),
            Text(f"{shared.value(0)} -> {shared.value(-1)}"),
            Text(shared.since),
            number(trend.p_adjusted, 2),
            *([Text(drawn)] if wide else []),
        )
    yield table
