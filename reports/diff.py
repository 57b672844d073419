"""The report of a comparison: what changed in one sentence, the changed heads, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from attn_diag.reports import words
from attn_diag.results.comparison import Comparison, HeadComparison, MeanChange, Outcome, Side, SizeChange

_STYLES: dict[Outcome, str] = {
    "became-biased": "bold red",
    "bias-reversed": "bold red",
    "bias-grew": "bold red",
    "bias-moved": "bold yellow",
    "grew": "bold red",
    "cured": "bold green",
    "bias-shrank": "green",
    "shrank": "green",
    "relabelled": "yellow",
}
_ORDER = list(_STYLES)
_SIZES = {
    "noise_factor": "noise factor",
    "dq_error": "dQ error",
    "dw_q_error": "dW_Q error",
    "conditioning": "conditioning",
    "repeated_maxima": "repeated maxima",
    "nonfinite_rows": "rows with NaN or Inf",
}
_PERCENT = ("dq_error", "dw_q_error", "repeated_maxima")
_MAX_HEADS = 16
# Columns from which the table has room for dQ's error.
_MEDIUM = 72
_MAX_DETAILS = 4
_MAX_ALONE = 6
_MAX_UNMATCHED = 8


def diff_renderables(found: Comparison) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    changed = _changed(found)
    style = _STYLES.get(changed[0].outcomes[0], "bold") if changed else "bold green"
    yield words.paragraph(found.summary, style=style)
    yield words.bullet("A", _side(found.a))
    yield words.bullet("B", _side(found.b))
    for unread in (*found.a.unreadable, *found.b.unreadable):
        yield words.paragraph(f"warning: not read: {unread}", style="yellow")
    yield words.bullet(" ", f"matched: {'; '.join(found.matched_by)}")
    if changed:
        yield from _title("What changed, the worst first")
        yield _Changes(found, changed[:_MAX_HEADS])
        if len(changed) > _MAX_HEADS:
            yield words.paragraph(f"and {len(changed) - _MAX_HEADS} more changed heads in --json", style="dim")
        for entry in changed[:_MAX_DETAILS]:
            yield from _detail(found, entry)
    if alone := [e for e in found.entries if e.outcomes == ("relabelled",) and e not in changed]:
        yield from _title("Other labels, and no change beyond chance")
        for entry in alone[:_MAX_ALONE]:
            yield words.bullet("-", f"{_name(found, entry)}: {_labels(entry)}")
        if len(alone) > _MAX_ALONE:
            yield words.bullet(" ", f"and {len(alone) - _MAX_ALONE} more in --json")
    if found.unmatched:
        yield from _title("Not compared")
        for item in found.unmatched[:_MAX_UNMATCHED]:
            yield words.bullet("-", f"{item.side}: {item.what}: {item.reason}")
        if len(found.unmatched) > _MAX_UNMATCHED:
            yield words.bullet(" ", f"and {len(found.unmatched) - _MAX_UNMATCHED} more in --json")
    yield from _title("How it was compared")
    for note in (*found.notes, _method(found), *_tools(found)):
        yield words.bullet("-", note)


def diff_lines(found: Comparison) -> Iterator[str]:
    """The report for a log: one fact a line, its kind first."""
    from attn_diag.reports.plain import line

    yield line("summary", words.printable(found.summary))
    yield line("A", words.printable(_side(found.a)))
    yield line("B", words.printable(_side(found.b)))
    for unread in (*found.a.unreadable, *found.b.unreadable):
        yield line("warning", f"not read: {words.printable(unread)}")
    yield line("matched", words.printable("; ".join(found.matched_by)))
    for entry in found.entries:
        place = _name(found, entry).replace(" ", "_")
        outcomes = ",".join(entry.outcomes) or "unchanged"
        yield line("head", place, outcomes, f"{','.join(entry.a_labels)} -> {','.join(entry.b_labels)}")
    for entry in _changed(found):
        place = _name(found, entry).replace(" ", "_")
        for mean in entry.means:
            yield line("mean", place, mean.name, _mean_words(mean))
        for size in entry.sizes:
            yield line("size", place, size.name, _size_words(size))
        yield from (line("note", place, words.printable(note)) for note in entry.notes)
    for item in found.unmatched:
        yield line("unmatched", item.side, words.printable(f"{item.what}: {item.reason}"))
    for note in (*found.notes, _method(found)):
        yield line("note", note)
    yield from (line("tool", tool) for tool in _tools(found))


def _changed(found: Comparison) -> list[HeadComparison]:
    """Entries with a significant change, or with something to say of one that is none; the worst first."""
    told = [entry for entry in found.entries if set(entry.outcomes) - {"relabelled"} or entry.notes]
    return sorted(told, key=lambda e: (min((_ORDER.index(o) for o in e.outcomes), default=len(_ORDER)), _least(e)))


def _least(entry: HeadComparison) -> float:
    """The smallest adjusted p-value of an entry."""
    return min((m.p_adjusted for m in entry.means if m.p_adjusted is not None), default=1.0)


def _title(text: str) -> Iterator[RenderableType]:
    yield Text("")
    yield words.paragraph(text, style="bold underline")


def _side(side: Side) -> str:
    return f"{side.source}: {side.sentence}"


def _name(found: Comparison, entry: HeadComparison) -> str:
    """The head, with observation and file where the comparison has several."""
    head = "all" if entry.head is None else f"H{entry.head}"
    parts = [head if entry.layer is None or entry.head is None else f"L{entry.layer}{head}"]
    if len({(e.a_observation, e.b_observation) for e in found.entries}) > 1:
        both = entry.a_observation == entry.b_observation
        parts.append(entry.b_observation if both else f"{entry.a_observation}/{entry.b_observation}")
    if len({e.b_source for e in found.entries}) > 1:
        parts.append(words.file_name(entry.b_source))
    return words.printable(" ".join(parts))


@dataclass(frozen=True)
class _Changes:
    """The table of changed heads; narrow screens leave dQ's error to the details below it."""

    found: Comparison
    entries: list[HeadComparison]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        shown = {"noise_factor": "noise\nfactor"} | ({"dq_error": "dQ\nerror"} if options.max_width >= _MEDIUM else {})
        table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
        table.add_column("head", overflow="fold")
        table.add_column("change", overflow="fold", min_width=13)
        table.add_column("labels", overflow="fold", min_width=15)
        for title in (*shown.values(), "adj.\np"):
            table.add_column(title, justify="right", no_wrap=True)
        for entry in self.entries:
            sizes = {size.name: size for size in entry.sizes}
            styled = [Text(outcome, style=_STYLES[outcome]) for outcome in entry.outcomes]
            table.add_row(
                Text(_name(self.found, entry)),
                Text(", ").join(styled) if styled else Text("none"),
                Text(_labels(entry)),
                *(_arrow(sizes.get(name)) for name in shown),
                words.number(_least(entry), 2),
            )
        yield table


def _labels(entry: HeadComparison) -> str:
    """The verdict's labels before and after."""
    before, after = ", ".join(entry.a_labels), ", ".join(entry.b_labels)
    return before if before == after else f"{before} -> {after}"


def _figure(name: str, value: float | None) -> str:
    return words.percent(value) if name in _PERCENT else words.number(value)


def _arrow(size: SizeChange | None) -> str:
    """Before and after, one above the other: side by side they take too much of 80 columns."""
    if size is None:
        return words.DASH
    if size.a == size.b:
        return _figure(size.name, size.a)
    return f"{_figure(size.name, size.a)}\n-> {_figure(size.name, size.b)}"


def _detail(found: Comparison, entry: HeadComparison) -> Iterator[RenderableType]:
    yield Text("")
    changes = (
        Text(", ").join(Text(o, style=_STYLES[o]) for o in entry.outcomes) if entry.outcomes else Text("no change")
    )
    yield words.Hanging("", Text.assemble((f"{_name(found, entry)}: ", "bold"), changes))
    for mean in entry.means:
        if mean.outcome not in ("none", "untested"):
            yield words.bullet("-", f"mean error of {words.TESTS[mean.name]} {mean.outcome}: {_mean_words(mean)}")
    for size in entry.sizes:
        if size.outcome not in ("none", "unknown"):
            yield words.bullet("-", f"{_SIZES[size.name]}: {_size_words(size)}")
    for note in entry.notes:
        yield words.bullet("!", note)


def _mean_words(mean: MeanChange) -> str:
    """A mean before and after, and the test of the difference."""
    unit = "floor" if mean.name.startswith("delta") else "ulp"
    values = f"{words.signed(mean.a)} -> {words.signed(mean.b)}"
    if mean.a_units is not None and mean.b_units is not None:
        values += f" ({words.signed(mean.a_units)} -> {words.signed(mean.b_units)} {unit})"
    if mean.p_adjusted is None:
        return f"{values}; not tested"
    low, high = mean.ci95 or (None, None)
    return (
        f"{values}; difference {words.signed(mean.difference)}, 95 % interval {words.signed(low)} to "
        f"{words.signed(high)}, t = {words.number(mean.t)} with {words.number(mean.df)} degrees of freedom, adjusted "
        f"p = {words.number(mean.p_adjusted, 2)}: {mean.outcome}"
    )


def _size_words(size: SizeChange) -> str:
    """A size before and after, and the bounds that chance keeps the ratio within."""
    values = f"{_figure(size.name, size.a)} -> {_figure(size.name, size.b)}"
    if size.ratio is not None and size.a != size.b:
        values += f", {size.ratio:.3g} times"
    if size.low is not None and size.high is not None:
        values += f" (chance alone: {size.low:.2g} to {size.high:.2g})"
    return f"{values}: {size.outcome}"


def _method(found: Comparison) -> str:
    return (
        f"{found.family_size} differences of means, Welch's test from each estimate's own standard error and degrees "
        f"of freedom, one Benjamini-Hochberg family at level {found.level}. A label that changes without a significant "
        "difference is neither a new bias nor a cure."
    )


def _tools(found: Comparison) -> Iterator[str]:
    """What made the two diagnoses."""
    tools = [words.tool_line(side.tool) for side in (found.a, found.b)]
    if tools[0] == tools[1]:
        yield f"A and B: {tools[0]}"
    else:
        yield from (f"{name}: {tool}" for name, tool in zip("AB", tools, strict=True))
