"""Makes every table and figure again from a record of runs, without a GPU: outcomes.json, the page, the picture.

    python benchmarks/failing_run/remake.py benchmarks/results/failing_chain [--gallery reports/gallery] [--no-picture]

What needs captures is left as it is in the record: ``chain_ARM.json.xz`` and ``summed_ARM.json`` (predictions.py), and
``accumulation.json`` (accumulation.py). The picture needs playwright and Chromium in PATH.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Literal

from accumulation import Accumulation
from accumulation import section as steps_section
from alarms import FAILING_TONE, HEALTHY_TONE, STEP, alarm_rows, charts, drawable, events, table, words
from launch import read_jobs
from limits import largest_repeated
from limits import section as limits_section
from outcomes import Outcomes, Predicted
from predictions import Batch, Heads, read_summed
from predictions import section as sites_section
from record import Record, Run, listed, markdown, write_json
from runlog import DEVIATIONS, FACTOR, PERSISTENCE, WINDOW

from attn_diag.reports import gallery_document
from attn_diag.reports.charts import Axis, Chart, Gallery, Mark, Section, Series, Tone, Value
from attn_diag.results.wording import DASH, number, percent

JOBS = Path(__file__).parent / "jobs" / "chain.txt"
LOSS = Axis("loss", fit=True)
NORM = Axis("gradient norm before clipping", log=True)
# Points of a curve, about: a figure is as many pixels wide.
POINTS = 600
# Steps shown before a fork.
_BEFORE = 150
_FATES = {"It trains on": False, "It fails all the same": True, "Cut off before it could be told": None}
# The cure in the picture.
_SHOWN = "fp32-scores"
_WIDTH, _SCALE = 800, 1.5
_ARMS = {
    "A": "Arm A's forward rounds the scores, S - m, O_bar, l and O to BF16.",
    "B": "Arm B is what fp32-scores leaves of that, from step 0 on: O_bar, l and O.",
}


def gallery(record: Record, found: Outcomes, jobs: Path = JOBS) -> Gallery:
    """The page."""
    arms = {arm: found.chains[arm] for arm in _ARMS if arm in found.chains}
    summed = read_summed(record)
    sections = [_overview(record, found), _runs(record, found)]
    sections += [sites_section([c.chain for c in arms.values()], "The guilty rounding"), _cure(record, arms)]
    sections += [_predicted(arm, found, chain, summed.get(arm)) for arm, chain in arms.items()]
    sections.append(_seeds(found))
    captured = largest_repeated(arms["A"].chain)
    sections.append(limits_section(found.limits, captured, "The published mitigation, and its limit"))
    if (steps := record.document("accumulation")) is not None:
        sections.append(steps_section(Accumulation.from_json(steps), "arm A, seed 0"))
    sections += [_held(found), _made(record, jobs)]
    return Gallery(
        "A training run that BF16 attention breaks: the alarm, the guilty rounding, the cure",
        _summary(record, found),
        tuple(map(_tight, sections)),
        "Made from the logs by benchmarks/failing_run/remake.py. One model, one corpus: it shows a causal chain, not "
        "how often it happens.",
    )


def _tight(section: Section) -> Section:
    """Short cells stay on one line of the page."""
    table = tuple(
        tuple(cell.replace(" ", "\u00a0") if len(cell) < 26 else cell for cell in line) for line in section.table
    )
    return replace(section, table=table)


_COLUMNS = (
    "In the tables: the error of dQ and of dW_Q that what-if predicts (* attribute; median over the sequences); of "
    "dW_Q in one sequence (root mean square) and of the sum over them, which is what the optimizer sees, with its "
    "coherence ‖ΣE‖² / Σ‖E‖² (random signs leave 1; p from all signs); what training did, and the first alarm since "
    "the change (checks every 50 steps, with those before it behind them). Seen: the monitor's largest error of dW_Q "
    "over dW_Q until the unchanged run failed, and where."
)


def _summary(record: Record, found: Outcomes) -> str:
    (run, *_), chain = record.of("A"), found.chains["A"]
    rows, site = chain.trained, chain.site
    words = {name: row.fork.words for name, row in rows.items() if row.fork}
    share = percent(median(effect.share for effect in chain.chain.effects(site.guilty)))
    failed = [name for name, left in site.others.items() if left]
    kept = sum(row.fork is not None and row.fork.failed is False for row in rows.values())
    calm, alarm = [r for r in record.healthy if r.departure is None], run.log.alarms[0]["step"]
    assert run.departure is not None
    return (
        f"Arm A, whose attention rounds the scores to BF16, leaves its trend at step {run.departure.step:,} "
        f"({run.departure.reason}), {run.departure.step - alarm:,} steps after the alarm at {alarm:,}. "
        f"Healthy runs (seeds {listed([str(r.seed) for r in calm])}) keep it for {min(r.until for r in calm) + 1:,} "
        f"steps. From one capture at the alarm, attribute names the rounding of {site.guilty}: {share} of dQ's error. "
        f"From the alarm's checkpoint the unchanged run {words['control']}. With that site repaired ({site.repair}) it "
        f"is {words[site.repair or '']}. With other sites repaired it fails all the same ({listed(failed)}). {kept} of "
        f"{len(rows) - 1} changes keep the trend."
    )


def _overview(record: Record, found: Outcomes) -> Section:
    words = (
        "GPT-2 small trains in BF16. All arms share initial weights, batches, optimizer, and FlashAttention-2's "
        f"backward; the healthy one rounds O alone. {' '.join(_ARMS.values())} A run leaves its trend at the first "
        f"step whose gradient norm is over {FACTOR:g} times the median of the {WINDOW} before, or whose loss lies "
        f"{DEVIATIONS:g} standard deviations above their mean for {PERSISTENCE} steps. Changes are named as attn-diag "
        "what-if names them: fp32-scores keeps scores and S - m in fp32, fp32-sums row sum and accumulator, "
        "same-scores recomputes P from the forward's rounded scores, delta-from-dp takes delta = rowsum(P o dP), "
        "fp32-o-delta takes it from O before its last rounding, stabilised-N is the published mitigation with beta = "
        "N, fa2 FlashAttention-2 altogether, qiu2025 the published code, forward and backward."
    )
    return Section("In one picture", (words,), charts=tuple(_pictured(record, found)))


def _runs(record: Record, found: Outcomes) -> Section:
    """Every run from step 0 and those of the record's subfolders, with what the monitor said."""
    lines = table((run for run in record.runs.values() if run.origin is None), found.alarms)
    for folder in ("generated", "alone"):
        if (record.folder / folder).is_dir():
            other = Record.read(record.folder / folder)
            lines += table(other.runs.values(), alarm_rows(other.runs.values(), found.rule), f"{folder}/")[1:]
    where = f"Generated: on tokens of make_tokens.py{_generated(record)}. Alone: on a GPU of its own."
    return Section("The runs", (words(found.rule), where), tuple(lines), charts(record, found.rule))


def _generated(record: Record) -> str:
    """What attribute said of the run on generated tokens, from its own JSON."""
    document = Record(record.folder / "generated", {}).document("attribute")
    if document is None:
        return ""
    heads = Heads.from_json(document).heads
    site = heads[0].guilty["dq"]
    shares = [100 * head.effect(site).share for head in heads]
    same = sum(head.guilty["dq"] == site for head in heads)
    return f" (attribute blames {site} in {same} of {len(heads)} sequences: {min(shares):.0f} to {max(shares):.0f} %)"


def _cure(record: Record, arms: dict[str, Predicted]) -> Section:
    """Gradient norms of the forks that train on, and of those that fail all the same."""
    said, drawn = [], list[Chart]()
    for arm, found in arms.items():
        forks = [row.fork for row in found.trained.values() if row.fork is not None]
        control, *forks = forks
        groups = {fate: [f for f in forks if f.failed is failed] for fate, failed in _FATES.items()}
        fates = [f"{fate} with {listed([f.mitigation for f in group])}." for fate, group in groups.items() if group]
        start = control.start
        said.append(
            f"Arm {arm}: from the checkpoint at the alarm (step {start:,}) the same run goes on {len(forks)} times, "
            "with the same batches, each time with one change in attention and nothing else. Unchanged it "
            f"{control.words}. {' '.join(fates)}"
        )
        for fate, name in (("It trains on", "cured"), ("It fails all the same", "not-cured")):
            last = max((fork.until for fork in groups[fate]), default=0)
            lines = [_curve("unchanged", record.runs[found.chain.run], NORM, first=max(start - _BEFORE, 0), last=last,
                            tone=FAILING_TONE)]  # fmt: skip
            lines += [_curve(fork.mitigation, record.runs[fork.run], NORM) for fork in groups[fate]]
            drawn.append(
                Chart(f"{arm}-{name}", f"Arm {arm}. {fate}", "Logarithmic; gaps are not finite.", STEP, NORM,
                      tuple(lines), marks=(Mark(float(start), f"changed at {start:,}"),))
            )  # fmt: skip
    return Section("The cure", tuple(said), charts=tuple(drawn))


def _predicted(arm: str, found: Outcomes, of: Predicted, summed: Batch | None) -> Section:
    """A line a fork: what was predicted of it, its sum over a batch, and what training did."""
    ranked = [row.mitigation for row in of.rows if row.fork is None and row.rank is not None]
    said = [f"Order, {a.of}: {a.words}." for a in of.agreement]
    said.append(f"Ranked by what-if and not trained, {len(ranked)} changes: {listed(ranked)}." if ranked else "")
    # Of a run that was replayed at several spacings the widest comes last.
    seen = {replay.run: replay for replay in [*found.alarms, *found.fork_alarms]}
    batch = {} if summed is None else {r.name.removeprefix(f"{summed.arm}+"): r for r in summed.rows}
    lines = [("change", "dQ off", "dW_Q off", "one", "sum", "coherence (p)", "training", "alarm", "seen")]
    for name, row in of.trained.items():
        fork, control = row.fork, name == "control"
        assert fork is not None
        adds, replay = batch.get(arm if control else name), seen.get(fork.run)
        head = "" if fork.worst is None else f", L{fork.worst[0]}H{fork.worst[1]}"
        lines.append((
            "none" if control else name,
            _left(row.left) + ("*" if row.left_by == "attribute" else ""), _left(row.left_dw_q),
            *((percent(adds.relative), percent(adds.relative_of_sum), f"{adds.coherence:.2f} ({adds.p_value:.2g})")
              if adds else [DASH] * 3),
            fork.words, DASH if replay is None else "silent" if replay.alarm is None else f"{replay.alarm:,}",
            DASH if fork.share is None else number(fork.share) + head,
        ))  # fmt: skip
    columns = (_COLUMNS,) if arm == "A" else ()
    return Section(f"Arm {arm}: predicted, and trained", (" ".join(said), *columns), tuple(lines))


def _seeds(found: Outcomes) -> Section:
    """The captures of arm A's seeds: the site that is blamed, and what its repair does."""
    chains = [chain for name, chain in found.chains.items() if name.partition("_seed")[0] == "A"]
    common = [name for name in chains[0].trained if all(name in chain.trained for chain in chains)]
    lines: list[tuple[str, ...]] = [("run", "captured", "attribute blames", "unchanged", *common[1:])]
    for of in chains:
        chain, site = of.chain, of.site
        shares = [effect.share for effect in chain.effects(site.guilty)]
        forks = {name: row.fork for name, row in of.trained.items() if row.fork is not None}
        lines.append((
            chain.run, f"step {chain.step:,}, L{chain.layer}H{chain.head}",
            f"{site.guilty} ({site.sequences} of {site.of}): {percent(median(shares))} of dQ's squared error "
            f"({100 * min(shares):.0f} to {100 * max(shares):.0f})",
            *(f"{forks[name].words}; predicted {_left(of.trained[name].left)}" for name in common),
        ))  # fmt: skip
    said = (
        "Each seed was captured at its own first alarm, and went on from there unchanged and with these changes. The "
        "predictions are of that capture alone."
    )
    return Section("Arm A on other seeds", (said,), tuple(lines))


def _left(value: float | None) -> str:
    return "not finite" if value is not None and not math.isfinite(value) else percent(value)


def _held(found: Outcomes) -> Section:
    """What the experiment had to show, and whether it did."""
    answers = {True: "yes", False: "no", None: "not run"}
    lines = [(c.words, answers[c.held], c.found) for c in found.criteria]
    return Section("What had to hold", (), (("what", "does it", "found"), *lines))


def _made(record: Record, jobs: Path) -> Section:
    """Planned runs that are not there, or not to their end; versions, devices, dates and configuration."""
    absent = []
    for name, options in read_jobs(jobs.read_text(encoding="utf-8"), Path()).items():
        run, wanted = record.runs.get(name), dict(pairwise(options)).get("--steps")
        if run is None:
            absent.append(name)
        elif run.departure is None and wanted is not None and run.until + 1 < int(wanted):
            absent.append(f"{name} (only to step {run.until + 1:,} of {int(wanted):,})")
    header, tokens = record.of("A")[0].header, record.of("A")[0].header.get("tokens", {})
    given = ", ".join(f"{k} {v}" for k, v in header["run"].items() if k not in ("arm", "seed"))
    made = set()
    for run in record.runs.values():
        tool = run.header.get("tool", {})
        versions = [f"{name} {tool.get(name)}" for name in ("python", "torch", "triton") if tool.get(name)]
        device = f"1 x {tool.get('device') or 'cpu'}, attn-diag {tool.get('version')}"
        made.add(", ".join([device, *versions, str(run.header.get("date", ""))[:10]]))
    return Section(
        "Not run, and how this was made",
        (
            "Planned, and not run or not finished; nothing on this page stands in for it: "
            f"{listed(absent) or 'nothing'}.",
            f"Of {record.of('A')[0].name}: {given}; {header.get('parameters', 0):,} parameters; "
            f"{tokens.get('count', 0):,} tokens of {tokens.get('file')}. Runs were made on {listed(sorted(made))}. "
            "Again: launch.py with jobs/chain.txt, which has every run's options, then remake.py, both in "
            "benchmarks/failing_run.",
        ),
    )


def thinned(x: Sequence[float], y: Sequence[Value]) -> tuple[tuple[float, ...], tuple[Value, ...]]:
    """Of a long curve the lowest and the highest of equal stretches, first and last; gaps stay gaps."""
    if len(x) <= POINTS:
        return tuple(x), tuple(y)
    kept, stretches = {0, len(x) - 1}, POINTS // (2 if None not in y else 3) - 1
    for i in range(stretches):
        places = range(i * len(x) // stretches, (i + 1) * len(x) // stretches)
        known = [(value, place) for place in places if (value := y[place]) is not None]
        kept |= {min(known)[1], max(known)[1]} if known else set()
        kept |= set([place for place in places if y[place] is None][:1])
    return tuple(x[i] for i in sorted(kept)), tuple(y[i] for i in sorted(kept))


def _curve(
    name: str, run: Run, axis: Axis, *, first: int = 0, last: float = math.inf, tone: Tone | None = None,
    look: Literal["faint", "broad"] | None = None,
) -> Series:  # fmt: skip
    """A run's loss or gradient norm at the steps first..last that it trained itself."""
    column = 1 if axis is LOSS else 2
    rows = [row for row in run.steps if first <= row[0] <= last]
    x, y = thinned([float(row[0]) for row in rows], [drawable(row[column], axis.log) for row in rows])
    return Series(name, x, y, tone=tone, look=look)


def _pictured(record: Record, found: Outcomes) -> list[Chart]:
    """Gradient norm and loss of the failing, the healthy and a cured run, with alarm and departure."""
    run, healthy, cure = record.of("A")[0], record.healthy[0], found.chains["A"].trained[_SHOWN].fork
    assert cure is not None
    cured = f"cured from the alarm on: {_SHOWN}"
    marks = events(run, [alarm["step"] for alarm in run.log.alarms])
    # Until the failure all are much alike: the healthy run is the ground on which the others lie.
    return [
        Chart(f"failing-run-{axis.label[:4]}", axis.label, "", STEP, axis, (
            _curve("healthy", healthy, axis, last=cure.until, tone=HEALTHY_TONE, look="broad"),
            _curve("scores rounded to BF16", run, axis, last=cure.until, tone=FAILING_TONE),
            _curve(cured, record.runs[cure.run], axis, last=cure.until, tone="good"),
        ), marks=marks)
        for axis in (NORM, LOSS)
    ]  # fmt: skip


def picture(record: Record, found: Outcomes, file: Path) -> None:
    """The README's figure as a PNG, 1,200 pixels wide. Raises RuntimeError without a Chromium."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        raise RuntimeError("no Chromium in PATH: it draws the picture")
    shown = Gallery("The failing run", "", tuple(Section("", charts=(chart,)) for chart in _pictured(record, found)))
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        source = Path(folder) / "page.html"
        source.write_text(gallery_document(shown), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": _WIDTH, "height": 900}, device_scale_factor=_SCALE, bypass_csp=True)
        page.goto(source.as_uri())
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        # The charts alone, one under the other.
        page.add_style_tag(content=_STYLE)
        page.wait_for_function(
            "document.querySelectorAll('figure svg').length === document.querySelectorAll('figure').length"
        )
        # One axis of steps for both: their plots begin and end at the same places.
        page.evaluate(_ALIGN)
        page.locator("main").screenshot(path=file)
        browser.close()


_ALIGN = """document.querySelectorAll(".chart").forEach((place) =>
    echarts.getInstanceByDom(place).setOption({ grid: { left: 48, bottom: 44, containLabel: false } }))"""
_STYLE = """
.bar, .lead, h2, footer, figcaption, .figure-head { display: none !important; }
main { padding: 14px 18px 6px !important; max-width: none !important; background: #fff; }
.gallery-section { margin: 0 !important; }
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--gallery", type=Path, default=Path("reports/gallery"), metavar="FOLDER")
    parser.add_argument("--no-picture", action="store_true")
    options = parser.parse_args()
    record = Record.read(options.record)
    found = Outcomes.of(record)
    write_json(options.record / "outcomes.json", found.plain())
    page = gallery(record, found)
    options.gallery.mkdir(parents=True, exist_ok=True)
    (options.gallery / "failing_run.html").write_text(gallery_document(page), encoding="utf-8")
    for section in page.sections:
        shown = [f"## {section.title}", *section.paragraphs, *([markdown(section.table)] if section.table else [])]
        print("\n\n".join(shown))
    if not options.no_picture:
        picture(record, found, options.gallery / "failing_run.png")


if __name__ == "__main__":
    main()
