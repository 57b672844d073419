"""README and docs: short, linked, and with commands that there are."""

from __future__ import annotations

import re
import shlex
from itertools import takewhile
from pathlib import Path

import pytest
import typer
from conftest import ROOT

import attn_diag
from attn_diag.cli import app
from attn_diag_pytest.fixture import AttnDiag

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    for line in re.findall(r"(?:^(?:    |\$ |    \$ )|`)attn-diag ([^`\n]+)", page.read_text(), re.MULTILINE):
        name, *words = shlex.split(line.replace("…", ""), comments=True) or [""]
        if not name.isupper() and not name.startswith("--"):
            options = {o for p in COMMANDS[name].params for o in (*p.opts, *p.secondary_opts)}
            own = takewhile(lambda word: not word.endswith(".py"), words)  # a script's options follow its name
            assert {w.partition("=")[0] for w in own if w.startswith("--")} <= options | {"--help"}, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_package_exist(page: Path) -> None:
    for name in re.findall(r"attn_diag\.(\w+)", page.read_text()):
        # The fixture of the tests bears the package's name.
        assert any(hasattr(owner, name) for owner in (attn_diag, AttnDiag)) or (ROOT / name).is_dir(), name


def test_every_public_name_stands_in_a_page() -> None:
    """As code, in what a user reads: the words ``diff`` and ``load`` of a sentence are no place to find it."""
    text = "\n".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    code = "\n".join(re.findall(r"^```.*?^```|^::: [^\n]+|`[^`\n]+`", text, re.MULTILINE | re.DOTALL))
    shown = set(re.findall(r"\w+", code))
    assert "misbehaves" in text
    assert "misbehaves" not in shown, "the check below can fail"
    assert set(attn_diag.__all__) <= shown


def test_every_command_has_its_line() -> None:
    listed = set(re.findall(r"^\| \[`([\w-]+)`\]", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE))
    assert listed == set(COMMANDS) == {page.stem for page in (ROOT / "docs" / "commands").glob("*.md")}


def test_the_version_is_the_same_everywhere() -> None:
    assert f"\nversion: {attn_diag.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {attn_diag.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
