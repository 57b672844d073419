"""Runs several arms and seeds at the same time, each on one GPU, from a queue; prints the table at the end.

    python benchmarks/failing_run/launch.py --arms healthy A --seeds 0 1 2 --out runs --limit-seconds 560 \\
        -- --tokens tokens.npy.xz --monitor-every 50
    python benchmarks/failing_run/launch.py --jobs benchmarks/failing_run/jobs/chain.txt --out runs -- --tokens …

What stands after ``--`` goes to every ``train.py``. A file of jobs has one run a line, as options of ``train.py`` ("#"
starts a comment). Runs start in the order given: put the long ones first. One that starts from a checkpoint (paths in
the file are relative to OUT) waits until it is there, one that has ended by itself is not run again. At the limit the
runs at work are asked to end after their step (SIGTERM) and those that wait are not started. Console output of a run:
OUT/NAME.txt. Exit code 1 if a run failed or was not started.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from alarms import all_rows, table
from record import Record, markdown
from runlog import RunLog, begun, run_name

from attn_diag.watching.monitoring.alarm import AlarmRule

TRAIN = Path(__file__).with_name("train.py")
START_FROM = "--start-from"
# Between the request to end and the end: a step and a checkpoint are done in it.
_GRACE_SECONDS = 30


@dataclass
class Slots:
    """One run at a time on every one of ``devices``: values of CUDA_VISIBLE_DEVICES, or "" for the CPU; a device that
    is to share its time between two runs stands there twice."""

    devices: list[str]
    folder: Path
    running: dict[str, tuple[str, subprocess.Popen[bytes]]] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)

    def free(self) -> list[str]:
        """The devices that can take a run, the least busy first."""
        used = Counter(device for device, _ in self.running.values())
        return sorted(Counter(self.devices) - used, key=used.__getitem__)

    def start(self, name: str, command: list[str]) -> None:
        """Start a command on a free device, its output in a file of its own."""
        device = self.free()[0]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": device, "PYTHONUNBUFFERED": "1"}
        with (self.folder / f"{name}.txt").open("wb") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        self.running[name] = device, process
        print(f"{name}: started on device {device or 'cpu'}", flush=True)

    def collect(self) -> None:
        """Take note of runs that have ended."""
        for name, (_, process) in list(self.running.items()):
            code = process.poll()
            if code is not None:
                self.codes[name] = code
                del self.running[name]
                lines = (self.folder / f"{name}.txt").read_text(errors="replace").splitlines()
                print(f"{name}: exit code {code}; " + "\n".join(lines[-15 if code else -1 :]), flush=True)

    def stop(self) -> None:
        """Ask all to end after their step, wait, and end those that do not."""
        for _, process in self.running.values():
            process.send_signal(signal.SIGTERM)
        until = time.monotonic() + _GRACE_SECONDS
        while self.running and time.monotonic() < until:
            time.sleep(0.1)
            self.collect()
        for _, process in self.running.values():
            process.kill()
            process.wait()
        self.collect()


def devices() -> list[str]:
    """The GPUs that this process may use; [""] without any."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]) or [""]


def run_all(jobs: dict[str, list[str]], slots: Slots, limit_seconds: float) -> bool:
    """Run the commands by name; True if all were started and ended with exit code 0."""
    until = time.monotonic() + limit_seconds
    waiting = list(jobs.items())
    try:
        while (waiting or slots.running) and time.monotonic() < until:
            ready = next((job for job in waiting if slots.free() and can_start(job[1])), None)
            if ready is not None:
                waiting.remove(ready)
                slots.start(*ready)
            elif not slots.running:
                break  # nobody makes what the others wait for
            else:
                time.sleep(0.1)
            slots.collect()
    finally:
        slots.stop()
    for name, command in waiting:
        print(f"{name}: not started, {'the time was up' if can_start(command) else 'its checkpoint is not there'}")
    return not waiting and not any(slots.codes.values())


def can_start(command: list[str]) -> bool:
    """Whether the checkpoint that a run starts from is there, if it needs one."""
    return START_FROM not in command or Path(command[command.index(START_FROM) + 1]).exists()


def read_jobs(text: str, out: Path) -> dict[str, list[str]]:
    """Name -> options of ``train.py``. Raises ValueError for a name that stands there twice."""
    jobs: dict[str, list[str]] = {}
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        named = argparse.ArgumentParser(add_help=False)
        for option, default in (("--arm", ""), ("--seed", "0"), ("--tag", "")):
            named.add_argument(option, default=default)
        found, _ = named.parse_known_args(words)
        start = argparse.ArgumentParser(add_help=False)
        start.add_argument(START_FROM, dest="file")
        checkpoint, words = start.parse_known_args(words)
        if checkpoint.file is not None:
            words += [START_FROM, str(out / checkpoint.file)]
        name = run_name(found.arm, found.seed, found.tag)
        if name in jobs:
            raise ValueError(f"two jobs are called {name}; give one a --tag")
        jobs[name] = words
    return jobs


def open_jobs(jobs: dict[str, list[str]], out: Path) -> dict[str, list[str]]:
    """The jobs whose log has not come to an end of its own in ``out``: one that finished fewer steps goes on."""
    left = dict(jobs)
    for name, options in jobs.items():
        path = out / f"{name}.jsonl"
        log = RunLog.read(path) if begun(path) else None
        # Of an option that is given twice the last one counts.
        wanted = [int(value) for option, value in pairwise(options) if option == "--steps"][-1:] or [0]
        done = log.steps[-1][0] + 1 if log and log.steps else 0
        if log and (log.end == "departed" or (log.end == "finished" and done >= wanted[0])):
            print(f"{name}: ended already ({log.end})")
            del left[name]
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = parser.add_mutually_exclusive_group(required=True)
    runs.add_argument("--arms", nargs="+", metavar="NAME")
    runs.add_argument("--jobs", type=Path, metavar="FILE")
    parser.add_argument("--per-device", type=int, default=1, metavar="RUNS", help="at a time on each")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"))
    own, rest = (sys.argv[1:], [])
    if "--" in own:
        own, rest = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    options.out.mkdir(parents=True, exist_ok=True)
    text = options.jobs.read_text() if options.jobs else ""
    for arm in options.arms or ():
        text += "".join(f"--arm {arm} --seed {seed}\n" for seed in options.seeds)
    jobs = {
        name: [sys.executable, str(TRAIN), "--out", str(options.out), *rest, *own_options]
        for name, own_options in read_jobs(text, options.out).items()
    }
    jobs = open_jobs(jobs, options.out)
    # A request to end reaches the runs too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    done = run_all(jobs, Slots(devices() * options.per_device, options.out), options.limit_seconds)
    record = Record.read(options.out)
    print(markdown(table(record.runs.values(), all_rows(record, AlarmRule()))))
    sys.exit(0 if done else 1)


if __name__ == "__main__":
    main()
