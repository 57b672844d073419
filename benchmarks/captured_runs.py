"""Runs of ``bench_recording``: a model that trains under capture in a process of its own, and what is left of it."""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import attn_diag
from attn_diag.captures.loading import half_written
from attn_diag.watching.live.recorder import Recorder

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from tiny_models import nano_gpt

# A child that takes longer than this to end is taken for hung; to begin it may take five times as long (compiling).
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
    modules: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    logged: int = 0
    hung: int = 0
    failed: bool = False
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
                # torch makes its pool of threads anew in a fork, and two threads that ask for it at once find none.
                torch.set_num_threads(torch.get_num_threads())
                work(lambda line: void(os.write(writing, f"{line}\n".encode())))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writing)
        self._lines = os.fdopen(reading)
        watchdog = threading.Timer(5 * PATIENCE, os.kill, (self.pid, signal.SIGKILL))
        watchdog.start()
        self._before = []
        while (line := self._lines.readline()) not in ("begun\n", ""):
            self._before.append(line)
        watchdog.cancel()
        self._failed = line == ""
        self._began = time.monotonic()

    def wait_for(self, lines: int) -> None:
        """Until it has told so much more, or has ended."""
        self._before += islice(self._lines, lines)

    def end(self, how: signal.Signals | None = None) -> Told:
        """Wait for it, after sending a signal if one is given."""
        if how is not None:
            os.kill(self.pid, how)
        told, watchdog = Told(failed=self._failed), threading.Timer(PATIENCE, os.kill, (self.pid, signal.SIGKILL))
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
        told.hit |= code == -signal.SIGKILL == -(how or 0) and not told.failed
        told.hung += code == -signal.SIGKILL and not told.hit and not told.failed
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
    found["wrong: ended before it trained"] = int(told.failed)
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


def warmed(setting: Setting, modules: Iterable[str]) -> None:
    """Do once, before runs are forked, what each of them would do anew, four fifths of its time if it compiles.

    Imported are the ``modules`` that a run had in the end, in its order. Nothing here may touch the device.
    """
    for name in modules:
        # Code that inductor has written is no module that can be found; what else cannot be imported, a run imports.
        with suppress(Exception):
            importlib.import_module(name)
    if setting.compiled:
        from torch._inductor import codecache, cpu_vec_isa

        # What keys of inductor's cache begin with: digests of torch's and triton's files, where this torch has them so.
        for digest in ("torch_key", "triton_key"):
            getattr(codecache, digest, dict)()
        if setting.device == "cpu":
            cpu_vec_isa.pick_vec_isa()
    usable = Process(lambda say: None if torch.cuda._is_in_bad_fork() else say("begun"))
    assert not usable.end().failed, "runs forked from here cannot use the device"
    gc.freeze()


def undisturbed(setting: Setting) -> Undisturbed:
    """The run that nothing happens to, and the one without capture; later ones are forked with all they need."""

    def telling(folder: Path, say: Say) -> None:
        captured(setting, folder, None, say)
        say(f"modules {json.dumps(list(sys.modules))}")

    losses = Process(lambda say: Training(setting).run(say)).end().losses
    with scratch() as name:
        warmed(setting, Process(partial(telling, name / "first")).end().modules)
        name /= "second"
        told = Process(partial(captured, setting, name, None)).end()
        files = {path.name: bits(path) for path in name.glob("*.safetensors")}
    assert len(files) == 2 * setting.steps, "a model of two layers"
    assert told.losses == losses, "a run under capture trains otherwise than one without"
    return Undisturbed(losses, files, told.seconds)
