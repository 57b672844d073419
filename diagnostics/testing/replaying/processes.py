"""Running one kernel in a process of its own, with a time limit: its outputs, or how it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from attn_diag.results.replay import Outcome

# Bytes at the end of what a process wrote to stderr, and characters of its last line, which may be megabytes.
_LOOKED_AT, _LAST_WORDS = 4096, 200
WORKER = "attn_diag.testing.replaying.worker"


@dataclass(frozen=True)
class Ran:
    """How a kernel's process ended, and what it left."""

    outcome: Outcome
    stage: Any = None
    """Where it ended early: start, forward or backward."""
    message: str | None = None
    """Why."""
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    """What it had returned by then, [B, H, T, D], on the CPU."""
    deterministic: bool | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None


def run_apart(name: str, inputs: Path, folder: Path, device: str, limit_s: float) -> Ran:
    """Run a kernel and wait for it.

    Args:
        name: As ``Target.of`` takes it.
        inputs: The capture's file.
        folder: An empty one, for this kernel alone.
        device: auto, cpu or cuda.
        limit_s: Then it is stopped, with all processes that it started.
    """
    os.link(inputs, folder / "inputs.safetensors")
    with (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            worker_command(WORKER, folder, name, device),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            stop(process)
    return _left(folder, code, limit_s)


def worker_command(module: str, folder: Path, name: str, device: str) -> list[str]:
    """The command of a process that runs a kernel: it imports from where this one does.

    The working directory is looked in for the user's module alone, not for ours.
    """
    path = json.dumps([entry for entry in sys.path if entry])
    return [sys.executable, "-P", "-m", module, str(folder), name, device, path]


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and its children: a kernel's compiler may outlive it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _left(folder: Path, code: int | None, limit_s: float) -> Ran:
    """What a process that ended with ``code`` (None: it was stopped) left in its folder."""
    outputs: dict[str, Tensor] = {}
    for stage in ("forward", "backward"):
        if (file := folder / f"outputs-{stage}.safetensors").exists():
            # The forward that a gradient belongs to is the backward's own.
            outputs = load_file(file)
    if (file := folder / "outcome.json").exists():
        return Ran(outputs=outputs, **json.loads(file.read_text()))
    begun = folder / "stage"
    stage = begun.read_text() if begun.exists() else "start"
    if code is None:
        return Ran("timed-out", stage, f"it was stopped after {limit_s:g} s", outputs)
    return Ran("crashed", stage, f"its process {ending(code)}{_last_words(folder / 'stderr')}", outputs)


def _last_words(file: Path) -> str:
    """The last line that a process wrote, after a colon; of a long one the beginning."""
    with file.open("rb") as stderr:
        stderr.seek(max(file.stat().st_size - _LOOKED_AT, 0))
        said = stderr.read().decode(errors="replace").strip().splitlines()
    if not said:
        return ""
    last = said[-1].strip()
    return f": {last if len(last) <= _LAST_WORDS else last[:_LAST_WORDS] + ' …'}"


def ending(code: int) -> str:
    """How a process ended, in words that follow "its process"."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"died of {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
