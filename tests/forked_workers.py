"""Kernels' worker processes, forked from one that has imported torch: they start in milliseconds, not in two seconds.

They are processes of their own that crash, hang and are killed as those are that ``subprocess`` starts.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

# Takes a line of JSON and three file descriptors for each process, and answers with its number; how a process ended is
# then in a file of that name. What follows the loop runs in the process.
SERVER = """
import array, gc, json, os, runpy, select, signal, socket, sys
import attn_diag, attn_diag.testing.hunting.hunt, attn_diag.testing.replaying.replay
folder, asked = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
woken, waking = socket.socketpair()
for end in (woken, waking):
    end.setblocking(False)
# Nothing is done in the handler: it may interrupt itself, and come before a call that then waits for ever.
signal.signal(signal.SIGCHLD, lambda *_: None)
signal.set_wakeup_fd(waking.fileno())
def note_ended():
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            with open(f"{folder}/new", "w") as file:
                file.write(str(os.waitstatus_to_exitcode(found[1])))
            os.rename(f"{folder}/new", f"{folder}/{found[0]}")
    except ChildProcessError:
        pass
gc.freeze()
while True:
    ready, _, _ = select.select([asked, woken], [], [])
    if woken in ready:
        woken.recv(2**16)
        note_ended()
    if asked not in ready:
        continue
    said, files, _, _ = socket.recv_fds(asked, 2**16, 3)
    if not said:
        sys.exit()
    if not (number := os.fork()):
        break
    asked.sendall(f"{number}\\n".encode())
    for file in files:
        os.close(file)
signal.set_wakeup_fd(-1)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
for end in (asked, woken, waking):
    end.close()
os.setsid()
for place, file in enumerate(files):
    os.dup2(file, place)
    os.close(file)
own = json.loads(said)
os.chdir(own["folder"])
os.environ.clear()
os.environ.update(own["environment"])
sys.stdin = open(0, closefd=False)
sys.argv = ["", *own["arguments"]]
runpy.run_module(own["module"], run_name="__main__", alter_sys=True)
"""


class Parent:
    """The process that they are forked from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._asked, theirs = socket.socketpair()
        # As -P: the working directory is looked in for no module.
        line = [sys.executable, "-P", "-c", SERVER, str(folder), str(theirs.fileno())]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(line, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()

    def subprocess(self) -> SimpleNamespace:
        """What of the module ``subprocess`` starts a worker."""
        kept = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "TimeoutExpired")}
        return SimpleNamespace(Popen=self.start, **kept)

    def start(self, line: Sequence[str], *, start_new_session: bool, **files: Any) -> Forked:
        """A worker, as ``subprocess.Popen`` starts it."""
        assert start_new_session
        assert list(line[:3]) == [sys.executable, "-P", "-m"], "only workers are started so"
        ours: dict[str, IO[bytes]] = {}
        theirs: list[int] = []
        for name in ("stdin", "stdout", "stderr"):
            if files[name] == subprocess.PIPE:
                ends = os.pipe()
                ours[name] = os.fdopen(ends[name == "stdin"], "wb" if name == "stdin" else "rb")
                theirs.append(ends[name != "stdin"])
            else:
                given = files[name]
                theirs.append(os.open(os.devnull, os.O_RDWR) if given == subprocess.DEVNULL else os.dup(given.fileno()))
        job = {"module": line[3], "arguments": line[4:], "folder": str(Path.cwd()), "environment": dict(os.environ)}
        socket.send_fds(self._asked, [json.dumps(job).encode()], theirs)
        for file in theirs:
            os.close(file)
        number = int(self._asked.recv(32))
        return Forked(number, self.folder / str(number), **ours)

    def close(self) -> None:
        """End it."""
        self._asked.close()
        self._process.wait(60)


class Forked:
    """A worker, with what of ``subprocess.Popen`` is used of it."""

    def __init__(self, pid: int, ended: Path, stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._ended = ended

    def poll(self) -> int | None:
        """How it ended; None: it runs."""
        return int(self._ended.read_text()) if self._ended.exists() else None

    def wait(self, timeout: float = 60.0) -> int:
        """Wait until it has ended."""
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            select.select([], [], [], 0.005)
        return code
