"""A diagnosis as text: what is wrong, what to do, the worst heads first, and where the numbers come from.

In a terminal it is readable from 60 columns on, and shows what the HTML report shows first; what it leaves out is in
JSON and HTML. For a log it is one fact a line, each with its kind first, so that grep finds it:

    verdict      BIASED: ...
    head         paper/H0        lossy            noise_factor=11.5 conditioning=248 dq_error=0.929 ...
    test         paper/H0        delta_excess     mean=+0.00017 t=1.34 ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

from rich.cells import cell_len
from rich.console import ConsoleOptions, RenderableType
from rich.table import Column
from rich.text import Text

from attn_diag.reports import error_map, layout, story, words
from attn_diag.reports.finding_words import style_of
from attn_diag.reports.head_map import HeadMap
from attn_diag.reports.opening import next_command, opening, style
from attn_diag.reports.quantities import (
    ANSWER_STYLES,
    CAPTURED_HEADINGS,
    CONDITIONING,
    DQ_BY_DELTA,
    DQ_ERROR,
    DW_Q_ERROR,
    FACTOR,
    NOISE_FACTOR,
    REPEATED_MAXIMA,
    STYLES,
    TEST_FIGURES,
    TESTS,
    TESTS_WORDS,
    Quantity,
    captured_cells,
    label_names,
    labels,
    tested,
)
from attn_diag.reports.story import Entry
from attn_diag.results.diagnosis import CaptureDiagnosis, Diagnosis, HeadDiagnosis, severity
from attn_diag.results.wording import DASH, SYMBOLS, head_name

_MAX_ROWS, _MOST_ALIKE = 16, 3
# Columns of what a line of the opening is about.
_ABOUT = 7
_MAX_DETAILS, _MAX_FACTS = 3, 16
_MAX_CAPTURES = 8
_SPARK_CELLS = 64
_MAX_ATTRIBUTED = 3
# A map of fewer heads than this says less than the table.
_LEAST_MAPPED = 4
# Columns from which the table of tests has room for all figures, and those that go where there is none: the units and
# the p-values say it too.
_MEDIUM, _TWICE_SAID = 72, ("mean", "detectable")
# Cells that the table of heads keeps for a head's name, for where it is (names may wrap), and for its labels.
_HEAD, _PLACE, _VERDICT = 5, 22, 15
# Its figures, and which of them go first where there is no room.
_FIGURES = (FACTOR, NOISE_FACTOR, CONDITIONING, DQ_ERROR, DW_Q_ERROR, REPEATED_MAXIMA, DQ_BY_DELTA)
_EXPENDABLE = (DQ_BY_DELTA, NOISE_FACTOR, REPEATED_MAXIMA, CONDITIONING, DW_Q_ERROR, DQ_ERROR, FACTOR)
_LOGGED = (FACTOR, NOISE_FACTOR, CONDITIONING, DQ_ERROR, DQ_BY_DELTA, DW_Q_ERROR, REPEATED_MAXIMA)
# In a terminal and a log the tests go without the reference's part, which has a sentence of its own.
_TEST_FIGURES = tuple(figure for figure in TEST_FIGURES if figure.key != "reference_bound")


def terminal_renderables(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    entries = story.judged_entries(diagnosis)
    yield layout.paragraph(story.headline(diagnosis), style=style(diagnosis))
    for line in opening(diagnosis):
        colour = "bold" if line.command else style_of(line.label) if line.label is not None else ""
        yield layout.Hanging(f"{line.about:<{_ABOUT}} ", Text(line.whole, colour))
    for warning in words.warnings(diagnosis):
        yield layout.paragraph(f"warning: {warning}", style="yellow")
    if entries:
        if any(_faulty(entry) for entry in entries):
            yield from _what_to_do(diagnosis)
        yield from _heads(diagnosis, entries)
        yield from _taken_apart(diagnosis)
        names = story.Names(entries)
        for entry in detailed(diagnosis, entries):
            yield from _detail(entry, names)
        if (left := len(entries) - min(len(entries), _MAX_DETAILS)) and any(_faulty(e) for e in entries):
            yield Text("")
            yield layout.paragraph(
                f"Details of {left} more {'head' if left == 1 else 'heads'}: --head N here, or --json and --html.",
                style="dim",
            )
    yield from _provenance(diagnosis)


def _what_to_do(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    yield from layout.title("What to do")
    for step in story.next_steps(diagnosis):
        yield layout.bullet(">", step)
    first = next_command(diagnosis).said
    for question, command in [asked for asked in story.commands(diagnosis) if asked[1] != first]:
        yield layout.bullet("?", Text.assemble(f"{question}: ", (command, "bold")))


def _faulty(entry: Entry) -> bool:
    return "clean" not in label_names(entry[2])


def _heads(diagnosis: Diagnosis, entries: list[Entry]) -> Iterator[RenderableType]:
    yield from layout.title("Heads, worst first" if len(entries) > 1 else "Head")
    shown = _shown(diagnosis, entries)
    pooled = [(c, o, o.pooled) for c in diagnosis.captures for o in c.observations if len(o.heads) > 2]
    yield layout.Sized(partial(_overview, shown, [p for p in pooled if len(pooled) <= 4 and p[2].verdict is not None]))
    told = {id(entry[2]) for entry in shown}
    if rest := [entry for entry in entries if id(entry[2]) not in told]:
        counts = Counter(labels(head) for _, _, head in rest)
        listed = "; ".join(f"{n} {label}" for label, n in counts.most_common())
        yield layout.paragraph(f"and {len(rest)} more: {listed}", style="dim")
        for name in dict.fromkeys(o.name for _, o, _ in entries):
            named = tuple(entry for entry in entries if entry[1].name == name)
            if len({(head.layer, head.head) for _, _, head in named}) >= _LEAST_MAPPED:
                captures = len({id(capture) for capture, _, _ in named})
                worst = f" (the worst of {captures} captures)" if captures > 1 else ""
                yield from layout.title(f"All heads of {name}, layer by layer{worst}")
                yield HeadMap(named)


def _taken_apart(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """Which sites make the errors of the heads that were taken apart, where these are several."""
    for name, maps in error_map.of_diagnosis(diagnosis).items():
        stepped = len({one.step for one in maps}) > 1
        for one in maps:
            yield from layout.title(f"{error_map.title(one, stepped=stepped)}: {name}")
            yield layout.paragraph(f"{error_map.finding(one)}.")
            yield from (layout.paragraph(sentence) for sentence in error_map.sentences(one))
            yield from error_map.tables(one)


def _shown(diagnosis: Diagnosis, entries: list[Entry]) -> list[Entry]:
    """Rows of the table: the worst head of every finding, and few that are like each other."""
    if len(entries) <= _MAX_ROWS:
        return entries
    alike: Counter[object] = Counter()
    chosen: set[int] = set()
    for number, (_, observation, head) in enumerate(worst := story.worst_of_findings(diagnosis) + entries):
        clean = label_names(head) == ("clean",)
        kind = observation.name, None if clean else head.layer, labels(head)
        wanted = number < len(worst) - len(entries) or (len(chosen) < _MAX_ROWS and alike[kind] < _MOST_ALIKE)
        if wanted and id(head) not in chosen:
            alike[kind] += 1
            chosen.add(id(head))
    return [entry for entry in entries if id(entry[2]) in chosen]


def _overview(entries: list[Entry], pooled: list[Entry], options: ConsoleOptions) -> Iterator[RenderableType]:
    """The table of heads, with as many figures as the width holds; names are wrapped, never cut."""
    names = story.Names(entries)
    named = any(names.where(entry) for entry in entries)
    several = len({head.layer for _, _, head in pooled}) > 1
    figures = [_figures(head) for _, _, head in (*entries, *pooled)]
    # What no head has, and what the width has no room for, is left out.
    shown = [q for q in _FIGURES if any(f[q] != DASH for f in figures)]
    while shown and _least_width(shown, figures, named=named) > options.max_width:
        shown.remove(next(q for q in _EXPENDABLE if q in shown))
    table = layout.table(
        Column("head", overflow="fold"),
        *([Column("where", overflow="fold")] if named else []),
        Column("verdict", min_width=_VERDICT, overflow="fold"),
        *layout.figures([q.heading for q in shown]),
    )
    for entry, known in zip((*entries, *pooled), figures, strict=True):
        head = entry[2]
        place = [Text(", ".join(names.where(entry)))] if named else []
        name = head_name(head.layer, head.head)
        if head.head is None and several:
            name = f"L{head.layer} {name}"
        table.add_row(Text(name), *place, _labels(head), *(known[q] for q in shown))
    yield table
    if explained := [f"{q.title}: {q.words[0].lower()}{q.words[1:]}" for q in shown if q.words]:
        yield layout.Hanging("", layout.note(" ".join(explained)))


def _least_width(shown: list[Quantity], figures: list[dict[Quantity, str]], *, named: bool) -> int:
    """Cells that the table of heads needs with these figures: with names of a readable width, and gaps of two."""
    columns = [max(cell_len(x) for x in (*q.heading.split("\n"), *(f[q] for f in figures))) for q in shown]
    texts = [_HEAD, *([_PLACE] if named else []), _VERDICT]
    return sum(texts) + sum(columns) + 2 * (len(texts) + len(columns))


def _figures(head: HeadDiagnosis) -> dict[Quantity, str]:
    return {q: q.nearest_text(head) if q is DQ_ERROR else q.text(head) for q in _FIGURES}


def _labels(head: HeadDiagnosis) -> Text:
    if head.verdict is None:
        return Text("no verdict", style="dim")
    parts = [Text(label, style=STYLES[label]) for label in head.verdict.labels]
    return Text(", ").join(parts)


def detailed(diagnosis: Diagnosis, entries: list[Entry]) -> list[Entry]:
    """The heads to tell more of: the worst of every finding, then the next worst; faulty ones only.

    Where no head is at fault, the first.
    """
    faulty = [entry for entry in entries if _faulty(entry)] or entries[:1]
    chosen = {id(e[2]): e for e in (*story.worst_of_findings(diagnosis), *faulty)}
    return sorted([*chosen.values()][:_MAX_DETAILS], key=lambda entry: severity(entry[2]))


def _detail(entry: Entry, names: story.Names) -> Iterator[RenderableType]:
    head = entry[2]
    assert head.verdict is not None
    yield Text("")
    yield layout.Hanging(
        "",
        Text.assemble((f"{names.name(entry)}: ", "bold"), _labels(head), f" (evidence: {head.verdict.evidence})"),
    )
    for reason in head.verdict.reasons:
        yield layout.bullet("-", reason)
    if head.quantities:
        yield layout.indented(_captured(head), expand=False)
    if (missing := words.not_judged(head.not_judged)) is not None:
        yield layout.bullet(" ", missing)
    if head.attribution is not None:
        for reason in head.attribution.reasons[:_MAX_ATTRIBUTED]:
            yield layout.bullet("=", reason)
    if head.details_note is not None:
        yield layout.bullet("=", head.details_note)
    yield layout.Sized(partial(_running_sum, head))
    if any(tested(head)):
        yield layout.Sized(partial(_tests, head))
    for said in words.numbers(head):
        yield layout.bullet(" ", said)


def _captured(head: HeadDiagnosis) -> RenderableType:
    """Each captured quantity beside a well-rounded kernel's."""
    first, second, *figures = CAPTURED_HEADINGS
    table = layout.table(Column(first, no_wrap=True), Column(second, no_wrap=True), *layout.figures(figures))
    for quantity in head.quantities:
        name, answer, *cells = captured_cells(quantity)
        table.add_row(name, Text(answer, style=ANSWER_STYLES[quantity.answer]), *cells)
    return table


def _running_sum(head: HeadDiagnosis, options: ConsoleOptions) -> Iterator[RenderableType]:
    """delta's signed error (O's, where there is no delta) summed over the rows, as a line of blocks."""
    known = {"delta": head.bias.delta, "O beyond correct rounding": head.bias.o_excess}
    for name, estimate in known.items():
        if estimate is None or (drawn := layout.spark(estimate, min(_SPARK_CELLS, options.max_width - 6))) is None:
            continue
        yield layout.bullet("-", f"Error of {name} summed over the rows {words.drift_words(estimate, drawn)}:")
        line = Text("    ")
        for character, out in zip(drawn.text(layout.blocks(options)), drawn.outside, strict=True):
            line.append(character, style="bold red" if out else "cyan")
        yield line
        if drawn.marks():
            yield Text(f"    {drawn.marks()}", style="bold red")
        return


def _tests(head: HeadDiagnosis, options: ConsoleOptions) -> Iterator[RenderableType]:
    """The table of the primary tests; on narrow screens without what their units and p-values say too."""
    wide = options.max_width >= _MEDIUM
    kept = [figure for figure in _TEST_FIGURES if wide or figure.key not in _TWICE_SAID]
    table = layout.table(Column("mean error of", no_wrap=True), *layout.figures([f.heading for f in kept]))
    for test in TESTS.values():
        table.add_row(test.title, *(figure.text(test, head) for figure in kept))
    yield layout.indented(table, expand=False)
    yield layout.Hanging("  ", layout.note(TESTS_WORDS))


def _provenance(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    yield from layout.title("Where the numbers come from")
    failed = [c for c in diagnosis.captures if c.unjudged]
    ordered = [*failed, *(c for c in diagnosis.captures if not c.unjudged)]
    for capture in ordered[:_MAX_CAPTURES]:
        yield from _capture(capture)
    if rest := ordered[_MAX_CAPTURES:]:
        unsure = sum(c.assumptions.ok is not True for c in rest)
        doubt = f"; of {unsure} the assumptions do not hold or could not be checked" if unsure else ""
        yield layout.paragraph(f"and {len(rest)} more captures{doubt} (--json lists them)", style="dim")
    yield layout.paragraph(f"{words.family_line(diagnosis)}. {words.CAVEAT}", style="dim")
    yield layout.paragraph(words.tool_line(diagnosis.tool), style="dim")


def _capture(capture: CaptureDiagnosis) -> Iterator[RenderableType]:
    yield layout.paragraph(capture.source)
    yield layout.bullet(" ", words.shape(capture))
    if notes := capture.metadata.get("notes"):
        yield layout.bullet(" ", f"notes: {notes}")
    if capture.assumptions.defaults:
        yield layout.bullet(" ", Text(f"assumed: {', '.join(capture.assumptions.defaults)}", "yellow"))
    style = "bold red" if capture.unjudged else ""
    yield layout.bullet(" ", Text(f"assumptions: {capture.assumptions.message}", style))
    for observation in capture.observations:
        yield layout.bullet(" ", words.observation_line(observation))


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """A diagnosis: the verdict, what to do, every head in one line, and the facts of the worst ones."""
    entries = story.judged_entries(diagnosis)
    yield layout.line("verdict", story.headline(diagnosis))
    for line in opening(diagnosis):
        yield layout.line("opening", f"{line.about}: {line.whole}")
    yield layout.line("summary", diagnosis.summary.sentence)
    yield from (layout.line("warning", w) for w in words.warnings(diagnosis))
    yield from (layout.line("next", step) for step in story.next_steps(diagnosis))
    yield from (layout.line("next", f"{question}: {command}") for question, command in story.commands(diagnosis))
    names = story.Names(entries)
    yield from (_head_line(entry, _place(entry, names)) for entry in entries)
    for name, maps in error_map.of_diagnosis(diagnosis).items():
        yield from (layout.line("sites", name, error_map.finding(one)) for one in maps)
    for entry in entries:
        if (apart := entry[2].attribution) is not None:
            yield layout.line("site", _place(entry, names), error_map.site_of(apart))
    faulty = [e for e in entries if label_names(e[2]) != ("clean",)] or entries[:1]
    for entry in faulty[:_MAX_FACTS]:
        yield from _facts(entry, _place(entry, names))
    if len(faulty) > _MAX_FACTS:
        yield layout.line(
            "note", f"facts of {len(faulty) - _MAX_FACTS} more heads: choose them with --head, or use --json"
        )
    for capture in diagnosis.captures:
        source = capture.source
        yield layout.line("capture", f"{source}: {words.shape(capture)}")
        if capture.assumptions.defaults:
            yield layout.line("capture", f"{source}: assumed: {', '.join(capture.assumptions.defaults)}")
        yield layout.line("capture", f"{source}: assumptions: {capture.assumptions.message}")
        for observation in capture.observations:
            yield layout.line("capture", f"{source}: {words.observation_line(observation)}")
    yield layout.line("family", words.family_line(diagnosis))
    yield layout.line("note", words.CAVEAT)
    yield layout.line("tool", words.tool_line(diagnosis.tool))


def _place(entry: Entry, names: story.Names) -> str:
    parts = [*reversed(names.where(entry)), head_name(entry[2].layer, entry[2].head)]
    return "/".join(part.replace(" ", "_") for part in parts)


def _pairs(figures: Iterable[tuple[str, float | None]]) -> str:
    return " ".join(f"{key}={'n/a' if value is None else format(value, '.4g')}".ljust(24) for key, value in figures)


def _head_line(entry: Entry, place: str) -> str:
    head = entry[2]
    return layout.line("head", place, ",".join(label_names(head)), _pairs((q.key, q.value(head)) for q in _LOGGED))


def _facts(entry: Entry, place: str) -> Iterator[str]:
    head = entry[2]
    assert head.verdict is not None
    for reason in head.verdict.reasons:
        yield layout.line("reason", place, reason)
    for q in head.quantities:
        low, high = q.factor_ci95 or (None, None)
        figures = (("factor", q.factor), ("low", low), ("high", high), ("error", q.relative_error))
        yield layout.line("quantity", place, f"{SYMBOLS[q.quantity]} {q.answer}", _pairs(figures))
    if (missing := words.not_judged(head.not_judged)) is not None:
        yield layout.line("reason", place, missing)
    for test, estimate in tested(head):
        yield layout.line("test", place, test.key, _pairs((f.key, f.value(estimate)) for f in _TEST_FIGURES))
    if head.bias.delta is not None and (drawn := layout.spark(head.bias.delta, _SPARK_CELLS)) is not None:
        yield layout.line(
            "drift", place, f"error of delta summed over the rows {words.drift_words(head.bias.delta, drawn)}"
        )
    yield from (layout.line("fact", place, text) for text in words.numbers(head))
