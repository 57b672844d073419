"""The report of ``check``: passed or not, what failed and why, one line a case; from 80 columns on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from attn_diag.reports import layout, words
from attn_diag.reports.quantities import NOISE_FACTOR
from attn_diag.results.check import BROKEN, CheckedBias, CheckedCase, CheckReport, Failure, Size
from attn_diag.results.wording import DASH, SYMBOLS, percent, plural

_SIZES = {"o": "O\nulp", "delta": NOISE_FACTOR.heading} | {name: SYMBOLS[name] for name in ("dq", "dk", "dv")}
# Names of so many failures a kind; the rest are in the JSON.
_SHOWN = 12


def check_renderables(found: CheckReport) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    yield layout.heading(f"check of {found.source}")
    yield Text(verdict(found), style="bold green" if found.passed else "bold red")
    yield layout.note(against(found))
    failures = [f"[{failure.kind}] {failure.message}" for failure in found.failures]
    yield from layout.bullets("✗", failures, _SHOWN, "… and {} more (--json has all)")
    for suspect in suspects(found):
        yield layout.bullet("→", suspect)
    for command in dict.fromkeys(f.look_closer for f in found.failures[:1] if f.look_closer):
        yield layout.bullet("?", f"look closer: {command}")
    if found.baseline and found.failures and not any(f.kind in BROKEN for f in found.failures):
        yield layout.bullet("?", f"accept: the same with --baseline {found.baseline} --update")
    yield from layout.bullets("-", found.notes, _SHOWN, "… and {} more notes (--json has all)")
    yield Text("")
    yield _table(found)
    yield Text("")
    yield layout.note(_legend(found))
    yield layout.note(words.tool_line(found.tool))


def verdict(found: CheckReport) -> str:
    """The outcome in a sentence."""
    cases = plural(len(found.cases), "case")
    if found.saved is not None:
        return f"{found.saved}: {cases} of {found.source}"
    if found.passed:
        compared = any(case.same_bits is not None for case in found.cases)
        bits = "; bits were NOT compared" if found.exact and not compared else ""
        return f"passed: {cases}, {found.tests} tests at level {found.level:g}{bits}"
    failed = {f.case for f in found.failures}
    return f"FAILED: {len(failed)} of {cases}, {len(found.failures)} failures"


def against(found: CheckReport) -> str:
    """What the kernel was compared with."""
    if found.baseline_key is not None:
        return f"{found.backend}; against {found.baseline}: {found.baseline_key}"
    what = "the key of the entry" if found.saved else "no baseline; key"
    return f"{found.backend}; {what}: {found.key}"


def suspects(found: CheckReport) -> list[str]:
    """What was found to have changed, or that nothing was."""
    if named := suspected(found.failures):
        return [f"looks like: {name}" for name in named]
    if any(f.kind in ("bias", "lossy", "growth", "bits") for f in found.failures):
        return ["no single change of a published recipe that is known here makes these bits"]
    return []


def suspected(failures: Iterable[Failure]) -> list[str]:
    """Each suspected change once, as the first failure words it; the numbers behind it are that case's."""
    found: dict[str, str] = {}
    for suspect in (f.suspect for f in failures if f.suspect):
        found.setdefault(suspect.partition(" (")[0], suspect)
    return list(found.values())


def _table(found: CheckReport) -> Table:
    sizes = {n: heading for n, heading in _SIZES.items() if any(n in c.sizes for c in found.cases)}
    table = layout.table(
        Column("case", no_wrap=True, overflow="ellipsis", max_width=24),
        Column("bias of |O|\nulp", no_wrap=True),
        *layout.figures(list(sizes.values())),
        Column("bits", no_wrap=True),
        Column("", no_wrap=True),
        collapse=True,
    )
    for case in found.cases:
        kinds = list(dict.fromkeys(f.kind for f in found.failures if f.case == case.name))
        table.add_row(
            case.name,
            _bias(case.biases.get("o_away_excess")),
            *(_size(n, case.sizes.get(n)) for n in sizes),
            _bits(case),
            Text(", ".join(kinds) or "ok", style="bold red" if kinds else "green"),
        )
    return table


def _bias(bias: CheckedBias | None) -> str:
    if bias is None:
        return DASH
    return f"{bias.mean:+.1g}" + ("" if bias.standard_error is None else f" ± {bias.standard_error:.0g}")


def _size(name: str, size: Size | None) -> str:
    if size is None:
        return DASH
    return f"{size.error:.2g}" if name in ("o", "delta") else percent(size.error, ".2g")


def _bits(case: CheckedCase) -> str:
    if case.deterministic is False:
        return "vary"
    return {True: "same", False: "other", None: DASH}[case.same_bits]


def _legend(found: CheckReport) -> str:
    held = (
        "means against the baseline's (Welch), sizes at most sqrt(5/4) of the baseline's on the same input"
        if found.baseline_key is not None
        else "means between 0 and a published recipe's, and 1/sqrt(12 T) ulp about that; every quantity at most 1.25 "
        "times a well-rounded kernel's error, or what is documented of a published kernel"
    )
    return (
        "Error = output - float64 reference on the same inputs; bias = mean beyond one correct rounding, ± standard "
        f"error over sequences. Held to: {held}; Holm over {found.tests} tests."
    )
