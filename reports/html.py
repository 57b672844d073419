"""HTML: a diagnosis or a gallery of charts as one self-contained page, and a diagnosis in a notebook.

A page holds our scripts and styles, ECharts and the data, under a strict Content-Security-Policy.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from attn_diag.reports import (
    cards,
    embedding,
    error_charts,
    error_map,
    glossary,
    head_labels,
    opening,
    quantities,
    story,
    timeline,
    words,
)
from attn_diag.reports.charts import Gallery
from attn_diag.reports.finding_words import grows, style_of
from attn_diag.results import wording
from attn_diag.results.attributions import ErrorMap
from attn_diag.results.diagnosis import CaptureDiagnosis, Diagnosis, HeadDiagnosis, ObservationDiagnosis
from attn_diag.results.embedded import ELEMENT
from attn_diag.results.findings import SharedFinding

# Of a page for 12 layers of 12 heads, everything included; what each further head adds; and of any page.
_LIMIT, _A_HEAD, _LARGEST = 2_000_000, 1_000, 5_000_000
_HEADS = 144
# Rows of the table that are written out; the page's script makes the others of the diagnosis when they are wanted.
_LISTED = 400
# Findings that are shown at once; the others are a click away.
_CARDS = 6
# A notebook shows the tables of so many captures; those of more are a click away.
_OPEN = 2
# Over several findings there is room for so many rows of verdicts.
_SHORT = 5
_COLUMNS = (
    quantities.FACTOR, quantities.DQ_ERROR, quantities.DW_Q_ERROR, quantities.NOISE_FACTOR, quantities.CONDITIONING,
    quantities.SMALLEST_P, quantities.REPEATED_MAXIMA, quantities.MAX_LOGIT,
)  # fmt: skip
_NOTEBOOK_COLUMNS = (
    quantities.FACTOR, quantities.NOISE_FACTOR, quantities.CONDITIONING, quantities.DQ_ERROR, quantities.DQ_BY_DELTA,
    quantities.DW_Q_ERROR, quantities.REPEATED_MAXIMA,
)  # fmt: skip
# A site is found where it makes more than this part of the squared error, and removing it removes it where no more than
# this part of the error is left, while repairing a site that reaches nothing (the sham) changes it by less than _SHAM.
_MOST, _SHAM = 0.5, 0.05
# How far a case has come.
_STEPS = (
    "An error stands out in this capture",
    "Its mean differs from zero beyond chance (large errors do harm without)",
    "The rounding that makes it is found",
    "Removing that rounding removes it, a sham does not",
    "It grows over training steps",
)
# In the order in which they are joined: each uses only what stands before it.
_SCRIPTS = ("core", "numbers", "theme", "export", "options", "charts", "table")
_REPORT_SCRIPTS = (
    *_SCRIPTS, "vocabulary", "glossary", "entries", "rows", "figures", "when", "map", "microscope", "head", "report",
)  # fmt: skip
_GALLERY_SCRIPTS = (*_SCRIPTS, "gallery")
_EXPLAINED_SCRIPTS = (*_SCRIPTS, "glossary", "when", "gallery")
_STYLES = ("base", "report", "print")
_REPORT_STYLES = (*_STYLES, "verdicts")
# The element of a gallery's data.
_GALLERY = "attn-diag-gallery"
# The element of the maps of heads that were taken apart.
_APART = "attn-diag-apart"
# What begins a number, or stands for one that there is none of.
_NUMBER = re.compile(r"[-+<\d−–∞]|NaN|Inf")
# Cells of so many characters are sentences, not numbers.
_LONG = 30
# What could end a script element or be read as markup, and what older JavaScript takes for a line's end.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


@dataclass(frozen=True)
class Row:
    """A line of the table of heads."""

    place: str
    """The head by its positions in the diagnosis, as addresses name it."""
    name: str
    capture: str
    observation: str
    cells: tuple[tuple[str, str], ...]
    """What is shown, and by what it is sorted ("": last)."""


def html_document(diagnosis: Diagnosis) -> str:
    """A complete page that needs no network; its figures are drawn from the diagnosis embedded in it.

    At most 2,000,000 bytes for 144 heads, 5,000,000 for thousands: running sums and figures are thinned, numbers
    shortened, all of it compressed, and the figures of the better heads left out, as far as that takes. All names and
    texts are escaped.
    """
    apart = error_map.of_diagnosis(diagnosis)
    rows = list(_rows(diagnosis, sites=bool(apart)))
    places = {id(head): row.place for row, (_, _, head) in zip(rows, diagnosis.entries(), strict=True)}
    order = {places[id(head)]: rank for rank, (_, _, head) in enumerate(diagnosis.ranked())}
    times = timeline.timelines(diagnosis, places)
    found = cards.cards(diagnosis, places)
    first = next((card.place for card in found if card.place), None)
    ranked = [entry for entry in diagnosis.ranked() if entry[2].verdict is not None]
    # The page opens on the head that shows its first finding best, though that be one without a verdict.
    among = ranked if first is None else diagnosis.entries()
    worst = next((e for e in among if first in (None, places[id(e[2])])), None)
    shown = {
        "diagnosis": diagnosis,
        "headline": story.headline(diagnosis),
        "steps": story.next_steps(diagnosis),
        "timelines": times,
        "names": head_labels.NAMES,
        "letters": head_labels.LETTERS,
        "legend": timeline.legend(times),
        "layout": _layout(len(found), sum(len(t.lines) for t in times)),
        "glossary": glossary.GROUPS,
        "cards": found,
        "listed_cards": _CARDS,
        "kernel_judged": any(observation.outputs for _, observation, _ in ranked),
        "passed": opening.style(diagnosis) == style_of("clean"),
        "nothing": cards.nothing(diagnosis),
        "undecided": _undecided(diagnosis),
        "columns": ("verdict", *(q.title for q in _COLUMNS), *(("site",) if apart else ())),
        "apart": [_apart(name, found) for name, found in apart.items()],
        "apart_data": _apart_data(diagnosis, rows, apart) if apart else "",
        "rows": sorted(rows, key=lambda row: order[row.place])[:_LISTED],
        "total": len(rows),
        "worst": worst,
        "worst_kinds": head_labels.kinds(worst[0], worst[2]) if worst else (),
        "worst_place": places[id(worst[2])] if worst else None,
        "evidence": _evidence(worst[2], diagnosis.findings[0]) if worst and found else (),
    }
    bare = _page("document.html.j2", _REPORT_SCRIPTS, _REPORT_STYLES, data="", **shown)
    limit = min(_LIMIT + _A_HEAD * max(len(rows) - _HEADS, 0), _LARGEST)
    room = limit - len(bare.encode()) - 200
    data = _json_element(ELEMENT, embedding.fitted(diagnosis, room))
    return _page("document.html.j2", _REPORT_SCRIPTS, _REPORT_STYLES, data=data, **shown)


def html_fragment(diagnosis: Diagnosis) -> str:
    """The report's body for a notebook cell: no script, as Jupyter would remove it."""
    shown = {
        "headline": story.headline(diagnosis),
        "cards": cards.cards(diagnosis, {}),
        "nothing": cards.nothing(diagnosis),
        "open": len(diagnosis.captures) <= _OPEN,
        "columns": _NOTEBOOK_COLUMNS,
    }
    return _environment().get_template("fragment.html.j2").render(diagnosis=diagnosis, **shown)


def gallery_document(gallery: Gallery) -> str:
    """A complete page that needs no network; every chart can be saved as SVG and CSV. All texts are escaped.

    Raises:
        ValueError: for a value that is NaN or infinite: what a chart cannot show is None.
    """
    charts = [[asdict(chart) for chart in section.charts] for section in gallery.sections]
    data = _json_element(_GALLERY, charts)
    scripts: tuple[str, ...] = _EXPLAINED_SCRIPTS if gallery.glossary else _GALLERY_SCRIPTS
    styles: tuple[str, ...] = _REPORT_STYLES if gallery.glossary else _STYLES
    helpers = {"text_columns": _text_columns, "legend": timeline.legend}
    return _page("gallery.html.j2", scripts, styles, gallery=gallery, data=data, **helpers)


def _text_columns(table: tuple[tuple[str, ...], ...]) -> set[int]:
    """Columns to be set flush left, as they hold a long text, or nothing that is or stands for a number."""
    columns = list(zip(*table[1:], strict=True))
    return {
        i for i, cells in enumerate(columns)
        if any(len(cell) >= _LONG for cell in cells) or not any(_NUMBER.match(cell) for cell in cells)
    }  # fmt: skip


def _apart(name: str, maps: tuple[ErrorMap, ...]) -> tuple[str, list[str]]:
    """The heads of one observation that were taken apart: its name, and what they show."""
    stepped = len({one.step for one in maps}) > 1
    said = []
    for one in maps:
        step = f"Step {one.step}: " if stepped and one.step is not None else ""
        said.append(" ".join((f"{step}{error_map.finding(one)}.", *error_map.sentences(one))))
    return name, said


def _apart_data(diagnosis: Diagnosis, rows: list[Row], apart: Mapping[str, tuple[ErrorMap, ...]]) -> Markup:
    """Their maps, and for the rows that the page's script makes the site of every head."""
    at = {
        (observation.name, capture.source, head.layer, a.batch, head.head): row.place
        for row, (capture, observation, head) in zip(rows, diagnosis.entries(), strict=True)
        if (a := head.attribution) is not None
    }
    charts = []
    for name, maps in apart.items():
        stepped = len({one.step for one in maps}) > 1
        places = {id(h): at[name, h.source, h.layer, h.batch, h.head] for one in maps for h in one.heads}
        charts.append([asdict(chart) for one in maps for chart in error_charts.charts(one, places, stepped=stepped)])
    sites = {row.place: row.cells[-1][0] for row in rows} if len(rows) > _LISTED else {}
    return _json_element(_APART, {"charts": charts, "sites": sites})


def _rows(diagnosis: Diagnosis, *, sites: bool) -> Iterator[Row]:
    """In the order of ``Diagnosis.entries``. A place names capture, observation and head by position.

    ``sites``: whether there is a column for what ``details`` found.
    """
    for i, capture in enumerate(diagnosis.captures):
        for j, observation in enumerate(capture.observations):
            for k, head in enumerate(observation.heads):
                if head.head is not None:
                    row = _row(f"c{i}o{j}h{k}", capture, observation, head)
                    if not sites:
                        yield row
                        continue
                    site = wording.DASH if head.attribution is None else error_map.site_of(head.attribution)
                    yield replace(row, cells=(*row.cells, (site, site if site != wording.DASH else "")))


def _row(place: str, capture: CaptureDiagnosis, observation: ObservationDiagnosis, head: HeadDiagnosis) -> Row:
    said = quantities.labels(head)
    # Numbers under wrong assumptions say nothing.
    known = head.verdict is not None
    cells = [(q.text(head), _key(q.value(head))) if known else (wording.DASH, "") for q in _COLUMNS]
    name = wording.head_name(head.layer, head.head)
    return Row(place, name, capture.source, observation.name, ((said.replace("_", "-"), said), *cells))


def _key(value: float | None) -> str:
    return "" if value is None else repr(value)


def _layout(findings: int, rows: int) -> tuple[str, bool]:
    """How the first screen is laid out: its class, and whether the findings stand before the verdicts over steps.

    Args:
        findings: How many there are.
        rows: Of the tables of verdicts over steps; 0 where there is one step, and the map of heads stands there.
    """
    name = "several" if findings > 1 else "single" if findings else ""
    # So much above several findings that the first screen would not hold them.
    return name, not rows or (findings > 1 and rows > _SHORT)


def _undecided(diagnosis: Diagnosis) -> str:
    """How many heads stay open; empty where none does."""
    heads = sum(found.heads for found in diagnosis.undecided)
    are = "is" if heads == 1 else "are"
    return f"{wording.plural(heads, 'head')} {are} undecided: too little data to say more, no finding." if heads else ""


def _evidence(head: HeadDiagnosis, finding: SharedFinding) -> tuple[tuple[bool, str], ...]:
    """Each step, and whether it is reached; none where rounding is no cause."""
    if head.verdict is None or {"wrong", "nonfinite"} & set(quantities.label_names(head)):
        return ()
    stated = head.verdict.evidence
    removed = False
    found = finding.site is not None or (finding.cause is not None and bool(finding.formats) and not finding.cause.near)
    if head.attribution is not None and stated != "none":
        main = "dq" if "dq" in head.attribution.totals else "o"
        guilty = next((s for s in head.attribution.sites if s.site == head.attribution.guilty.get(main)), None)
        if guilty is not None:
            effect, total = guilty.effects[main], head.attribution.totals[main].error
            makes_most = effect.share > _MOST
            found |= makes_most
            removed = makes_most and effect.repaired < _MOST * total and head.attribution.inert[1] < _SHAM * total
    return tuple(zip((stated != "none", stated == "significant", found, removed, grows(finding)), _STEPS, strict=True))


@cache
def _environment() -> Environment:
    """The templates' environment: everything is escaped, unknown names are errors."""
    found = Environment(
        loader=PackageLoader("attn_diag.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"number": wording.number, "percent": wording.percent}
    found.globals |= {"quantities": quantities, "wording": wording, "words": words}
    return found


def _json(data: Any) -> str:
    """As JSON in which no character can be taken for markup."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).translate(_ESCAPES)


def _json_element(identifier: str, data: Any) -> Markup:
    return Markup('<script type="application/json" id="{}">{}</script>').format(identifier, Markup(_json(data)))


def _page(template: str, scripts: tuple[str, ...], styled: tuple[str, ...] = _STYLES, **values: Any) -> str:
    """Render ``template`` with ``policy``, ``styles``, ``library`` and ``script``, which joins ``scripts``."""
    library, script, styles = _static("vendor/echarts/echarts.min.js"), _script(scripts), _style(styled)
    policy = "; ".join([
        "default-src 'none'",
        f"script-src {_source(library)} {_source(script)}",
        f"style-src {_source(styles)}",
        "base-uri 'none'",
        "form-action 'none'",
    ])  # fmt: skip
    # The files are ours, or checked against their checksum; nothing of a reader's or a capture's is in them.
    trusted = {"styles": Markup(styles), "library": Markup(library), "script": Markup(script)}
    return _environment().get_template(template).render(policy=policy, **trusted, **values)


@cache
def _script(names: tuple[str, ...]) -> str:
    """Our scripts in one; "vocabulary" stands for the names that the page shares with the other reports."""
    columns = [asdict(q) | {"path": q.path if isinstance(q.path, str) else ""} for q in _COLUMNS]
    kinds = {kind: [letter, head_labels.NAMES[kind]] for kind, letter in head_labels.LETTERS.items()}
    more = {"columns": columns, "labels": kinds, "calm": sorted(map(str, head_labels.CALM))}
    vocabulary = f"attnDiag.vocabulary = {_json(quantities.vocabulary() | more)};"
    return "\n".join(vocabulary if name == "vocabulary" else _static(f"{name}.js") for name in names)


@cache
def _style(names: tuple[str, ...]) -> str:
    return "\n".join(_static(f"{name}.css") for name in names)


@cache
def _static(name: str) -> str:
    return files("attn_diag.reports").joinpath("static", *name.split("/")).read_text(encoding="utf-8")


@cache
def _source(text: str) -> str:
    """The text's hash, as a Content-Security-Policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
