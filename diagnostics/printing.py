"""The one door for what is printed, logged or raised: no name that somebody else chose acts where it is shown.

Names of files, tensors, keys and functions come from outside. In a terminal a control character moves the cursor,
colours, or turns the reading order round; a line break forges a line of a log; and GitHub and other CI systems obey
lines that begin with ``::`` and text that has ``##[`` anywhere.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import TextIO, TypeVar, cast

_T = TypeVar("_T")

# Of one text, so that a name of megabytes does not flood a log. Enough for our longest sentences.
_LONGEST, _END = 4000, 500
# Letters and marks to Python, but nothing to the eye; .NET, in which GitHub compares, passes over them.
_UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
# After any blanks.
_AT_LINE_START = re.compile(r"^( *):(?=:)", re.MULTILINE)
# Of GitHub "##[", of Azure Pipelines "##vso[", of TeamCity "##teamcity[".
_ANYWHERE = re.compile(r"#(?=#\S{0,12}\[)")
_NUMBERS = {int, float, bool, type(None)}
_NOT_ASCII = re.compile(r"[^\n -~]")


def printable(text: str) -> str:
    """A text of others as a part of a line: what is not seen is replaced, the middle of a long one left out.

    Where it may come to stand at the beginning of a line, the line must be ``inert``, too.
    """
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - _END]} … ({len(text) - _LONGEST} characters left out) … {text[-_END:]}"
    text = text if text.isascii() else _UNSEEN.sub("�", text)
    text = text if text.isprintable() else "".join(c if c.isprintable() else "�" for c in text)
    return _ANYWHERE.sub("# ", text)


def inert(text: str) -> str:
    """Printable lines, wrapped as they will be shown, with a blank in what a CI system would take for a command."""
    return _ANYWHERE.sub("# ", _AT_LINE_START.sub(r"\1: ", text))


def inert_json(text: str) -> str:
    """The same JSON document, with escapes for what a terminal or a CI system would obey."""
    # Documents are large: most need no look at each character.
    if not text.isascii() or "\x7f" in text:
        text = _NOT_ASCII.sub(lambda found: _escaped(found[0]), text)
    return _ANYWHERE.sub(r"\\u0023", text) if "##" in text else text


def _escaped(character: str) -> str:
    """As JSON has it, unless it is seen."""
    seen = character.isprintable() and not _UNSEEN.match(character)
    return character if seen else json.dumps(character)[1:-1]


def made_printable(value: _T) -> _T:
    """A result with every text in it ``printable``; the same object where all of them are already."""
    if isinstance(value, str):
        return printable(value)  # type: ignore[return-value]
    if isinstance(value, dict):
        pairs = [(made_printable(key), made_printable(item)) for key, item in value.items()]
        same = all(a is c and b is d for (a, b), (c, d) in zip(pairs, value.items(), strict=True))
        return value if same else dict(pairs)  # type: ignore[return-value]
    if isinstance(value, tuple | list):
        if set(map(type, value)) <= _NUMBERS:
            return value  # many are long
        items = [made_printable(item) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    changed, kind = {}, cast(type, type(value))
    for name in _names_of(kind):
        old = getattr(value, name)
        if type(old) not in _NUMBERS and (new := made_printable(old)) is not old:
            changed[name] = new
    return replace(value, **changed) if changed else value  # type: ignore[type-var]


@cache
def _names_of(kind: type) -> tuple[str, ...]:
    """Of a dataclass's fields; of other kinds none."""
    return tuple(f.name for f in fields(kind)) if is_dataclass(kind) else ()


def printable_lines(text: str) -> str:
    """Lines that are ours, with names of others in them: each ``printable`` and ``inert``."""
    return inert("\n".join(map(printable, text.split("\n"))))


def say(text: str, file: TextIO | None = None) -> None:
    """Print ``printable_lines``, on stderr unless ``file`` is given; nowhere where stderr is closed."""
    # print() itself takes None for stdout, where the JSON may be.
    if (target := sys.stderr if file is None else file) is not None:
        print(printable_lines(text), file=target)


class _Door(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = inert(printable(record.getMessage())), ()
        return True


# The package's only logger. A filter, unlike a handler, is asked wherever the record goes.
logging.getLogger("attn_diag").addFilter(_Door())
