"""Where a test's baseline lies."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

import pytest

MARKER = "attn_diag_baseline"
FOLDER = "attn_diag_baselines"

# Longer names, with the folder's and a temporary file's additions, do not fit every file system's 255 bytes.
_LONGEST = 100


def baseline_path(item: pytest.Item) -> Path | None:
    """The file of a test's first call; None where the test has no marker.

    One file a test, so that workers of pytest-xdist never write the same one.
    """
    found = next(item.iter_markers_with_node(MARKER), None)
    if found is None:
        return None
    node, mark = found
    given = _argument(item, mark)
    name = full_name(item)
    if given is None:
        return item.path.parent / FOLDER / item.path.stem / f"{safe(name)}.json"
    path = item.path.parent / given
    if path.suffix != ".json":
        return path / f"{safe(name)}.json"
    if node is not item or hasattr(item, "callspec"):
        pytest.fail(
            f"{MARKER}: several tests (parameters, or a mark on a class or module) cannot share the file {given}; "
            "give a folder",
            pytrace=False,
        )
    return path


def numbered(path: Path, call: int) -> Path:
    """The file of a test's second, third, ... call."""
    return path if call == 1 else path.with_name(f"{path.stem}.{call}.json")


def full_name(item: pytest.Item) -> str:
    """Classes, function and parameters: "TestFlash::test_forward[bf16-64]".

    Not the end of the node id, which pytest-xdist changes (``--dist loadgroup``).
    """
    return "::".join(node.name for node in item.listchain() if isinstance(node, (pytest.Class, pytest.Item)))


def safe(name: str) -> str:
    """A file's name on every system; what had to be changed has a hash of the original, so that no two are the same."""
    kept = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:_LONGEST].strip("-.")
    return kept if kept == name else f"{kept}-{sha256(name.encode()).hexdigest()[:8]}"


def _argument(item: pytest.Item, mark: pytest.Mark) -> str | None:
    given = [*mark.args, *mark.kwargs.values()]
    if len(given) > 1 or set(mark.kwargs) - {"path"} or not all(isinstance(g, (str, Path)) for g in given):
        pytest.fail(
            f"{MARKER} takes one path, a str or Path, got {mark.args} {mark.kwargs} at {item.nodeid}", pytrace=False
        )
    return str(given[0]) if given else None
