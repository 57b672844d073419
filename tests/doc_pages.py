"""The blocks of the docs' pages: what is run, what it must print, and what is not run and why.

```console         each "$ command" is run; the lines behind it are what it prints ("…": left out here)
```sh              each line is run; it must end with 0 or 1
```python          is run, in one namespace a page; a ```text block right behind it is what it prints
```python title="file.py"     (or another language) is written to that file
<!-- yours: … -->  is Python that stands for what the reader has, such as a model; it is run, and not shown
<!-- not run: why -->         before a block of these kinds that is only shown
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from snapshots import FIGURE

_BLOCK = re.compile(
    r"^<!-- yours:\n(?P<yours>.*?)^-->$"
    r'|^(?:<!-- not run: (?P<why>[^\n]+) -->\n)?```(?P<kind>\w+)(?: title="(?P<file>[^"]+)")?\n(?P<body>.*?)^```$'
    r"(?:\n\n```text\n(?P<printed>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
_VERSION = re.compile(r"v?\d+\.\d+\.\d+[\w.+]*,?")
LEFT_OUT = "…"
# Two figures that a page and another machine may give for one thing: a fifth apart, or next to nothing.
_APART, _NOTHING = 0.2, 1e-3


@dataclass(frozen=True)
class Step:
    """One thing to run: "python", "command" or "file", with what it must print (None: anything)."""

    kind: str
    name: str
    text: str
    expected: str | None
    span: tuple[int, int]
    """Where ``expected`` stands in the page."""


def steps(text: str, name: str) -> list[Step]:
    """What a page has to be run, in order."""
    found: list[Step] = []
    for block in _BLOCK.finditer(text):
        if block["yours"] is not None:
            found.append(Step("python", name, block["yours"], None, (0, 0)))
        elif block["why"] is not None or block["kind"] == "text":
            continue
        elif block["file"]:
            found.append(Step("file", block["file"], block["body"], None, (0, 0)))
        elif block["kind"] == "python":
            found.append(Step("python", name, block["body"], block["printed"], block.span("printed")))
        elif block["kind"] == "sh":
            found += [Step("command", name, line, None, (0, 0)) for line in block["body"].splitlines()]
        elif block["kind"] == "console":
            start = block.start("body")
            for part in re.finditer(
                r"^\$ (?P<line>[^\n]+)\n(?P<out>(?:(?!\$ )[^\n]*\n)*)", block["body"], re.MULTILINE
            ):
                place = (start + part.start("out"), start + part.end("out"))
                found.append(Step("command", name, part["line"], part["out"], place))
        else:
            raise AssertionError(f"{name}: a block of a kind that is not run: {block['kind']}")
    return found


def says_the_same(expected: str, printed: str) -> bool:
    """Whether all that a page shows is printed, in its order; figures may differ a little, lines break elsewhere."""
    words, at = printed.split(), 0
    parts = re.split(rf"^ *{LEFT_OUT}\n", expected, flags=re.MULTILINE)
    for number, part in enumerate(parts):
        wanted = part.split()
        last, first = number == len(parts) - 1, number == 0
        if last and not first and not wanted:
            return True
        starts = [at] if first else range(at, len(words) - len(wanted) + 1)
        if last and not first:
            starts = [len(words) - len(wanted)]
        fit = (s for s in starts if s >= at and len(words[s : s + len(wanted)]) == len(wanted))
        start = next((s for s in fit if all(map(_alike, wanted, words[s : s + len(wanted)]))), None)
        if start is None:
            return False
        at = start + len(wanted)
    return at == len(words)


def shown(expected: str, printed: str) -> str:
    """What a page is to show: as many first lines as it does now before "…", or all."""
    head, cut, _ = expected.partition(f"{LEFT_OUT}\n")
    lines = [f"{line.rstrip()}\n" for line in printed.splitlines()]
    if not cut:
        return "".join(lines)
    return "".join(lines[: len(head.splitlines())]) + f"{LEFT_OUT}\n"


def _alike(word: str, other: str) -> bool:
    # Versions are the reader's own.
    if word == other or (_VERSION.fullmatch(word) and _VERSION.fullmatch(other)):
        return True
    mine, theirs = FIGURE.findall(word), FIGURE.findall(other)
    if FIGURE.sub("#", word) != FIGURE.sub("#", other) or len(mine) != len(theirs):
        return False
    pairs = [(float(a), float(b)) for a, b in zip(mine, theirs, strict=True)]
    return all(abs(a - b) <= max(_APART * max(abs(a), abs(b)), _NOTHING) for a, b in pairs)


def pages(root: Path) -> list[Path]:
    """All pages that have something to run."""
    found = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    return [page for page in sorted(found) if steps(page.read_text(), page.name)]
