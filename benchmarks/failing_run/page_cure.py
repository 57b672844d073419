"""The page's section on cures: forks from the alarm's checkpoint, each with one change, beside the run that goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from page_outcomes import EARLY, FAILS, ON, fate_of, rows, trained_words
from page_record import Record, Run
from page_series import LOSS, NORM, STEP, curve

from attn_diag.reports.charts import Axis, Chart, Mark, Section, Series
from attn_diag.reports.words import DASH

# Steps shown before a fork.
_BEFORE = 150
# Steps whose mean loss is compared.
_LAST = 20


def control_of(record: Record, origin: Run) -> Run:
    """The run itself, or its like from the same checkpoint on where that was trained longer."""
    again = [run for run in record.forks(origin.name) if run.arm == origin.arm]
    return max([origin, *again], key=lambda run: run.end)


def cures(record: Record, origin: Run) -> list[Run]:
    """Forks of a run that change something."""
    return [run for run in record.forks(origin.name) if run.arm != origin.arm]


def fate(run: Run, control: Run) -> str:
    """What became of a fork of the run that went on unchanged as ``control``."""
    return fate_of(run.departure.step if run.departure else None, _cut_off(run, control))


def trained(run: Run, control: Run) -> str:
    """The same in words, with its step."""
    return trained_words(run.departure.step if run.departure else None, run.end - 1, _cut_off(run, control))


def _cut_off(run: Run, control: Run) -> bool:
    return control.departure is not None and run.end <= control.departure.step


def cure(record: Record, arm: str, title: str) -> list[Section]:
    """Forks of the arm's first seed: curves, and a table. Empty where there are none."""
    origin = record.first(arm)
    forks = cures(record, origin) if origin else []
    if origin is None or not forks:
        return []
    control, step = control_of(record, origin), forks[0].first
    groups = {name: [run for run in forks if fate(run, control) == name] for name in (ON, FAILS, EARLY)}
    charts = []
    for stem, words, name in (("cured", "trains on", ON), ("not-cured", "fails all the same", FAILS)):
        if groups[name]:
            charts += _pair(arm, stem, words, origin, groups[name], step)
    said = (
        f"From the checkpoint at the alarm (step {step:,}) the same run goes on {len(forks)} times, with the same "
        f"batches, each time with one change in attention and nothing else. Unchanged, it {trained(control, control)}. "
        f"{_listed('It trains on with', groups[ON])}{_listed('It fails all the same with', groups[FAILS])}"
        f"{_listed('Stopped before that could be told:', groups[EARLY])}"
    )
    curves = Section(title, (said.strip(), *_like(record, groups[ON])), charts=tuple(charts))
    # With predictions there is a table of both.
    return [curves] if rows(record, arm) else [curves, Section(f"{title}: run by run", (), table(control, forks))]


def _like(record: Record, kept: Sequence[Run]) -> list[str]:
    """Of changes that keep the trend so far: arms of the same roundings that failed later, from step 0 on."""
    return [
        f"{fork.change} removes this failure, not every one: with the same roundings from step 0 on arm {run.arm} "
        f"fails at {run.departure.step:,}."
        for fork in kept
        for run in record.runs
        if run.origin is None and run.departure and _same_forward(run, fork)
    ]


def _same_forward(run: Run, other: Run) -> bool:
    found = run.header.get("forward")
    return found is not None and found == other.header.get("forward")


def _listed(words: str, runs: Sequence[Run]) -> str:
    return f"{words} {', '.join(run.change for run in runs)}. " if runs else ""


def _pair(arm: str, stem: str, words: str, origin: Run, group: Sequence[Run], step: int) -> list[Chart]:
    marks = (Mark(float(step), f"changed at {step:,}"),)
    last = max(run.end for run in group)

    def lines(axis: Axis) -> tuple[Series, ...]:
        before = curve("unchanged", origin, axis, first=max(step - _BEFORE, 0) // 50 * 50, last=last, tone="second")
        return (before, *(curve(run.change, run, axis) for run in group))

    return [
        Chart(f"{arm}-{stem}-gradient-norm", f"What {words}: gradient norm", "Logarithmic; gaps are not finite.",
              STEP, NORM, lines(NORM), marks=marks),
        Chart(f"{arm}-{stem}-loss", f"What {words}: training loss", "The same batches in every run.",
              STEP, LOSS, lines(LOSS), marks=marks),
    ]  # fmt: skip


def table(control: Run, forks: Sequence[Run]) -> tuple[tuple[str, ...], ...]:
    """What training did with each change; loss: the mean of the last steps before its departure or end."""
    lines = [("change", "training", "by", "largest gradient norm", f"loss, mean of the last {_LAST}")]
    for run in (control, *forks):
        until = run.departure.step if run.departure else run.end
        losses = [loss for step, loss, _ in run.steps if step < until and math.isfinite(loss)][-_LAST:]
        norms = [norm for step, _, norm in run.steps if step >= forks[0].first]
        worst = max((n if math.isfinite(n) else math.inf for n in norms), default=math.nan)
        name = "none" if run is control else run.change
        lines.append((
            name, trained(run, control), run.departure.reason if run.departure else DASH,
            f"{worst:.3g}" if math.isfinite(worst) else "not finite", f"{fmean(losses):.3f}" if losses else DASH,
        ))  # fmt: skip
    return tuple(lines)
