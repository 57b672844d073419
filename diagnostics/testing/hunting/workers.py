"""A kernel's worker processes: each runs case after case with a time limit, and is started again when it has died."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.replaying.processes import Ran, ending, stop, worker_command

WORKER = "attn_diag.testing.hunting.worker"
# To import torch and to reach the device, whatever the limit of a case is.
_START_S = 180.0


@dataclass
class _Worker:
    """One process, started when it is first asked."""

    name: str
    device: str
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    unread: bytes = b""
    count: int = 0

    def run(self, case: CaseInputs, layout: str, limit_s: float) -> Ran:
        """One case; a process that dies or takes too long is ended, and the next case starts another."""
        number = self._write(case, layout)
        stage = "start"
        try:
            process = self._started()
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(f"{number}\n".encode())
                process.stdin.flush()
            until = time.monotonic() + limit_s
            while True:
                said = self._next(until)
                if "outcome" in said:
                    break
                stage = said["stage"]
        except TimeoutError:
            self.close()
            return Ran("timed-out", stage, f"it was stopped after {limit_s:g} s", self._outputs(number))
        except EOFError:
            return Ran("crashed", stage, self._last_words(), self._outputs(number))
        if said["outcome"] == "crashed":
            self.close()
        return Ran(outputs=self._outputs(number), **said)

    def _write(self, case: CaseInputs, layout: str) -> str:
        self.count += 1
        number = str(self.count)
        save_file({n: x.contiguous() for n, x in case.tensors.items()}, self.folder / f"{number}.safetensors")
        options: dict[str, Any] = {
            n: getattr(case, n) for n in ("scale", "causal", "window", "softcap", "alibi_origin", "dropout_p")
        }
        (self.folder / f"{number}.json").write_text(json.dumps(options | {"layout": layout}))
        return number

    def _started(self) -> subprocess.Popen[bytes]:
        if self.process is not None and self.process.poll() is None:
            return self.process
        self.close()
        self.unread = b""
        with (self.folder / "stderr").open("wb") as stderr:
            self.process = subprocess.Popen(
                worker_command(WORKER, self.folder, self.name, self.device),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True,
            )  # fmt: skip
        self._next(time.monotonic() + _START_S)
        return self.process

    def _next(self, until: float) -> dict[str, Any]:
        """The next line that the process writes. Raises TimeoutError, and EOFError where it has ended."""
        assert self.process is not None
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        while b"\n" not in self.unread:
            ready, _, _ = select.select([pipe], [], [], max(until - time.monotonic(), 0))
            if not ready:
                raise TimeoutError
            if not (more := os.read(pipe, 2**16)):
                raise EOFError
            self.unread += more
        line, _, self.unread = self.unread.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _last_words(self) -> str:
        """How the process ended, and the last line that it wrote to stderr."""
        assert self.process is not None
        code = self.process.wait()
        self.close()
        said = (self.folder / "stderr").read_text(errors="replace").strip().splitlines()
        return f"its process {ending(code)}" + (f": {said[-1].strip()}" if said else "")

    def _outputs(self, number: str) -> Mapping[str, Tensor]:
        """What a case has left, the backward's own forward before the other; its files are removed."""
        outputs: dict[str, Tensor] = {}
        for stage in ("forward", "backward"):
            file = self.folder / f"{number}-{stage}.safetensors"
            # A process that dies while it writes leaves a file that cannot be read.
            with suppress(Exception):
                outputs = {n: x.clone() for n, x in load_file(file).items()}
        for file in self.folder.glob(f"{number}[-.]*"):
            file.unlink(missing_ok=True)
        return outputs

    def close(self) -> None:
        """End the process and its children."""
        if self.process is None:
            return
        stop(self.process)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self.process = None


@dataclass
class Workers:
    """Several processes of one kernel; a case goes to one that is free."""

    name: str
    """As ``Target.of`` takes it."""
    device: str
    """cpu or cuda."""
    count: int
    """How many run side by side."""
    limit_s: float
    """Per case."""
    folder: Path
    _free: Queue[_Worker] = field(default_factory=Queue)
    _all: list[_Worker] = field(default_factory=list)

    def __post_init__(self) -> None:
        for _ in range(self.count):
            own = Path(tempfile.mkdtemp(dir=self.folder))
            self._all.append(_Worker(self.name, self.device, own))
            self._free.put(self._all[-1])

    def run(self, case: CaseInputs, layout: str, *, limit_s: float | None = None, alone: bool = False) -> Ran:
        """Run a case in a free process; ``alone``: in one that has run nothing before."""
        worker = self._free.get()
        try:
            if alone:
                worker.close()
            return worker.run(case, layout, limit_s or self.limit_s)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """End all processes."""
        for worker in self._all:
            worker.close()


@contextmanager
def workers(name: str, device: str, count: int, limit_s: float) -> Iterator[Workers]:
    """Processes of a kernel that end with the block."""
    with tempfile.TemporaryDirectory(prefix="attn-diag-hunt-") as folder:
        found = Workers(name, device, count, limit_s, Path(folder))
        try:
            yield found
        finally:
            found.close()
