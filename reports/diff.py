"""The report of a comparison: what changed in one sentence, the changed heads, and how sure that is."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

from rich.console import ConsoleOptions, RenderableType
from rich.table import Column
from rich.text import Text

from attn_diag.reports import layout, words
from attn_diag.reports.diff_groups import WORDS, ChangedHeads, changed_heads, labels_words
from attn_diag.reports.diff_trends import figure_title, shared_trends, trend_table
from attn_diag.reports.quantities import DQ_ERROR, NOISE_FACTOR, QUANTITIES, TESTS, PrimaryTest, Quantity
from attn_diag.results.comparison import Comparison, HeadComparison, MeanChange, Outcome, Side, SizeChange
from attn_diag.results.wording import DASH, file_name, head_name, number, signed

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
_MAX_GROUPS, _MAX_TRENDS, _MOST_SAID = 16, 16, 3
# Columns from which the table has room for dQ's error.
_MEDIUM = 72
_MAX_DETAILS = 4
_MAX_ALONE = 6
_MAX_UNMATCHED = 8


_WORSE = {"became-biased", "bias-reversed", "bias-grew", "grew"}
_BETTER = {"cured", "bias-shrank", "shrank"}


def headline(found: Comparison, groups: Sequence[ChangedHeads]) -> str:
    """OK, FAIL or BETTER; what changed, where and since when; in one paragraph."""
    if not groups:
        return f"{_verdict(found)}: {found.summary}"
    said = []
    for group in groups[:_MOST_SAID]:
        size = f" ({group.size})" if group.size else ""
        said.append(f"{group.place}: {group.change}{size}")
    if more := groups[_MOST_SAID:]:
        said.append(f"and {len(more)} more below")
    return f"{_verdict(found)}: {'; '.join(said)}."


def next_command(groups: Sequence[ChangedHeads]) -> str | None:
    """What to run next about the worst change; None where nothing is worse."""
    worse = [entry for group in groups for entry in group.entries if {*entry.outcomes} & _WORSE]
    if not worse or not worse[0].b_source.endswith((".safetensors", ".pt", ".npz")):
        return None
    first = next((entry for entry in worse if entry.head is not None), worse[0])
    head = "" if first.head is None else f" --head {first.head}"
    return f"attn-diag inspect {shlex.quote(first.b_source)}{head}"


def _verdict(found: Comparison) -> str:
    """The word that the report begins with: whether B is worse."""
    outcomes = set(found.outcomes)
    if outcomes & _WORSE:
        return "FAIL"
    if any(entry.untested for entry in found.entries if entry.head is not None):
        return "UNDECIDED"
    return "BETTER" if outcomes & _BETTER else "OK"


def diff_renderables(found: Comparison) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    changed = changed_entries(found)
    groups = changed_heads(found, changed)
    style = _STYLES.get(changed[0].outcomes[0], "bold") if changed and changed[0].outcomes else "bold green"
    yield layout.paragraph(headline(found, groups), style=style)
    if (following := next_command(groups)) is not None:
        yield layout.Hanging("  ", Text(f"Next: {following}", style="bold"))
    if groups:
        yield layout.Hanging("  ", Text(found.summary))
    yield layout.bullet("A", side_line(found.a))
    yield layout.bullet("B", side_line(found.b))
    for unread in (*found.a.unreadable, *found.b.unreadable):
        yield layout.paragraph(f"warning: not read: {unread}", style="yellow")
    yield layout.bullet(" ", f"matched: {'; '.join(found.matched_by)}")
    if groups:
        yield from layout.title("What changed, the worst first")
        yield layout.Sized(partial(_changes, groups[:_MAX_GROUPS]))
        if len(groups) > _MAX_GROUPS:
            yield layout.paragraph(f"and {len(groups) - _MAX_GROUPS} more groups of heads in --json", style="dim")
        for group in groups[:_MAX_DETAILS]:
            yield from _detail(found, group.entries[0])
    if shared := shared_trends(found):
        yield from layout.title("Over the steps")
        yield layout.Sized(partial(trend_table, shared[:_MAX_TRENDS]))
        if len(shared) > _MAX_TRENDS:
            yield layout.paragraph(f"and {len(shared) - _MAX_TRENDS} more in --json", style="dim")
    if alone := [e for e in found.entries if e.outcomes == ("relabelled",) and e not in changed]:
        yield from layout.title("Other labels, and no change beyond chance")
        relabelled = [f"{entry_name(found, entry)}: {labels_words(entry)}" for entry in alone]
        yield from layout.bullets("-", relabelled, _MAX_ALONE, "and {} more in --json")
    if found.unmatched:
        yield from layout.title("Not compared")
        unmatched = [f"{item.side}: {item.what}: {item.reason}" for item in found.unmatched]
        yield from layout.bullets("-", unmatched, _MAX_UNMATCHED, "and {} more in --json")
    yield from layout.title("How it was compared")
    for note in (*found.notes, method_line(found), *tool_lines(found)):
        yield layout.bullet("-", note)


def diff_lines(found: Comparison) -> Iterator[str]:
    """The report for a log: one fact a line, its kind first."""
    groups = changed_heads(found, changed_entries(found))
    yield layout.line("verdict", headline(found, groups))
    if (following := next_command(groups)) is not None:
        yield layout.line("next", following)
    yield layout.line("summary", found.summary)
    yield layout.line("A", side_line(found.a))
    yield layout.line("B", side_line(found.b))
    for unread in (*found.a.unreadable, *found.b.unreadable):
        yield layout.line("warning", f"not read: {unread}")
    yield layout.line("matched", "; ".join(found.matched_by))
    for entry in found.entries:
        place = entry_name(found, entry).replace(" ", "_")
        outcomes = ",".join(entry.outcomes) or "unchanged"
        yield layout.line("head", place, outcomes, f"{','.join(entry.a_labels)} -> {','.join(entry.b_labels)}")
    for entry in changed_entries(found):
        place = entry_name(found, entry).replace(" ", "_")
        for mean in entry.means:
            yield layout.line("mean", place, mean.name, mean_words(mean))
        for size in entry.sizes:
            yield layout.line("size", place, size.name, size_words(size))
        yield from (layout.line("note", place, note) for note in entry.notes)
    for shared in shared_trends(found):
        yield layout.line("trend", shared.place.replace(" ", "_"), shared.trend.name, shared.words())
    for item in found.unmatched:
        yield layout.line("unmatched", item.side, f"{item.what}: {item.reason}")
    for note in (*found.notes, method_line(found)):
        yield layout.line("note", note)
    yield from (layout.line("tool", tool) for tool in tool_lines(found))


def changed_entries(found: Comparison) -> list[HeadComparison]:
    """Entries with a significant change, or with something to say of one that is none; the worst first."""
    told = [entry for entry in found.entries if set(entry.outcomes) - {"relabelled"} or entry.notes]
    return sorted(told, key=lambda e: (min((_ORDER.index(o) for o in e.outcomes), default=len(_ORDER)), least_p(e)))


def least_p(entry: HeadComparison) -> float:
    """The smallest adjusted p-value of an entry."""
    return min((m.p_adjusted for m in entry.means if m.p_adjusted is not None), default=1.0)


def side_line(side: Side) -> str:
    """A side in a line: where it was read, and what was found there."""
    return f"{side.source}: {side.sentence}"


def entry_name(found: Comparison, entry: HeadComparison) -> str:
    """The head, with steps, observation and file where the comparison has several."""
    parts = [head_name(entry.layer, entry.head)]
    if len({(e.a_step, e.b_step) for e in found.entries}) > 1 and entry.b_step is not None:
        same = entry.a_step in (None, entry.b_step)
        parts.append(f"step {entry.b_step}" if same else f"step {entry.a_step}/{entry.b_step}")
    if len({(e.a_observation, e.b_observation) for e in found.entries}) > 1:
        both = entry.a_observation == entry.b_observation
        parts.append(entry.b_observation if both else f"{entry.a_observation}/{entry.b_observation}")
    twins = [e for e in found.entries if _place(e) == _place(entry)]
    if len({e.b_source for e in twins}) > 1:
        parts.append(file_name(entry.b_source))
    return " ".join(parts)


def _place(entry: HeadComparison) -> tuple[object, ...]:
    return entry.layer, entry.head, entry.b_step, entry.a_observation, entry.b_observation


def _changes(groups: list[ChangedHeads], options: ConsoleOptions) -> Iterator[RenderableType]:
    """The table of what changed, the figures of each group's clearest head; narrow screens go without dQ's error."""
    wide = options.max_width >= _MEDIUM
    shown = [NOISE_FACTOR, *([DQ_ERROR] if wide else [])]
    table = layout.table(
        Column("where", overflow="fold"),
        Column("change", overflow="fold", min_width=13 if wide else 8),
        Column("labels", overflow="fold", min_width=15 if wide else 10),
        *layout.figures([*(q.heading for q in shown), "mean's\nadj. p"]),
    )
    for group in groups:
        clearest = group.entries[0]
        sizes = {size.name: size for size in clearest.sizes}
        styled = [Text(WORDS[outcome], style=_STYLES[outcome]) for outcome in group.outcomes]
        table.add_row(
            Text(group.place),
            Text(", ").join(styled) if styled else Text("none"),
            Text(group.labels),
            *(_arrow(sizes.get(q.key)) for q in shown),
            number(least_p(clearest), 2),
        )
    yield table
    yield layout.Hanging("", layout.note("Figures of the head of each row in which it is clearest, told below."))


def quantity_of(size: SizeChange) -> Quantity:
    """What a size is called, and how it is shown."""
    # A document may have been edited: names are texts there.
    known = QUANTITIES.get(size.name)
    return known or Quantity(size.name, figure_title(size.name), size.name, digits=3)


def test_of(mean: MeanChange) -> PrimaryTest:
    """What a mean is called, and its unit."""
    unit: Literal["floor", "ulp"] = "floor" if mean.name.startswith("delta") else "ulp"
    return TESTS.get(mean.name) or PrimaryTest(mean.name, mean.name, mean.name, unit)


def _arrow(size: SizeChange | None) -> str:
    """Before and after, one above the other: side by side they take too much of 80 columns."""
    if size is None:
        return DASH
    shown = quantity_of(size).shown
    if size.a == size.b:
        return shown(size.a)
    return f"{shown(size.a)}\n-> {shown(size.b)}"


def _detail(found: Comparison, entry: HeadComparison) -> Iterator[RenderableType]:
    yield Text("")
    changes = (
        Text(", ").join(Text(o, style=_STYLES[o]) for o in entry.outcomes) if entry.outcomes else Text("no change")
    )
    yield layout.Hanging("", Text.assemble((f"{entry_name(found, entry)}: ", "bold"), changes))
    for mean in entry.means:
        if mean.outcome not in ("none", "untested"):
            yield layout.bullet("-", f"mean error of {test_of(mean).title} {mean.outcome}: {mean_words(mean)}")
    for size in entry.sizes:
        if size.outcome not in ("none", "unknown"):
            yield layout.bullet("-", f"{quantity_of(size).title}: {size_words(size)}")
    for note in entry.notes:
        yield layout.bullet("!", note)


def mean_words(mean: MeanChange) -> str:
    """A mean before and after, and the test of the difference."""
    values = f"{signed(mean.a)} -> {signed(mean.b)}"
    if mean.a_units is not None and mean.b_units is not None:
        values += f" ({signed(mean.a_units)} -> {signed(mean.b_units)} {test_of(mean).unit})"
    if mean.p_adjusted is None:
        return f"{values}; not tested"
    low, high = mean.ci95 or (None, None)
    return (
        f"{values}; difference {signed(mean.difference)}, 95 % interval {signed(low)} to "
        f"{signed(high)}, t = {number(mean.t)} with {number(mean.df)} degrees of freedom, adjusted "
        f"p = {number(mean.p_adjusted, 2)}: {mean.outcome}"
    )


def size_words(size: SizeChange) -> str:
    """A size before and after, and the bounds that chance keeps the ratio within."""
    shown = quantity_of(size).shown
    values = f"{shown(size.a)} -> {shown(size.b)}"
    if size.ratio is not None and size.a != size.b:
        values += f", {size.ratio:.3g} times"
    if size.low is not None and size.high is not None:
        values += f" (chance alone: {size.low:.2g} to {size.high:.2g})"
    return f"{values}: {size.outcome}"


def method_line(found: Comparison) -> str:
    """How many differences were tested, and how."""
    return (
        f"{found.family_size} differences of means, Welch's test from each estimate's own standard error and degrees "
        f"of freedom, one Benjamini-Hochberg family at level {found.level}. A label that changes without a significant "
        "difference is neither a new bias nor a cure."
    )


def tool_lines(found: Comparison) -> Iterator[str]:
    """What made the two diagnoses."""
    tools = [words.tool_line(side.tool) for side in (found.a, found.b)]
    if tools[0] == tools[1]:
        yield f"A and B: {tools[0]}"
    else:
        yield from (f"{name}: {tool}" for name, tool in zip("AB", tools, strict=True))
