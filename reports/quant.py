"""The report of ``quant``: whether the values are the declared quantiser's, what the error is, what others leave."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Column
from rich.text import Text

from attn_diag.reports import layout, words
from attn_diag.reports.charts import Gallery, Section
from attn_diag.reports.html import gallery_document
from attn_diag.reports.lead import FAIL, OK, lead
from attn_diag.results.quant import OFF, EngineWeights, MeanOfErrors, Quant, StraightThrough
from attn_diag.results.wording import percent

_VERDICTS = {"pass": OK, "fail": FAIL, "undecided": "UNDECIDED"}
_PARTS = {
    "clipped": "clipped: past the last number",
    "dead-zone": "dead zone: became 0",
    "grid": "grid: rounded to a neighbour",
}
_LEGEND = (
    "Error: root mean square of Q(w) - w over that of w. Away from zero: the mean of the error times sign(w), over the "
    "mean of |w|; below 0 the weight shrinks. Constant: the part of the output's squared error that is the same in "
    "every row of x."
)


def quant_renderables(found: Quant) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    yield from lead(_VERDICTS[found.outcome], f"{found.source}: {found.headline}", found.notes, found.next)
    yield Text("")
    yield layout.heading(f"quantised weight: {found.source}")
    yield Text(_about(found), style="bold")
    for sentence in _sentences(found):
        yield layout.paragraph(sentence)
    for title, head, rows in _tables(found):
        yield from layout.title(title)
        figures = (Column(name, justify="right") for name in head[1:])
        yield layout.indented(layout.table(head[0], *figures, rows=rows, collapse=True))
    yield Text("")
    yield layout.note(_LEGEND)
    yield layout.note(words.tool_line(found.tool))


def quant_document(found: Quant) -> str:
    """The same as a self-contained page."""
    about = (*found.notes, _about(found), *_sentences(found))
    sections = [Section("The error", about)]
    sections += [Section(title, (), (head, *rows)) for title, head, rows in _tables(found)]
    lead_ = f"{found.headline}." + (f" Next: {found.next}" if found.next else "")
    footer = f"{_LEGEND} {words.tool_line(found.tool)}"
    return gallery_document(Gallery(f"{_VERDICTS[found.outcome]} {found.source}", lead_, tuple(sections), footer))


def _about(found: Quant) -> str:
    rows, columns = found.shape
    judged = (
        "errors of the observed values" if found.judged == "observed" else f"errors of {found.judged}, computed here"
    )
    return f"w [{rows}, {columns}] {found.dtype}; {judged}; declared: {found.declared or 'no quantizer'}"


def _sentences(found: Quant) -> Iterator[str]:
    yield (
        f"The error is {percent(found.error)} of w. Its mean is {_mean(found.mean)}; away from zero "
        f"{_mean(found.away)}."
    )
    if found.channels_tested:
        yield (
            f"{found.channels_biased} of {found.channels_tested} output channels have a mean error other than 0 at "
            f"level {found.level:g} (Benjamini-Hochberg over the channels)."
        )
    if found.output is not None:
        shift = found.output
        yield (
            f"The output x wᵀ of {shift.rows} rows is off by {percent(shift.error)}; {percent(shift.constant)} of that "
            f"error's square is the same in every row. Channel {shift.worst_channel} moves most: its mean by "
            f"{percent(shift.worst_shift)} of the output's size."
        )
    if found.gradient is not None:
        yield _gradient(found.gradient, next((p.elements for p in found.parts if p.part == "clipped"), 0))
    if found.engine is not None:
        yield _engine(found.engine)


def _gradient(found: StraightThrough, clipped: int) -> str:
    if found.inner_gain is None and not found.clipped:
        return "No straight-through gradient arrives at w."
    known = "is that of the smoothed forward" if found.right else "is not that of the smoothed forward"
    words = (
        f"Along dyᵀ x the straight-through gradient {known}: its gain is {found.gain:.3f} ± {found.standard_error:.1g} "
        "(1: right)"
    )
    if found.off > OFF:
        words += f"; element by element it is {percent(found.off)} off dyᵀ x where nothing is clipped"
    if found.clipped_gain is None:
        return f"{words}; clipped elements are given none of it." if clipped else f"{words}; nothing is clipped."
    return f"{words}; clipped elements have {percent(found.clipped)} of it, with a gain of {found.clipped_gain:.2g}."


def _engine(found: EngineWeights) -> str:
    whose = "" if found.quantizer is None else f" ({found.quantizer})"
    output = "" if found.output is None else f", the output by {percent(found.output)}"
    if found.same:
        return f"The engine{whose} has the trainer's weights: {percent(found.equal, '.4g')} of them equal."
    return (
        f"Mismatch: the engine's weights{whose} are not the trainer's: {found.words}. {percent(found.equal)} are "
        f"equal; they differ by {percent(found.difference)} of w{output}, away from zero by {100 * found.away:+.3g} %."
    )


def _mean(found: MeanOfErrors) -> str:
    if found.standard_error is None or found.p_value is None:
        return f"{found.mean:+.2e} of w's size (not tested)"
    tested = f"p = {found.p_value:.2g}, {found.clusters} clusters"
    return f"{found.mean:+.2e} ± {found.standard_error:.1e} of w's size ({tested})"


def _tables(found: Quant) -> Iterator[tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]]]:
    """Title, head and rows of each."""
    if found.matches:
        rows = tuple((m.words, m.quantizer, percent(m.equal, ".4g")) for m in found.matches)
        yield "Which quantizer gives these values", ("how it differs", "quantizer", "equal values"), rows
    parts = tuple(
        (_PARTS[p.part], str(p.elements), percent(p.of_square), f"{100 * p.away:+.3g} %") for p in found.parts
    )
    yield "What the error consists of", ("", "elements", "of its square", "away from zero"), parts
    if found.alternatives:
        with_output = found.output is not None
        head = ("what is changed", "error", "away from zero", *(("output error", "constant") if with_output else ()))
        rows = tuple(
            (
                a.words, percent(a.error), f"{100 * a.away:+.3g} %",
                *((percent(a.output_error), percent(a.output_constant)) if with_output else ()),
            )
            for a in found.alternatives
        )  # fmt: skip
        yield "What others leave", head, rows
