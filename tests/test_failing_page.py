"""benchmarks/failing_run/page.py: every section from a small record, its numbers those of the logs, gaps named.

Every check is also given something wrong, and must reject it.
"""

from __future__ import annotations

import json
import lzma
import math
import random
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from attn_diag.reports import gallery_document
from attn_diag.reports.charts import Chart, Gallery, Section
from attn_diag.watching.monitoring.alarm import AlarmRule
from attn_diag.watching.monitoring.record import LayerCheck, MonitorCheck

sys.path.append(str(Path(__file__).parent.parent / "benchmarks" / "failing_run"))
import page
import page_picture
from alarms import replayed
from page_cure import control_of, cures
from page_missing import planned
from page_monitor import spacing, watched
from page_record import Record, read_record
from page_series import NORM, curve, thinned
from values import at, middle, number, spread

Rows = list[tuple[int, float, float]]

FORK, FAILS, STEPS = 130, 170, 230
JOBS = """
# comment
--arm A --at-alarm --monitor-every 10 --steps 230
--arm fa2 --monitor-every 10 --steps 230   # healthy
--arm fa2 --seed 1 --monitor-every 10 --steps 230
--arm A --tag steps --start-from A_seed0_alarm.pt --steps 230 --capture-steps 150:160
--arm A+fp32-scores --start-from A_seed0_alarm.pt --steps 230
--arm A+fp32-sums --start-from A_seed0_alarm.pt --steps 230
--arm A+stabilised-2 --start-from A_seed0_alarm.pt --steps 230
--arm B --monitor-every 10 --steps 230
--arm B-fp32-row-sum --start-from B_seed0_alarm.pt --steps 230
--arm qiu2025 --steps 230
"""
TITLES = [
    "In one picture",
    "The run that fails", "What the monitor saw", "What the monitor saw: run by run", "The guilty rounding",
    "The guilty rounding: site by site", "The cure", "Predicted, and trained", "Predicted, and trained: run by run",
    "Do the errors add up over a batch?",
    "Arm B: the run that fails", "Arm B: what the monitor saw", "Arm B: what the monitor saw: run by run",
    "Arm B: the guilty rounding", "Arm B: the guilty rounding: site by site", "Arm B: the cure",
    "Arm B: predicted, and trained", "Arm B: predicted, and trained: run by run",
    "Arm B: do the errors add up over a batch?",
    "The published mitigation, and its limit", "Other arms, from the start", "What had to hold", "Not run",
    "How this was made",
]  # fmt: skip


# --- A small record ---


def rows_of(seed: int, first: int = 0, end: int = STEPS, fails: int | None = None) -> Rows:
    """Loss and gradient norm of a run; from ``fails`` on both grow, and the last norm is not finite."""
    draw = random.Random(seed)
    found = []
    for step in range(end):
        loss, norm = 3 + draw.gauss(0, 0.01), draw.lognormvariate(0, 0.1)
        if fails is not None and step >= fails:
            loss, norm = loss + 0.05 * (step - fails), norm * 30 * 1.3 ** (step - fails)
        found.append((step, loss, norm))
    if fails is not None:
        found = found[: fails + 25]
        found[-1] = (found[-1][0], found[-1][1], math.inf)
    return found[first:]


def write_log(
    folder: Path, name: str, rows: Rows, origin: str | None = None, alarm: int | None = None, words: str = "words"
) -> None:
    arm, _, rest = name.partition("_seed")
    header = {
        "date": "2026-11-22T02:04:53+00:00", "words": words, "world": 1, "parameters": 98_323_200,
        "run": {"arm": arm, "seed": int(rest.partition("_")[0]), "sequences": 40},
        "tool": {"version": "0.1.0", "torch": "2.11.0", "triton": "3.6.0", "device": "H200"},
        "tokens": {"file": "tokens.npy", "count": 1000},
        "from": None if origin is None else {"run": origin, "step": FORK},
    }  # fmt: skip
    lines: list[dict[str, Any]] = [{"header": header}]
    for step, loss, norm in rows:
        shown = norm if math.isfinite(norm) else "Infinity"
        lines.append({"step": step, "loss": loss, "grad_norm": shown, "lr": 0.0, "seconds": 0.08})
    if alarm is not None:
        lines.append(
            {"alarm": {"kind": "rounding", "step": alarm, "layer": 1, "head": 0, "reason": "r", "seen": alarm}}
        )
    lines.append({"end": "finished", "step": rows[-1][0] + 1})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def checks_of(end: int, grows: bool, every: int = 10) -> list[MonitorCheck]:
    """Two layers of two heads; where it grows layer 1, head 0 does, from step 80 on."""
    found = []
    for step in range(0, end, every):
        share = np.array([0.004, 0.003])
        over, logit = np.array([1.0, 1.1]), np.array([5.0, 6.0]) + step / 10
        guilty = [share * [2 + max(step - 80, 0), 1], over * [20 if step > 80 else 1, 1]] if grows else [share, over]
        metrics = [(share, over), (guilty[0], guilty[1])]
        found.append(
            MonitorCheck(
                step,
                tuple(
                    LayerCheck(
                        i, f"h.{i}", {"dw_q_share": s, "dw_q_over_floor": o, "w_q_norm": s + 1, "max_logit": logit}
                    )
                    for i, (s, o) in enumerate(metrics)
                ),
            )
        )
    return found


def write_checks(folder: Path, name: str, checks: list[MonitorCheck]) -> None:
    (folder / "monitor").mkdir(exist_ok=True)
    with lzma.open(folder / "monitor" / f"{name}.jsonl.xz", "wt") as file:
        file.writelines(check.to_json() + "\n" for check in checks)


def chain_of(arm: str, guilty: str, other: str) -> dict[str, Any]:
    def effects(share: float, repaired: float, sham: float | None) -> dict[str, Any]:
        both = {"share": [share, share - 0.02, share + 0.02], "alone": [0.1] * 3, "repaired": [repaired] * 3}
        return {"dq": both | {"sham": [sham] * 3}, "dw_q": both | {"sham": [None] * 3}}

    def total(value: float) -> dict[str, list[float]]:
        return {"error": [value] * 3, "exact": [0.0] * 3, "captured": [value] * 3}

    repairs = [
        {"site": guilty, "left": {"dq": 0.02, "dw_q": 0.03}},
        {"site": other, "left": {"dq": 0.01, "dw_q": 0.01}},
    ]
    return {
        "run": f"{arm}_seed0", "arm": arm, "step": FORK + 1, "layer": 1, "head": 0, "sequences": 3, "rows": 1024,
        "inspect": {"labels": ["lossy"], "noise_factor": 11.3,
                    "propagation": {"dq": {"relative_error": 0.148}, "dw_q": {"relative_error": 0.0717}}},
        "identify": {"recipes": [["bf16-forward"]] * 3, "agreement": [0.99998] * 3},
        "attribute": {
            "sites": {
                other: {"words": f"rounding of {other}", "format": None, **effects(0.05, 0.14, None)},
                guilty: {"words": f"rounding of {guilty}", "format": "bf16", **effects(0.93, 0.021, 0.139)},
            },
            "totals": {"dq": total(0.148), "dw_q": total(0.07)},
            "guilty": {"dq": [guilty, guilty, other], "dw_q": [guilty] * 3},
            "guilty_words": {"dq": f"{guilty} in 2 of 3 sequences", "dw_q": f"{guilty} in 3 of 3 sequences"},
            "biased": {"dq": [None, None, None]},
            "inert": {"site": "backward_probs", "largest_change": [0.0, 0.0, 0.0]},
            "repairs": [repairs, repairs, repairs[::-1]],
        },
    }  # fmt: skip


def outcomes_of() -> dict[str, Any]:
    def row(name: str, left: Any, rank: float | None, fork: dict[str, Any] | None) -> dict[str, Any]:
        return {"mitigation": name, "left": left, "rank": rank, "left_by": "what-if", "left_dw_q": left, "sites": [],
                "equivalence": "exact", "fork": fork}  # fmt: skip

    def fork(run: str, departure: int | None) -> dict[str, Any]:
        reason = "gradient norm" if departure else None
        return {"run": run, "departure": departure, "until": STEPS - 1, "reason": reason, "loss": 3.0123, "gap": 0.5}

    rows = [
        row("fp32-scores", 0.0208, 1, fork("A+fp32-scores_seed0", None)),
        row("fp32-sums", 0.146, 2, fork("A+fp32-sums_seed0", 171)),
        row("stabilised-8", "Infinity", None, fork("A+stabilised-8_seed0", 140)),
        row("tile-64", 0.147, 3, None),
    ]
    agreement = [{"of": "mitigations that what-if ranks", "words": "Somers' D +1.00 over 1 pairs"}]
    apart = {"kept_most": {"mitigation": "fp32-scores", "left": 0.0208},
             "failed_least": {"mitigation": "fp32-sums", "left": 0.146}, "separated": True}  # fmt: skip
    site = {"words": "attribute blames scores", "repair": "fp32-scores", "others": {"fp32-sums": True, "pv-fp32": None}}
    chain = {"rows": rows, "agreement": agreement, "separation": apart, "site": site}
    criteria = [
        {"words": "A fails", "held": True, "found": "A_seed0: 170"},
        {"words": "B fails", "held": False, "found": "x"},
        {"words": "healthy runs", "held": None, "found": ""},
    ]
    alarms = [{"run": "A+fp32-scores_seed0", "alarm": None}, {"run": "A+fp32-sums_seed0", "alarm": 150}]
    return {"chains": {"A": chain, "B": chain}, "criteria": criteria, "fork_alarms": alarms}


def stabilised_of() -> dict[str, Any]:
    forecast = {
        "at": 131,
        "limit": 87.3,
        "level": 52.75,
        "level_from": "capture",
        "step": 188.2,
        "low": 150.0,
        "high": None,
    }
    return {
        "rule": {"window": 200},
        "capture": {"run": "A_seed0"},
        "runs": [{"run": "A+stabilised-2_seed0", "beta": 2.0, "limit": 87.3, "came": 190, "until": 190,
                  "error": -0.0095, "error_ahead": -0.03, "note": "", "forecast": forecast}],
        "not_run": [{"beta": 4.0, "forecasts": [forecast | {"limit": 29.1}]}],
    }  # fmt: skip


def summed_of(arm: str) -> dict[str, Any]:
    rows = [
        {"name": name, "relative": 0.06, "relative_of_sum": left, "coherence": 1.7, "p_value": 0.14, "cosine": -0.08}
        for name, left in ((arm, 0.08), (f"{arm}+fp32-scores", 0.01), (f"{arm}+delta-from-dp", 0.07))
    ]
    return {"arm": arm, "rows": rows}


def write_record(folder: Path) -> Path:
    """A record of everything but accumulation.json and the run A_seed0_steps."""
    folder.mkdir()
    (folder / "chain.txt").write_text(JOBS)
    failing = {arm: rows_of(seed, fails=FAILS) for seed, arm in enumerate("AB")}
    for arm, rows in failing.items():
        write_log(folder, f"{arm}_seed0", rows, alarm=120)
        write_checks(folder, f"{arm}_seed0", checks_of(len(rows), grows=True))
    for seed in (0, 1):
        write_log(folder, f"fa2_seed{seed}", rows_of(10 + seed))
        write_checks(folder, f"fa2_seed{seed}", checks_of(STEPS, grows=False))
    for name, fails in (("A+fp32-scores", None), ("A+fp32-sums", FAILS + 1), ("A+stabilised-2", 190)):
        # 100 steps of the origin stand before a fork's own.
        before = failing["A"][FORK - 100 : FORK]
        write_log(folder, f"{name}_seed0", [*before, *rows_of(3, FORK, fails=fails)], "A_seed0")
    write_log(folder, "B-fp32-row-sum_seed0", [*failing["B"][FORK - 100 : FORK], *rows_of(4, FORK)], "B_seed0")
    write_log(folder, "qiu2025_seed0", rows_of(5), words="the published code")
    documents = {
        "chain_A": chain_of("A", "scores", "row_sum"),
        "chain_B": chain_of("B", "row_sum", "accumulator"),
        "outcomes": outcomes_of(),
        "stabilised": stabilised_of(),
        "summed_A": summed_of("A"),
        "summed_B": summed_of("B"),
    }
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_record(tmp_path_factory.mktemp("record") / "chain")


@pytest.fixture(scope="module")
def record(folder: Path) -> Record:
    return read_record(folder)


@pytest.fixture(scope="module")
def made(folder: Path, record: Record) -> Gallery:
    return page.gallery(record, folder / "chain.txt")


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def section(gallery: Gallery, title: str) -> Section:
    return next(s for s in gallery.sections if s.title == title)


def chart(gallery: Gallery, name: str) -> Chart:
    return next(c for s in gallery.sections for c in s.charts if c.name == name)


def line(section: Section, first: str) -> dict[str, str]:
    """The row of a table that begins so, by its header."""
    found = next(row for row in section.table[1:] if row[0] == first)
    return dict(zip(section.table[0], found, strict=True))


def said(section: Section) -> str:
    return " ".join(section.paragraphs)


# --- The sections ---


def test_every_section_is_there_in_order(made: Gallery) -> None:
    assert [s.title for s in made.sections] == TITLES
    names = [c.name for s in made.sections for c in s.charts]
    assert len(set(names)) == len(names), "a file's name for every chart"


def test_the_page_is_one_file_that_a_browser_can_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new" / "page.html"
    arguments = ["page.py", str(folder), "--out", str(out), "--jobs", str(folder / "chain.txt")]
    monkeypatch.setattr(sys, "argv", arguments)
    page.main()
    text = out.read_text(encoding="utf-8")
    assert text == gallery_document(page.gallery(read_record(folder), folder / "chain.txt"))
    data = json.loads(re.findall(r'id="attn-diag-gallery">(.*?)</script>', text, re.S)[0])
    assert len(data) == len(TITLES)
    assert not re.findall(r"(?:src|href)=", text.partition("<script>")[0]), "nothing is fetched"


def test_the_summary_says_what_happened(record: Record) -> None:
    words = page.summary(record)
    for part in (
        "leaves its trend at step 170 (gradient norm)", "Healthy runs (seeds 0 and 1) keep their trend for 230 steps",
        "alarmed at step 120, 50 steps before", "the rounding of scores: 93 % of dQ", "the unchanged run fails at 170",
        "With that site repaired (fp32-scores) it is on its trend to 229 (ended).",
            "With other sites repaired it fails all the same (fp32-sums).",
            "1 of 3 changes keep the trend",
    ):  # fmt: skip
        assert part in words
    assert "fp32-sums (to" not in words


def same_values(found: Chart, name: str, rows: Rows, column: int) -> bool:
    """Whether a chart's line shows these steps of a log."""
    series = next(s for s in found.series if s.name == name)
    expected = [(float(row[0]), row[column] if math.isfinite(row[column]) else None) for row in rows]
    return list(zip(series.x, series.y, strict=True)) == expected


@pytest.mark.parametrize(("stem", "column"), [("loss", 1), ("gradient-norm", 2)])
def test_curves_are_the_logs(made: Gallery, stem: str, column: int) -> None:
    rows, healthy = rows_of(0, fails=FAILS), rows_of(10)
    found = chart(made, f"A-{stem}")
    assert same_values(found, "arm A, seed 0", rows, column)
    assert same_values(found, "healthy, seed 0", healthy, column)
    assert not same_values(found, "arm A, seed 0", [(s + 1, loss, norm) for s, loss, norm in rows], column)
    assert not same_values(found, "healthy, seed 0", rows_of(11), column)
    assert not same_values(found, "arm A, seed 0", rows, 3 - column)
    assert [(m.x, m.label) for m in found.marks] == [(120, "alarm at 120"), (170, "fails at 170")]


def test_a_fork_shows_and_judges_its_own_steps_only(record: Record, made: Gallery) -> None:
    origin = record.first("A")
    assert origin is not None
    forks = {run.change: run for run in cures(record, origin)}
    assert {name: run.departure.step if run.departure else None for name, run in forks.items()} == {
        "fp32-scores": None, "fp32-sums": 171, "stabilised-2": 190,
    }  # fmt: skip
    assert forks["fp32-sums"].steps[0][0] == FORK
    assert forks["fp32-sums"].log.steps[0][0] == FORK - 100
    assert same_values(chart(made, "A-cured-loss"), "fp32-scores", rows_of(3, FORK), 1)
    assert not same_values(chart(made, "A-cured-loss"), "fp32-scores", rows_of(3, FORK - 1), 1)
    assert {s.name for s in chart(made, "A-not-cured-loss").series} == {"unchanged", "fp32-sums", "stabilised-2"}


def test_the_control_is_the_longer_of_the_two(copied: Path) -> None:
    origin = read_record(copied).first("A")
    assert origin is not None
    assert control_of(read_record(copied), origin).name == "A_seed0"
    write_log(copied, "A_seed0_steps", [*rows_of(0)[FORK - 100 : FORK], *rows_of(0, FORK, fails=FAILS)][:-5], "A_seed0")
    assert control_of(read_record(copied), origin).name == "A_seed0"
    write_log(copied, "A_seed0_steps", [*rows_of(0)[FORK - 100 : FORK], *rows_of(0, FORK)], "A_seed0")
    assert control_of(read_record(copied), origin).name == "A_seed0_steps"
    assert [run.name for run in read_record(copied).of("A")] == ["A_seed0"], "a fork is no run from the beginning"


# --- The monitor ---


def test_the_monitors_values_are_those_of_the_replayed_rule(record: Record, made: Gallery) -> None:
    run, rule = record.first("A"), AlarmRule()
    assert run is not None
    expected = replayed(run.log, run.checks, 10, rule)
    assert expected.alarm is not None
    row = line(section(made, "What the monitor saw: run by run"), "arm A, seed 0")
    assert row["check every"] == "10"
    assert row["first alarm"] == str(expected.alarm)
    assert row["lead, steps"] == str(FAILS - expected.alarm) == str(expected.lead)
    assert row["head"] == "layer 1, head 0"
    assert line(section(made, "What the monitor saw: run by run"), "healthy, seed 1")["first alarm"] == "silent"
    seen = watched(run.checks, 10, rule)
    assert seen.alarm == expected.alarm
    assert watched(run.checks, 20, rule).alarm == replayed(run.log, run.checks, 20, rule).alarm
    assert watched(run.checks, 10, replace(rule, level=10.0)).alarm != expected.alarm
    before = [w for step, w in zip(seen.steps, seen.witness, strict=True) if step < expected.alarm]
    assert max(before) == expected.witness


def test_levels_and_marks_are_the_rules(made: Gallery) -> None:
    rule = AlarmRule()
    (level,) = chart(made, "A-share").bands
    assert (level.low, level.high) == (rule.level, rule.level)
    (threshold,) = chart(made, "A-witness").bands
    assert threshold.low == 1
    assert [m.label for m in chart(made, "A-share").marks][1] == "fails at 170"
    with pytest.raises(StopIteration):
        chart(made, "B-max-logit")


def test_checks_are_compared_at_a_spacing_that_all_have(copied: Path) -> None:
    write_checks(copied, "fa2_seed0", checks_of(STEPS, grows=False, every=30))
    record = read_record(copied)
    assert spacing([*record.of("A"), *record.healthy]) == 30
    made = page.gallery(record, copied / "chain.txt")
    assert "checked every 10, arm A alarmed at 120" in said(section(made, "What the monitor saw"))
    steps = next(s for s in chart(made, "A-witness").series if s.name == "arm A, seed 0").x
    assert steps == tuple(float(s) for s in range(0, FAILS + 25, 30))


# --- What the tool said ---


def test_sites_are_medians_the_guiltiest_first(made: Gallery) -> None:
    found = chart(made, "A-sites")
    assert found.y.names == ("rounding of scores (scores, bf16)", "rounding of row_sum (row_sum)")
    assert found.series[0].x == (0.93, 0.05)
    assert (
        line(section(made, "The guilty rounding: site by site"), found.y.names[0])["all but it"] == "2.1 % (2.1 to 2.1)"
    )
    assert dict(zip(chart(made, "A-sham").y.names, chart(made, "A-sham").series[0].x, strict=True)) == {
        "as it is": 0.148, "scores exact": 0.021, "scores: errors with random signs": 0.139,
        "sham repair: backward_probs exact": 0.148,
    }  # fmt: skip
    repairs = chart(made, "A-repairs")
    assert repairs.y.names == ("nothing exact", "1: scores (2 of 3)", "2: row_sum (2 of 3)")
    assert repairs.series[0].x == (0.148, 0.02, 0.01)
    text = said(section(made, "The guilty rounding"))
    for part in (
        "step 131, layer 1, head 0, 3 sequences of 1,024 tokens",
        "11.3 times",
        "dQ is 14.8 % off",
        "in 3 of 3",
    ):
        assert part in text
    assert chart(made, "B-sites").y.names[0].startswith("rounding of row_sum")


def test_predictions_stand_beside_what_training_did(made: Gallery) -> None:
    table = section(made, "Predicted, and trained: run by run")
    assert line(table, "fp32-scores")["training"] == "on its trend to 229 (ended)"
    assert line(table, "fp32-sums")["training"] == "fails at 171, gradient norm"
    assert [line(table, name)["alarm"] for name in ("fp32-scores", "fp32-sums", "stabilised-8")] == [
        "silent",
        "150",
        "–",
    ]
    assert line(table, "fp32-sums")["predicted: error of dQ"] == "14.6 %"
    assert line(table, "stabilised-8")["predicted: error of dQ"] == "not finite"
    bars = {s.name: s.x for s in chart(made, "A-predicted").series}
    assert bars == {"trains on": (0.0208,), "fails": (0.146,), "not trained": (0.147,)}
    assert "not finite or not known: stabilised-8" in chart(made, "A-predicted").caption
    assert "Somers' D +1.00 over 1 pairs" in said(section(made, "Predicted, and trained"))
    held = section(made, "What had to hold").table[1:]
    assert [row[1] for row in held] == ["yes", "no", "not known", "yes", "yes"]
    assert "forecast within 20 % of it" in held[-2][0]
    assert "forecast within 20 % of the steps ahead" in held[-1][0]


def test_what_had_to_hold_can_fail(copied: Path) -> None:
    def judged(words: str) -> str:
        made = page.gallery(read_record(copied), copied / "chain.txt")
        return next(row[1] for row in section(made, "What had to hold").table if words in row[0])

    limit = json.loads((copied / "stabilised.json").read_text())
    for run in limit["runs"]:
        if run["error"] is not None:
            run["error"] = 0.25
    (copied / "stabilised.json").write_text(json.dumps(limit))
    assert judged("forecast within 20 %") == "no"
    for departures, expected in (([749, 755], "yes"), ([749, 800], "no"), ([749, None], "no")):
        repeats = {"repeats": [{"run": "A_seed0", "departures": departures, "ends": [779, 830]}]}
        (copied / "repeats.json").write_text(json.dumps(repeats))
        assert judged("within 5 %") == expected
    # One that was ended at 600 says nothing of a failure at 749; one that went on to 760 does.
    for end, expected in ((600, "yes"), (760, "no")):
        run = {"run": "A_seed0", "departures": [749, 750, None], "ends": [779, 780, end]}
        (copied / "repeats.json").write_text(json.dumps({"repeats": [run]}))
        assert judged("within 5 %") == expected


def test_a_change_that_only_delays_the_failure_is_said_to(copied: Path) -> None:
    """With the roundings of an arm that failed later, from step 0 on."""

    def words() -> str:
        return said(section(page.gallery(read_record(copied), copied / "chain.txt"), "The cure"))

    def with_forward(name: str, forward: dict[str, str]) -> None:
        first, rest = (copied / f"{name}.jsonl").read_text().split("\n", 1)
        row = json.loads(first)
        row["header"]["forward"] = forward
        (copied / f"{name}.jsonl").write_text(json.dumps(row) + "\n" + rest)

    assert "not every one" not in words()
    with_forward("A+fp32-scores_seed0", {"scores": "fp32"})
    with_forward("B_seed0", {"scores": "bf16"})
    assert "not every one" not in words()
    with_forward("B_seed0", {"scores": "fp32"})
    assert "fp32-scores removes this failure, not every one" in words()


def test_steps_have_a_page_of_their_own(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page.steps_gallery(read_record(copied)) is None
    module = ModuleType("accumulation_page")
    monkeypatch.setattr(module, "sections", lambda found, _: [Section(t) for t in found["titles"]], raising=False)
    monkeypatch.setitem(sys.modules, "accumulation_page", module)
    (copied / "accumulation.json").write_text(json.dumps({"titles": ["one", "two", "three"]}))
    steps = page.steps_gallery(read_record(copied))
    assert steps is not None
    assert [s.title for s in steps.sections] == ["one", "two", "three"]
    shown = [s.title for s in page.gallery(read_record(copied), copied / "chain.txt").sections]
    assert [t for t in shown if t in ("one", "two", "three")] == ["one", "two"]


def test_the_steps_run_is_named_where_it_is_known(copied: Path) -> None:
    def captured(*steps: int) -> str | None:
        (copied / "accumulation.json").write_text(json.dumps({"over_steps": {"steps": steps}}))
        found = page.captured(read_record(copied))
        return None if found is None else found.name

    assert captured(FORK, FAILS) is None
    write_log(copied, "A_seed0_steps", [*rows_of(0)[FORK - 100 : FORK], *rows_of(0, FORK)], "A_seed0")
    assert captured(FORK, FAILS) == "A_seed0_steps"
    assert captured(FORK - 1, FAILS) is None
    assert captured(FORK, STEPS) is None
    write_log(copied, "A_seed1_steps", [*rows_of(0)[FORK - 100 : FORK], *rows_of(0, FORK)], "A_seed1")
    assert captured(FORK, FAILS) is None


def test_errors_that_add_up_stand_beside_training(made: Gallery) -> None:
    table = section(made, "Do the errors add up over a batch?")
    assert line(table, "none")["training"] == "fails at 170"
    assert line(table, "fp32-scores")["training"] == "on its trend to 229 (ended)"
    assert line(table, "delta-from-dp")["training"] == "not trained"
    assert line(table, "fp32-scores")["error of the sum"] == "1 %"
    assert line(table, "delta-from-dp")["error of the sum"] == "7 %"


@pytest.mark.parametrize("end", [170, 171])
def test_a_fork_that_stopped_before_the_unchanged_run_failed_says_nothing(end: int, copied: Path) -> None:
    before = rows_of(0, FORK - 100, FORK)
    write_log(copied, "A+fp32-scores_seed0", [*before, *rows_of(3, FORK, end=end)], "A_seed0")
    found = outcomes_of()
    found["chains"]["A"]["rows"][0]["fork"] |= {"until": 150, "cut_off": True}
    (copied / "outcomes.json").write_text(json.dumps(found))
    made = page.gallery(read_record(copied), copied / "chain.txt")
    # Unchanged it fails at step 170, to which a run of 171 steps has come.
    if end == 171:
        assert "It trains on with fp32-scores" in said(section(made, "The cure"))
        return
    assert "Stopped before that could be told: fp32-scores" in said(section(made, "The cure"))
    assert "it trains on" not in made.lead
    assert not [c for c in section(made, "The cure").charts if "cured" in c.name and "not-cured" not in c.name]
    row = line(section(made, "Predicted, and trained: run by run"), "fp32-scores")
    assert row["training"] == "stopped at 150: too early to tell"
    assert [s.name for s in chart(made, "A-predicted").series] == [
        "fails", "stopped too early to tell", "not trained",
    ]  # fmt: skip
    with pytest.raises(StopIteration):
        next(s for s in page_picture.picture(read_record(copied)).sections[0].charts[0].series if "cured" in s.name)


def test_other_seeds_stand_beside_the_first(copied: Path) -> None:
    assert "The same on other seeds" not in [s.title for s in page.gallery(read_record(copied)).sections]
    found = outcomes_of()
    site = {"guilty": "scores", "sequences": 8, "of": 8, "words": "attribute blames scores"}
    control = {"mitigation": "control", "left": 0.15, "fork": {"departure": 170, "until": 190}}
    first = found["chains"]["A"] | {"run": "A_seed0", "step": 131, "layer": 1, "head": 0, "site": site}
    first["rows"] = [*first["rows"], control]
    kept = {"mitigation": "fp32-scores", "left": 0.03, "fork": {"departure": None, "until": 229}}
    other = first | {"run": "A_seed1", "rows": [kept, control]}
    found["chains"] = {"A": first, "A_seed1": other, "AB": first}
    (copied / "outcomes.json").write_text(json.dumps(found))
    table = section(page.gallery(read_record(copied)), "The same on other seeds")
    # What was trained on one seed alone is left to the other tables.
    assert table.table[0] == ("run", "captured", "attribute blames", "unchanged", "fp32-scores")
    assert [row[0] for row in table.table[1:]] == ["A_seed0", "A_seed1"]
    assert line(table, "A_seed1")["fp32-scores"] == "on its trend to 229 (ended); predicted 3 %"
    assert line(table, "A_seed1")["unchanged"] == "fails at 170; predicted 15 %"


def test_without_predictions_the_forks_have_their_own_table(copied: Path) -> None:
    (copied / "outcomes.json").unlink()
    made = page.gallery(read_record(copied), copied / "chain.txt")
    table = section(made, "The cure: run by run")
    assert line(table, "none")["training"] == "fails at 170"
    assert line(table, "none")["largest gradient norm"] == "not finite"
    losses = [loss for step, loss, _ in rows_of(3, FORK, fails=FAILS + 1) if step < FAILS + 1][-20:]
    assert line(table, "fp32-sums")["loss, mean of the last 20"] == f"{sum(losses) / 20:.3f}"


def test_the_nan_is_shown_predicted_and_come(made: Gallery) -> None:
    table = section(made, "The published mitigation, and its limit")
    row = line(table, "A+stabilised-2_seed0")
    assert (row["NaN predicted at (95 %)"], row["NaN came at"], row["error"]) == ("188 (150 to open)", "190", "-0.9 %")
    assert line(table, "not run")["NaN came at"] == "not run"
    (found,) = table.charts
    assert [(m.x, m.label) for m in found.marks] == [
        (131, "capture 131"), (188.2, "NaN predicted 188"), (190, "NaN came 190"),
    ]  # fmt: skip
    known = next(s for s in found.series if s.name.startswith("A_seed0"))
    assert known.x == tuple(float(s) for s in range(0, 131, 10))
    assert known.y == tuple(6.0 + s / 10 for s in range(0, 131, 10))


def test_accumulation_plugs_in(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("accumulation_page")
    monkeypatch.setattr(module, "sections", lambda found, _: [Section(found["title"])], raising=False)
    monkeypatch.setitem(sys.modules, "accumulation_page", module)
    with lzma.open(copied / "accumulation.json.xz", "wt") as file:
        json.dump({"title": "Bias, size or coherence?"}, file)
    made = page.gallery(read_record(copied), copied / "chain.txt")
    titles = [s.title for s in made.sections]
    assert titles == [*TITLES[:-3], "Bias, size or coherence?", *TITLES[-3:]]
    assert "accumulation.json" not in absent(copied)
    with lzma.open(copied / "accumulation.json.xz", "wt") as file:
        json.dump({"another": "version"}, file)
    assert absent(copied)["accumulation.json"].startswith("not drawn, made by another version (KeyError: 'title')")


# --- What is not there ---


def absent(folder: Path) -> dict[str, str]:
    made = page.gallery(read_record(folder), folder / "chain.txt")
    return {row[0]: row[1] for row in section(made, "Not run").table[1:]}


def test_what_is_missing_of_the_whole_record(folder: Path) -> None:
    assert absent(folder) == {
        "A_seed0_steps": "not run",
        "accumulation.json": "not made (accumulation.py)",
        "1 changes of arm A that what-if ranks": "predicted, not trained",
        "1 changes of arm B that what-if ranks": "predicted, not trained",
    }


@pytest.mark.parametrize(
    ("file", "name", "gone"),
    [
        ("A_seed0.jsonl", "A_seed0", ["In one picture", "The run that fails", "What the monitor saw", "The cure"]),
        ("fa2_seed1.jsonl", "fa2_seed1", []),
        ("B_seed0.jsonl", "B_seed0", ["Arm B: the run that fails", "Arm B: what the monitor saw", "Arm B: the cure"]),
        ("A+fp32-scores_seed0.jsonl", "A+fp32-scores_seed0", []),
        ("B-fp32-row-sum_seed0.jsonl", "B-fp32-row-sum_seed0", ["Arm B: the cure"]),
        ("qiu2025_seed0.jsonl", "qiu2025_seed0", ["Other arms, from the start"]),
        ("monitor/A_seed0.jsonl.xz", "A_seed0", ["What the monitor saw"]),
        ("monitor/fa2_seed0.jsonl.xz", "fa2_seed0", []),
        ("chain_A.json", "chain_A.json", ["The guilty rounding"]),
        ("chain_B.json", "chain_B.json", ["Arm B: the guilty rounding"]),
        ("outcomes.json", "outcomes.json", ["Predicted, and trained", "Arm B: predicted, and trained"]),
        ("summed_B.json", "summed_B.json", ["Arm B: do the errors add up over a batch?"]),
        ("stabilised.json", "stabilised.json", ["The published mitigation, and its limit"]),
    ],
)
def test_every_missing_part_is_named_and_not_filled_in(
    copied: Path, made: Gallery, file: str, name: str, gone: list[str]
) -> None:
    assert name not in {row[0] for row in section(made, "Not run").table}
    (copied / file).unlink()
    less = page.gallery(read_record(copied), copied / "chain.txt")
    assert name in {row[0] for row in section(less, "Not run").table}
    assert not {s.title for s in less.sections} & set(gone)
    assert set(gone) <= set(TITLES)


def test_a_run_that_was_cut_short_is_named(copied: Path) -> None:
    write_log(copied, "fa2_seed1", rows_of(11)[:150])
    assert absent(copied)["fa2_seed1"] == "only to step 150 of 230"
    # One that failed is at its end.
    assert "A_seed0" not in absent(copied)


def test_an_empty_folder_makes_a_page_of_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "chain.txt").write_text(JOBS)
    made = page.gallery(read_record(tmp_path), tmp_path / "chain.txt")
    assert [s.title for s in made.sections] == ["Not run", "How this was made"]
    assert len(section(made, "Not run").table) == 1 + 10 + 7
    assert "No run of arm A" in made.lead
    assert gallery_document(made)


def test_what_cannot_be_read_is_named(tmp_path: Path, copied: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        read_record(tmp_path / "none")
    (copied / "outcomes.json").write_text("{")
    with pytest.raises(ValueError, match=r"outcomes\.json is no JSON"):
        read_record(copied)


def test_jobs_are_read_as_train_would(folder: Path) -> None:
    jobs = {job.name: job for job in planned(folder / "chain.txt")}
    assert len(jobs) == 10
    assert jobs["A_seed0_steps"].words == "how A_seed0 goes on unchanged from its alarm"
    assert jobs["A+fp32-scores_seed0"].words == "whether A_seed0 trains on with fp32-scores from its alarm on"
    assert jobs["fa2_seed1"].monitored
    assert jobs["fa2_seed1"].steps == 230
    assert not jobs["qiu2025_seed0"].monitored
    assert planned(folder / "none.txt") == []


def test_how_it_was_made_is_in_the_page(made: Gallery) -> None:
    found = section(made, "How this was made")
    row = line(found, "A+fp32-scores_seed0")
    assert (row["starts from"], row["date"], row["ms a step"]) == ("A_seed0, step 130", "2026-11-22", "80")
    assert "1 x H200, attn-diag 0.1.0, torch 2.11.0, Triton 3.6.0: every run." in said(found)
    assert row["options of train.py"] == "--arm A+fp32-scores --start-from A_seed0_alarm.pt --steps 230"
    assert "sequences 40" in said(found)


# --- Escaping, thinning, readers ---


def test_hostile_texts_stay_text(copied: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    chain = chain_of("A", evil, "row_sum")
    chain["inspect"]["labels"] = [evil]
    (copied / "chain_A.json").write_text(json.dumps(chain))
    write_log(copied, "qiu2025_seed0", rows_of(5), words=evil)
    text = gallery_document(page.gallery(read_record(copied), copied / "chain.txt"))
    assert evil not in text
    assert "<img src=x" not in text
    assert text.count("&lt;img src=x") >= 3
    assert evil in text.replace("&lt;", "<").replace("&gt;", ">"), "the check can fail"


def spiked(length: int = 2550) -> tuple[list[float], list[float | None]]:
    draw = random.Random(1)
    y: list[float | None] = [draw.random() for _ in range(length)]
    y[1234], y[1300], y[2000] = 50.0, -50.0, None
    return [float(i) for i in range(length)], y


def keeps(points: tuple[tuple[float, ...], tuple[float | None, ...]]) -> bool:
    """Whether a thinned curve has the extremes, the gap and the ends, in order."""
    x, y = points
    pairs = dict(zip(x, y, strict=True))
    return (
        pairs.get(1234.0) == 50.0 and pairs.get(1300.0) == -50.0 and pairs.get(2000.0, 0) is None
        and x[0] == 0 and x[-1] == 2549 and list(x) == sorted(set(x))
    )  # fmt: skip


def test_thinning_keeps_extremes_gaps_and_ends() -> None:
    x, y = spiked()
    found = thinned(x, y)
    assert len(found[0]) <= 600
    assert keeps(found)
    assert set(zip(*found, strict=True)) <= set(zip(x, y, strict=True)), "no point is made up"
    assert not keeps((tuple(x[::5]), tuple(y[::5])))
    assert thinned(x[:600], y[:600]) == (tuple(x[:600]), tuple(y[:600]))
    gaps = thinned(x, [None] * len(x))
    assert set(gaps[1]) == {None}


def test_long_runs_make_a_small_page(copied: Path) -> None:
    for seed in (0, 1):
        write_log(copied, f"fa2_seed{seed}", rows_of(10 + seed, end=2550))
    for name in ("A+fp32-scores", "A+fp32-sums"):
        write_log(copied, f"{name}_seed0", [*rows_of(0)[FORK - 100 : FORK], *rows_of(3, FORK, end=2550)], "A_seed0")
    made = page.gallery(read_record(copied), copied / "chain.txt")
    sizes = [len(s.x) for part in made.sections for c in part.charts for s in c.series]
    assert 500 < max(sizes) <= 600
    assert len(gallery_document(made).encode()) < 1_500_000
    run = read_record(copied).healthy[0]
    assert max(v for v in curve("", run, NORM).y if v is not None) == max(norm for _, _, norm in run.steps)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), ("Infinity", math.inf), ("-Infinity", -math.inf), (None, None), ("x", None), (True, None), ([1], None)],
)
def test_numbers_are_read_as_they_are(value: Any, expected: float | None) -> None:
    assert number(value) == expected


def test_readers_leave_out_what_is_missing() -> None:
    document = {"a": [{"b": 1}, {"b": None}]}
    assert at(document, "a", 0, "b") == 1
    assert at(document, "a", 1, "b") is None
    assert at(document, "a", 2, "b") is None
    assert at(document, "a", "b") is None
    assert middle([1.0, None, "NaN", 3.0]) == 2.0
    assert middle([]) is None
    assert spread([0.1, 0.3, 0.2]) == "20 % (10 to 30)"
    assert spread([0.1, "Infinity", "Infinity"]) == "not finite"
    assert spread(None) == "–"
    assert spread([1e-9, -2e-8]) == "below 0.001 %"
    assert spread([1e-9, 1.0]) == "50 % (1e-07 to 100)"


# --- The picture ---


def test_the_picture_shows_the_failing_the_healthy_and_the_cured_run(record: Record) -> None:
    found = page_picture.picture(record)
    for part in found.sections:
        names = [s.name for s in part.charts[0].series]
        assert names == ["healthy", "scores rounded to BF16", "cured from the alarm on: fp32-scores"]
        assert [m.label for m in part.charts[0].marks] == ["alarm at 120", "fails at 170"]
    with pytest.raises(ValueError, match="no run of arm A"):
        page_picture.picture(replace(record, runs=()))


def test_the_picture_is_1200_pixels_wide(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("playwright")
    if not any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")):
        pytest.skip("needs Chromium in PATH")
    file = tmp_path / "new" / "picture.png"
    # In a process of its own: another test's browser may be at work in this one.
    subprocess.run([sys.executable, page.__file__, folder, "--picture", file], check=True, timeout=120)
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1200
    assert 600 < height < 1200
