"""The page's section on the runs: those that fail and the healthy ones, and the arms that no other section shows."""

from __future__ import annotations

from folder import HEALTHY
from page_record import Record, Run
from page_series import FAILING_TONE, HEALTHY_TONE, LOSS, NORM, STEP, curve, events, last_drawn
from values import listed

from attn_diag.reports.charts import Axis, Chart, Section, Series
from attn_diag.reports.words import DASH


def failing(record: Record, arm: str, title: str, words: str) -> Section | None:
    """Loss and gradient norm of an arm's seeds beside the healthy ones. None without a run of the arm."""
    runs = record.of(arm)
    if not runs:
        return None
    last = last_drawn(runs)
    marks = events(runs[0])
    said = " ".join(_said(f"Arm {arm}", run) for run in runs)
    until = (
        f" Healthy runs are drawn to step {last:,}; they went on." if any(r.end > last for r in record.healthy) else ""
    )
    about = f"Marks: seed {runs[0].seed} of arm {arm}. " if marks else ""

    def lines(axis: Axis) -> tuple[Series, ...]:
        return tuple(
            curve(f"{who}, seed {run.seed}", run, axis, last=last, tone=tone, look="faint" if i else None)
            # The failing ones lie on top: until they fail all are much alike.
            for who, tone, group in (("healthy", HEALTHY_TONE, record.healthy), (f"arm {arm}", FAILING_TONE, runs))
            for i, run in enumerate(group)
        )

    charts = (
        Chart(f"{arm}-gradient-norm", "Gradient norm", f"{about}Logarithmic; gaps are not finite.{until}", STEP, NORM,
              lines(NORM), marks=marks),
        Chart(f"{arm}-loss", "Training loss", f"{about}Each step's own batch; the same batches in every run of a seed.",
              STEP, LOSS, lines(LOSS), marks=marks),
    )  # fmt: skip
    return Section(title, tuple(text for text in (words, said, healthy_words(record)) if text), charts=charts)


def healthy_words(record: Record) -> str:
    """What became of the healthy runs."""
    calm = [run for run in record.healthy if run.departure is None]
    steps = min((run.end for run in calm), default=0)
    said = [_said("Healthy", run) for run in record.healthy if run.departure]
    if calm:
        seeds = listed([str(run.seed) for run in calm])
        said.append(
            f"Healthy runs ({'seeds' if len(calm) > 1 else 'seed'} {seeds}) keep their trend for {steps:,} steps."
        )
    return " ".join(said)


def _said(who: str, run: Run) -> str:
    if run.departure is None:
        return f"{who}, seed {run.seed}: keeps its trend for {run.end:,} steps."
    alarm = run.log.alarms[0]["step"] if run.log.alarms else None
    before = f", {run.departure.step - alarm:,} steps after the alarm at {alarm:,}" if alarm is not None else ""
    return f"{who}, seed {run.seed}: leaves its trend at step {run.departure.step:,} ({run.departure.reason}){before}."


def others(record: Record, title: str) -> Section | None:
    """Arms from the beginning that no other section shows. None where there are none."""
    runs = [run for run in record.runs if run.origin is None and not run.tag and run.arm not in ("A", "B", *HEALTHY)]
    if not runs:
        return None
    lines = [("arm", "seed", "what it is", "steps", "fails at", "by", "first alarm")]
    for run in runs:
        fails, by = (DASH, DASH) if run.departure is None else (f"{run.departure.step:,}", run.departure.reason)
        alarm = f"{run.log.alarms[0]['step']:,}" if run.log.alarms else "silent" if run.checks else "not monitored"
        words = str(run.header.get("words", DASH))
        lines.append((run.arm, str(run.seed), words, f"{run.end:,}", fails, by, alarm))
    last = max(run.end for run in runs)
    healthy = tuple(
        curve(f"healthy, seed {r.seed}", r, NORM, last=last, tone=HEALTHY_TONE, look="faint")
        for r in record.healthy[:1]
    )
    series = (*healthy, *(curve(f"{run.arm}, seed {run.seed}", run, NORM) for run in runs))
    chart = Chart("other-arms", "Gradient norm", "Logarithmic; gaps are not finite.", STEP, NORM, series)
    return Section(title, (), tuple(lines), (chart,))
