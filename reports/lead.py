"""The first lines of a report: OK or what was found, how sure that is, what is normal, and what to run next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from attn_diag.reports.layout import Hanging
from attn_diag.results.wording import source_argument

OK, FAIL = "OK", "FAIL"
_STYLES = {OK: "bold green", FAIL: "bold red"}


def lead(
    verdict: str, what: str, told: Sequence[str] = (), following: str | None = None, style: str | None = None
) -> Iterator[RenderableType]:
    """The lines: the verdict with what was found and where, what to run next, and why.

    Args:
        verdict: "OK", "FAIL", or another word that the report begins with.
        what: What was found, and where.
        told: How sure that is and what is normal, a sentence or two each.
        following: The command to run next, or a call in Python.
        style: Of the first line; by default by its verdict.
    """
    yield Hanging("", Text(f"{verdict} {what}", style=_STYLES.get(verdict, "bold") if style is None else style))
    if following is not None:
        yield Hanging("  ", Text(f"Next: {following}", style="bold"))
    for sentence in told:
        yield Hanging("  ", Text(sentence))


def on_head(command: str, source: str, head: int | None, observation: str | None = None) -> str | None:
    """A command on the head that a result is of, with its options filled in; None where that is in no file.

    Args:
        command: Such as "attribute".
        source: What the result calls its capture.
        head: The head; None: all.
        observation: The one that it is of; "observed" is a file's only one.
    """
    if not source.endswith((".safetensors", ".pt", ".npz")):
        return None
    options = [] if head is None else ["--head", str(head)]
    if observation not in (None, "observed"):
        options += ["--observation", shlex.quote(str(observation))]
    return " ".join(["attn-diag", command, source_argument(source), *options])
