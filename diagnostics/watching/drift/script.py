"""A user's script, run as Python would run it, under ``trace_dtypes``."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from attn_diag import errors
from attn_diag.errors import InputError
from attn_diag.printing import say
from attn_diag.results.dtypes import DtypeDrift
from attn_diag.watching.drift.trace import trace_dtypes

_OURS = str(Path(errors.__file__).parent) + os.sep
_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_RAISED = 1  # as Python exits


@dataclass(frozen=True)
class Run:
    """What the trace saw, and how the script ended."""

    drift: DtypeDrift
    code: int
    """Exit status, as Python would give it."""
    raised: bool
    """Whether an exception ended it."""


def run_script(script: Path, arguments: list[str]) -> Run:
    """Run a script as ``__main__`` with these arguments; its own traceback goes to stderr.

    Raises:
        InputError: it cannot be read, or is no Python.
    """
    _require_python(script)
    file = str(script.resolve())
    argv, path, code, raised = sys.argv, sys.path[:], 0, False
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(Path(file).parent))
    trace = None
    try:
        with trace_dtypes(str(script)) as trace:
            runpy.run_path(file, run_name="__main__")
    except SystemExit as stopped:
        code = _exit_code(stopped)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except Exception as error:
        code, raised = _RAISED, True
        _show(error, file)
    finally:
        sys.argv, sys.path[:] = argv, path
    assert trace is not None
    return Run(trace.result(), code, raised)


def _require_python(script: Path) -> None:
    try:
        compile(script.read_bytes(), str(script), "exec")
    except OSError as error:
        raise InputError(f"cannot read {script}: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise InputError(f"{script} is no Python: {error}") from None


def _exit_code(stopped: SystemExit) -> int:
    """As Python does: None is 0, a number itself, anything else is printed and 1."""
    if stopped.code is None or isinstance(stopped.code, int):
        return stopped.code or 0
    say(str(stopped.code))
    return _RAISED


def _show(error: Exception, file: str) -> None:
    """The traceback that the script alone would have had: from its first line on, and without this package's frames."""
    whole = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = whole
    while part is not None:
        first = next((i for i, frame in enumerate(part.stack) if frame.filename == file), 0)
        kept = [frame for frame in part.stack[first:] if not frame.filename.startswith(_OURS)]
        part.stack = traceback.StackSummary.from_list(kept)
        part = part.__cause__ or part.__context__
    say("".join(whole.format()).removesuffix("\n"))
