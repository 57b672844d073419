"""What a debugger's prompt has room for."""

from __future__ import annotations


def too_much(text: str, lines: int = 25, width: int = 80) -> list[str]:
    from rich.cells import cell_len

    found = [line for line in text.splitlines() if cell_len(line) > width]
    return found + text.splitlines()[lines:]
