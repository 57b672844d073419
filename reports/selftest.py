"""The reports of ``selftest``: the installation's checks, and a GPU's measured arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from attn_diag.reports import layout
from attn_diag.reports.lead import FAIL, OK, lead
from attn_diag.reports.words import tool_line
from attn_diag.results.hardware import Exp2Profile, HardwareProfile, SumProfile
from attn_diag.results.selftest import Installation
from attn_diag.results.wording import DASH, listed, number, percent, plural, signed

_NO_FIT = "does not fit"


def installation_renderables(found: Installation) -> Iterator[RenderableType]:
    """The table of checks, the failed ones in red."""
    failed = sum(not check.passed for check in found.checks)
    if failed:
        names = listed([c.name for c in found.checks if not c.passed], 3)
        told = ["Its figures cannot be trusted: mend or reinstall torch first."]
        yield from lead(FAIL, f"this installation: {failed} of {len(found.checks)} checks failed ({names})", told,
                        "attn-diag env")  # fmt: skip
    else:
        yield from lead(OK, f"this installation: all {len(found.checks)} checks passed")
    table = layout.table("check", "cases", "found", "limit", "")
    for check in found.checks:
        style = "" if check.passed else "red"
        word = "ok" if check.passed else "FAILED"
        cells = (check.name, str(check.cases), f"{number(check.figure)} {check.unit}", number(check.limit), word)
        table.add_row(*(Text(cell, style=style) for cell in cells))
    yield layout.indented(table)
    yield layout.note(f"{tool_line(found.tool)}; {found.seconds:.1f} s")


def profile_renderables(found: HardwareProfile) -> Iterator[RenderableType]:
    """Sums, exp2 and casts as measured, and what does not fit."""
    odd = [_unit_name(unit) for unit in found.sums if not unit.fits]
    where = f"arithmetic of {found.gpu} ({found.backend}), measured {found.measured}"
    if odd:
        yield from lead(FAIL, f"{where}: the sums of {listed(odd, 3)} fit no rule that is known", style="bold yellow")
    else:
        yield from lead(OK, f"{where}: the sums of {plural(len(found.sums), 'unit')} fit a rule")
    yield Text("")
    yield layout.indented(_sums(found.sums))
    for unit in found.sums:
        for note in unit.notes:
            yield Text(f"{_unit_name(unit)}: {note}", style="yellow")
    yield Text("")
    for line in _exp2(found.exp2):
        yield Text(line)
    yield Text(f"fp32 products with subnormal operands or results: {found.multiply_subnormals or _NO_FIT}.")
    yield Text("")
    casts = layout.table("cast from fp32 to", "rounding", "subnormals", "overflow", "values")
    for cast in found.casts:
        casts.add_row(
            cast.format,
            cast.rounding or _NO_FIT,
            cast.subnormals or _NO_FIT,
            cast.overflow or _NO_FIT,
            str(cast.values),
        )
    yield layout.indented(casts)
    yield layout.note(f"torch {found.torch}, triton {found.triton}; {found.seconds:.1f} s")


def _sums(units: tuple[SumProfile, ...]) -> Table:
    table = layout.table("sums of", "block", "bits", "terms", "sum", "products", "subnormals", "missed")
    for unit in units:
        missed = DASH if unit.mismatches is None else f"{unit.mismatches} of {unit.sums}"
        table.add_row(
            Text(_unit_name(unit), style="" if unit.fits else "yellow"),
            _NO_FIT if unit.block is None else str(unit.block),
            _NO_FIT if unit.fraction_bits is None else str(unit.fraction_bits),
            unit.alignment or _NO_FIT,
            unit.result or _NO_FIT,
            "exact" if unit.products_exact else "rounded",
            unit.subnormals or _NO_FIT,
            missed,
        )
    return table


def _exp2(found: Exp2Profile) -> Iterator[str]:
    exact = "exactly 1" if found.exact_at_zero else "not 1"
    integers = "exact" if found.exact_at_integers else "not exact"
    yield (
        f"exp2: error at most {number(found.max_error_ulp)} ulp over {found.arguments} arguments of [-126, 0] "
        f"(at {found.worst_argument:.9g}); exp2(0) is {exact}, at the integers it is {integers}."
    )
    yield (
        f"On a uniform grid on [-1, 0) its mean error is {signed(found.mean_error_ulp)} ulp "
        f"({signed(found.mean_relative_error)} relative), and {percent(found.not_nearest)} are not the nearest "
        f"number; subnormal results: {found.subnormal_results or _NO_FIT}."
    )


def _unit_name(unit: SumProfile) -> str:
    return f"{unit.operands.upper()}, {unit.instruction}"
