"""The microscope's terminal report; readable from 80 columns on."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from attn_diag.reports import layout, words
from attn_diag.reports.lead import lead, on_head
from attn_diag.reports.quantities import STEPS
from attn_diag.results import wording
from attn_diag.results.microscope import (
    Addition,
    ClosedForm,
    ClosedFormTotals,
    Curve,
    Microscope,
    Point,
    SumSite,
)
from attn_diag.results.wording import DASH, file_name, head_name, number, percent, plural

_MAX_SITES = 6
_PLOT_COLUMNS, _PLOT_ROWS = 64, 7
_CLASSES = {"tie": "a tie", "swamped": "swamped", "ordinary": "ordinary rounding"}


def microscope_renderables(m: Microscope) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    yield from _first(m)
    yield Text("")
    what = "recipe's" if m.observed is None else m.observation
    yield Text(
        f"O[{m.row}, {m.feature}] of {head_name(m.layer, m.head)}, batch {m.batch} ({m.chosen}): "
        f"{what} error {_signed(m.error)} = {m.error / m.ulp:+.3g} ulp",
        style="bold",
    )
    splits = f" in {m.splits} splits" if m.splits > 1 else ""
    yield Text(f"{m.source}; {plural(m.keys, 'visible key')}, {plural(m.ranges, 'key range')}{splits}")
    if m.unfit:
        yield Text(f"{m.unfit} The walk is {m.recipe}'s, not the kernel's.", "yellow")
    yield Text(f"recipe {m.recipe_reason}")
    yield _values(m)
    if m.observed is not None and m.observed != m.walked:
        yield Text(f"The captured kernel did not do here what {m.recipe} does: what follows is the recipe's.", "yellow")
    yield from _sites(m)
    if m.addition is not None and m.decisive is not None:
        site = m.sites[m.decisive]
        yield from _addition(m.addition, site, decisive=not abs(m.before_sum) > abs(site.contribution))
    yield from _terms(m)
    yield from _curve(m.curve)
    yield layout.section("Closed form: tie × residual sign, swamping")
    yield Text(_element(m))
    if m.closed_form is not None:
        yield from closed_form_renderables(m.closed_form)
    yield Rule(style="dim")
    yield Text(
        "Error = observed - float64 reference on the same inputs. What happened inside a captured kernel is inferred: "
        f"the walk is recipe {m.recipe}'s. One element is an example, not a measure of bias.\n"
        f"{words.tool_line(m.tool)}",
        style="dim",
    )


def _first(m: Microscope) -> Iterator[RenderableType]:
    """How far the element is off, and which rounding makes it; and what to run next."""
    place = f"{file_name(m.source)}: {head_name(m.layer, m.head)}, O[{m.row}, {m.feature}]:"
    off = f"off by {wording.in_last_bits(abs(m.error / m.ulp))}, too {'high' if m.error > 0 else 'low'}"
    if not m.error:
        off = "exactly right"
    if m.decisive is None or not m.error:
        made = ""
    elif abs(m.before_sum) > abs(m.sites[m.decisive].contribution):
        made = "; most of it is made before the sum, by scores, exp or the cast of P̄"
    else:
        site = m.sites[m.decisive]
        made = f"; {_step(site)} makes {_signed(site.contribution)} of {_signed(m.walked - m.reference)}"
    told = ["One element is an example; the whole head's are below, and in attn-diag inspect."]
    if m.unfit or (m.observed is not None and m.observed != m.walked):
        told.insert(0, f"The walk is recipe {m.recipe}'s: the captured kernel did otherwise here.")
    following = on_head("attribute", m.source, m.head, None if m.observed is None else m.observation)
    yield from lead(place, f"{off}{made}", told, following)


def whole_closed_form_renderables(found: ClosedForm) -> Iterator[RenderableType]:
    """The closed form on its own."""
    yield from closed_form_renderables(found.totals)


def closed_form_renderables(t: ClosedFormTotals) -> Iterator[RenderableType]:
    """The closed form over a head."""
    yield Text(f"Whole head: {t.statement}")
    if t.format is None:
        return
    table = _table("error of", "n", "predicted sum", "measured sum", "correlation", "explained")
    for name, found in (("O", t.o), ("delta", t.delta)):
        if found is not None:
            sums = _signed(found.predicted_sum), _signed(found.measured_sum)
            table.add_row(name, str(found.n), *sums, number(found.correlation), percent(found.share))
    yield layout.indented(table)
    # Not the swamped rows of the other reports, which are so in all features.
    rows = f"{t.rows['tie']} with a tie in a feature, {t.rows['swamped']} others with a swamped feature, "
    rows += f"{t.rows['ordinary']} with neither"
    if t.dq_measured is not None:
        measured, predicted = percent(t.dq_measured), percent(t.dq_predicted)
        rows += f"; through delta, dQ is off by {measured} as measured, by {predicted} as predicted"
    yield Text(f"Rows: {rows}.")


def _values(m: Microscope) -> Table:
    table = _table("", "value", "- float64")
    agree = "bit for bit the emulation" if m.bit_equal else f"the emulation has {m.emulated!r}"
    if m.observed is not None:
        table.add_row(f"observed ({m.observation})", repr(m.observed), _signed(m.observed - m.reference))
    table.add_row(f"walked ({agree})", repr(m.walked), _signed(m.walked - m.reference))
    table.add_row("float64, rounded once", repr(m.rounded_reference), _signed(m.rounded_reference - m.reference))
    table.add_row("float64 reference", f"{m.reference:.12g}", "")
    return table


def _sites(m: Microscope) -> Iterator[RenderableType]:
    yield layout.section("Where the walked error comes from")
    table = _table("rounding", "keys", "format", "from", "to", "makes of O")
    ranked = sorted(range(len(m.sites)), key=lambda i: -abs(m.sites[i].contribution))
    for i in sorted(ranked[:_MAX_SITES]):
        site = m.sites[i]
        style = "bold" if i == m.decisive else ""
        table.add_row(_step(site), _keys(site), site.format, f"{site.before:.9g}", f"{site.after:.9g}",
                      _signed(site.contribution), style=style)  # fmt: skip
    if len(ranked) > _MAX_SITES:
        rest = sum(m.sites[i].contribution for i in ranked[_MAX_SITES:])
        table.add_row(f"{len(ranked) - _MAX_SITES} more", "", "", "", "", _signed(rest))
    table.add_row("before the sum", "", "", "", "", _signed(m.before_sum))
    yield table
    yield layout.note("Before the sum: scores, exp, the cast of P̄, l, and fp32 arithmetic.")


def _addition(a: Addition, site: SumSite, *, decisive: bool) -> Iterator[RenderableType]:
    """``decisive``: no more was lost before the sum than by this rounding of it."""
    where = f", keys {_keys(site)}" if site.keys else ""
    title = "The decisive rounding" if decisive else "Largest rounding of the sum (more was lost before)"
    yield layout.section(f"{title}: {_step(site)}{where}, to {a.format}")
    yield from addition_renderables(a)
    if site.after != a.rounded:
        yield Text(
            f"That is nearest-even; the recipe rounds {site.format.partition(':')[2]} here, to {site.after:.9g}."
        )


def addition_renderables(a: Addition) -> Iterator[RenderableType]:
    """One rounding of a sum, bit by bit."""
    table = _table("operand", "value", "2^", "bits, aligned; | ends what is kept")
    for o in a.operands:
        label = f"{'residual: ' if o.residual else ''}{o.label.replace('P_bar', 'P̄').replace('O_bar', 'Ō')}"
        sign = "-" if o.negative else " "
        exponent = DASH if o.exponent is None else str(o.exponent)
        table.add_row(label, f"{o.value:.9g}", exponent, sign + o.aligned)
    sign = "-" if a.exact < 0 else " "
    table.add_row("exact sum", repr(a.exact), str(a.exponent), sign + a.exact_aligned, style="bold")
    table.columns[3].justify = "left"
    yield table
    carry = f"carry of {a.carry}" if a.carry > 0 else "no carry" if not a.carry else f"cancellation of {-a.carry} bits"
    yield Text(
        f"{carry}; kept {a.kept}, guard {a.guard}, round {a.round_bit}, sticky {a.sticky}: {_tie(a)}. "
        f"Neighbours {a.toward_zero:.9g} and {a.away:.9g} (spacing {a.ulp:.4g})."
    )
    yield Text(f"Rounds to {a.rounded:.9g}, {a.direction}: error {a.error:+.17g}.", style="bold")
    if (alone := a.without_residual) is not None:
        same = "the same" if alone.rounded == a.rounded else "another"
        tie = ", a tie, to even" if alone.tie else ""
        yield Text(
            f"Without the residual of {a.residual:+.6g}: {alone.exact:.12g} rounds to {alone.rounded:.9g}{tie} "
            f"({same} value), error {alone.error:+.6g}."
        )


def _tie(a: Addition) -> str:
    if a.tie == "exact":
        return "a tie, to even"
    if a.tie == "broken":
        return f"a tie of the main operands, broken by the residual {a.residual:+.6g}"
    return f"no tie ({a.from_tie:+.4g} from half-way)"


def _terms(m: Microscope) -> Iterator[RenderableType]:
    yield layout.section("The sum, term by term: P̄ = 1 and the largest terms")
    table = _table("t", "key", "P̄ cast", "V", "P̄V at the end", "Ō_err before", "after")
    for t in m.terms:
        table.add_row(
            str(t.position), str(t.key), f"{t.cast_probs:.5g}", f"{t.value:.6g}", f"{t.product:.6g}",
            _signed(t.error_before), _signed(t.error_after), style="bold" if t.unit else "",
        )  # fmt: skip
    yield table
    more = f"; {m.keys - len(m.terms)} more keys" if m.keys > len(m.terms) else ""
    yield layout.note(f"Bold: P̄ = 1 at the final maximum{more}.")


def _curve(curve: Curve) -> Iterator[RenderableType]:
    title = f"Prefix error Ō_err(t), rounded to {curve.format}; {curve.unit_keys} of {curve.keys} keys have P̄ = 1"
    yield layout.section(title)
    if not curve.points:
        return
    yield Text("\n".join(_plot(curve)), no_wrap=True)
    last = curve.points[-1]
    yield Text(f"At the end {_signed(last.error)}; of it, {_signed(last.rounding_error)} by rounding the sum alone.")


def _plot(curve: Curve) -> list[str]:
    """The points over t, the largest of each column; marks under the columns with P_bar = 1."""
    columns: dict[int, Point] = {}
    marks = [" "] * _PLOT_COLUMNS
    for point in curve.points:
        column = min((point.position - 1) * _PLOT_COLUMNS // max(curve.keys, 1), _PLOT_COLUMNS - 1)
        if column not in columns or abs(point.error) > abs(columns[column].error):
            columns[column] = point
        if point.unit:
            marks[column] = "^"
    columns = {column: point for column, point in columns.items() if math.isfinite(point.error)}
    errors = [0.0, *(p.error for p in columns.values())]
    low, high = min(errors), max(errors)
    # Of halves: the difference of two finite numbers need not be finite.
    half = (high / 2 - low / 2) / (_PLOT_ROWS - 1) or 1.0
    rows = [[" "] * _PLOT_COLUMNS for _ in range(_PLOT_ROWS)]
    zero = round(high / 2 / half) if high > low else _PLOT_ROWS // 2
    rows[zero] = ["·"] * _PLOT_COLUMNS
    for column, point in columns.items():
        at = round((high / 2 - point.error / 2) / half) if high > low else zero
        rows[at][column] = "o" if point.unit else "•"
    labels = {0: high, _PLOT_ROWS - 1: low, zero: 0.0}
    lines = [f"{_signed(labels[i]) if i in labels else '':>9} {''.join(row).rstrip()}" for i, row in enumerate(rows)]
    return [*lines, f"{'P̄ = 1':>10} {''.join(marks).rstrip()}", f"{'':>9} t = 1 … {curve.keys}"]


def _element(m: Microscope) -> str:
    e = m.element
    how = "nothing is predicted (0)" if e.kind == "ordinary" else f"predicted error {_signed(e.predicted_error)}"
    keys = f"{plural(e.unit_keys, 'key')} with P̄ = 1"
    detail = f", base {e.base:.6g}, residual {_signed(e.residual)}" if e.unit_keys else ""
    return f"This element: {_CLASSES[e.kind]} ({keys}{detail}): {how}, measured {_signed(m.error)}."


def _step(site: SumSite) -> str:
    return STEPS.get(f"{site.name}/{site.step}", f"{site.name}, {site.step}")


def _keys(site: SumSite) -> str:
    return "" if site.keys is None else f"{site.keys[0]}-{site.keys[1] - 1}"


def _signed(value: float) -> str:
    return wording.signed(value, 3)


def _table(first: str, *figures: str) -> Table:
    return layout.table(first, *layout.figures(figures))
