"""Mutated captures, dumps, diagnoses, pages and baselines by the hundred thousand: what becomes of each.

Every case is known by what reads it and its seed, and runs in a worker process with a limit on memory and time. It
ends in success or in an InputError; whatever else happens (another exception, an InputError for lack of memory, a
process that dies or runs too long) is a hole, and is printed with the command that repeats it. Seeds can be split:
each run adds its own to FILE.

    python benchmarks/fuzz.py --first 0 --count 100000 --json benchmarks/results/fuzz_cpu.json
    python benchmarks/fuzz.py --only inspect --first 4711 --count 1 --show
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import signal
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from fuzzing import TARGETS, attempt, corpus, diagnosis
from measuring import made_by, options_of, save

_MB = 2**20


class TooLongError(BaseException):
    """Not an Exception: no parser's handler may take it for damage."""


def work(target: str, seeds: range, seconds: int, megabytes: int, folder: str, pipe: Connection) -> None:
    """Run the cases of ``seeds``; sends (seed, outcome, seconds, peak in MB) of each."""
    torch.set_num_threads(1)
    diagnosis()
    corpus(target)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * _MB,) * 2)

    def stop(*_: object) -> None:
        raise TooLongError

    signal.signal(signal.SIGVTALRM, stop)
    for seed in seeds:
        pipe.send(("begin", seed))
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        # What Python cannot interrupt is ended, and seen to have died.
        signal.alarm(20 * seconds)
        start = time.process_time()
        try:
            outcome = attempt(target, seed, Path(folder))
        except TooLongError:
            outcome = f"more than {seconds} s"
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            outcome = f"{type(error).__name__}: {str(error)[:200]} ({Path(last.filename).name}, {last.name})"
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        pipe.send(("end", seed, outcome, time.process_time() - start, peak))
    pipe.send(None)


@dataclass
class Worker:
    """One target's cases, in a process that is started anew where a case ends it."""

    target: str
    seeds: range
    seconds: int
    megabytes: int
    counts: Counter[str] = field(default_factory=Counter)
    holes: list[dict[str, Any]] = field(default_factory=list)
    slowest: float = 0.0
    peak: float = 0.0
    current: int = -1

    def start(self) -> None:
        self.folder = TemporaryDirectory()
        self.pipe, theirs = multiprocessing.Pipe(duplex=False)
        arguments = (self.target, self.seeds, self.seconds, self.megabytes, self.folder.name, theirs)
        self.process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
        self.process.start()
        theirs.close()

    def hear(self) -> bool:
        """Take one message; whether there are more to come."""
        try:
            message = self.pipe.recv()
        except EOFError:
            self.process.join()
            self.hole(self.current, f"the process died ({self.process.exitcode})")
            self.seeds = range(self.current + 1, self.seeds.stop)
            self.start()
            return True
        if message is None:
            self.process.join()
            self.folder.cleanup()
            return False
        if message[0] == "begin":
            self.current = message[1]
            return True
        _, seed, outcome, seconds, peak = message
        self.slowest, self.peak = max(self.slowest, seconds), max(self.peak, peak)
        if outcome in ("success", "refused"):
            self.counts[outcome] += 1
        else:
            self.hole(seed, outcome)
        return True

    def hole(self, seed: int, what: str) -> None:
        self.counts["holes"] += 1
        self.holes.append({"target": self.target, "seed": seed, "what": what})
        print(f"{what}\n  python benchmarks/fuzz.py --only {self.target} --first {seed} --count 1 --show", flush=True)

    def figures(self) -> dict[str, Any]:
        done = sum(self.counts.values())
        outcomes = {name: self.counts[name] for name in ("success", "refused", "holes")}
        return {"cases": done, **outcomes, "slowest_s": round(self.slowest, 2), "peak_mb": round(self.peak)}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000, help="how many seeds of each target, at most")
    parser.add_argument("--only", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--seconds", type=int, default=30, help="CPU time of a case, at most")
    parser.add_argument("--megabytes", type=int, default=1024, help="memory of a case, at most")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--show", action="store_true", help="run here, without limits, with the traceback")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.count)
    if given.show:
        for target in given.only:
            with TemporaryDirectory() as folder:
                for seed in seeds:
                    print(target, seed, attempt(target, seed, Path(folder)))
        return
    workers = [Worker(target, seeds, given.seconds, given.megabytes) for target in given.only]
    for worker in workers:
        worker.start()
    start, active = time.monotonic(), {w.pipe: w for w in workers}
    while active and time.monotonic() - start < 60 * given.minutes:
        for pipe in wait(list(active), timeout=5):
            worker = active.pop(pipe)  # type: ignore[call-overload]
            if worker.hear():
                active[worker.pipe] = worker
    for worker in active.values():
        worker.process.kill()
        worker.process.join()
    run = made_by() | {
        "seeds": [given.first, given.first + given.count],
        "limits": {"cpu_s": given.seconds, "mb": given.megabytes},
        "minutes": round((time.monotonic() - start) / 60, 1),
        "targets": {worker.target: worker.figures() for worker in workers},
        "holes": [hole for worker in workers for hole in worker.holes],
    }
    before = json.loads(given.json.read_text())["runs"] if given.json is not None and given.json.exists() else []
    save({"runs": [*before, run]}, given.json)
    print(json.dumps(run["targets"], indent=1))


if __name__ == "__main__":
    main()
