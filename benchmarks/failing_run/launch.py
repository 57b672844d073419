"""Runs several arms and seeds at the same time, each alone on one GPU, from a queue; prints the table at the end.

    python benchmarks/failing_run/launch.py --arms healthy A --seeds 0 1 2 --out runs --limit-seconds 560 \\
        -- --tokens tokens.npy.xz --monitor-every 50

What stands after ``--`` goes to every ``train.py``. Runs start in the order given, arm by arm: put the long ones first.
At the limit the runs at work are asked to end after their step (SIGTERM) and those that wait are not started. Console
output of a run: OUT/ARM_seedSEED.txt. Exit code 1 if a run failed or was not started.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import summary

TRAIN = Path(__file__).with_name("train.py")
# Between the request to end and the end: a step and a checkpoint are done in it.
_GRACE_SECONDS = 30


@dataclass
class Slots:
    """One run at a time on every device of ``devices``: values of CUDA_VISIBLE_DEVICES, or "" for the CPU."""

    devices: list[str]
    folder: Path
    running: dict[str, tuple[str, subprocess.Popen[bytes]]] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)

    def start(self, name: str, command: list[str]) -> None:
        """Start a command on a free device, its output in a file of its own."""
        device = next(d for d in self.devices if d not in self.running)
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": device, "PYTHONUNBUFFERED": "1"}
        with (self.folder / f"{name}.txt").open("wb") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        self.running[device] = name, process
        print(f"{name}: started on device {device or 'cpu'}", flush=True)

    def collect(self) -> None:
        """Take note of runs that have ended."""
        for device, (name, process) in list(self.running.items()):
            code = process.poll()
            if code is not None:
                self.codes[name] = code
                del self.running[device]
                lines = (self.folder / f"{name}.txt").read_text(errors="replace").splitlines()
                print(f"{name}: exit code {code}; " + "\n".join(lines[-15 if code else -1 :]), flush=True)

    def free(self) -> bool:
        return len(self.running) < len(self.devices)

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
            while waiting and slots.free():
                slots.start(*waiting.pop(0))
            time.sleep(0.1)
            slots.collect()
    finally:
        slots.stop()
    for name, _ in waiting:
        print(f"{name}: not started, the time was up", flush=True)
    return not waiting and not any(slots.codes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", required=True, metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"))
    own, rest = (sys.argv[1:], [])
    if "--" in own:
        own, rest = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    options.out.mkdir(parents=True, exist_ok=True)
    jobs = {
        f"{arm}_seed{seed}": [
            sys.executable, str(TRAIN), "--arm", arm, "--seed", str(seed), "--out", str(options.out), *rest
        ]
        for arm in options.arms
        for seed in options.seeds
    }  # fmt: skip
    # A request to end reaches the runs too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    done = run_all(jobs, Slots(devices(), options.out), options.limit_seconds)
    print(summary.table(summary.read(options.out)))
    sys.exit(0 if done else 1)


if __name__ == "__main__":
    main()
