"""The terminal report: what is wrong, what to do, the worst heads first, and where the numbers come from.

Readable from 60 columns on. It shows what the HTML report shows first; what it leaves out is in JSON and HTML.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from attn_diag.reports import story, words
from attn_diag.reports.head_map import STYLES, HeadMap
from attn_diag.reports.sparks import ASCII, BLOCKS, drift_words, spark
from attn_diag.reports.story import Entry
from attn_diag.results.diagnosis import CaptureDiagnosis, Diagnosis, GradientError, HeadDiagnosis, severity

_MAX_ROWS = 16
_MAX_DETAILS = 3
_MAX_CAPTURES = 8
_SPARK_CELLS = 64
_MAX_ATTRIBUTED = 3
# A map of fewer heads than this says less than the table.
_LEAST_MAPPED = 4
# Columns from which the table of tests has room for all figures.
_MEDIUM = 72
# Cells that the table of heads keeps for a head's name, for where it is (names may wrap), and for its labels.
_HEAD, _PLACE, _VERDICT = 5, 22, 15
# Its figures that go first where there is no room.
_EXPENDABLE = (
    "dQ error\nby delta", "repeated\nmaxima", "condi-\ntioning", "dW_Q\nerror", "noise\nfactor", "dQ\nerror",
)  # fmt: skip


def terminal_renderables(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    entries = [entry for entry in diagnosis.ranked() if entry[2].verdict is not None]
    worst = words.label_names(entries[0][2])[:1] if entries else ()
    style = f"bold {STYLES.get(worst[0], 'cyan').removeprefix('bold ')}" if worst else "bold"
    yield words.paragraph(story.headline(diagnosis), style=style)
    yield words.paragraph(diagnosis.summary.sentence)
    for warning in warnings(diagnosis):
        yield words.paragraph(f"warning: {warning}", style="yellow")
    if entries:
        yield from _what_to_do(diagnosis)
        yield from _heads(diagnosis, entries)
        names = story.Names.of(entries)
        for entry in detailed(entries):
            yield from _detail(entry, names)
        if (left := len(entries) - min(len(entries), _MAX_DETAILS)) and any(_faulty(e) for e in entries):
            yield Text("")
            yield words.paragraph(f"Details of {left} more heads: --head N here, or --json and --html.", style="dim")
    yield from _provenance(diagnosis)


def warnings(diagnosis: Diagnosis) -> Iterator[str]:
    """Everything that limits what can be concluded: what was not read, not finite, or not as assumed."""
    for capture in diagnosis.captures:
        if capture.assumptions.ok is False:
            yield f"no verdict for {words.file_name(capture.source)}: {capture.assumptions.message}"
    yield from diagnosis.summary.warnings
    yield from (f"not read: {u}" for u in diagnosis.summary.unreadable)


def _what_to_do(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    yield from _title("What to do")
    for step in story.next_steps(diagnosis):
        yield words.bullet(">", step)
    for question, command in story.commands(diagnosis):
        yield words.bullet("?", Text.assemble(f"{question}: ", (command, "bold")))


def _title(text: str) -> Iterator[RenderableType]:
    yield Text("")
    yield words.paragraph(text, style="bold underline")


def _faulty(entry: Entry) -> bool:
    return "clean" not in words.label_names(entry[2])


def _heads(diagnosis: Diagnosis, entries: list[Entry]) -> Iterator[RenderableType]:
    yield from _title("Heads, worst first" if len(entries) > 1 else "Head")
    shown = entries[:_MAX_ROWS]
    pooled = [(c, o, o.pooled) for c in diagnosis.captures for o in c.observations if len(o.heads) > 2]
    yield Overview(tuple(shown), tuple(p for p in pooled if len(pooled) <= 4 and p[2].verdict is not None))
    if rest := entries[_MAX_ROWS:]:
        counts = Counter(words.labels(head) for _, _, head in rest)
        listed = "; ".join(f"{n} {label}" for label, n in counts.most_common())
        yield words.paragraph(f"and {len(rest)} more: {listed}", style="dim")
        for name in dict.fromkeys(o.name for _, o, _ in entries):
            named = tuple(entry for entry in entries if entry[1].name == name)
            if len({(head.layer, head.head) for _, _, head in named}) >= _LEAST_MAPPED:
                captures = len({id(capture) for capture, _, _ in named})
                worst = f" (the worst of {captures} captures)" if captures > 1 else ""
                yield from _title(f"All heads of {words.printable(name)}, layer by layer{worst}")
                yield HeadMap(named)


@dataclass(frozen=True)
class Overview:
    """The table of heads, with as many figures as the width holds; names are wrapped, never cut."""

    entries: tuple[Entry, ...]
    pooled: tuple[Entry, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        entries = (*self.entries, *self.pooled)
        names = story.Names.of(self.entries)
        table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
        table.add_column("head", overflow="fold")
        if named := any(names.where(entry) for entry in self.entries):
            table.add_column("where", overflow="fold")
        table.add_column("verdict", min_width=15, overflow="fold")
        figures = [_figures(head) for _, _, head in entries]
        # What no head has, and what the width has no room for, is left out.
        titles = [t for t in figures[0] if any(f[t] != words.DASH for f in figures)]
        while titles and _least_width(titles, figures, named=named) > options.max_width:
            titles.remove(next(t for t in _EXPENDABLE if t in titles))
        for title in titles:
            table.add_column(title, justify="right", no_wrap=True)
        for entry, known in zip(entries, figures, strict=True):
            place = [", ".join(names.where(entry))] if named else []
            head = Text(words.head_name(entry[2]))
            table.add_row(head, *map(Text, place), _labels(entry[2]), *(known[title] for title in titles))
        yield table


def _least_width(titles: list[str], figures: list[dict[str, str]], *, named: bool) -> int:
    """Cells that the table of heads needs with these figures: with names of a readable width, and gaps of two."""
    columns = [max(cell_len(x) for x in (*title.split("\n"), *(f[title] for f in figures))) for title in titles]
    texts = [_HEAD, *([_PLACE] if named else []), _VERDICT]
    return sum(texts) + sum(columns) + 2 * (len(texts) + len(columns))


def _figures(head: HeadDiagnosis) -> dict[str, str]:
    """A head's figures by the column's title."""
    error, predicted = story.dq_error(head)
    dq, dw_q = head.propagation.dq, head.propagation.dw_q
    return {
        "noise\nfactor": words.number(head.noise_factor),
        "condi-\ntioning": words.number(head.conditioning),
        "dQ\nerror": f"{'~' if predicted else ''}{words.percent(error)}",
        "dW_Q\nerror": words.percent(dw_q.relative_error if dw_q else None),
        "repeated\nmaxima": words.percent(head.row_maxima.exact.fraction),
        "dQ error\nby delta": words.percent(dq.predicted_relative_error if dq else None),
    }


def _labels(head: HeadDiagnosis) -> Text:
    if head.verdict is None:
        return Text("no verdict", style="dim")
    parts = [Text(label, style=STYLES.get(label, "cyan")) for label in head.verdict.labels]
    return Text(", ").join(parts)


def detailed(entries: list[Entry], most: int = _MAX_DETAILS) -> list[Entry]:
    """The heads to tell more of: the worst of every observation first, then the next worst; faulty ones only.

    Where no head is at fault, the first.
    """
    faulty = [entry for entry in entries if _faulty(entry)] or entries[:1]
    first = {entry[1].name: entry for entry in reversed(faulty)}.values()
    chosen = sorted(first, key=lambda entry: severity(entry[2]))[:most]
    told = {id(entry[2]) for entry in chosen}
    chosen += [entry for entry in faulty if id(entry[2]) not in told][: most - len(chosen)]
    return sorted(chosen, key=lambda entry: severity(entry[2]))


def _detail(entry: Entry, names: story.Names) -> Iterator[RenderableType]:
    head = entry[2]
    assert head.verdict is not None
    yield Text("")
    yield words.Hanging(
        "",
        Text.assemble((f"{names.name(entry)}: ", "bold"), _labels(head), f" (evidence: {head.verdict.evidence})"),
    )
    for reason in head.verdict.reasons:
        yield words.bullet("-", reason)
    if head.attribution is not None:
        for reason in head.attribution.reasons[:_MAX_ATTRIBUTED]:
            yield words.bullet("=", reason)
    if head.details_note is not None:
        yield words.bullet("=", head.details_note)
    yield CumulativeSum(head)
    if any(getattr(head.bias, name) is not None for name in words.TESTS):
        yield Tests(head)
    for line in numbers(head):
        yield words.bullet(" ", line)


@dataclass(frozen=True)
class CumulativeSum:
    """delta's signed error (O's, where there is no delta) summed over the rows, as a line of blocks."""

    head: HeadDiagnosis

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        known = {"delta": self.head.bias.delta, "O beyond correct rounding": self.head.bias.o_excess}
        for name, estimate in known.items():
            if estimate is None or (drawn := spark(estimate, min(_SPARK_CELLS, options.max_width - 6))) is None:
                continue
            yield words.bullet("-", f"Error of {name} summed over the rows {drift_words(estimate, drawn)}:")
            line = Text("    ")
            for character, out in zip(drawn.text(ASCII if options.ascii_only else BLOCKS), drawn.outside, strict=True):
                line.append(character, style="bold red" if out else "cyan")
            yield line
            if drawn.marks():
                yield Text(f"    {drawn.marks()}", style="bold red")
            return


def numbers(head: HeadDiagnosis) -> Iterator[str]:
    """What else is known of a head, a sentence each: sharpness of the reference, gradients, rows left out."""
    yield from (line for line in (words.reference_words(head), words.certificate_words(head)) if line is not None)
    for name, title in words.GRADIENTS.items():
        error = getattr(head.propagation, name)
        if error is not None and error.relative_error is not None:
            yield f"{title} off {words.percent(error.relative_error)}: {words.share_words(error)}{_unexplained(error)}"
            if error.coherence is not None:
                yield (
                    f"coherence of delta's part in {title} {words.number(error.coherence)} (random signs: up to "
                    f"{words.number(error.coherence_null95)}), cancellation {words.number(error.cancellation)}, "
                    f"participation {words.number(error.participation)}"
                )
    yield from head.propagation.notes
    counted = {
        "fully masked": head.rows_fully_masked,
        "not finite": head.rows_nonfinite,
        "beyond float64 (huge scores or masks)": head.rows_unknown,
    }
    if left_out := [f"{count} {why}" for why, count in counted.items() if count]:
        yield f"rows left out: {', '.join(left_out)}; {head.rows_all} analysed"


def _unexplained(error: GradientError) -> str:
    parts = []
    if error.unexplained_fraction:
        parts.append(f"{words.percent(error.unexplained_fraction)} by delta alone")
    if error.unexplained_with_casts is not None:
        parts.append(f"{words.percent(error.unexplained_with_casts)} with LSE and casts")
    return f"; unexplained {', '.join(parts)}" if parts else ""


@dataclass(frozen=True)
class Tests:
    """The table of the primary tests; on narrow screens without what their units and p-values say too."""

    head: HeadDiagnosis

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        wide = options.max_width >= _MEDIUM
        table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
        table.add_column("mean error of", no_wrap=True)
        titles = ("mean", "in units", "t", "adj. p", "n_eff", "detectable")
        kept = [i for i, title in enumerate(titles) if wide or title not in ("mean", "detectable")]
        for i in kept:
            table.add_column(titles[i], justify="right", no_wrap=True)
        for name in words.TESTS:
            title, *cells = words.test_cells(name, getattr(self.head.bias, name))
            table.add_row(title, *(cells[i] for i in kept))
        yield Padding(table, (0, 0, 0, 2), expand=False)


def _provenance(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    yield from _title("Where the numbers come from")
    failed = [c for c in diagnosis.captures if c.assumptions.ok is False]
    ordered = [*failed, *(c for c in diagnosis.captures if c.assumptions.ok is not False)]
    for capture in ordered[:_MAX_CAPTURES]:
        yield from _capture(capture)
    if rest := ordered[_MAX_CAPTURES:]:
        unsure = sum(c.assumptions.ok is not True for c in rest)
        doubt = f"; of {unsure} the assumptions do not hold or could not be checked" if unsure else ""
        yield words.paragraph(f"and {len(rest)} more captures{doubt} (--json lists them)", style="dim")
    family = diagnosis.family
    yield words.paragraph(
        f"{family.size} primary tests, one Benjamini-Hochberg family at level {family.level}. {words.CAVEAT}",
        style="dim",
    )
    yield words.paragraph(words.tool_line(diagnosis.tool), style="dim")


def _capture(capture: CaptureDiagnosis) -> Iterator[RenderableType]:
    yield words.paragraph(capture.source)
    yield words.bullet(" ", words.shape(capture))
    if notes := capture.metadata.get("notes"):
        yield words.bullet(" ", f"notes: {notes}")
    if capture.assumptions.defaults:
        yield words.bullet(" ", Text(f"assumed: {words.printable(', '.join(capture.assumptions.defaults))}", "yellow"))
    style = "bold red" if capture.assumptions.ok is False else ""
    yield words.bullet(" ", Text(f"assumptions: {words.printable(capture.assumptions.message)}", style))
    for observation in capture.observations:
        yield words.bullet(" ", words.observation_line(observation))
