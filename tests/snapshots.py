"""Texts that tests compare with what is stored in tests/data/snapshots."""

from __future__ import annotations

import os
from difflib import unified_diff
from pathlib import Path

import pytest

STORED = Path(__file__).parent / "data" / "snapshots"
_RENEW = "ATTN_DIAG_SNAPSHOTS"


def same_as_stored(name: str, text: str) -> None:
    """Fails where ``text`` is not what is stored under ``name``, and shows the difference.

    With ATTN_DIAG_SNAPSHOTS=write it is stored instead: read the difference that git shows before you commit it.
    """
    file = STORED / f"{name}.txt"
    if os.environ.get(_RENEW) == "write":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    stored = file.read_text(encoding="utf-8") if file.exists() else ""
    if stored != text:
        lines = unified_diff(stored.splitlines(), text.splitlines(), "stored", "now", lineterm="", n=1)
        pytest.fail("\n".join([f"{file} differs; if it is better now: {_RENEW}=write pytest …", *lines]))
