"""What runs that capture leave behind when they are killed, interrupted or forked, or lose their disk.

    python benchmarks/bench_recording.py [--kills 1000] [--device cuda] [--compile] [--parallel 8] [--json FILE]

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
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from measuring import made_by, options_of, save

import attn_diag
from attn_diag.captures.loading import half_written
from attn_diag.watching.live.claim import claim
from attn_diag.watching.live.recorder import Recorder

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from tiny_models import nano_gpt

# A child that takes longer than this to end is taken for hung.
PATIENCE = 60.0

Say = Callable[[str], None]
Mischief = Callable[[int, Recorder], None]


@dataclass(frozen=True)
class Setting:
    """What is trained, and where."""

    device: str
    compiled: bool
    steps: int


@dataclass
class Told:
    """What a run announced before it ended."""

    losses: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    logged: int = 0
    hung: int = 0
    hit: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Undisturbed:
    """What a run has to agree with: losses without capture, and the captures' bits by file name."""

    losses: list[str]
    files: dict[str, dict[str, str]]
    seconds: float


class Training:
    """A model, all but its attention perhaps compiled, and its optimizer."""

    def __init__(self, setting: Setting) -> None:
        tiny = nano_gpt()
        self._setting, self._loss = setting, tiny.loss
        self.model = tiny.model.to(setting.device)
        self._run: Any = self.model
        if setting.compiled:
            for name in tiny.attentions:
                attention: Any = self.model.get_submodule(name)
                attention.forward = torch.compiler.disable(attention.forward)  # type: ignore[no-untyped-call]
            self._run = torch.compile(self.model)

    def run(self, say: Say, recorder: Recorder | None = None, mischief: Mischief | None = None) -> None:
        """All steps, telling of each, and of each file as soon as it is announced."""
        device, optimizer = self._setting.device, torch.optim.SGD(self.model.parameters(), lr=0.1)
        told = 0
        for step in range(self._setting.steps):
            if step == int(self._setting.compiled):  # the first step is compiling
                say("begun")
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = self._loss(self._run)
            torch.autograd.backward(loss)
            optimizer.step()
            say(f"losses {float(loss.detach()).hex()}")
            if recorder is not None:
                for path in recorder.written[told:]:
                    say(f"files {path.name}")
                    told += 1
            if recorder is not None and mischief is not None:
                mischief(step, recorder)


def captured(setting: Setting, folder: Path, mischief: Mischief | None, say: Say) -> None:
    """Train under capture; an interrupt ends it."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("attn_diag").addHandler(handler)
    training = Training(setting)
    recorder = attn_diag.capture(training.model, folder, batch=None, if_taken="another")
    try:
        with recorder:
            training.run(say, recorder, mischief)
    except KeyboardInterrupt:
        say("hit true")
        recorder.close()  # as the exit handlers do, where the interrupt came while it was being closed
    for path in recorder.written:
        say(f"files {path.name}")
    say(f"dropped {json.dumps(recorder.dropped)}")
    say(f"logged {len(logged)}")


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that goes; unlike tempfile's own it outlives the exit handlers of a forked child."""
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Process:
    """Work in a forked process, and the pipe through which it tells."""

    def __init__(self, work: Callable[[Say], None]) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what a shell put aside
                os.close(reading)
                work(lambda line: void(os.write(writing, f"{line}\n".encode())))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writing)
        self._lines = os.fdopen(reading)
        self._before = list(iter(self._lines.readline, "begun\n"))
        self._began = time.monotonic()

    def wait_for(self, lines: int) -> None:
        """Until it has told so much more, or has ended."""
        self._before += islice(self._lines, lines)

    def end(self, how: signal.Signals | None = None) -> Told:
        """Wait for it, after sending a signal if one is given."""
        if how is not None:
            os.kill(self.pid, how)
        told, watchdog = Told(), threading.Timer(PATIENCE, os.kill, (self.pid, signal.SIGKILL))
        watchdog.start()
        for line in (*self._before, *self._lines):
            kind, _, text = line.rstrip("\n").partition(" ")
            if kind in ("losses", "files"):
                getattr(told, kind).append(text)
            elif line.endswith("\n"):
                setattr(told, kind, json.loads(text))
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        watchdog.cancel()
        self._lines.close()
        told.seconds = time.monotonic() - self._began
        told.hit |= code == -signal.SIGKILL == -(how or 0)
        told.hung += code == -signal.SIGKILL and not told.hit
        return told


def void(_: object) -> None:
    """Of something only its effect is wanted."""


def bits(path: Path) -> dict[str, str]:
    """A digest of each of a capture's tensors."""
    found = {}
    for name, stored in attn_diag.load(path).tensors.items():
        tensor = stored[...].contiguous()
        raw = tensor.flatten().view(torch.uint8).numpy().tobytes()
        found[name] = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + raw).hexdigest()
    return found


def judged(folder: Path, told: Told, right: Undisturbed) -> Counter[str]:
    """What a run left, counted; everything under "wrong: …" must be 0."""
    found = Counter(
        {"files": 0, "announced": len(set(told.files)), "wrong: hung": told.hung, "steps": len(told.losses)}
    )
    there = {path.name: path for path in folder.glob("*.safetensors")} if folder.exists() else {}
    found["files"] = len(there)
    found["wrong: announced and lost"] = len(set(told.files) - there.keys())
    for name, path in there.items():
        try:
            found_there, right_there = bits(path).items(), right.files.get(name, {}).items()
            found["wrong: other bits in a file"] += not found_there <= right_there
            found["complete"] += found_there == right_there
        except attn_diag.InputError:
            found["wrong: unreadable"] += 1
    partial = list(folder.glob(".*.partial")) if folder.exists() else []
    found["left half-written"] = len(partial)
    found["wrong: half-written and not named"] = len(partial) - len(half_written([folder]))
    found["wrong: other loss than without capture"] = sum(
        a != b for a, b in zip(told.losses, right.losses, strict=False)
    )
    found["marker left"] = len(list(folder.glob(".attn-diag-rank*"))) if folder.exists() else 0
    return found


def next_run(folder: Path, *, empty: bool) -> int:
    """1 where the run after this one does not get the folder that it should get."""
    next_one = claim(folder, 0, "the next", "another")
    next_one.release()
    return int((next_one.folder == folder) != empty)


def one_hit(how: signal.Signals, setting: Setting, right: Undisturbed, seed: int) -> Counter[str]:
    """Runs until one of them gets its signal before it ends."""
    chance, found = random.Random(seed), Counter[str]()
    while not found["runs"]:
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


def summed(counts: Iterable[Counter[str]]) -> dict[str, int]:
    """All runs' counts added up."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items()))


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


def undisturbed(setting: Setting) -> Undisturbed:
    """The run that nothing happens to, and the one without capture."""
    losses = Process(lambda say: Training(setting).run(say)).end().losses
    with scratch() as name:
        told = Process(partial(captured, setting, name, None)).end()
        files = {path.name: bits(path) for path in name.glob("*.safetensors")}
    assert len(files) == 2 * setting.steps, "a model of two layers"
    assert told.losses == losses, "a run under capture trains otherwise than one without"
    return Undisturbed(losses, files, told.seconds)


def main() -> None:
    parser = options_of(__doc__, device="cpu")
    parser.add_argument("--compile", action="store_true", help="all but the attention, by inductor")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--interrupts", type=int, default=100)
    parser.add_argument("--steps", type=int, default=15, help="of each run")
    parser.add_argument("--parallel", type=int, default=1, help="so many runs at a time")
    options = parser.parse_args()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # not a pool of processes that outlives a kill
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    logging.getLogger("attn_diag").addHandler(logging.NullHandler())
    setting = Setting(options.device, options.compile, options.steps)
    right = undisturbed(setting)
    result: dict[str, Any] = {"compiled": options.compile, "steps of a run": options.steps}
    # No process here may touch the device before it has forked its own.
    with get_context("fork").Pool(options.parallel) if options.parallel > 1 else nullcontext() as pool:
        every: Callable[..., Iterable[Counter[str]]] = map if pool is None else pool.imap_unordered
        for title, how, runs in (
            ("killed", signal.SIGKILL, options.kills),
            ("interrupted", signal.SIGINT, options.interrupts),
        ):
            result[title] = summed(every(partial(one_hit, how, setting, right), range(runs)))
            print(json.dumps({title: result[title]}), file=sys.stderr, flush=True)
    result |= scenarios(setting, right)
    counts = [count for one in result.values() if isinstance(one, dict) for count in one.items()]
    result["wrong in all"] = sum(count for name, count in counts if name.startswith("wrong"))
    result = made_by(options.device) | result
    print(json.dumps(result, indent=1))
    save(result, options.json)


if __name__ == "__main__":
    main()
