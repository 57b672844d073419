"""What was planned and is not in the record, and how what is there was made."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import page_outcomes as outcomes
from page_record import Record, Run
from runlog import run_name
from values import listed

from attn_diag.reports.charts import Section
from attn_diag.reports.words import DASH

# JSON files by stem, what makes them, and what they show.
DOCUMENTS = {
    "chain_A": ("predictions.py", "which rounding site is guilty in arm A, from the capture at its alarm"),
    "chain_B": ("predictions.py", "which rounding site is guilty in arm B, from the capture at its alarm"),
    "outcomes": ("outcomes.py", "mitigations predicted beside trained, with their rank correlation"),
    "summed_A": ("summed.py", "whether arm A's errors of dW_Q add up over a batch, cure by cure"),
    "summed_B": ("summed.py", "whether arm B's errors of dW_Q add up over a batch, cure by cure"),
    "stabilised": ("stabilised.py", "when the stabilised softmax makes a NaN, predicted beside come"),
    "accumulation": ("accumulation.py", "how the error of dW_Q accumulates over 100 consecutive steps"),
}

_VERSIONS = {"version": "attn-diag", "python": "Python", "torch": "torch", "triton": "Triton"}
_HEAD = ("run", "starts from", "steps", "end", "date", "ms a step", "options of train.py")


@dataclass(frozen=True)
class Job:
    """A planned run: a line of a file of jobs, as options of train.py."""

    arm: str
    seed: int
    tag: str
    steps: int | None
    start_from: str | None
    monitored: bool
    options: str

    @property
    def name(self) -> str:
        """Of its files."""
        return run_name(self.arm, self.seed, self.tag)

    @property
    def words(self) -> str:
        """What it is to show."""
        if self.start_from is None:
            return f"whether arm {self.arm} trains, seed {self.seed}"
        change = self.arm.partition("+")[2]
        start = Path(self.start_from).stem.removesuffix("_alarm")
        if start.partition("_seed")[0] == self.arm:
            return f"how {start} goes on unchanged from its alarm"
        return f"whether {start} trains on with {change or f'arm {self.arm}'} from its alarm on"


def planned(path: Path) -> list[Job]:
    """The jobs of a file; none where there is no such file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tag", default="")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--start-from")
    parser.add_argument("--monitor-every", type=int, default=0)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = []
    for words in (shlex.split(line, comments=True) for line in lines):
        if words:
            o, _ = parser.parse_known_args(words)
            found.append(Job(o.arm, o.seed, o.tag, o.steps, o.start_from, o.monitor_every > 0, shlex.join(words)))
    return found


def missing(record: Record, jobs: Sequence[Job], undrawn: str | None = None) -> Section:
    """Every planned run and result that is not there, or not to its end. ``undrawn``: why accumulation.json is not."""
    by_name = {run.name: run for run in record.runs}
    rows = []
    for job in jobs:
        run = by_name.get(job.name)
        if run is None:
            rows.append((job.name, "not run", job.words))
            continue
        if run.departure is None and job.steps is not None and run.end < job.steps:
            rows.append((job.name, f"only to step {run.end:,} of {job.steps:,}", job.words))
        if job.monitored and run.monitor is None:
            rows.append((job.name, "no monitor's log", "its alarm, replayed from every head's metrics"))
    rows += [
        (f"{stem}.json", f"not made ({script})", words)
        for stem, (script, words) in DOCUMENTS.items()
        if stem not in record.documents
    ]
    if undrawn is not None:
        rows.append(("accumulation.json", undrawn, DOCUMENTS["accumulation"][1]))
    for arm in ("A", "B"):
        names = [
            str(row.get("mitigation"))
            for row in outcomes.rows(record, arm)
            if row.get("fork") is None and row.get("rank") is not None
        ]
        if names:
            rows.append(
                (f"{len(names)} changes of arm {arm} that what-if ranks", "predicted, not trained", listed(names))
            )
    if not rows:
        return Section("Not run", ("Nothing: all that was planned is above.",))
    said = "What was planned and could not be run, or was not finished. Nothing on this page stands in for it."
    return Section("Not run", (said,), (("what", "state", "it would have shown"), *rows))


def made(record: Record, jobs: Sequence[Job]) -> Section:
    """Versions, device, dates and configuration, from the logs' headers; the options of planned runs."""
    options = {job.name: job.options for job in jobs}
    lines: list[tuple[str, ...]] = [_HEAD]
    lines += [(*_line(run), options.get(run.name, DASH)) for run in record.runs]
    words = {run.arm: str(run.header.get("words", "")) for run in record.runs}
    arms = tuple(f"{arm}: {text}." for arm, text in words.items() if text and "+" not in arm)
    configuration = _configuration(record.runs)
    shared = "ms a step: the median; several runs may have shared a GPU."
    again = "Again: launch.py with the jobs below, then this page by page.py, both in benchmarks/failing_run."
    said = (*configuration, *_tools(record.runs), *arms, shared, again)
    return Section("How this was made", said, tuple(lines) if record.runs else ())


def _configuration(runs: Sequence[Run]) -> tuple[str, ...]:
    if not runs:
        return ()
    main = next((run for run in runs if run.arm == "A" and not run.tag), runs[0])
    header = main.header
    given = {k: v for k, v in header.get("run", {}).items() if k not in ("arm", "seed")}
    said = f"Of {main.name}: " + ", ".join(f"{name} {value}" for name, value in given.items())
    others = [
        run.name
        for run in runs
        if {k: v for k, v in run.header.get("run", {}).items() if k not in ("arm", "seed")} != given
    ]
    parameters, tokens = header.get("parameters"), header.get("tokens", {})
    more = [f"{parameters:,} parameters"] if isinstance(parameters, int) else []
    more += [f"{tokens['count']:,} tokens of {tokens.get('file')}"] if "count" in tokens else []
    same = "all runs alike" if not others else f"different in {', '.join(others)}"
    return (f"{said}; {'; '.join([*more, same])}.",)


def _tools(runs: Sequence[Run]) -> list[str]:
    """Devices and versions, and of which runs where they differ."""
    found: dict[str, list[str]] = {}
    for run in runs:
        tool = run.header.get("tool", {})
        versions = [f"{name} {tool.get(key)}" for key, name in _VERSIONS.items() if tool.get(key)]
        words = ", ".join([f"{run.header.get('world', 1)} x {tool.get('device') or 'cpu'}", *versions])
        found.setdefault(words, []).append(run.name)
    return [f"{words}: {'every run' if len(found) == 1 else ', '.join(names)}." for words, names in found.items()]


def _line(run: Run) -> tuple[str, ...]:
    start = f"{run.origin}, step {run.first:,}" if run.origin else "step 0"
    return (
        run.name, start, f"{run.end:,}", run.log.end, str(run.header.get("date", DASH))[:10],
        f"{1e3 * median(run.log.seconds):.0f}" if run.log.seconds else DASH,
    )  # fmt: skip
