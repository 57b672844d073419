"""The paper's figures as a gallery of charts. Each caption says what is shown, of what data, with what uncertainty."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attn_diag.reports import paper_terms, words
from attn_diag.reports import paper_words as say
from attn_diag.reports.charts import Axis, Band, Chart, Gallery, Map, Section, Series
from attn_diag.reports.html import gallery_document
from attn_diag.results.paper import (
    Accumulated,
    AtomRow,
    Atoms,
    DeltaRows,
    DeltaSteps,
    FeatureProducts,
    Matrix,
    OverSteps,
    PaperFigures,
    PrefixError,
    Similarity,
    SpectralNorms,
    StepAtoms,
    TriggerCounts,
    Triggers,
)
from attn_diag.results.wording import DASH, head_name

# Lines that can still be told apart.
_MAX_LINES = 12
_FIGURE_4 = f"After Figure 4 of {say.PAPER}"

# What these figures leave open.
_NEXT = (
    "The figures follow the cause of failed training that Qiu & Yao describe, an error of delta that adds up. What "
    "else may be wrong, since when, how sure that is and what to do next, attn-diag inspect says of these captures."
)
# Paragraphs and charts.
_Drawn = tuple[Sequence[str], Sequence[Chart]]


def paper_document(f: PaperFigures) -> str:
    """The gallery as a self-contained page."""
    return gallery_document(paper_gallery(f))


def paper_gallery(f: PaperFigures) -> Gallery:
    """The gallery: a section a figure, and one of what could not be drawn."""
    draw: dict[str, Callable[[Any], _Drawn]] = {
        "spectral_norms": _spectral_norms,
        "atoms": _atoms,
        "delta_steps": _delta_steps,
        "delta_rows": _delta_rows,
        "features": _features,
        "prefix": _prefix,
        "triggers": lambda found: _triggers(found, f.chosen.name),
    }
    sections = []
    for name, function in draw.items():
        if (found := getattr(f, name)) is not None:
            paragraphs, charts = function(found)
            sections.append(Section(say.TITLES[name], tuple(paragraphs), charts=tuple(charts)))
    if f.missing:
        listed = tuple((say.TITLES[name].split(":")[0], reason) for name, reason in f.missing.items())
        sections.append(Section("Not drawn", table=(("figure", "why"), *listed)))
    if f.notes:
        sections.append(Section("Notes", paragraphs=f.notes))
    verdict, what, told = say.said_first(f)
    title = f"{verdict}: {what}."
    lead = " ".join([*told, say.lead(f), _NEXT])
    return Gallery(title, lead, tuple(sections), f"{say.CAVEAT} {words.tool_line(f.tool)}", paper_terms.WORDS)


def _spectral_norms(found: SpectralNorms) -> _Drawn:
    about = (
        f"After Figure 3 of {say.PAPER}. Largest singular value of each head's D rows of W_Q, by float64 SVD of the "
        f"weight as captured ({found.dtype}); computed from all its elements, so without sampling error."
    )
    ranked = sorted(found.heads, key=lambda h: -_plain(h.spectral[-1]))
    charts = []
    if any(len(h.steps) > 1 for h in ranked):
        lines = tuple(
            Series(
                head_name(h.layer, h.head),
                tuple(float(s) for s in h.steps if s is not None),
                _plain_values(v for s, v in zip(h.steps, h.spectral, strict=True) if s is not None),
            )
            for h in ranked[:_MAX_LINES]
        )
        more = f" The {_MAX_LINES} largest of {len(ranked)} heads." if len(ranked) > _MAX_LINES else ""
        charts.append(Chart("figure-3-steps", "Spectral norm over steps", about + more,
                            Axis("training step"), Axis("spectral norm of W_Q"), lines))  # fmt: skip
    layers = sorted({h.layer for h in ranked if h.layer is not None})
    if len(layers) > 1:
        heads = sorted({h.head for h in ranked})
        last = {(h.layer, h.head): h.spectral[-1] for h in ranked}
        cells = tuple(_plain_values(last.get((layer, head)) for head in heads) for layer in layers)
        axes = Axis("head", names=tuple(map(str, heads))), Axis("layer", names=tuple(map(str, layers)))
        charts.append(Chart("figure-3", "Spectral norm at each head's last step", about, *axes,
                            map=Map("spectral norm", cells)))  # fmt: skip
    else:
        ordered = sorted(ranked, key=lambda h: h.head)
        names = tuple(head_name(h.layer, h.head) for h in ordered)
        places = tuple(float(i) for i in range(len(ordered)))
        charts.append(
            Chart(
                "figure-3",
                "Spectral norm by head" + ("" if len(charts) == 0 else ", at its last step"),
                f"{about} Beside it the Frobenius norm: equal where the weight has rank 1.",
                Axis("head", names=names),
                Axis("norm of W_Q"),
                (
                    Series("spectral", places, _plain_values(h.spectral[-1] for h in ordered), "bars"),
                    Series("Frobenius", places, _plain_values(h.frobenius[-1] for h in ordered), "points"),
                ),
            )
        )
    return [say.spectral_norms(found)], charts


def _atoms(found: Atoms) -> _Drawn:
    panels = (("(PK)_t", "pk", found.probs_k), ("x_t", "x", found.x), ("(PK)_t ⊗ x_t", "atoms", found.atoms))
    charts = [_atom_rows(label, stem, s, found.rows) for label, stem, s in panels if s is not None]
    if len(found.steps) > 1:
        charts += _atoms_over_steps(found.steps)
    if found.over_steps is not None:
        charts += _between_steps(found.over_steps)
    return say.atoms(found), charts


def _atom_rows(label: str, stem: str, found: Similarity, rows: tuple[AtomRow, ...]) -> Chart:
    # What all rows share is not repeated on every tick.
    parts: dict[str, list[int | None]] = {
        "step": [r.step for r in rows],
        "batch item": [r.batch for r in rows],
        "row": [r.row for r in rows],
    }
    shown = {name: values for name, values in parts.items() if name == "row" or len(set(values)) > 1}
    names = tuple(":".join(DASH if v is None else str(v) for v in tick) for tick in zip(*shown.values(), strict=True))
    axis = Axis(" : ".join(shown), names=names)
    chance = ""
    if found.random99 is not None:
        chance = " Chance: independent directions, uniform on the sphere (Bingham's test)."
    caption = (
        f"{_FIGURE_4}, which compares tokens and steps. |cosine| of {label}, in float64. Rows shown: those with the "
        "largest atoms |Δdelta_t|·‖(PK)_t‖·‖x_t‖ of every step (of 16 steps at most), in order; chosen by size, so no "
        f"sample. {say.similarity('All rows', found)}{chance}"
    )
    cells = Map("|cosine|", _cells(found.cosines))
    return Chart(f"figure-4-{stem}", f"|cosine| of {label} between rows", caption, axis, axis, map=cells)


def _atoms_over_steps(steps: tuple[StepAtoms, ...]) -> list[Chart]:
    numbers = [s.step for s in steps]
    coherence = _over_steps(
        "figure-4-coherence",
        "Do the atoms of a step add up?",
        "Coherence ‖Σa_t‖² / Σ‖a_t‖² of the signed atoms over each step's rows, and what random signs of the rows stay "
        f"below in 95 % of cases. Beside {say.PAPER}: similar directions alone do not accumulate, signs decide.",
        "coherence",
        numbers,
        {"coherence": [s.coherence for s in steps], "95 % of random signs": [s.coherence_null95 for s in steps]},
    )
    first_share = _over_steps(
        "figure-4-first-share",
        "How much of dW_Q's error is of rank 1",
        "Share of ‖M‖² that the first singular direction of a step's M = Σ a_t holds; M is the part of dW_Q's error "
        "that delta makes. Exact for the rows captured.",
        "share of the first direction",
        numbers,
        {"first direction": [s.first_share for s in steps]},
    )
    return [coherence, first_share]


def _over_steps(
    stem: str, title: str, caption: str, axis: str, steps: Sequence[int], lines: dict[str, Sequence[float | None]],
    *bands: Band,
) -> Chart:  # fmt: skip
    """Lines by name over training steps."""
    x = tuple(map(float, steps))
    series = tuple(Series(name, x, _plain_values(values)) for name, values in lines.items())
    return Chart(stem, title, caption, Axis("training step"), Axis(axis), series, bands)


def _between_steps(found: OverSteps) -> list[Chart]:
    axis = Axis("training step", names=tuple(map(str, found.steps)))
    below = "|cosine| of the first singular directions of the M, on the side of {}; random ones: below {:.2f} in 95 %."
    panels = (
        ("errors of dW_Q", "steps", found.cosines, f"Signed cosine of the steps' M. {say.over_steps(found)}"),
        ("first left directions", "left", found.left, below.format("q's features", found.left_random95)),
        ("first right directions", "right", found.right, below.format("x", found.right_random95)),
    )
    charts = []
    for label, stem, values, text in panels:
        signed = stem == "steps"
        cells = Map("cosine" if signed else "|cosine|", _cells(values), diverging=signed)
        title = f"Cosine of the {label} between steps"
        charts.append(Chart(f"figure-4-{stem}", title, f"{_FIGURE_4}. {text}", axis, axis, map=cells))
    return charts


def _cells(found: Matrix) -> tuple[tuple[float | None, ...], ...]:
    return tuple(map(_plain_values, found))


def _delta_steps(found: DeltaSteps) -> _Drawn:
    kinds = [("total", "mean error of delta", found.total)]
    if found.excess is not None:
        kinds.append(("excess", "mean error of delta beyond one correct rounding of O", found.excess))
    charts = []
    for stem, name, a in kinds:
        charts.append(
            _over_steps(
                f"figure-5a-{stem}",
                f"Running sum of the {name}",
                f"After Figure 5a of {say.PAPER}. Each step adds the mean of delta's signed error over its rows, in "
                "units of delta (the loss's). Band: independent unbiased steps stay inside throughout with 99 % "
                "probability; from each step's own clustered standard error (variances added, Student's t). "
                "Consecutive steps share most of V, so leaving it shows accumulation over these steps, not a law. "
                "The paper reports a bias of one sign; here the sum "
                + ("leaves the band." if a.outside else "stays inside: no bias beyond chance."),
                "running sum",
                found.steps,
                {name: a.sums},
                Band("99 % band", -a.band99, a.band99),
            )
        )
        charts.append(_means(stem, name, tuple(map(float, found.steps)), a))
    if len(found.heads) > 1:
        charts.append(_drifts(found))
    return say.delta_steps(found), charts


def _means(stem: str, name: str, x: tuple[float, ...], a: Accumulated) -> Chart:
    pairs = list(zip(a.means, a.standard_errors, strict=True))
    return Chart(
        f"figure-5a-{stem}-steps",
        f"The {name}, step by step",
        "Each step's mean, and two standard errors on either side.",
        Axis("training step"),
        Axis("mean over rows"),
        (
            Series("mean", x, _plain_values(a.means), "points"),
            Series("+ 2 standard errors", x, _plain_values(m + 2 * e for m, e in pairs)),
            Series("- 2 standard errors", x, _plain_values(m - 2 * e for m, e in pairs)),
        ),
    )


def _drifts(found: DeltaSteps) -> Chart:
    layers = list(dict.fromkeys(h.layer for h in found.heads))
    heads = sorted({h.head for h in found.heads})
    extremes = {(h.layer, h.head): h.extreme for h in found.heads}
    return Chart(
        "figure-5a-heads",
        "Running sums of delta's mean error, all heads, over their bands",
        "The running sum's largest |value| over the steps, with its sign, in units of the head's own 99 % band: beyond "
        f"±1 it leaves it. {say.all_heads(found)} Not in {say.PAPER}, which follows one case: a head chosen for being "
        "the worst leaves its band more often than others.",
        Axis("head", names=tuple(map(str, heads))),
        Axis("layer", names=tuple(DASH if layer is None else str(layer) for layer in layers)),
        map=Map(
            "largest sum / band",
            tuple(_plain_values(extremes.get((layer, head)) for head in heads) for layer in layers),
            diverging=True,
        ),
    )


def _delta_rows(found: DeltaRows) -> _Drawn:
    chart = Chart(
        "figure-5a-rows",
        f"Running sum of delta's error over the rows, {say.at_step(found.step)}",
        f"After Figure 5a of {say.PAPER}, within one step: delta's signed error summed over query rows (sequences one "
        "after the other), in units of delta. Band: unbiased independent rows stay inside with 99 % probability; rows "
        "that copy the same key share its rounding, which the band does not know.",
        Axis("row"),
        Axis("running sum"),
        (Series("sum of Δdelta", tuple(map(float, found.rows)), _plain_values(found.sums)),),
        (Band("99 % band", -found.band99, found.band99),),
    )
    return [say.delta_rows(found)], [chart]


def _features(found: FeatureProducts) -> _Drawn:
    x = tuple(float(i) for i in range(len(found.do)))
    where = f"row {found.row}, batch item {found.batch}, {say.at_step(found.step)}"
    about = (
        f"After Figures 5b-c of {say.PAPER}, which look at one token: here {where}, the row with the largest |Δdelta|. "
        "It was chosen for its error, so alignment in it is expected; all rows are drawn below."
    )
    every = f"All {found.rows} rows, {say.at_step(found.step)}."

    def bars(stem: str, title: str, axis: str, values: Iterable[float | None], caption: str) -> Chart:
        series = (Series(axis, x, _plain_values(values), "bars"),)
        return Chart(f"figure-5bc-{stem}", title, caption, Axis("feature"), Axis(axis), series)

    charts = [
        bars("do", "dO in the worst row", "dO", found.do, about),
        bars("error", "Error of O in the worst row", "O - reference", found.o_error, about),
        bars("product", "dO × error of O in the worst row", "dO × error", found.product,
             f"{about} The products add up to Δdelta where delta comes from O."),
        bars("aligned", "Rows in which dO and the error agree in sign", "fraction of rows", found.aligned,
             f"{every} 0.5 is no agreement; rows are not independent, so no interval is given."),
        bars("contribution", "What each feature adds to the sum of Δdelta", "sum of dO × error", found.contribution,
             every),
    ]  # fmt: skip
    return [say.features(found)], charts


def _prefix(found: PrefixError) -> _Drawn:
    x = tuple(map(float, found.positions))
    marked = _plain_values(e if unit else None for e, unit in zip(found.error, found.unit, strict=True))
    chart = Chart(
        "figure-6",
        f"Prefix error of Ō[{found.row}, {found.feature}]",
        f"After Figure 6 of {say.PAPER}. Error of Ō after the first t visible keys, in the order in which recipe "
        f"{found.recipe} adds them, against float64; marks: P̄ = 1. Ō is what the recipe would hold were key t the "
        f"last, rounded to {found.format}; a kernel that keeps fp32 sums rounds once, at the end. The kernel's inside "
        "is inferred; one element is an example, without an uncertainty.",
        Axis("visible keys added, t"),
        Axis("error of Ō"),
        (
            Series("error", x, _plain_values(found.error)),
            Series("of it, by rounding the sum", x, _plain_values(found.rounding_error)),
            Series("P̄ = 1", x, marked, "points"),
        ),
    )
    return [say.prefix(found)], [chart]


def _triggers(found: Triggers, head: str) -> _Drawn:
    own = _counts("head", head, found.steps, found.head)
    layer = _counts("layer", "all heads looked at in its layer", found.steps, found.layer)
    return [say.triggers(found, head)], [own, layer]


def _counts(stem: str, name: str, steps: tuple[int, ...], found: TriggerCounts) -> Chart:
    rows = sorted(set(found.rows))
    of = f"{rows[0]} rows" if len(rows) == 1 else f"{rows[0]} to {rows[-1]} rows"
    return _over_steps(
        f"figure-13-{stem}",
        f"Rows with a repeated maximum: {name}",
        f"After Figure 13 of {say.PAPER}. Of {of} a step, exact counts. exact: equal in the scores rounded once to q's "
        "dtype; window: within 1e-3 of the maximum in float64 (the published mitigation's rule); unit: P̄ rounds to "
        "1 more than once. A repeated maximum is a trigger, not by itself an error.",
        "rows",
        steps,
        {"exact": found.exact, "window": found.window, "unit": found.unit},
    )


def _plain_values(values: Iterable[float | None]) -> tuple[float | None, ...]:
    """As a chart takes them: what is no finite number is a gap."""
    return tuple(None if v is None or not math.isfinite(v) else float(v) for v in values)


def _plain(value: float) -> float:
    return value if math.isfinite(value) else 0.0
