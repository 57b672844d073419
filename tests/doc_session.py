"""Runs the blocks of one page of the docs, in order and in one process: ``python doc_session.py STEPS.json``.

STEPS.json holds the folder to be in and a list of [kind, name, text]; what each step printed comes back in the file
itself, as a list of [exit code, text]. Run by ``test_doc_pages.py`` in a process that has imported torch already.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def printed(act: Callable[[], object]) -> tuple[int, str]:
    """The exit code and what went to stdout; a traceback too, where there is one."""
    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out):
        try:
            act()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        except BaseException:
            code = 70
            print(traceback.format_exc())
    return code, out.getvalue()


def command(line: str) -> tuple[int, str]:
    """``attn-diag …`` and ``python …`` here, all else in a shell."""
    words = shlex.split(line, comments=True)
    if words[0] not in ("attn-diag", "python") or {"|", "&&"} & {*words}:
        # The programs of this environment come first; torchrun is a module's.
        line = re.sub(r"^torchrun\b", "python -m torch.distributed.run", line)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(line, shell=True, text=True, capture_output=True, env=os.environ | {"PATH": path})
        return done.returncode, done.stdout + (done.stderr if done.returncode not in (0, 1) else "")
    before, sys.argv = sys.argv, words if words[0] == "attn-diag" else words[1:]
    try:
        if words[0] == "attn-diag":
            from attn_diag.cli import main

            return printed(main)
        if words[1] == "-m":
            sys.argv = words[2:]
            return printed(lambda: runpy.run_module(words[2], run_name="__main__", alter_sys=True))
        return printed(lambda: runpy.run_path(words[1], run_name="__main__"))
    finally:
        sys.argv = before


def main(file: Path) -> None:
    """Run the steps and write what they printed."""
    page = json.loads(file.read_text())
    os.chdir(page["folder"])
    sys.path.insert(0, page["folder"])
    names: dict[str, Any] = {"__name__": "__main__"}
    results: list[tuple[int, str]] = []
    for kind, name, text in page["steps"]:
        if kind == "file":
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            results.append((0, str(Path(name).write_text(text))))
        elif kind == "python":
            results.append(printed(lambda text=text, name=name: exec(compile(text, name, "exec"), names)))  # type: ignore[misc]
        else:
            results.append(command(text))
    file.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
