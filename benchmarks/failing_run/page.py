"""The record of a failing run as one page: what failed, the alarm before it, the guilty rounding, the cure.

    python benchmarks/failing_run/page.py benchmarks/results/failing_chain --out reports/gallery/failing_run.html

Needs no GPU. It is made from whatever is in the folder; what was planned (``--jobs``) and is not there is listed at the
end. ``--picture FILE``: also one figure as a PNG, 1,200 pixels wide (needs playwright and Chromium in PATH).
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from departure import DEVIATIONS, FACTOR, PERSISTENCE, WINDOW
from page_cure import control_of, cure, cures, fate, trained
from page_limits import limits
from page_missing import made, missing, planned
from page_monitor import monitor
from page_outcomes import ON, held, predicted
from page_picture import picture, take
from page_record import Record, Run, read_record
from page_runs import failing, healthy_words, others
from page_seeds import seeds
from page_sites import chain_of, guilty, sites
from page_summed import summed
from values import at, listed, middle, percent

from attn_diag.reports import gallery_document
from attn_diag.reports.charts import Gallery, Section
from attn_diag.watching.monitoring.alarm import AlarmRule

JOBS = Path(__file__).parent / "jobs" / "chain.txt"
_A = (
    "GPT-2 small trains in BF16. Arm A's forward rounds the scores, S - m, O_bar, l and O to BF16; the healthy arm "
    "rounds O alone. All else is the same: initial weights, batches, optimizer, and the backward, FlashAttention-2's."
)
_B = "Arm B keeps scores and S - m in fp32 and rounds O_bar, l and O."


def gallery(record: Record, jobs: Path = JOBS) -> Gallery:
    """The whole page but for what happens step by step (``steps_gallery``)."""
    rule, plan = AlarmRule(), planned(jobs)
    accumulated, undrawn = accumulation(record)
    sections = [
        overview(record),
        failing(record, "A", "The run that fails", _A),
        *monitor(record, "A", "What the monitor saw", rule),
        *sites(record, "A", "The guilty rounding"),
        *cure(record, "A", "The cure"),
        *predicted(record, "A", "Predicted, and trained"),
        seeds(record, "A", "The same on other seeds"),
        summed(record, "A", "Do the errors add up over a batch?"),
        failing(record, "B", "Arm B: the run that fails", _B),
        *monitor(record, "B", "Arm B: what the monitor saw", rule, signs=False),
        *sites(record, "B", "Arm B: the guilty rounding"),
        *cure(record, "B", "Arm B: the cure"),
        *predicted(record, "B", "Arm B: predicted, and trained"),
        summed(record, "B", "Arm B: do the errors add up over a batch?"),
        limits(record, "The published mitigation, and its limit"),
        others(record, "Other arms, from the start"),
        *accumulated[:2],
        held(record, "What had to hold"),
        missing(record, plan, undrawn),
        made(record, plan),
    ]
    return Gallery(
        "A training run that BF16 attention breaks: the alarm, the guilty rounding, the cure",
        summary(record),
        tuple(section for section in sections if section),
        "Made from the logs by benchmarks/failing_run/page.py. One model, one corpus: it shows a causal chain, not how "
        "often it happens.",
    )


def steps_gallery(record: Record) -> Gallery | None:
    """Consecutive steps before the failure, with the paper's figures; None where they are not in the record."""
    sections, _ = accumulation(record)
    if not sections:
        return None
    run = captured(record)
    of = f" of {_called(run)}" if run else ""
    end = f"; the run leaves its trend at step {run.departure.step:,}" if run and run.departure else ""
    lead = f"The failing run of failing_run.html, step by step: how the error of dW_Q adds up in one head{of}{end}."
    footer = "Made from accumulation.json by benchmarks/failing_run/page.py."
    return Gallery("A training run that BF16 attention breaks: step by step", lead, tuple(sections), footer)


def overview(record: Record) -> Section | None:
    """The README's figure and what the words mean. None without a run of arm A."""
    if record.first("A") is None:
        return None
    words = (
        f"A run leaves its trend at the first step whose gradient norm is over {FACTOR:g} times the median of the "
        f"{WINDOW} before, or whose loss lies {DEVIATIONS:g} standard deviations above their mean for {PERSISTENCE} "
        "steps. The alarm is attn-diag's Monitor; changes from there on are named as attn-diag what-if names them: "
        "fp32-scores keeps scores and S - m in fp32, fp32-sums row sum and accumulator, same-scores recomputes P from "
        "the forward's rounded scores, delta-from-dp takes delta = rowsum(P o dP), fp32-o-delta takes it from O before "
        "its last rounding, stabilised-N is the published mitigation with beta = N, fa2 FlashAttention-2 altogether."
    )
    charts = tuple(chart for section in picture(record).sections for chart in section.charts)
    return Section("In one picture", (words,), charts=charts)


def summary(record: Record) -> str:
    """The page in a few sentences, of what is there."""
    run = record.first("A")
    if run is None:
        return "No run of arm A is in this record."
    end = (
        f"leaves its trend at step {run.departure.step:,} ({run.departure.reason})"
        if run.departure
        else f"keeps its trend for {run.end:,} steps"
    )
    said = [f"Arm A, whose attention rounds the scores to BF16, {end}.", *filter(None, [healthy_words(record)])]
    if run.log.alarms:
        alarm = run.log.alarms[0]["step"]
        lead = f", {run.departure.step - alarm:,} steps before" if run.departure else ""
        said.append(f"The monitor alarmed at step {alarm:,}{lead}.")
    chain = chain_of(record, "A")
    if site := guilty(chain):
        share = percent(middle(at(chain, "attribute", "sites", site, "dq", "share")))
        said.append(
            f"From one capture at the alarm, attribute names the rounding of {site}: {share} of dQ's squared error."
        )
    if forks := cures(record, run):
        control = control_of(record, run)
        said.append(f"From the alarm's checkpoint the unchanged run {trained(control, control)}.")
        tried = at(record.documents.get("outcomes"), "chains", "A", "site")
        repair = next((fork for fork in forks if at(tried, "repair") in (fork.change, fork.arm)), None)
        if repair is not None:
            said.append(f"With that site repaired ({repair.change}) it is {trained(repair, control)}.")
        if failed := [name for name, left in (at(tried, "others") or {}).items() if left]:
            said.append(f"With other sites repaired it fails all the same ({listed(failed)}).")
        on = [fork for fork in forks if fate(fork, control) == ON]
        said.append(f"{len(on)} of {len(forks)} changes keep the trend; below is what was predicted of each.")
    return " ".join(said)


def accumulation(record: Record) -> tuple[list[Section], str | None]:
    """The sections that accumulation_page makes of its document, and why there are none though there is one."""
    found = record.documents.get("accumulation")
    if found is None:
        return [], None
    try:
        run = captured(record)
        name = _called(run) if run else None
        return list(importlib.import_module("accumulation_page").sections(found, name)), None
    except ImportError as error:
        return [], f"not drawn: {error}"
    except (KeyError, IndexError, ValueError) as error:
        return [], f"not drawn, made by another version ({type(error).__name__}: {error}): make it again"


def captured(record: Record) -> Run | None:
    """The run that captured the steps of accumulation.json, which states only its captures' random identity.

    It is the one tagged "steps"; None where several are, or where it did not train all of these steps.
    """
    steps = at(record.documents.get("accumulation"), "over_steps", "steps")
    tagged = [run for run in record.runs if run.tag == "steps"]
    if not steps or len(tagged) != 1:
        return None
    (run,) = tagged
    return run if run.first <= min(steps) and max(steps) < run.end else None


def _called(run: Run) -> str:
    return f"arm {run.arm}, seed {run.seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the record, such as benchmarks/results/failing_chain")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page")
    parser.add_argument("--jobs", type=Path, default=JOBS, metavar="FILE", help="the runs that were planned")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="the figure of the README")
    options = parser.parse_args()
    if options.out is None and options.picture is None:
        parser.error("nothing to make: give --out, --picture or both")
    record = read_record(options.folder)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(gallery_document(gallery(record, options.jobs)), encoding="utf-8")
        if (steps := steps_gallery(record)) is not None:
            beside = options.out.with_stem(f"{options.out.stem}_steps")
            beside.write_text(gallery_document(steps), encoding="utf-8")
    if options.picture is not None:
        take(picture(record), options.picture)


if __name__ == "__main__":
    main()
