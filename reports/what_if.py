"""The terminal report of a what-if: a summary, and one line a candidate; readable from 80 columns on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from rich.console import ConsoleOptions, RenderableType
from rich.table import Column, Table
from rich.text import Text

from attn_diag.reports import layout, words
from attn_diag.reports.lead import lead, on_head
from attn_diag.reports.quantities import NOISE_FACTOR
from attn_diag.results.diagnosis import BiasEstimate
from attn_diag.results.what_if import Candidate, WhatIf
from attn_diag.results.wording import DASH, SYMBOLS, file_name, head_name, number, percent, signed

_WIDE = 110
# A candidate helps where it takes away so much of the error.
_HELPS = 0.1
_STYLES = {"baseline": "bold", "mitigation": "", "mix": "yellow", "other recipe": "cyan"}


def what_if_renderables(found: WhatIf) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    yield from _first(found)
    yield Text("")
    yield layout.heading(found.source)
    yield Text(_subject(found), style="bold")
    for sentence in found.summary:
        yield _bullet("-", sentence)
    for note in found.notes:
        yield _bullet(" ", note)
    yield Text("")
    yield layout.Sized(partial(_ranking, found))
    if rest := [c for c in found.candidates if c.rank is None]:
        yield Text("\nNot ranked, for they are not the same attention here:", style="bold")
        reasons: dict[str, list[str]] = {}
        for candidate in rest:
            reasons.setdefault(_reason(candidate, found.ranked_by), []).append(candidate.name)
        for reason, names in reasons.items():
            yield _bullet(" ", f"{', '.join(names)}: {reason}")
    yield Text("")
    yield layout.note(_legend(found))
    yield layout.note(words.tool_line(found.tool))


def _first(found: WhatIf) -> Iterator[RenderableType]:
    """What helps most, and at what cost; and what to run next."""
    title, where = SYMBOLS[found.ranked_by], head_name(found.layer, found.head)
    place = f"{file_name(found.source)}: {where}:"
    best = next((c for c in found.candidates if c.rank == 1), None)
    before = percent(found.baseline.left)
    following = on_head("attribute", found.source, found.head, found.observation)
    told = ["This head of this capture only; costs are estimates, not measurements."]
    if found.unfit:
        told.insert(0, f"{found.unfit} So this is about the recipe {found.recipe}, not about the captured kernel.")
    with_o = None if best is None else _of_o(found, best)
    if best is None or best.removed is None or (best.removed < _HELPS and with_o is None):
        if best is not None and best.removed is not None:
            told.insert(0, f"The best, {best.name}, leaves {percent(best.left)}: {best.description}.")
        yield from lead(
            place, f"nothing tried takes away much of {title}'s error ({before}; emulated)", told, following
        )
        return
    told.insert(0, f"{best.name}: {best.description}.")
    cost = best.cost
    paid = (
        ""
        if cost is None
        else ", at no cost"
        if not cost.tensor_flops and not cost.bytes_fraction
        else f", for {_more(cost.tensor_flops)} matrix products and {_more(cost.bytes_fraction)} bytes"
    )
    cheap = min(
        (c for c in found.candidates if c.rank is not None and (c.removed or 0.0) >= _HELPS and c.cost is not None),
        key=_price, default=None,
    )  # fmt: skip
    if cheap is not None and cheap.name != best.name:
        told.insert(1, f"Cheapest that helps: {cheap.name}, which leaves {percent(cheap.left)}: {cheap.description}.")
    yield from lead(
        place,
        f"{best.name} leaves {title} {percent(best.left)} off instead of {before}{with_o or ''} (emulated){paid}",
        told,
        following,
    )


def _of_o(found: WhatIf, best: Candidate) -> str | None:
    """What a candidate leaves of O's error, where it takes away much of it and dQ's is what ranks; else None."""
    before, left = found.baseline.errors.o, best.errors.o
    if found.ranked_by == "o" or not before or left is None or not left <= (1 - _HELPS) * before:
        return None
    return f", and O {percent(left)} instead of {percent(before)}"


def _price(candidate: Candidate) -> tuple[float, float]:
    assert candidate.cost is not None
    return candidate.cost.tensor_flops + candidate.cost.bytes_fraction, candidate.left or 0.0


def _ranking(found: WhatIf, options: ConsoleOptions) -> Iterator[RenderableType]:
    """The table, with more columns where there is room."""
    wide = options.max_width >= _WIDE
    other = "o" if found.ranked_by == "dq" else None
    extra = [name for name in ("dw_q", other) if wide and name and getattr(found.baseline.errors, name) is not None]
    with_delta = found.baseline.errors.delta is not None
    heads = [_error(found.ranked_by), "removed", *map(_error, extra)]
    heads += [NOISE_FACTOR.heading] if with_delta else []
    heads += ["bias |O|\n(ulp)", *(["delta\nt"] if wide and with_delta else [])]
    heads += ["more\nwork", "more\nbytes", *(["ops a\nscore"] if wide else [])]
    candidates = Column("candidate", min_width=24)
    table = layout.table(layout.figure(""), candidates, *layout.figures(heads), collapse=True)
    for candidate in (found.baseline, *(c for c in found.candidates if c.rank is not None)):
        table.add_row(*_cells(found, candidate, extra, wide=wide), style=_STYLES[candidate.kind])
    yield table


def _cells(found: WhatIf, c: Candidate, extra: list[str], *, wide: bool) -> list[str]:
    cost = c.cost
    # Names are joined by "+"; a blank before it lets long ones wrap.
    name = c.name.replace("+", " +")
    cells = [
        f"{c.rank or ''}{'*' if c.pareto else ' '}",
        name if c.kind != "baseline" else f"baseline: {found.recipe}",
    ]
    spread = getattr(c.spread, found.ranked_by) if c.spread is not None else None
    cells.append(f"{'' if spread is None else '~'}{percent(c.left)}")
    cells += ["" if c.kind == "baseline" else _removed(c.removed)]
    cells += [percent(getattr(c.errors, name)) for name in extra]
    if found.baseline.errors.delta is not None:
        cells.append(number(c.errors.delta, 2))
    cells.append(_bias(c.bias_o, in_units=True, biased="o" in c.biased))
    if wide and found.baseline.errors.delta is not None:
        cells.append(_bias(c.bias_delta, in_units=False, biased="delta" in c.biased))
    if cost is None:
        return [*cells, *([""] * (3 if wide else 2))]
    cells += [_more(cost.tensor_flops), _more(cost.bytes_fraction)]
    return [*cells, *([f"{cost.vector_ops:.0f}"] if wide else [])]


def _error(quantity: str) -> str:
    return f"{SYMBOLS[quantity]}\nerror"


def _subject(found: WhatIf) -> str:
    seen = f", observation {found.observation}" if found.observation is not None else ""
    head = head_name(found.layer, found.head)
    return f"{head}, batch item {found.batch}{seen}: {found.rows} rows, largest score {found.max_logit:.4g}"


def _legend(found: WhatIf) -> str:
    title = SYMBOLS[found.ranked_by]
    return (
        f"Ranked by {title}'s error against the float64 reference; all recipes are emulated. *: no mitigation leaves "
        "less at no more cost. ~: mean over seeds. mix: the scores are rounded otherwise in forward or backward; "
        "kernel: another kernel's recipe. removed: of the baseline's error (3 x: three times it). "
        f"!: significant at level {found.level} among {found.family_size} tests (Benjamini-Hochberg). "
        "Bias of |O|: away from zero, beyond one correct rounding. More work (matrix products) and bytes: estimates "
        "relative to fused attention's own, not measurements. This head of this capture only."
    )


def _bias(estimate: BiasEstimate | None, *, in_units: bool, biased: bool) -> str:
    if estimate is None or estimate.t is None:
        return DASH
    return f"{signed(estimate.mean_ulp if in_units else estimate.t)}{'!' if biased else ' '}"


def _removed(value: float | None) -> str:
    """The part of the baseline's error that is gone; where there is more than twice of it, how many times."""
    if value is None:
        return DASH
    return percent(value, "+.1f") if value > -1 else f"{1 - value:.3g} x"


def _reason(candidate: Candidate, by: str) -> str:
    reason = candidate.equivalence.reason or ""
    if not candidate.finite:
        return reason
    changed = candidate.equivalence.status == "changes the model"
    error = percent(getattr(candidate.errors, by))
    return f"{reason}; {SYMBOLS[by]} {error} off{' against the changed model' if changed else ''}"


def _more(fraction: float) -> str:
    return f"+{percent(fraction, '.0f')}" if fraction else "0"


def _bullet(mark: str, text: str) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=1, justify="right")
    grid.add_column()
    grid.add_row(mark, Text(text))
    return grid
