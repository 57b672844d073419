"""benchmarks/failing_run: the departure's definition, logs, arms, resuming, processes, the queue and the table."""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from itertools import count
from pathlib import Path
from typing import Any

import alarms
import launch
import make_tokens
import numpy as np
import predictions
import pytest
import record
import torch
import train
from arms import ARMS, Arm, arm
from failing_record import RESULTS, a_run, one_thread  # noqa: F401  (a fixture)
from record import Record, Repeats
from runlog import Departure, RunLog, Writer, departures, plain, rows_of
from torch import Tensor

import attn_diag
from attn_diag.kernels.recipe import BACKWARD, Recipe
from attn_diag.watching.monitoring.alarm import Alarm, AlarmRule
from attn_diag.watching.monitoring.record import MonitorCheck, read_log

Rows = list[tuple[int, float, float]]


def on_trend(steps: int, seed: int = 0, noise: float = 0.02) -> Rows:
    """The first steps of a healthy run: the loss falls from 9.7 to 4, the gradient norm from 8 to 0.6."""
    draw = random.Random(seed)
    return [
        (s, 4 + 5.7 * 0.98**s + draw.gauss(0, noise), (0.6 + 7.4 * 0.9**s) * draw.lognormvariate(0, 0.3))
        for s in range(steps)
    ]


def changed(rows: Rows, at: range, loss: float = 0.0, factor: float = 1.0) -> Rows:
    return [(s, x + loss, n * factor) if s in at else (s, x, n) for s, x, n in rows]


CALM = on_trend(400)
CASES: dict[str, tuple[Rows, list[Departure]]] = {
    "calm": (CALM, []),
    "noisy": (on_trend(1100, seed=1, noise=0.3), []),
    "level shift": (changed(CALM, range(300, 400), loss=1.0), [Departure(300, "loss")]),
    "slow rise": (changed(CALM, range(310, 315), loss=0.5), [Departure(310, "loss")]),
    "four steps high": (changed(CALM, range(300, 304), loss=1.0), []),
    "norm 15 times": (changed(CALM, range(300, 301), factor=8.0), []),
    "norm 50 times": (changed(CALM, range(300, 301), factor=50.0), [Departure(300, "gradient norm")]),
    "high before there is a trend": (changed(CALM, range(40, 46), loss=3.0, factor=60.0), []),
    "not a number, at once": (changed(CALM, range(5, 400), loss=float("nan")), [Departure(5, "non-finite")]),
    "infinite norm": (changed(CALM, range(300, 400), factor=float("inf")), [Departure(300, "non-finite")]),
    "norm, then loss before it was certain": (
        changed(changed(CALM, range(300, 400), loss=1.0), range(302, 303), factor=50.0),
        [Departure(300, "loss"), Departure(302, "gradient norm")],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_departures(case: str) -> None:
    rows, expected = CASES[case]
    assert departures(rows) == expected


def write_log(path: Path, rows: Rows, alarms: tuple[int, ...] = ()) -> None:
    with Writer(path) as log:
        log.write({"header": {"run": {"arm": "A", "seed": 3}, "first_step": 0}})
        for step, loss, norm in rows:
            log.write({"step": step, "loss": loss, "grad_norm": norm, "lr": step * 5e-7, "seconds": 0.271828})
            if step in alarms:
                log.write(
                    {"alarm": {"kind": "growth", "step": step, "layer": 2, "head": 7, "reason": "so", "seen": step}}
                )
        log.write({"end": "departed", "step": len(rows)})


def test_a_log_reads_back(tmp_path: Path) -> None:
    rows = changed(on_trend(1100), range(1000, 1100), loss=float("nan"), factor=float("inf"))
    write_log(tmp_path / "run.jsonl", rows, alarms=(450,))
    log = RunLog.read(tmp_path / "run.jsonl")
    assert [s for s, _, _ in log.steps] == list(range(1100))
    assert log.steps[500][1] == pytest.approx(rows[500][1], rel=1e-5)
    assert log.steps[500][1] != rows[500][1]  # six digits
    assert np.isnan(log.steps[1050][1])
    assert log.steps[1050][2] == float("inf")
    assert [a["step"] for a in log.alarms] == [450]
    assert log.end == "departed"


def test_a_killed_run_keeps_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_log(path, on_trend(10))
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b'{"step":7') + 20])
    log = RunLog.read(path)
    assert [s for s, _, _ in log.steps] == list(range(7))
    assert log.end == "cut off"


def test_a_resumed_log_has_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_log(path, on_trend(120), alarms=(30, 110))
    with Writer(path, resume_at=101) as log:
        log.write({"header": {"first_step": 101}})
        log.write({"step": 101, "loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "seconds": 1.0})
    read = RunLog.read(path)
    assert [s for s, _, _ in read.steps] == list(range(102))
    assert ([a["step"] for a in read.alarms], len(read.headers)) == ([30], 2)


def test_an_exception_is_in_the_log(tmp_path: Path) -> None:
    def fail() -> None:
        with Writer(tmp_path / "run.jsonl") as log:
            log.write({"header": {}})
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        fail()
    assert RunLog.read(tmp_path / "run.jsonl").end == "RuntimeError: out of memory"
    (tmp_path / "other.jsonl").write_text('{"step":0,"loss":1,"grad_norm":1,"seconds":1}\n')
    with pytest.raises(ValueError, match="no header"):
        RunLog.read(tmp_path / "other.jsonl")


# By arm: what is rounded elsewhere than in arm A, forward and backward.
AGAINST_A: dict[str, tuple[set[str], set[str]]] = {
    "B": ({"scores", "difference"}, set()),
    "B-fp32-accumulator": ({"scores", "difference", "accumulator"}, set()),
    "B-fp32-row-sum": ({"scores", "difference", "row_sum"}, set()),
    "stabilised": ({"softmax"}, set()),
    "A+fp32-sums": ({"accumulator", "row_sum"}, set()),
    "A+fp32-scores": ({"scores", "difference"}, set()),
    "A+fp32-o-delta": (set(), {"delta_from"}),
    "A+delta-from-dp": (set(), {"delta_from"}),
    "B+stabilised-2": ({"scores", "difference", "softmax"}, set()),
}


def test_an_arm_differs_from_a_in_the_named_sites_alone() -> None:
    names = [f.name for f in fields(Recipe) if f.init and f.name not in ("name", "summary")]

    def differ(name: str) -> tuple[set[str], set[str]]:
        found, a = arm(name), ARMS["A"]
        forward, backward = (
            {n for n in names if getattr(one, n) != getattr(other, n)}
            for one, other in ((found.forward, a.forward), (found.backward, a.backward))
        )
        # Each recipe is run one way only.
        return forward - set(BACKWARD), backward & set(BACKWARD)

    assert {name: differ(name) for name in AGAINST_A} == AGAINST_A
    assert differ("qiu2025") not in AGAINST_A.values()


def test_what_is_no_arm_is_refused() -> None:
    for name, said in (("C", "no arm 'C'"), ("A+magic", "no mitigation 'magic'"), ("healthy+uncast-ds", "no recipe")):
        with pytest.raises(KeyError, match=said):
            arm(name)


def test_arm_a_rounds_what_it_says_and_nothing_else() -> None:
    a = ARMS["A"].forward
    assert a is not None
    rounded = {f.name for f in fields(Recipe) if f.init and getattr(a, f.name) == "bf16" and f.name != "input"}
    # probs (P_bar for the tensor core) and the backward's casts: as in every BF16 kernel.
    assert rounded == {"scores", "difference", "accumulator", "row_sum", "out"} | {
        "probs", "backward_probs", "dscores", "dq"
    }  # fmt: skip
    assert (a.row_max, a.softmax.kind) == ("fp32", "safe")
    assert ARMS["A"].backward.backward_scores == "fp32"
    assert ARMS["A"].backward.delta_from == "rounded-o"


VOCABULARY, CONTEXT = 61, 16


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text with structure: every token is followed by one of two."""
    draw = np.random.default_rng(0)
    text = np.cumsum(draw.integers(1, 3, 4000)) % VOCABULARY
    path = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    np.save(path, text.astype(np.uint16))
    return path


def arguments(tokens: Path, out: Path, arm: str, *more: str) -> list[str]:
    tiny = {
        "layers": 1, "heads": 1, "width": 32, "context": CONTEXT, "vocabulary": VOCABULARY, "sequences": 4,
        "micro-batch": 2, "warmup": 4, "learning-rate": 0.01, "steps": 3, "print-every": 1000,
    }  # fmt: skip
    sizes = [str(part) for name, value in tiny.items() for part in (f"--{name}", value)]
    return ["--arm", arm, "--tokens", str(tokens), "--out", str(out), "--device", "cpu", *sizes, *more]


def run(tokens: Path, out: Path, arm: str, *more: str, received: list[int] | None = None) -> tuple[str, RunLog]:
    options = train.parser().parse_args(arguments(tokens, out, arm, *more))
    end = train.train(options, [] if received is None else received)
    return end, RunLog.read(out / f"{train.name_of(options)}.jsonl")


def losses(log: RunLog) -> list[float]:
    return [loss for _, loss, _ in log.steps]


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_trains(arm: str, tokens: Path, tmp_path: Path) -> None:
    small = ("--sequences", "1", "--steps", "3")
    (end, log), (_, healthy), (_, other) = (
        run(tokens, tmp_path / part, name, *small, "--seed", seed)
        for part, name, seed in (("one", arm, "0"), ("two", "healthy", "0"), ("three", "healthy", "1"))
    )
    assert (end, log.end, len(log.steps)) == ("finished", "finished", 3)
    assert losses(log)[0] == pytest.approx(np.log(VOCABULARY), rel=0.05)
    # The same weights and data: before the first update only the roundings of one layer's attention differ. BF16
    # keeps 2**-9 of O; the loss sees that through a residual branch that is small at the start.
    assert losses(log)[0] == pytest.approx(losses(healthy)[0], abs=2**-9)
    assert losses(other)[0] != pytest.approx(losses(healthy)[0], abs=2**-9)
    header = log.headers[0]
    assert (header["run"]["arm"], header["run"]["seed"], header["first_step"]) == (arm, 0, 0)
    assert header["tokens"] == {"file": "tokens.npy", "count": 4000, "crc32": header["tokens"]["crc32"]}


def test_gradient_accumulation_changes_nothing(tokens: Path, tmp_path: Path) -> None:
    def norms(name: str, size: str) -> list[float]:
        return [n for _, _, n in run(tokens, tmp_path / name, "healthy", "--micro-batch", size)[1].steps]

    # 3 + 1 sequences: the parts weigh by their size. BF16 products see the same numbers in another order.
    assert norms("parts", "3") == pytest.approx(norms("whole", "4"), rel=2**-8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "sum", lambda sizes: next(iter(sizes)), raising=False)  # the first part's size for all
        assert norms("wrong", "3") != pytest.approx(norms("again", "4"), rel=2**-8)


def checkpointed(path: Path) -> list[Tensor]:
    """Weights and optimizer state of a checkpoint."""
    state = torch.load(path, weights_only=True)
    moments = [value for per in state["optimizer"]["state"].values() for value in per.values()]
    return [*state["model"].values(), *moments]


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_resumed_run_goes_on_bit_for_bit(
    forgotten: bool, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = ("--checkpoint-every", "2")
    run(tokens, tmp_path / "whole", "healthy", "--steps", "6", *save)
    run(tokens, tmp_path / "parts", "healthy", "--steps", "3", *save)
    if forgotten:
        monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", lambda *_: None)
    end, log = run(tokens, tmp_path / "parts", "healthy", "--steps", "6", "--resume", *save)
    whole = RunLog.read(tmp_path / "whole" / "healthy_seed0.jsonl")
    pairs = zip(*(checkpointed(tmp_path / name / "healthy_seed0.pt") for name in ("whole", "parts")), strict=True)
    assert (end, len(log.headers), log.headers[1]["first_step"]) == ("finished", 2, 3)
    assert all(torch.equal(a, b) for a, b in pairs) is (log.steps == whole.steps) is not forgotten


def test_a_signal_ends_the_run_after_its_step(tokens: Path, tmp_path: Path) -> None:
    end, log = run(tokens, tmp_path, "healthy", "--checkpoint-every", "50", received=[15])
    assert (end, log.end, len(log.steps)) == ("stopped by a signal", "stopped by a signal", 1)
    assert (tmp_path / "healthy_seed0.pt").exists()
    assert not list(tmp_path.glob("*.partial"))


def test_a_failed_run_ends_soon_after(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count()

    def breaking(self: Arm, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG001
        """NaN from the ninth call on: two micro-batches a step, one layer, so that a step has two calls."""
        return attend(ARMS["healthy"], q, k, v) * (1.0 if next(calls) < 8 else float("nan"))

    attend = Arm.attend
    monkeypatch.setattr(Arm, "attend", breaking)
    end, log = run(tokens, tmp_path, "A", "--steps", "30", "--stop-after", "5")
    assert departures(log.steps) == [Departure(4, "non-finite")]
    assert (end, log.end, log.steps[-1][0]) == ("departed", "departed", 9)


class Alarming(attn_diag.Monitor):
    """Alarms at step 5."""

    def step_ended(self, step: int) -> None:
        super().step_ended(step)
        if step == 5:
            self._raise(Alarm("rounding", step, 0, 0, None, "so", ""))


def test_at_the_alarm_the_run_is_kept_and_the_head_captured(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attn_diag, "Monitor", Alarming)
    more = ("--monitor-every", "3", "--steps", "9")
    _, log = run(tokens, tmp_path, "healthy", "--at-alarm", *more)
    assert log.alarms == [{"kind": "rounding", "step": 5, "layer": 0, "head": 0, "reason": "so"}]
    # The alarm of step 5 is known after it: step 6 is captured, and the checkpoint is what step 6 starts from.
    (capture,) = (tmp_path / "captures" / "healthy_seed0_alarm").glob("*.safetensors")
    found = attn_diag.load(capture)
    assert (found.metadata.step, found.metadata.layer, found.q_heads) == (6, 0, 1)
    assert torch.load(tmp_path / "healthy_seed0_alarm.pt", weights_only=True)["step"] == 6

    # Resumed after the alarm it keeps the first alarm's checkpoint.
    kept = (tmp_path / "healthy_seed0_alarm.pt").read_bytes()
    shutil.copy(tmp_path / "healthy_seed0_alarm.pt", tmp_path / "healthy_seed0.pt")
    more_steps = ("--monitor-every", "3", "--steps", "14", "--at-alarm", "--resume")
    run(tokens, tmp_path, "healthy", *more_steps)
    assert len(list((tmp_path / "captures" / "healthy_seed0_alarm").iterdir())) == 1
    assert (tmp_path / "healthy_seed0_alarm.pt").read_bytes() == kept

    start = ("--start-from", str(tmp_path / "healthy_seed0_alarm.pt"))
    run(tokens, tmp_path, "healthy", *start, *more, "--tag", "again")
    whole_run, again = (RunLog.read(tmp_path / f"healthy_seed0{tag}.jsonl") for tag in ("", "_again"))
    assert again.headers[0]["from"] == {"run": "healthy_seed0", "step": 6}
    assert again.steps == whole_run.steps[:9]  # what lies behind it was copied, the rest is the same bits
    run(tokens, tmp_path, "A", *start, *more)
    other = RunLog.read(tmp_path / "A_seed0.jsonl")
    assert other.steps[:6] == whole_run.steps[:6]
    assert other.steps[7:] != whole_run.steps[7:]
    with pytest.raises(ValueError, match="is of the run"):
        run(tokens, tmp_path, "B", *start, "--clip", "2.0")
    # The same command again is refused, and takes nothing away.
    with pytest.raises(FileExistsError, match="--resume"):
        run(tokens, tmp_path, "healthy", "--at-alarm", *more)
    assert (tmp_path / "healthy_seed0_alarm.pt").read_bytes() == kept


def test_a_fork_has_its_parent_s_checks_behind_it(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitored = ("--monitor-every", "1", "--checkpoint-every", "10")
    run(tokens, tmp_path, "healthy", "--steps", "3", *monitored, "--tag", "first")
    seen = []

    class Watched(attn_diag.Monitor):
        def __init__(self, *args: Any, history: Sequence[MonitorCheck], **options: Any) -> None:
            seen.append([check.step for check in history])
            super().__init__(*args, history=history, **options)

    monkeypatch.setattr(attn_diag, "Monitor", Watched)
    start = ("--start-from", str(tmp_path / "healthy_seed0_first.pt"), "--tag", "fork")
    _, log = run(tokens, tmp_path, "healthy", *start, "--steps", "5", *monitored)
    assert log.headers[0]["from"] == {"run": "healthy_seed0_first", "step": 3}
    run(tokens, tmp_path, "healthy", "--steps", "6", *monitored, "--tag", "fork", "--resume")
    assert seen == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert [c.step for c in read_log(tmp_path / "monitor" / "healthy_seed0_fork.jsonl")] == list(range(6))


def test_the_named_steps_are_captured(tokens: Path, tmp_path: Path) -> None:
    run(tokens, tmp_path, "healthy", "--steps", "5", "--capture-steps", "2:4", "--capture-layers", "0")
    files = (tmp_path / "captures" / "healthy_seed0_from0").glob("*.safetensors")
    assert sorted(attn_diag.load(file).metadata.step or 0 for file in files) == [2, 3]


def test_a_step_s_sequences_follow_from_seed_and_step() -> None:
    starts = [train.sequence_starts(*of, 160, 10_000, 64) for of in ((7, 12), (7, 12), (7, 13), (8, 12))]
    assert [torch.equal(starts[0], other) for other in starts[1:]] == [True, False, False]


SLEEPER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("ended after its step", flush=True), sys.exit(0)))
print("at work", flush=True)
time.sleep({seconds})
print("finished", flush=True)
sys.exit({code})
"""


def sleeper(seconds: float, code: int = 0) -> list[str]:
    return [sys.executable, "-c", SLEEPER.format(seconds=seconds, code=code)]


def test_the_queue_runs_all_on_every_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slots = launch.Slots(["0", "1"], tmp_path)
    show = [sys.executable, "-c", "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES']); time.sleep(0.5)"]
    began = time.monotonic()
    assert launch.run_all({f"run{i}": show for i in range(4)}, slots, 60)
    assert slots.codes == {f"run{i}": 0 for i in range(4)}
    assert time.monotonic() - began >= 1  # two by two
    assert sorted((tmp_path / f"run{i}.txt").read_text() for i in range(4)) == ["0\n", "0\n", "1\n", "1\n"]
    assert not launch.run_all({"bad": sleeper(0, 3), "good": sleeper(0)}, launch.Slots([""], tmp_path), 60)
    assert "bad: exit code 3; at work" in capsys.readouterr().out


def test_at_the_limit_runs_end_after_their_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slots = launch.Slots([""], tmp_path)
    assert not launch.run_all({"long": sleeper(60), "waiting": sleeper(60)}, slots, 1.0)
    assert (tmp_path / "long.txt").read_text() == "at work\nended after its step\n"
    assert slots.codes == {"long": 0}
    assert "waiting: not started" in capsys.readouterr().out


def test_a_run_that_has_ended_is_not_started_again(tmp_path: Path) -> None:
    for name, end in (("done", "finished"), ("failed", "departed"), ("cut", "stopped by a signal")):
        with Writer(tmp_path / f"{name}.jsonl") as log:
            log.write({"header": {"run": {}}})
            log.write({"end": end, "step": 3})
    (tmp_path / "empty.jsonl").touch()  # killed before its header
    jobs = {name: sleeper(0) for name in ("done", "failed", "cut", "new", "empty")}
    assert list(launch.open_jobs(jobs, tmp_path)) == ["cut", "new", "empty"]
    # With more steps to do it goes on; of --steps given twice the last counts.
    assert list(launch.open_jobs({"done": ["--steps", "0", "--steps", "4"]}, tmp_path)) == ["done"]
    assert not launch.open_jobs({"done": ["--steps", "4", "--steps", "0"]}, tmp_path)


def test_launched_runs_come_out_as_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path, "A", 3, departs=300, end=310)
    a_run(tmp_path, "fa2", monitored=50, end=200)
    (tmp_path / "empty.jsonl").touch()  # killed before its header
    monkeypatch.setattr(sys, "argv", ["launch.py", "--arms", "A", "--seeds", "3", "--out", str(tmp_path)])
    monkeypatch.setattr(launch, "open_jobs", lambda *_: {})
    with pytest.raises(SystemExit) as ended:
        launch.main()
    assert ended.value.code == 0
    _, _, failing, calm = (line.split(" | ") for line in capsys.readouterr().out.splitlines())
    assert failing[:4] == ["| A_seed3", "310", "300, loss", "–"]
    assert calm[:5] == ["| fa2_seed0", "200", "–", "–", "silent"]


def test_jobs_are_read(tmp_path: Path) -> None:
    text = "--arm A --seed 1  # first\n\n--arm A --start-from A_seed1_alarm.pt --tag 'again'\n"
    jobs = launch.read_jobs(text, tmp_path)
    assert list(jobs) == ["A_seed1", "A_seed0_again"]
    assert jobs["A_seed0_again"][-2:] == ["--start-from", str(tmp_path / "A_seed1_alarm.pt")]
    assert launch.read_jobs("--arm A --start-from=a.pt", tmp_path)["A_seed0"][-1] == str(tmp_path / "a.pt")
    with pytest.raises(ValueError, match="two jobs are called A_seed0"):
        launch.read_jobs("--arm A\n--arm A --seed 0\n", tmp_path)


def test_a_run_waits_for_the_checkpoint_it_starts_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "there.pt"
    make = [sys.executable, "-c", f"import time, pathlib; time.sleep(0.5); pathlib.Path({str(there)!r}).touch()"]
    read = [sys.executable, "-c", f"import pathlib; assert pathlib.Path({str(there)!r}).exists()", "--start-from"]
    slots = launch.Slots(["", ""], tmp_path)
    assert launch.run_all({"waits": [*read, str(there)], "makes": make}, slots, 60)
    assert slots.codes == {"makes": 0, "waits": 0}
    assert not launch.run_all({"never": [*read, str(tmp_path / "nowhere.pt")]}, launch.Slots([""], tmp_path), 60)
    assert "never: not started, its checkpoint is not there" in capsys.readouterr().out


def test_the_committed_table_is_what_the_committed_logs_say() -> None:
    replays = alarms.alarm_rows(Record.read(RESULTS / "failing_run").runs.values(), AlarmRule())
    again = plain({"rule": asdict(AlarmRule()), "runs": [asdict(row) for row in replays]})
    assert again == json.loads((RESULTS / "failing_run" / "alarms.json").read_text())
    runs = [run for run in replays if run.every == 25]
    assert len(runs) == 6
    for run in runs:
        if run.run.startswith("A"):
            assert run.lead is not None
            assert run.lead >= 150
        else:
            assert (run.departure, run.alarm, run.steps >= 1000, run.witness < 0.5) == (None, None, True, True)


def test_monitored_runs_are_the_runs_that_were_not() -> None:
    for seed in (1, 2):
        paths = [RESULTS / "failing_run" / f"A_seed{seed}{part}.jsonl" for part in ("", "_first480")]
        whole, first = (RunLog.read(path).steps for path in paths)
        assert len(first) == 480
        assert first == whole[:480]
        assert [any("monitor" in row for row in rows_of(path)) for path in paths] == [False, True]


def test_tokens_spell_the_text() -> None:
    texts = [b"the cat and the dog", b"the  end\n"]
    assert [b"".join(make_tokens.cut(text)) for text in texts] == texts
    known = make_tokens.tokens_by_piece(texts, 257 + 2)  # "the" and one more word are tokens
    tokens = make_tokens.encode(texts, known).tolist()
    assert tokens.count(0) == 2
    assert tokens.count(257) == 3
    assert tokens[-3:] == [ord("d") + 1, ord("\n") + 1, 0]
    assert max(tokens) <= 258
    spelled = {257 + i: piece for piece, i in ((p, t - 257) for p, t in known.items())}
    back = b"".join(b"|" if t == 0 else spelled.get(t) or bytes([t - 1]) for t in tokens)
    assert back == b"".join(text + b"|" for text in texts)


def test_a_record_holds_what_the_runs_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = on_trend(60)
    write_log(tmp_path / "A_seed3.jsonl", rows, alarms=(50,))
    (tmp_path / "monitor").mkdir()
    check = '{"step":50,"layers":[{"layer":0,"module":null,"metrics":{"max_logit":[1.23456789,null,"Infinity"]}}]}\n'
    (tmp_path / "monitor" / "A_seed3.jsonl").write_text(check + '{"step":100,"lay')  # a kill cut the last line
    monkeypatch.setattr(sys, "argv", ["record.py", str(tmp_path), str(tmp_path / "record")])
    record.main()
    kept = RunLog.read(tmp_path / "record" / "A_seed3.jsonl.xz")
    assert kept == RunLog.read(tmp_path / "A_seed3.jsonl")
    assert kept.alarms
    (found,) = read_log(tmp_path / "record" / "monitor" / "A_seed3.jsonl.xz")
    assert found.layers[0].values["max_logit"] == pytest.approx([1.2346, np.nan, np.inf], nan_ok=True, abs=1e-12)
    assert not list((tmp_path / "record").rglob("*.partial"))


def test_runs_made_twice_are_compared_digit_by_digit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nans = changed(CALM, range(390, 400), loss=float("nan"))
    for folder, rows in (("one", nans), ("two", nans[:395]), ("three", changed(nans, range(200, 201), loss=1e-3))):
        (tmp_path / folder).mkdir()
        write_log(tmp_path / folder / "A_seed3.jsonl", rows)
    for again, differs in ((["two"], None), (["two", "three"], 200)):
        where = [str(tmp_path / name) for name in ("one", "record", "--again", *again)]
        monkeypatch.setattr(sys, "argv", ["record.py", *where[:2], "--again", *where[3:]])
        record.main()
        (found,) = Repeats.from_json(Record.read(tmp_path / "record").document("repeats") or b"").repeats
        assert (found.compared, found.differs_at, found.times) == (395, differs, 1 + len(again))
        assert (found.departures[:2], found.ends[:2]) == ((390, 390), (399, 394))


def test_errors_of_one_direction_add_up_and_others_do_not() -> None:
    draw = torch.Generator().manual_seed(0)
    exact = torch.randn(8, 4, 6, generator=draw, dtype=torch.float64)
    same = torch.ones(4, 6) * (1 + 0.1 * torch.rand(8, 1, 1, generator=draw, dtype=torch.float64))
    signs = torch.tensor([1, -1, -1, 1, 1, -1, 1, -1.0], dtype=torch.float64)[:, None, None]
    coherent, mixed = (predictions.summed("", e, exact) for e in (same, same * signs))
    # Of the 2^7 choices of signs (a common one does not count) only the one at hand does as much.
    assert (coherent.p_value, coherent.sequences) == (2**-7, 8)
    assert coherent.coherence == pytest.approx(8, rel=0.01)
    assert mixed.p_value > 0.5
    assert mixed.coherence < 0.1
    assert mixed.relative == pytest.approx(coherent.relative)
    assert coherent.relative_of_sum > 5 * mixed.relative_of_sum


def test_the_scores_repair_is_what_the_failing_capture_needs() -> None:
    captures = Path(__file__).parent / "captures"
    capture = attn_diag.load(captures / "failing_step500_L2H7.safetensors")
    arm_a, scores, sums = predictions.summed_batch(capture, "A", ["fp32-scores", "fp32-sums"]).rows
    assert arm_a.relative == pytest.approx(0.0717, rel=0.02)  # dW_Q's error as attribute has it
    assert scores.relative < arm_a.relative / 3 < sums.relative
    with pytest.raises(ValueError, match="one head"):
        predictions.summed_batch(attn_diag.load(captures / "gqa_T200.safetensors"), "A", [])
