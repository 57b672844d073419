"""Figure 4 as charts: cosines of the rank-1 atoms' directions between rows and steps, and whether atoms add up."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from attn_diag.reports import paper_words as say
from attn_diag.reports.charts import Axis, Chart, Map, Series

if TYPE_CHECKING:
    from attn_diag.results.paper import AtomRow, Atoms, Matrix, OverSteps, Similarity, StepAtoms

_SOURCE = f"After Figure 4 of {say.PAPER}"


def atoms(found: Atoms) -> tuple[list[str], list[Chart]]:
    """Paragraphs and charts."""
    panels = (("(PK)_t", "pk", found.probs_k), ("x_t", "x", found.x), ("(PK)_t ⊗ x_t", "atoms", found.atoms))
    charts = [_rows(label, stem, s, found.rows) for label, stem, s in panels if s is not None]
    if len(found.steps) > 1:
        charts += [_coherence(found.steps), _first_share(found.steps)]
    if found.over_steps is not None:
        charts += _between_steps(found.over_steps)
    return say.atoms(found), charts


def plain_values(values: Iterable[float | None]) -> tuple[float | None, ...]:
    """As a chart takes them: what is no finite number is a gap."""
    return tuple(None if v is None or not math.isfinite(v) else float(v) for v in values)


def _rows(label: str, stem: str, found: Similarity, rows: tuple[AtomRow, ...]) -> Chart:
    # What all rows share is not repeated on every tick.
    parts: dict[str, list[int | None]] = {
        "step": [r.step for r in rows],
        "batch item": [r.batch for r in rows],
        "row": [r.row for r in rows],
    }
    shown = {name: values for name, values in parts.items() if name == "row" or len(set(values)) > 1}
    names = tuple(":".join("–" if v is None else str(v) for v in tick) for tick in zip(*shown.values(), strict=True))
    axis = Axis(" : ".join(shown), names=names)
    chance = ""
    if found.random99 is not None:
        chance = " Chance: independent directions, uniform on the sphere (Bingham's test)."
    caption = (
        f"{_SOURCE}, which compares tokens and steps. |cosine| of {label}, in float64. Rows shown: those with the "
        "largest atoms |Δdelta_t|·‖(PK)_t‖·‖x_t‖ of every step (of 16 steps at most), in order; chosen by size, so no "
        f"sample. {say.similarity('All rows', found)}{chance}"
    )
    cells = Map("|cosine|", _cells(found.cosines))
    return Chart(f"figure-4-{stem}", f"|cosine| of {label} between rows", caption, axis, axis, map=cells)


def _coherence(steps: tuple[StepAtoms, ...]) -> Chart:
    x = tuple(float(s.step) for s in steps)
    return Chart(
        "figure-4-coherence",
        "Do the atoms of a step add up?",
        "Coherence ‖Σa_t‖² / Σ‖a_t‖² of the signed atoms over each step's rows, and what random signs of the rows stay "
        f"below in 95 % of cases. Beside {say.PAPER}: similar directions alone do not accumulate, signs decide.",
        Axis("training step"),
        Axis("coherence"),
        (
            Series("coherence", x, plain_values(s.coherence for s in steps)),
            Series("95 % of random signs", x, plain_values(s.coherence_null95 for s in steps)),
        ),
    )


def _first_share(steps: tuple[StepAtoms, ...]) -> Chart:
    x = tuple(float(s.step) for s in steps)
    return Chart(
        "figure-4-first-share",
        "How much of dW_Q's error is of rank 1",
        "Share of ‖M‖² that the first singular direction of a step's M = Σ a_t holds; M is the part of dW_Q's error "
        "that delta makes. Exact for the rows captured.",
        Axis("training step"),
        Axis("share of the first direction"),
        (Series("first direction", x, plain_values(s.first_share for s in steps)),),
    )


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
        charts.append(Chart(f"figure-4-{stem}", title, f"{_SOURCE}. {text}", axis, axis, map=cells))
    return charts


def _cells(found: Matrix) -> tuple[tuple[float | None, ...], ...]:
    return tuple(map(plain_values, found))
