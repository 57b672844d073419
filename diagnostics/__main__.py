"""``attn-diag`` and ``python -m attn_diag``: the command line, which Ctrl-C ends at any time with one line and 130."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_SHOW_CURSOR = "\x1b[?25h"
# Threads that wait for others spin so often before they sleep. Beside other work on all cores those of GNU's OpenMP, as
# they are, take the time that the others need: 55 to 70 s instead of 4 to 11, of one inspection.
_SPINS = "1000"


def main() -> None:
    """Run the command line."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    try:
        from attn_diag.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """End at once where a module is being imported: torch and NumPy swallow what is raised then, or fail by it.

    Anywhere else, and in a script that ``dtypes`` runs, as Python does.
    """
    importing, outer = False, frame
    while outer is not None:
        if outer.f_code.co_name == "run_path":
            signal.default_int_handler(number, frame)
        importing = importing or outer.f_code.co_filename == "<frozen importlib._bootstrap>"
        outer = outer.f_back
    # A progress bar hides the cursor.
    shown = _SHOW_CURSOR if importing and sys.stderr is not None and sys.stderr.isatty() else ""
    os.write(2, f"{shown}attn-diag: interrupted\n".encode())
    if importing:
        os._exit(_INTERRUPTED)
    signal.default_int_handler(number, frame)


if __name__ == "__main__":
    main()
