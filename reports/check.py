"""The report of ``check``: passed or not, what failed and why, one line a case; from 80 columns on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from attn_diag.reports import words
from attn_diag.reports.check_failure import suspected

if TYPE_CHECKING:
    from attn_diag.results.check import CheckedBias, CheckedCase, CheckReport, Size

_SIZES = ("o", "delta", "dq", "dk", "dv")
_HEADS = {"o": "O\nulp", "delta": "noise\nfactor", "dq": "dQ", "dk": "dK", "dv": "dV"}
# Names of so many failures a kind; the rest are in the JSON.
_SHOWN = 12


def check_renderables(found: CheckReport) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    yield Rule(Text(f"check of {words.printable(found.source)}", overflow="ellipsis"), align="left")
    yield Text(verdict(found), style="bold green" if found.passed else "bold red")
    yield Text(against(found), style="dim")
    for failure in found.failures[:_SHOWN]:
        yield words.bullet("✗", f"[{failure.kind}] {words.printable(failure.message)}")
    if len(found.failures) > _SHOWN:
        yield words.bullet("", f"… and {len(found.failures) - _SHOWN} more (--json has all)")
    for suspect in suspects(found):
        yield words.bullet("→", suspect)
    for command in dict.fromkeys(f.look_closer for f in found.failures[:1] if f.look_closer):
        yield words.bullet("?", f"look closer: {words.printable(command)}")
    # What is broken is never accepted.
    if found.baseline and found.failures and not any(f.kind in ("fit", "determinism") for f in found.failures):
        yield words.bullet("?", f"accept: the same with --baseline {words.printable(found.baseline)} --update")
    for note in found.notes[:_SHOWN]:
        yield words.bullet("-", words.printable(note))
    if len(found.notes) > _SHOWN:
        yield words.bullet("", f"… and {len(found.notes) - _SHOWN} more notes (--json has all)")
    yield Text("")
    yield _table(found)
    yield Text("")
    yield Text(_legend(found), style="dim")
    yield Text(words.tool_line(found.tool), style="dim")


def verdict(found: CheckReport) -> str:
    """The outcome in a sentence."""
    count = f"{len(found.cases)} case{'s' * (len(found.cases) != 1)}"
    if found.saved is not None:
        return f"{found.saved}: {count} of {words.printable(found.source)}"
    if found.passed:
        compared = any(case.same_bits is not None for case in found.cases)
        bits = "; bits were NOT compared" if found.exact and not compared else ""
        return f"passed: {count}, {found.tests} tests at level {found.level:g}{bits}"
    failed = {f.case for f in found.failures}
    return f"FAILED: {len(failed)} of {count}, {len(found.failures)} failures"


def against(found: CheckReport) -> str:
    """What the kernel was compared with."""
    if found.baseline_key is not None:
        return words.printable(f"{found.backend}; against {found.baseline}: {found.baseline_key}")
    what = "the key of the entry" if found.saved else "no baseline; key"
    return words.printable(f"{found.backend}; {what}: {found.key}")


def suspects(found: CheckReport) -> list[str]:
    """What was found to have changed, or that nothing was."""
    if named := suspected(found.failures):
        return [words.printable(f"looks like: {name}") for name in named]
    if any(f.kind in ("bias", "growth", "bits") for f in found.failures):
        return ["no single change of a published recipe that is known here makes these bits"]
    return []


def _table(found: CheckReport) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim", collapse_padding=True)
    table.add_column("case", no_wrap=True, overflow="ellipsis", max_width=24)
    table.add_column("bias of |O|\nulp", no_wrap=True)
    sizes = [n for n in _SIZES if any(n in c.sizes for c in found.cases)]
    for name in sizes:
        table.add_column(_HEADS[name], justify="right", no_wrap=True)
    table.add_column("bits", no_wrap=True)
    table.add_column("", no_wrap=True)
    for case in found.cases:
        kinds = list(dict.fromkeys(f.kind for f in found.failures if f.case == case.name))
        table.add_row(
            words.printable(case.name),
            _bias(case.biases.get("o_away_excess")),
            *(_size(n, case.sizes.get(n)) for n in sizes),
            _bits(case),
            Text(", ".join(kinds) or "ok", style="bold red" if kinds else "green"),
        )
    return table


def _bias(bias: CheckedBias | None) -> str:
    if bias is None:
        return words.DASH
    return f"{bias.mean:+.1g}" + ("" if bias.standard_error is None else f" ± {bias.standard_error:.0g}")


def _size(name: str, size: Size | None) -> str:
    if size is None:
        return words.DASH
    return f"{size.error:.2g}" if name in ("o", "delta") else f"{100 * size.error:.2g} %"


def _bits(case: CheckedCase) -> str:
    if case.deterministic is False:
        return "vary"
    return {True: "same", False: "other", None: words.DASH}[case.same_bits]


def _legend(found: CheckReport) -> str:
    held = (
        "means against the baseline's (Welch), sizes at most sqrt(5/4) of the baseline's on the same input"
        if found.baseline_key is not None
        else "means between 0 and a published recipe's, and 1/sqrt(12 T) ulp about that; sizes at most twice the "
        "recipe's and one rounding"
    )
    return (
        "Error = output - float64 reference on the same inputs; bias = mean beyond one correct rounding, ± standard "
        f"error over sequences. Held to: {held}; Holm over {found.tests} tests."
    )
