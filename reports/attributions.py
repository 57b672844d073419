"""The report of ``attribute`` over many captures: which layers, heads and sites carry the error; text and page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby, islice

from rich.console import RenderableType
from rich.rule import Rule

from attn_diag.reports import error_charts, error_map, glossary, layout, words
from attn_diag.reports.attribution import KINDS, grouped
from attn_diag.reports.charts import Gallery, Section
from attn_diag.reports.html import gallery_document
from attn_diag.reports.lead import lead, on_head
from attn_diag.results.attribution import Attribution
from attn_diag.results.attributions import Attributions, ErrorMap, HeadError, side_by_side
from attn_diag.results.wording import SYMBOLS, file_name, head_names, percent, plural

# Rows of the page's table, groups of heads that are told of in a sentence, and maps that a page holds.
_LISTED, _TOLD, _MAPS = 400, 3, 12
_MEANING = (
    "Part: a head's part of the squared error of all heads. Squares add up, as every head has rows of its own in W_Q, "
    "and every layer its own W_Q; a head with a small gradient has a small part however far off it is, so that both "
    "stand here. Site: the rounding with the largest share (Shapley value) of that head's error, of runs of the recipe "
    "that has its kernel's bits. Each sequence counts by itself."
)


def attributions_renderables(found: Attributions) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    ordered, stepped = _ordered(found)
    kind, said, told, following = _opening(found)
    yield from lead(f"{kind} {_source(found)}:", said, told, following, KINDS.get(kind, "bold"))
    for message in (*(f"not attributed: {why}" for why in found.unreadable), *found.warnings):
        yield layout.paragraph(f"warning: {message}", style="yellow")
    # Of several steps the one with the largest error.
    for alike in _by_quantity(ordered):
        one = alike[0]
        yield from layout.title(error_map.title(one, stepped=stepped))
        if one is not ordered[0]:
            yield layout.paragraph(f"{error_map.finding(one)}.")
            yield from (layout.paragraph(sentence) for sentence in error_map.sentences(one))
        yield from error_map.tables(one)
        if len(alike) > 1:
            yield from layout.title(f"{SYMBOLS[one.quantity]}'s error, step by step")
            header, *rows = error_map.steps_table(alike)
            table = layout.table(*layout.figures(header[:-1]), header[-1], rows=rows)
            yield layout.indented(table, expand=False)
    yield Rule(style="dim")
    yield layout.note(f"{_MEANING} {words.CAVEAT}")
    yield layout.note(_made_by(found))


def attribution_document(found: Attribution) -> str:
    """One capture's heads beside each other, as a self-contained page."""
    return attributions_document(Attributions((found,), side_by_side((found,)), ()))


def attributions_document(found: Attributions) -> str:
    """The same as a self-contained page."""
    ordered, stepped = _ordered(found)
    kind, said, told, following = _opening(found)
    unread = tuple(f"Not attributed: {message}" for message in found.unreadable)
    sections = [
        Section(f"{SYMBOLS[alike[0].quantity]}'s error, step by step", table=error_map.steps_table(alike))
        for alike in _by_quantity(ordered)
        if len(alike) > 1
    ]
    for one in ordered[:_MAPS]:
        sections += _sections(one, stepped, told if one is ordered[0] else ())
    if len(ordered) > _MAPS:
        sections.append(Section(f"The other {len(ordered) - _MAPS} steps", ("--json has their heads.",)))
    sections.append(Section("What the numbers mean", (*unread, *found.warnings, _MEANING, words.CAVEAT)))
    sentences = f"Next: {following}" if following else ""
    footer = _made_by(found)
    title = f"{kind} {_source(found)}: {said}"
    return gallery_document(Gallery(title, sentences, tuple(sections), footer, glossary.GROUPS))


def _sections(one: ErrorMap, stepped: bool, told: tuple[str, ...]) -> Iterator[Section]:
    """Of one map: the heads in colours, the sites over all of them, and the heads in a table."""
    said = told or (f"{error_map.finding(one)}.", *error_map.sentences(one))
    # As addresses of rows: a step has one map of a quantity.
    rows = {id(head): f"{one.quantity}-{one.step}-{i}" for i, head in enumerate(one.heads[:_LISTED])}
    maps = error_charts.charts(one, rows, stepped=stepped)
    yield Section(error_map.title(one, stepped=stepped), said, charts=maps)
    if one.sites:
        sites = ((s.site, s.words, percent(s.share)) for s in one.sites)
        rest = (("", "heads that are not attributed", percent(one.not_attributed)),) if one.not_attributed else ()
        yield Section("Sites over all heads", table=(("site", "what it is", "part of the error"), *sites, *rest))
    more = (f"The {_LISTED} with the largest parts; --json has all.",) if len(one.heads) > _LISTED else ()
    yield Section("Every head", more, error_charts.table_rows(one, _LISTED), places=tuple(rows.values()))


def _ordered(found: Attributions) -> tuple[list[ErrorMap], bool]:
    """The maps, by quantity, those with coarse roundings and large errors first; and whether they are of several steps.

    A head that is coarse at some step is not to stand behind one that is fragile at another.
    """
    coarse = _coarse(found)

    def rank(one: ErrorMap) -> tuple[int, bool, float]:
        return _DEPTH.index(one.quantity), not any(coarse(one, head) for head in one.heads), -(one.relative or 0.0)

    return sorted(found.maps, key=rank), len({one.step for one in found.maps}) > 1


def _coarse(found: Attributions) -> Callable[[ErrorMap, HeadError], bool]:
    """Whether a head of a map is one of those with roundings that good kernels do not do."""
    places = {
        (one.source, one.step, head.layer, head.batch, head.head)
        for one in found.results
        for group in grouped(one.heads)
        for head in group.heads
        if group.kind == "COARSE"
    }
    return lambda one, head: (head.source, one.step, head.layer, head.batch, head.head) in places


_DEPTH = ("dw_q", "dq", "o")


def _by_quantity(ordered: list[ErrorMap]) -> list[list[ErrorMap]]:
    return [list(alike) for _, alike in groupby(ordered, key=lambda one: one.quantity)]


def _opening(found: Attributions) -> tuple[str, str, tuple[str, ...], str | None]:
    """The first word, what was found, more sentences, and what to run next."""
    ordered, stepped = _ordered(found)
    groups = grouped(found.heads)
    if not ordered or not groups:
        return "NOTHING", "no rounding site was found to err", (), None
    first = ordered[0]
    kind = groups[0].kind
    if kind == "NORMAL" and (found.unreadable or any(head.open for one in ordered for head in one.heads)):
        kind = "UNKNOWN"
    step = f"step {first.step}: " if stepped and first.step is not None else ""
    told = [*error_map.sentences(first)]
    others = (
        f"{SYMBOLS[one.quantity] if one.step is None else f'Step {one.step}'}: {said}"
        for one in ordered[1:]
        for said in error_map.unattributed(one)
    )
    told += [*islice(others, _TOLD)] if stepped else []
    told += [group.sentence + "." for group in groups if group.kind == "COARSE"][:_TOLD]
    said = step + error_map.finding(first)
    coarse = _coarse(found)
    if kind == "COARSE" and not coarse(first, first.heads[0]):
        names = head_names({(h.layer, h.head) for h in first.heads if coarse(first, h)})
        said += f"; coarse roundings: {names or 'in other heads, see below'}"
    if found.unreadable:
        said += f" ({plural(len(found.unreadable), 'capture')} not attributed in full)"
    # The largest part where most of the error is no site's, or the head that the first word is about, else the largest.
    heads, top = [(one, head) for one in ordered for head in one.heads], first.heads[0]
    meant = [h for one, h in heads if (coarse(one, h) if kind == "COARSE" else kind == "UNKNOWN" and h.open)]
    if meant and not (top.site is None and first.not_attributed >= error_map.ALONE):
        top = meant[0]
    observation = next((one.observation for one in found.results if one.source == top.source), None)
    command = "inspect" if top.site is None else "what-if"
    return kind, said, tuple(told), on_head(command, top.source, top.head, observation)


def _made_by(found: Attributions) -> str:
    """Whose errors these are, and what ran the recipes."""
    names = dict.fromkeys(one.observation for one in found.results if one.observation is not None)
    of = f"Observation {', '.join(names)}. " if names else ""
    return f"{of}{found.results[0].backend}; {words.tool_line(found.results[0].tool)}"


def _source(found: Attributions) -> str:
    """The folder that all captures are in, or how many they are."""
    if len(found.results) == 1:
        return file_name(found.results[0].source)
    folders = {one.source.rpartition("/")[0] for one in found.results}
    return (
        file_name(folders.pop()) if len(folders) == 1 and "" not in folders else plural(len(found.results), "capture")
    )
