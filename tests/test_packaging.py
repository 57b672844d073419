"""What a release holds besides its modules: a man page, a conda recipe, completion, extras."""

from __future__ import annotations

import ast
import re
import runpy
import tomllib

import pytest
from command_line import Programs
from conftest import ROOT

import attn_diag

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def test_the_man_page_is_of_this_version() -> None:
    made = runpy.run_path(str(ROOT / "packaging" / "make_man_page.py"))["main"]()
    again = "python packaging/make_man_page.py packaging/attn-diag.1"
    assert (ROOT / "packaging" / "attn-diag.1").read_text() == made, again


def test_the_conda_recipe_needs_what_the_package_needs() -> None:
    recipe = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text()
    assert f"version: {attn_diag.__version__}\n" in recipe
    conda = dict(re.findall(r"^    - ([\w-]+) >=([\d.]+)$", recipe, re.MULTILINE))
    pip = dict(re.findall(r"^([\w-]+)>=([\d.]+)$", "\n".join(PROJECT["dependencies"]), re.MULTILINE))
    assert conda == {{"torch": "pytorch"}.get(name, name): floor for name, floor in pip.items()} | {
        "python": PROJECT["requires-python"].removeprefix(">=")
    }


def _imported(tree: ast.Module) -> set[str]:
    """The packages that a module imports anywhere in it, also where a function first needs them."""
    nodes = list(ast.walk(tree))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def test_the_package_imports_nothing_that_tests_alone_install() -> None:
    """An environment with the tests' packages does not show that a user's lacks one."""
    tests_alone = set(re.findall(r"^[\w-]+", "\n".join(EXTRAS["test"]), re.MULTILINE)) - {"attn-diag", "pytest"}
    assert {"ml_dtypes", "gfloat"} <= tests_alone
    for folder in ("diagnostics", "kernels", "reference", "reports"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            taken = tests_alone & _imported(ast.parse(path.read_text()))
            assert not taken, f"{path.relative_to(ROOT)} imports {taken}, which a user does not have"


def test_the_frameworks_that_are_tested_have_extras() -> None:
    assert "attn-diag[hf,lightning]" in EXTRAS["frameworks"]
    assert EXTRAS["hf"][1].startswith("transformers>=")
    assert EXTRAS["lightning"][0].startswith("lightning>=")


@pytest.mark.parametrize(
    ("typed", "word", "offered"), [("attn-diag inv", 1, "invariance"), ("attn-diag inspect --fail", 2, "--fail-on")]
)
def test_shells_complete_commands_and_options(programs: Programs, typed: str, word: int, offered: str) -> None:
    asked = {"_ATTN_DIAG_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(word)}
    source = "import sys\nsys.argv = ['attn-diag']\nfrom attn_diag.cli import main\nmain()\n"
    assert programs.run(source, **asked).out.split() == [offered]
