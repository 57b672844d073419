"""The HTML report: one self-contained file, or a fragment for a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attn_diag.reports import embedding, page, story, words
from attn_diag.results.diagnosis import CaptureDiagnosis, Diagnosis, HeadDiagnosis, ObservationDiagnosis
from attn_diag.results.embedded import ELEMENT

# Of a page for 12 layers of 12 heads, everything included.
_LIMIT = 2_000_000
COLUMNS = (
    "verdict", "dQ error", "dW_Q error", "noise factor", "conditioning", "smallest p", "repeated maxima", "max logit",
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


@dataclass(frozen=True)
class Row:
    """A line of the table of heads; ``cells``: what is shown and by what it is sorted ("": last)."""

    place: str
    name: str
    capture: str
    observation: str
    cells: tuple[tuple[str, str], ...]


def html_document(diagnosis: Diagnosis) -> str:
    """A complete page that needs no network; its figures are drawn from the diagnosis embedded in it.

    At most 2,000,000 bytes for 144 heads: running sums and figures are thinned, numbers shortened, and all of it
    compressed as far as that takes. All names and texts are escaped.
    """
    rows = list(_rows(diagnosis))
    places = {id(head): row.place for row, (_, _, head) in zip(rows, diagnosis.entries(), strict=True)}
    order = {places[id(head)]: rank for rank, (_, _, head) in enumerate(diagnosis.ranked())}
    worst = next((entry for entry in diagnosis.ranked() if entry[2].verdict is not None), None)
    shown = {
        "diagnosis": diagnosis,
        "headline": story.headline(diagnosis),
        "steps": story.next_steps(diagnosis),
        "commands": story.commands(diagnosis),
        "columns": COLUMNS,
        "rows": sorted(rows, key=lambda row: order[row.place]),
        "worst": worst,
        "worst_place": places[id(worst[2])] if worst else None,
        "evidence": _evidence(worst[2]) if worst else (),
    }
    bare = page.page("document.html.j2", kind="report", data="", **shown)
    room = _LIMIT - len(bare.encode()) - 200
    data = page.json_element(ELEMENT, embedding.fitted(diagnosis, room))
    return page.page("document.html.j2", kind="report", data=data, **shown)


def html_fragment(diagnosis: Diagnosis) -> str:
    """The report's body for a notebook cell: no script, as Jupyter would remove it."""
    fragment = page.environment().get_template("fragment.html.j2")
    return fragment.render(diagnosis=diagnosis, headline=story.headline(diagnosis))


def _rows(diagnosis: Diagnosis) -> Iterator[Row]:
    """In the order of ``Diagnosis.entries``. A place names capture, observation and head by position."""
    for i, capture in enumerate(diagnosis.captures):
        for j, observation in enumerate(capture.observations):
            for k, head in enumerate(observation.heads):
                if head.head is not None:
                    yield _row(f"c{i}o{j}h{k}", capture, observation, head)


def _row(place: str, capture: CaptureDiagnosis, observation: ObservationDiagnosis, head: HeadDiagnosis) -> Row:
    cells = [(words.labels(head).replace("_", "-"), words.labels(head))]
    if capture.assumptions.ok is False:
        # Numbers under wrong assumptions say nothing.
        cells += [(words.DASH, "")] * (len(COLUMNS) - 1)
    else:
        dq, dw_q = head.propagation.dq, head.propagation.dw_q
        fraction = head.row_maxima.exact.fraction
        logit = head.figures.max_logit if head.figures else None
        cells += [(words.percent(e.relative_error if e else None), _key(e.relative_error if e else None))
                  for e in (dq, dw_q)]  # fmt: skip
        cells += [(words.number(x), _key(x)) for x in (head.noise_factor, head.conditioning)]
        smallest = min((p for n in words.TESTS if (e := getattr(head.bias, n)) and (p := e.p_adjusted) is not None),
                       default=None)  # fmt: skip
        cells += [(words.number(smallest, 2), _key(smallest)), (words.percent(fraction), _key(fraction))]
        cells += [(words.number(logit), _key(logit))]
    return Row(place, words.head_name(head), capture.source, observation.name, tuple(cells))


def _key(value: float | None) -> str:
    return "" if value is None else repr(value)


def _evidence(head: HeadDiagnosis) -> tuple[tuple[bool, str], ...]:
    """Each step, and whether it is reached. The last needs captures of several steps."""
    stated = head.verdict.evidence if head.verdict else "none"
    found = removed = False
    if head.attribution is not None and stated != "none":
        main = "dq" if "dq" in head.attribution.totals else "o"
        guilty = next(s for s in head.attribution.sites if s.site == head.attribution.guilty[main])
        effect, total = guilty.effects[main], head.attribution.totals[main].error
        found = effect.share > _MOST
        removed = found and effect.repaired < _MOST * total and head.attribution.inert[1] < _SHAM * total
    return tuple(zip((stated != "none", stated == "significant", found, removed, False), _STEPS, strict=True))
