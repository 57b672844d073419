"""Text snapshots: what a report said when it was last looked at, in files beside this one."""

from __future__ import annotations

import os
import re
from pathlib import Path

FOLDER = Path(__file__).parent / "snapshots"
# Measured figures move in their last digits with the machine; whole numbers (rows, keys, counts) do not.
_FIGURE = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?e[-+]?\d+|(?<![\w.])[-+]?\d+\.\d+")


def require_unchanged(name: str, text: str) -> None:
    """Fail unless ``text`` is the stored one, but for measured figures; ATTN_DIAG_SNAPSHOTS=write stores it instead.

    Args:
        name: Of the file.
        text: A report, or its first lines.
    """
    file = FOLDER / f"{name}.txt"
    if os.environ.get("ATTN_DIAG_SNAPSHOTS") == "write":
        FOLDER.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return
    assert file.exists(), f"no snapshot {name}: look at the text, and store it with ATTN_DIAG_SNAPSHOTS=write"
    stored = file.read_text(encoding="utf-8")
    assert _words(text) == _words(stored), (
        f"{name} says something else than when it was last looked at; if that is better, store it with "
        "ATTN_DIAG_SNAPSHOTS=write pytest"
    )


def _words(text: str) -> list[str]:
    """Without figures, whose width moves the line breaks."""
    return _FIGURE.sub("#", text).split()
