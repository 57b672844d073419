"""Text snapshots: what a report or page said when it was last looked at, in tests/data/snapshots."""

from __future__ import annotations

import os
import re
from difflib import unified_diff
from pathlib import Path

import pytest

STORED = Path(__file__).parent / "data" / "snapshots"
RENEW = "ATTN_DIAG_SNAPSHOTS"
# Measured figures move in their last digits with the machine; whole numbers (rows, keys, counts) do not.
FIGURE = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?e[-+]?\d+|(?<![\w.])[-+]?\d+\.\d+")


def require_unchanged(name: str, text: str) -> None:
    """Fail where ``text`` is not what is stored under ``name``, and show the difference.

    Where figures alone differ, as on another machine, the words must be the same and the line breaks, which figures
    move, need not be. With ATTN_DIAG_SNAPSHOTS=write the text is stored instead: read what git shows before you commit.

    Args:
        name: Of the file, without its ending.
        text: A report, a page's text, or its first lines.
    """
    file = STORED / f"{name}.txt"
    if os.environ.get(RENEW) == "write":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    stored = file.read_text(encoding="utf-8") if file.exists() else ""
    if text == stored:
        return
    if FIGURE.findall(text) == FIGURE.findall(stored) or _words(text) != _words(stored):
        lines = unified_diff(stored.splitlines(), text.splitlines(), "stored", "now", lineterm="", n=1)
        pytest.fail("\n".join([f"{file.name} differs; where that is better: {RENEW}=write pytest …", *lines]))


def _words(text: str) -> list[str]:
    return FIGURE.sub("#", text).split()
