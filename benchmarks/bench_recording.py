"""What runs that capture leave behind when they are killed, interrupted or forked, or lose their disk.

    python benchmarks/bench_recording.py [--kills 1000] [--device cuda] [--compile] [--parallel 16] [--seconds 500]

Each run is a process of its own: a small model trains some steps under ``attn_diag.capture`` (both layers, all steps)
and announces, through a pipe, its loss after every step and every file in ``Recorder.written``. What it leaves is held
against a run that nothing happened to, and against one without capture:

- every announced file is there; every file that bears a capture's name is read to its last byte, and has the bits of
  the undisturbed run's file of that name; what was being written is named by ``half_written``;
- every announced loss has the bits of the run without capture;
- the folder is not taken for good: the next run may have it where nothing was written, and another one else.

Kills (SIGKILL) and interrupts (SIGINT) come up to a step's time after one of the run's announcements, drawn at random.
A run that ended before its signal came counts as none, and another is drawn. ``--compile`` runs everything but the
attention as one model compiled by inductor, as attention inside a compiled graph is not seen.

The result is saved after every part and every ten seconds. With ``--seconds`` no run is begun after that long: "runs"
says how many there were, "finished" whether they are all.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from captured_runs import PATIENCE, Process, Say, Setting, Training, Undisturbed, captured, judged, scratch, undisturbed
from measuring import Keeper, made_by, options_of, save

import attn_diag
from attn_diag.watching.live.claim import claim
from attn_diag.watching.live.recorder import Recorder


def next_run(folder: Path, *, empty: bool) -> int:
    """1 where the run after this one does not get the folder that it should get."""
    next_one = claim(folder, 0, "the next", "another")
    next_one.release()
    return int((next_one.folder == folder) != empty)


def one_hit(how: signal.Signals, setting: Setting, right: Undisturbed, until: float, seed: int) -> Counter[str]:
    """Runs until one of them gets its signal before it ends; none begins after ``until``, of the monotonic clock."""
    chance, found = random.Random(seed), Counter[str]()
    while not (found["runs"] or found["wrong: ended before it trained"]) and time.monotonic() < until:
        found.update(one_signal(how, setting, right, chance))
    return found


def one_signal(how: signal.Signals, setting: Setting, right: Undisturbed, chance: random.Random) -> Counter[str]:
    """A run that gets a signal at a random moment."""
    with scratch() as name:
        folder = name / "captures"
        process = Process(partial(captured, setting, folder, None))
        # Each step tells of a loss and of two files.
        process.wait_for(chance.randrange(3 * setting.steps))
        time.sleep(chance.uniform(0, right.seconds / setting.steps))
        told = process.end(how)
        found = judged(folder, told, right)
        found["runs"], found["runs that ended before"] = int(told.hit), int(not told.hit)
        found["wrong: the folder for the next run"] = next_run(folder, empty=not found["files"])
    # A kill leaves whole files and what was being written. An interrupt leaves nothing half-written, and of the step
    # that it cut short what had come so far, in two layers.
    cut_short = found["files"] - found["complete"]
    if how == signal.SIGINT:
        found["wrong: half-written or marked"] = found["left half-written"] + found["marker left"]
        cut_short = max(0, cut_short - 2)
    found["wrong: a file without all tensors"] = cut_short
    return found


def signalled(
    how: signal.Signals, runs: int, setting: Setting, right: Undisturbed, until: float, parallel: int
) -> Iterator[Counter[str]]:
    """What becomes of so many runs that get a signal, as they end."""
    # No process here may touch the device before it has forked its own.
    with get_context("fork").Pool(parallel) if parallel > 1 else nullcontext() as pool:
        every: Callable[..., Iterable[Counter[str]]] = map if pool is None else pool.imap_unordered
        yield from every(partial(one_hit, how, setting, right, until), range(runs))


def summed(counts: Iterable[Counter[str]]) -> dict[str, int]:
    """All runs' counts added up."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items()))


def wrongs(count: Mapping[str, int]) -> int:
    """How much of it is wrong."""
    return sum(number for name, number in count.items() if name.startswith("wrong"))


# What befalls a run while it trains.


def full_disk(setting: Setting, step: int, recorder: Recorder) -> None:
    """In the middle third no file can grow beyond 4 KiB."""
    recorder.drain()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    third = setting.steps // 3
    limit = 4096 if third <= step + 1 < 2 * third else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def removed_folder(setting: Setting, step: int, recorder: Recorder) -> None:
    """In the middle of the run."""
    if step == setting.steps // 2:
        recorder.drain()
        shutil.rmtree(recorder.folder)


def forks(say: Say, step: int, recorder: Recorder) -> None:  # noqa: ARG001 - a mischief's signature
    """After every step four children that run all exit handlers."""
    children = []
    for _ in range(4):
        children.append(os.fork())
        if not children[-1]:
            atexit._run_exitfuncs()
            os._exit(0)
    deadline, hung = time.monotonic() + PATIENCE / 3, 0
    for child in children:
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                hung += 1
            time.sleep(1e-4)
    if hung:
        say(f"hung {hung}")


def in_threads(setting: Setting, folder: Path, say: Say) -> None:
    """Two threads train under one capture; told are the losses of both, and how many calls are unaccounted for.

    Never compiled: a call is passed on unseen while another thread compiles.
    """
    lines: list[list[str]] = [[], []]
    with attn_diag.capture(None, folder, batch=None, calls=None) as recorder:
        threads = [threading.Thread(target=Training(setting).run, args=(own.append,)) for own in lines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    say("begun")
    for line in [*lines[0], *lines[1], *(f"files {path.name}" for path in recorder.written)]:
        if line != "begun":
            say(line)
    say(f"hung {4 * setting.steps - len(recorder.written) - sum(recorder.dropped.values())}")


def scenarios(setting: Setting, right: Undisturbed) -> dict[str, Any]:
    """One run for each."""
    found: dict[str, Any] = {}
    with scratch() as name:
        for title, mischief in (("disk full", full_disk), ("folder removed", removed_folder)):
            folder = name / title
            told = Process(partial(captured, setting, folder, partial(mischief, setting))).end()
            if title == "folder removed":
                told.files = []  # with the folder
            count = judged(folder, told, right)
            lost = sum(told.dropped.values())
            found[title] = {
                **count,
                "dropped": lost,
                "logged": told.logged,
                "wrong: not logged once": int(told.logged != 1),
            }
            if title == "disk full":
                found[title]["wrong: neither written nor dropped"] = len(right.files) - count["files"] - lost
        folder = name / "fork"
        forked = Process(lambda say: captured(setting, folder, partial(forks, say), say)).end()
        found["fork"] = judged(folder, forked, right) | {"forks": 4 * setting.steps}
        folder = name / "two"
        both = [Process(partial(captured, setting, folder, None)) for _ in range(2)]
        places = (folder, folder.with_name("two-2"))
        found["two processes"] = summed(judged(p, one.end(), right) for p, one in zip(places, both, strict=True))
        folder = name / "threads"
        eager = replace(setting, compiled=False)
        one = Process(lambda say: Training(eager).run(say)).end()
        told = Process(partial(in_threads, eager, folder)).end()
        there = [attn_diag.load(path) for path in folder.iterdir()]
        found["two threads"] = {
            "files": len(there),
            "wrong: announced and lost": len(set(told.files)) - len(there),
            "wrong: neither written nor dropped": told.hung,
            "wrong: other loss than without capture": int(told.losses != 2 * one.losses),
        }
    return found


def main() -> None:
    parser = options_of(__doc__, device="cpu")
    parser.add_argument("--compile", action="store_true", help="all but the attention, by inductor")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--interrupts", type=int, default=100)
    parser.add_argument("--steps", type=int, default=15, help="of each run")
    parser.add_argument("--parallel", type=int, default=1, help="so many runs at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so long")
    options = parser.parse_args()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # not a pool of processes that outlives a kill
    # Inductor asks at its import whether there is a device; the driver itself, once asked, is of no use to forks.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    logging.getLogger("attn_diag").addHandler(logging.NullHandler())
    setting = Setting(options.device, options.compile, options.steps)
    # A process that has asked the device what it is can fork none that uses it.
    with get_context("fork").Pool(1) as pool:
        result: dict[str, Any] = pool.apply(made_by, (options.device,))
    result |= {"compiled": options.compile, "steps of a run": options.steps, "finished": False}
    keeper = Keeper(lambda: save(result, options.json), options.seconds, every=10)
    right = undisturbed(setting)
    found = scenarios(setting, right)
    result |= found
    keeper.save()
    wrong = sum(wrongs(count) for count in found.values())
    # An equal share of what time is left for each signal, in proportion to its runs.
    share = (keeper.end - time.monotonic()) / max(options.kills + options.interrupts, 1)
    until, all_run = time.monotonic() + share * options.interrupts, True
    for title, how, runs, end in (
        ("interrupted", signal.SIGINT, options.interrupts, until),
        ("killed", signal.SIGKILL, options.kills, keeper.end),
    ):
        total: Counter[str] = Counter()
        result["wrong in all"] = wrong
        for one in signalled(how, runs, setting, right, end, options.parallel):
            total.update(one)
            result[title], result["wrong in all"] = dict(sorted(total.items())), wrong + wrongs(total)
            keeper.goes_on()
        wrong = result["wrong in all"]
        all_run &= total["runs"] == runs
        result["finished"] = all_run and title == "killed"
        print(json.dumps({title: result.get(title)}), file=sys.stderr, flush=True)
        keeper.save()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
