"""That a text snapshot fails where words or layout differ, and not where a measured figure does."""

from __future__ import annotations

from pathlib import Path

import pytest
import snapshots
from snapshots import RENEW, require_unchanged

STORED = "WRONG: 3 of 24 heads.\ndQ is 1.86 % off.\n"


@pytest.fixture(autouse=True)
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(RENEW, raising=False)
    monkeypatch.setattr(snapshots, "STORED", tmp_path)
    (tmp_path / "report.txt").write_text(STORED, encoding="utf-8")
    return tmp_path / "report.txt"


@pytest.mark.parametrize("text", [STORED, STORED.replace("1.86", "1.859"), "WRONG: 3 of 24\nheads. dQ is 1.9 % off.\n"])
def test_the_same_words_pass_with_other_figures(text: str) -> None:
    require_unchanged("report", text)


@pytest.mark.parametrize(
    "text",
    [STORED.replace("WRONG", "PASS"), STORED.replace("3 of", "4 of"), STORED.replace("heads.\n", "heads. "), ""],
    ids=["word", "count", "layout", "nothing"],
)
def test_other_words_counts_or_lines_fail(text: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"(?s)differs.*\n-WRONG"):
        require_unchanged("report", text)


def test_what_is_not_stored_fails() -> None:
    with pytest.raises(pytest.fail.Exception, match="differs"):
        require_unchanged("another", STORED)


def test_a_snapshot_is_written_when_asked(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RENEW, "write")
    require_unchanged("report", "PASS\n")
    assert stored.read_text(encoding="utf-8") == "PASS\n"
