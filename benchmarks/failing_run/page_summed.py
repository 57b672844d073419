"""The page's section on errors that add up over a batch, or do not (``summed_ARM.json``), beside what training did."""

from __future__ import annotations

from typing import Any

from page_cure import control_of, cures, trained
from page_record import Record
from values import at, number, percent

from attn_diag.reports.charts import Section
from attn_diag.reports.words import DASH


def summed(record: Record, arm: str, title: str) -> Section | None:
    """None without the arm's document."""
    found = [row for row in at(record.documents.get(f"summed_{arm}"), "rows") or () if isinstance(row, dict)]
    if not found:
        return None
    said = (
        "what-if ranks by the error in one sequence; the optimizer sees the sum over a batch. Of each change, emulated "
        "on the capture's sequences: the error of dW_Q in a sequence (root mean square) and of the sum, and the "
        "coherence ‖ΣE‖² / Σ‖E‖², which random signs leave at 1 in the mean; p is exact, from all signs."
    )
    fates = _fates(record, arm)
    lines: list[tuple[str, ...]] = [
        ("change", "error in a sequence", "error of the sum", "coherence", "p", "cosine with dW_Q", "training")
    ]
    lines += [_line(row, arm, fates) for row in found]
    return Section(title, (said,), tuple(lines))


def _fates(record: Record, arm: str) -> dict[str, str]:
    """What training did, by arm of the fork."""
    origin = record.first(arm)
    if origin is None:
        return {}
    control = control_of(record, origin)
    return {run.arm: trained(run, control) for run in (control, *cures(record, origin))}


def _line(row: dict[str, Any], arm: str, fates: dict[str, str]) -> tuple[str, ...]:
    name = str(row.get("name"))
    coherence, p_value, cosine = (number(at(row, key)) for key in ("coherence", "p_value", "cosine"))
    return (
        "none" if name == arm else name.removeprefix(f"{arm}+"),
        percent(number(at(row, "relative"))), percent(number(at(row, "relative_of_sum"))),
        DASH if coherence is None else f"{coherence:.2f}", DASH if p_value is None else f"{p_value:.2g}",
        DASH if cosine is None else f"{cosine:+.3f}", fates.get(name, "not trained"),
    )  # fmt: skip
