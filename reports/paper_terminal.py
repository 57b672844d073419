"""The paper's figures in a terminal: each a sentence with its numbers and a sparkline; readable from 80 columns on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderableType
from rich.rule import Rule
from rich.text import Text

from attn_diag.reports import paper_words as say
from attn_diag.reports import words
from attn_diag.reports.sparks import ASCII, BLOCKS

if TYPE_CHECKING:
    from attn_diag.results.paper import PaperFigures

_WIDTH = 56


def paper_renderables(f: PaperFigures) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    yield Text(f"Figures after {say.PAPER}", style="bold")
    yield Text(say.lead(f))
    for note in f.notes:
        yield Text(f"note: {words.printable(note)}", style="yellow")
    for name, title in say.TITLES.items():
        lines = _lines(f, name)
        if lines:
            yield Rule(Text(title), align="left", style="dim")
            yield from (Text(line) if isinstance(line, str) else line for line in lines)
    if f.missing:
        yield Rule(Text("Not drawn"), align="left", style="dim")
        for name, reason in f.missing.items():
            yield Text(f"{say.TITLES[name].split(':')[0]}: {words.printable(reason)}")
    yield Rule(style="dim")
    yield Text(f"{say.CAVEAT}\n{words.tool_line(f.tool)}", style="dim")


@dataclass(frozen=True)
class _Bars:
    """``spark`` in the characters that the console can write."""

    values: Sequence[float]
    zero: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if options.ascii_only:
            # The dot for no number would look like a low bar.
            yield Text(spark(self.values, zero=self.zero, bars=ASCII, gap=" "))
        else:
            yield Text(spark(self.values, zero=self.zero))


def _lines(f: PaperFigures, name: str) -> Sequence[str | _Bars]:
    """A figure's sentences and sparklines; none where it is not drawn."""
    if name == "spectral_norms" and f.spectral_norms is not None:
        worst = max(f.spectral_norms.heads, key=lambda h: h.spectral[-1])
        chart = [_Bars(worst.spectral, zero=True)] if len(worst.spectral) > 1 else []
        return [say.spectral_norms(f.spectral_norms), *chart]
    if name == "atoms" and f.atoms is not None:
        return say.atoms(f.atoms)
    if name == "delta_rows" and f.delta_rows is not None:
        return [say.delta_rows(f.delta_rows), _Bars(f.delta_rows.sums)]
    if name == "delta_steps" and f.delta_steps is not None:
        found = f.delta_steps
        sums = [found.total.sums] + ([found.excess.sums] if found.excess is not None else [])
        said = say.delta_steps(found)
        drawn = [line for pair in zip(said, map(_Bars, sums), strict=False) for line in pair]
        return [*drawn, *said[len(sums) :]]
    if name == "features" and f.features is not None:
        return [say.features(f.features), _Bars(f.features.product)]
    if name == "prefix" and f.prefix is not None:
        return [say.prefix(f.prefix), _Bars(f.prefix.error)]
    if name == "triggers" and f.triggers is not None:
        return [say.triggers(f.triggers, f.chosen.name), _Bars(f.triggers.head.exact, zero=True)]
    return []


def spark(values: Sequence[float], *, zero: bool = False, bars: str = BLOCKS, gap: str = "·") -> str:
    """A line of bars over at most 56 columns, the largest in magnitude of each, with its range.

    Args:
        values: What is drawn, in order.
        zero: Whether bars start at 0, not at the smallest value.
        bars: One character a height, the lowest first.
        gap: The character of a column without a finite number.
    """
    columns = min(_WIDTH, len(values))
    shown = []
    for i in range(columns):
        part = values[i * len(values) // columns : (i + 1) * len(values) // columns]
        shown.append(max((v for v in part if math.isfinite(v)), key=abs, default=math.nan))
    finite = [v for v in shown if math.isfinite(v)]
    if not finite:
        return gap * columns
    low, high = (min(0.0, *finite) if zero else min(finite)), max(finite)
    step = (high - low) / (len(bars) - 1) or 1.0
    line = "".join(gap if math.isnan(v) else bars[round((v - low) / step)] for v in shown)
    return f"{line}  {low:.2g} … {high:.2g}"
