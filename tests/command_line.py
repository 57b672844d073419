"""The command line: run in this process (the fixture ``run``) or as a program of its own."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Protocol

TESTS = str(Path(__file__).parent)


class Done(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str


class Run(Protocol):
    """``attn-diag ARGUMENTS`` in this process, with environment variables besides."""

    def __call__(self, *arguments: object, **environment: str) -> Done: ...


def program(*arguments: object, **environment: str) -> Done:
    """``attn-diag ARGUMENTS`` in a process of its own."""
    return python("-m", "attn_diag", *arguments, **environment)


def python(*arguments: object, **environment: str) -> Done:
    """``python ARGUMENTS``."""
    line = [sys.executable, *map(str, arguments)]
    done = subprocess.run(line, check=False, capture_output=True, text=True, env=os.environ | environment)
    return Done(done.returncode, done.stdout, done.stderr)


def loaded_by(code: str, *names: str) -> set[str]:
    """Which of these modules a fresh process has imported after ``code``."""
    shown = f"import sys\n{code}\nprint('loaded:', *sorted({set(names)!r} & set(sys.modules)))"
    done = python("-c", shown)
    assert done.code == 0, done.err
    return set(done.out.rpartition("loaded:")[2].split())


def command(*arguments: object) -> str:
    """The source of a program that runs ``attn-diag ARGUMENTS`` and goes on if that ended well."""
    line = ["attn-diag", *map(str, arguments)]
    return (
        f"import sys\nfrom attn_diag.cli import main\nsys.argv = {line!r}\n"
        "try:\n    main()\nexcept SystemExit as stopped:\n    assert not stopped.code, stopped.code\n"
    )


# Reads jobs, forks the processes of each, and prints how they ended; what follows the loop runs in the children.
SERVER = """
import gc, json, os, runpy, signal, sys
import scipy.stats, attn_diag, attn_diag.cli.inspect
attn_diag.inspect, attn_diag.capture, attn_diag.break_if
gc.freeze()
for line in sys.stdin:
    job, children = json.loads(line), []
    for own in job["processes"]:
        children.append(os.fork())
        if not children[-1]:
            break
    else:
        print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), flush=True)
        continue
    break
else:
    sys.exit()
gc.unfreeze()
signal.alarm(300)
os.environ.update(own["environment"])
if own["files"][1] == "closed pipe":
    reading, own["files"][1] = os.pipe()
    os.close(reading)
for place, file in enumerate(own["files"]):
    how = os.O_WRONLY | os.O_CREAT if place else os.O_RDONLY
    os.dup2(os.open(file, how) if isinstance(file, str) else file, place)
sys.stdin = open(0, closefd=False)
sys.stdout = sys.__stdout__ = open(1, "w", closefd=False, encoding=own["environment"].get("PYTHONIOENCODING"))
sys.path[:0], sys.argv = job["path"], [job["script"], *job["arguments"]]
if job["script"] == "attn_diag":
    runpy.run_module("attn_diag", run_name="__main__", alter_sys=True)
else:
    runpy.run_path(job["script"], run_name="__main__")
"""


class Programs:
    """Python programs forked from one process that has imported torch, so that each need not take seconds to do so.

    They are processes of their own, with files for stdin, stdout and stderr, and end as any other does.
    """

    def __init__(self) -> None:
        line = [sys.executable, "-c", SERVER]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._parent = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def run(self, source: str, *arguments: object, stdin: str = "", stdout: str = "", **environment: str) -> Done:
        """Run a program's ``source``, or ``attn-diag`` where that is "attn_diag".

        Args:
            source: The program.
            *arguments: What it finds in ``sys.argv``.
            stdin: What it reads.
            stdout: A file that takes what it prints, or "closed pipe".
            **environment: Variables besides this process's.
        """
        with TemporaryDirectory() as folder:
            script, read, printed, errors = (Path(folder) / name for name in ("program.py", "in", "out", "err"))
            script.write_text(source)
            read.write_text(stdin)
            printed.touch()
            files = [str(read), stdout or str(printed), str(errors)]
            name = source if source == "attn_diag" else str(script)
            (code,) = self._fork(name, arguments, [{"files": files, "environment": environment}])
            return Done(code, printed.read_text(), errors.read_text())

    def run_file(self, script: str | Path) -> Done:
        """Run a program where it lies."""
        return self.run(f"import runpy\nrunpy.run_path({str(script)!r}, run_name='__main__')")

    def ranks(self, script: str, *arguments: object, count: int = 2) -> None:
        """Run a script in processes that find each other as torchrun's do, and see that all end well.

        Where a signal ended one, all is done once more, into empty folders: of some hundred runs torch's ring over gloo
        broke its heap once ("malloc(): unaligned tcache chunk detected"). What our own code breaks it breaks twice.
        """
        there = {one: set(one.iterdir()) for one in arguments if isinstance(one, Path) and one.is_dir()}
        codes, errors = self._ranks(script, arguments, count)
        if min(codes) < 0:
            for folder, known in there.items():
                for made in set(folder.iterdir()) - known:
                    shutil.rmtree(made) if made.is_dir() else made.unlink()
            codes, errors = self._ranks(script, arguments, count)
        assert codes == [0] * count, errors

    def _ranks(self, script: str, arguments: tuple[object, ...], count: int) -> tuple[list[int], str]:
        """Their exit codes, and what they said."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(count)}
        with TemporaryDirectory() as folder:
            errors = [Path(folder) / str(rank) for rank in range(count)]
            processes = [
                {"files": [os.devnull, os.devnull, str(file)], "environment": shared | {"RANK": file.name}}
                for file in errors
            ]
            codes = self._fork(script, arguments, processes)
            return codes, "\n".join(file.read_text() for file in errors)

    def _fork(self, script: str, arguments: tuple[object, ...], processes: Sequence[Mapping[str, object]]) -> list[int]:
        """Their exit codes."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        job = {"script": script, "arguments": [*map(str, arguments)], "processes": processes, "path": [TESTS]}
        self._parent.stdin.write(json.dumps(job) + "\n")
        self._parent.stdin.flush()
        return [int(code) for code in self._parent.stdout.readline().split()]

    def close(self) -> None:
        """End the process that they are forked from."""
        self._parent.communicate(timeout=60)
