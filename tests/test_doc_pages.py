"""Every command and code block of the docs runs, and prints what the page says it prints."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from command_line import Programs
from conftest import ROOT
from doc_pages import LEFT_OUT, pages, says_the_same, shown, steps
from snapshots import RENEW

PROGRAM = Path(__file__).with_name("doc_session.py").read_text()
# Those that take more than a few seconds.
SLOW = {
    f"docs/{name}.md"
    for name in (
        "ci", "examples", "kernels", "linear", "mismatch", "commands/attribute", "commands/check", "commands/diff",
        "commands/figures", "commands/invariance", "commands/probe", "commands/replay", "commands/report",
        "tutorials/kernel-engineer", "tutorials/training-engineer", "tutorials/rl-engineer", "tutorials/researcher",
    )
}  # fmt: skip
# As a reader's terminal is: 80 columns, no colour, not GitHub's.
TERMINAL = {"COLUMNS": "80", "TRITON_INTERPRET": "1", "GITHUB_ACTIONS": "", "NO_COLOR": "1"}


def marked(page: Path) -> object:
    name = page.relative_to(ROOT).as_posix()
    return pytest.param(page, id=name, marks=[pytest.mark.slow] if name in SLOW else [])


@pytest.mark.parametrize("page", [marked(page) for page in pages(ROOT)])
def test_page(page: Path, tmp_path: Path, programs: Programs) -> None:
    text = page.read_text()
    found = steps(text, page.name)
    folder = tmp_path / "work"
    folder.mkdir()
    for name in ("tests", "examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    file = tmp_path / "steps.json"
    file.write_text(json.dumps({"folder": str(folder), "steps": [[s.kind, s.name, s.text] for s in found]}))
    done = programs.run(PROGRAM, file, **TERMINAL)
    assert done.code == 0, done.err
    results = json.loads(file.read_text())
    told = [*zip(found, results, strict=True)]
    for step, (code, printed) in told:
        assert code in (0, 1), f"{step.text}\nended with {code}:\n{printed}\n{done.err}"
    wrong = []
    for step, (_, printed) in reversed(told):  # backwards: places before what is renewed stay
        if step.expected is not None and not says_the_same(step.expected, printed):
            wrong.append(f"{step.text}\nprints\n{printed}\nand the page says\n{step.expected}")
            if os.environ.get(RENEW) == "write" and step.expected.count(LEFT_OUT) < 2:
                text = text[: step.span[0]] + shown(step.expected, printed) + text[step.span[1] :]
    if text != page.read_text():
        page.write_text(text)
    else:
        assert not wrong, "\n\n".join(wrong) + f"\nwhere that is better: {RENEW}=write pytest …, and read the page"


PRINTED = "FAIL k: O is 1.23 % off\nNext: attn-diag check\n12 of 13 cases\nend\n"


@pytest.mark.parametrize(
    ("page", "same"),
    [
        (PRINTED, True),
        (PRINTED.replace("1.23", "1.24"), True),
        ("FAIL k: O is 1.23 % off\n…\n", True),
        ("FAIL k: O is 1.23 % off\n…\n12 of 13 cases\n…\n", True),
        ("…\nend\n", True),
        (PRINTED.replace("1.23", "12.3"), False),
        (PRINTED.replace("12 of", "11 of"), False),
        ("FAIL k: O is 1.23 % off\n", False),
        ("Next: attn-diag check\n…\n", False),
        ("FAIL k: O is 1.23 % off\n…\n12 of 14 cases\n…\n", False),
        ("FAIL k:\n…\n12 of 13 cases\n", False),
        ("", False),
    ],
)
def test_what_a_page_shows_is_held_against_what_is_printed(page: str, same: bool) -> None:
    assert says_the_same(page, PRINTED) is same


def test_kinds_of_blocks() -> None:
    page = (
        "<!-- yours:\nx = 1\n-->\n\n```python\nprint(x)\n```\n\n```text\n1\n```\n\n"
        '```python title="k.py"\ny = 2\n```\n\n```console\n$ a b\nout\n$ c\n```\n\n'
        "<!-- not run: needs a GPU -->\n```sh\nd\n```\n\n```sh\ne\nf\n```\n"
    )
    assert [(s.kind, s.name, s.text, s.expected) for s in steps(page, "p")] == [
        ("python", "p", "x = 1\n", None),
        ("python", "p", "print(x)\n", "1\n"),
        ("file", "k.py", "y = 2\n", None),
        ("command", "p", "a b", "out\n"),
        ("command", "p", "c", ""),
        ("command", "p", "e", None),
        ("command", "p", "f", None),
    ]
    with pytest.raises(AssertionError, match="not run: cpp"):
        steps("```cpp\n```\n", "p")


def test_a_renewed_page_shows_as_much_as_before() -> None:
    assert shown("old\nlines\n…\n", "new  \nwords\nmore\n") == "new\nwords\n…\n"
    assert shown("old\n", "new  \nwords\n") == "new\nwords\n"
