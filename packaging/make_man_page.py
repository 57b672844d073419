"""The man page, from the commands' own help: python packaging/make_man_page.py packaging/attn-diag.1"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import attn_diag
from attn_diag.cli import app


def main() -> str:
    """The page in man's own format."""
    return "\n".join(_lines(typer.main.get_command(app))) + "\n"


def _lines(root: Any) -> Iterator[str]:
    yield f'.TH ATTN-DIAG 1 "" "attn-diag {attn_diag.__version__}" "User Commands"'
    yield f".SH NAME\nattn-diag \\- {_plain(root.help)}"
    yield ".SH SYNOPSIS\n.B attn-diag\n.I COMMAND\n[OPTIONS] [ARGUMENTS]"
    yield ".SH COMMANDS"
    for name, command in root.commands.items():
        usage = " ".join(_takes(p) for p in command.params if p.param_type_name == "argument")
        yield f".SS attn-diag {_plain(name)} [OPTIONS] {_plain(usage)}\n{_plain(command.help)}"
        for parameter in command.params:
            if parameter.param_type_name == "option" and not getattr(parameter, "hidden", False):
                names = ", ".join([*parameter.opts, *parameter.secondary_opts])
                takes = "" if parameter.is_flag else f" {_takes(parameter)}"
                yield f".TP\n.B {_plain(names + takes)}\n{_plain(parameter.help or '')}"
    yield (
        ".SH EXIT STATUS\n0: done. 1: a verdict named in \\-\\-fail\\-on, or a failed probe, check or selftest. "
        "2: unusable input. 3: internal error."
    )


def _takes(parameter: Any) -> str:
    """What stands for its value in the help."""
    return str(parameter.metavar or parameter.name.upper())


def _plain(text: str) -> str:
    """On one line, with what man reads as commands escaped."""
    one = re.sub(r"\s+", " ", text).strip().replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{one}" if one.startswith((".", "'")) else one


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(main(), encoding="utf-8")
