"""Help pages say all that they have to say, and an option that would not be read is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from command_line import Programs, Run
from typer.main import get_command

from attn_diag.cli import app

COMMANDS = get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_no_word_of_a_help_page_is_lost_or_broken(name: str, programs: Programs) -> None:
    """At 80 columns: what looks like markup is swallowed, and a long word is cut off, where nobody looks."""
    done = programs.run("attn_diag", name, "--help", COLUMNS="80")
    assert done.code == 0, done.err
    shown = done.out.replace("│", " ")
    assert "…" not in shown.replace(", …", "").replace(",…", "").replace("inspect …", "")
    taken = COMMANDS[name]
    said = [taken.help or "", *(getattr(p, "help", None) or "" for p in taken.params)]
    assert not {w for text in said for w in text.split()} - set(shown.split())
    # A paragraph is wrapped at the width of the screen alone: no line of it ends early.
    prose = shown.partition("╭")[0].splitlines()
    for line, following in pairwise(prose):
        if line.strip() and following.strip() and "Usage" not in line:
            assert len(line.rstrip()) + 1 + len(following.split()[0]) > 79, line


UNREAD = {
    "check --budget": (["check", "sdpa", "--budget", "5"], "--budget is for --hunt alone"),
    "check --axes": (["check", "sdpa", "--axes", "mask", "--limit", "5"], "--axes, --limit is for --hunt alone"),
    "check --exact": (["check", "sdpa", "--exact"], "exact compares with the bits of a baseline: name its file"),
    "check --head-dim": (["check", "sdpa", "--head-dim", "0"], "head_dim must be at least 8, got 0"),
    "hunt --exact": (["check", "sdpa", "--hunt", "--exact", "--save"], "--hunt has no --save, --exact"),
    "hunt --length": (["check", "sdpa", "--hunt", "--length", "256"], "--hunt has no --length"),
    "hunt --no-backward": (["check", "sdpa", "--hunt", "--no-backward"], "--hunt has no --backward or --no-backward"),
    "replay --out": (
        ["replay", "--example", "--out", "cases"],
        "--out is for --hunt alone: add --hunt, or leave it out",
    ),
    "replay --hunt --head": (["replay", "--example", "--hunt", "--head", "4"], "--hunt has no --head"),
    "inspect --engine": (
        ["inspect", "--example", "--engine", "triton"],
        "--engine triton is for --recipe alone: add --recipe NAME, or leave it out",
    ),
    "inspect --certify-bits": (
        ["inspect", "--example", "--certify-bits", "256"],
        "--certify-bits is for --certify alone: add --certify N, or leave it out",
    ),
    "invariance --no-schedules": (
        ["invariance", "m:f", "--operator", "kda", "--no-schedules"],
        "linear attention takes no --no-schedules: leave it out",
    ),
    "diff --device": (
        ["diff", "a.json", "b.json", "--device", "cpu"],
        "two saved diagnoses are compared on no device; leave --device out",
    ),
    "inspect --json-full": (["inspect", "--example", "--json-full"], "add --json FILE, or leave it out"),
}


@pytest.mark.parametrize(("arguments", "message"), UNREAD.values(), ids=UNREAD)
def test_an_option_that_would_not_be_read_is_refused(arguments: list[str], message: str, run: Run) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert message in done.err
    assert not done.out
