"""The report of ``replay``: the kernel, the head or neither; then a line a kernel, and how those ended that failed."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from attn_diag.reports import layout, words
from attn_diag.reports.charts import Gallery, Section
from attn_diag.reports.html import gallery_document
from attn_diag.reports.lead import lead
from attn_diag.results.replay import CAUSES, FAILED, Replay, ReplayedCapture, ReplayedKernel, ReplayedQuantity
from attn_diag.results.wording import DASH, SYMBOLS, file_name, number, plural, share, times

_STYLES = {
    "kernel": "bold red", "metadata": "bold red", "head": "bold yellow", "undecided": "bold yellow",
    "pass": "bold green",
}  # fmt: skip
_MARKS = {"nonfinite": "NaN", "wrong": "wrong", "lossy": "lossy", "undecided": "?", "good": "", "stated": ""}
_ENDED = {
    "refused": "refused", "raised": "raised", "crashed": "crashed", "timed-out": "timed out",
    "other-function": "computes another function",
}  # fmt: skip
_LEGEND = (
    "Figures are errors in units of a well-rounded kernel's (1: as good; lossy above 1.25), of the worst head; ? is "
    "neither passed nor faulted; * a published kernel makes the same error, or it is so by design. Bits: which known "
    "recipe has the O's bits, and its order of keys. Times: the best of a few calls, forward and backward, in ms."
)


def replay_renderables(found: Replay) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    cause, said, *told = _opening(found)
    yield from lead(cause.upper(), said, told, _next(found), _STYLES[found.cause])
    for message in found.unreadable:
        yield Text(f"warning: not read: {message}", style="yellow")
    for capture in found.captures:
        yield Text("")
        yield layout.heading(capture.source)
        if len(found.captures) > 1:
            yield layout.paragraph(f"{capture.cause.upper()}: {capture.words}", _STYLES[capture.cause])
        sizes = " ".join(f"{name}={size}" for name, size in capture.shape.items())
        yield Text(f"{sizes}, {capture.dtype}", style="bold")
        yield layout.indented(_table(capture))
        for note in _notes(capture):
            yield layout.bullet("-", note)
    yield Text("")
    if found.not_here:
        yield layout.note(f"Not run: {', '.join(found.not_here)}.")
    yield layout.note(_LEGEND)
    yield layout.note(words.tool_line(found.tool))


def replay_document(found: Replay) -> str:
    """The same as a page of its own."""
    cause, said, *told = _opening(found)
    sections = [
        Section(f"{c.source}: {c.cause}", (c.words, *_notes(c)), table=(_COLUMNS, *map(_cells, c.kernels)))
        for c in found.captures
    ]
    left = f"Not run: {', '.join(found.not_here)}. " if found.not_here else ""
    title = f"{cause.upper()} {said}"
    return gallery_document(
        Gallery(title, " ".join(told) or _LEGEND, tuple(sections), f"{left}{words.tool_line(found.tool)}")
    )


def _opening(found: Replay) -> list[str]:
    """The gravest cause, what it is about, and what is said of the rest."""
    worst = sorted(found.captures, key=lambda c: CAUSES.index(c.cause))
    first = worst[0]
    said = first.words if len(worst) == 1 else f"{file_name(first.source)}: {first.words}"
    told = []
    if len(worst) > 1:
        counts = [(cause, sum(c.cause == cause for c in worst)) for cause in CAUSES]
        told.append(f"Of {len(worst)} captures: {', '.join(f'{n} {cause}' for cause, n in counts if n)}.")
    if found.failed:
        ended = {k.name: k for c in found.captures for k in c.kernels if k.outcome in FAILED}
        told.append(" ".join(f"{_ended(k)}." for k in ended.values()))
    return [first.cause, said, *told]


def _next(found: Replay) -> str | None:
    capture = min(found.captures, key=lambda c: CAUSES.index(c.cause))
    own = any(k.captured and k.name in capture.culprits for k in capture.kernels)
    if capture.source == "memory" or capture.cause not in ("kernel", "metadata", "head"):
        return None
    if capture.cause == "head":
        return f"attn-diag what-if {capture.source}"
    return f"attn-diag inspect {capture.source}" if own or capture.cause == "metadata" else None


_COLUMNS = ("kernel", "version", "verdict", *(SYMBOLS[n] for n in ("o", "lse", "dq", "dk", "dv")), "bits", "ms")
_FIGURES = ("o", "lse", "dq", "dk", "dv")


def _cells(kernel: ReplayedKernel) -> tuple[str, ...]:
    by_name = {q.quantity: q for q in kernel.quantities}
    figures = [_figure(by_name.get(name)) for name in _FIGURES]  # type: ignore[call-overload]
    version = (kernel.version or DASH).partition(" ")[0] if kernel.captured else kernel.version or DASH
    took = [number(ms, 2) for ms in (kernel.forward_ms, kernel.backward_ms) if ms is not None]
    return (kernel.name, version, _verdict(kernel), *figures, _bits(kernel), "+".join(took) or DASH)


def _figure(found: ReplayedQuantity | None) -> str:
    if found is None:
        return DASH
    mark = _MARKS[found.answer] + ("*" if found.excused else "")
    figure = "" if found.factor is None else times(found.factor)
    return f"{figure} {mark}".strip() or "right"


def _verdict(kernel: ReplayedKernel) -> str:
    ended = "" if kernel.stage is None or not kernel.judged else f", {kernel.stage} {_ENDED[kernel.outcome]}"
    if not kernel.judged:
        return _ENDED.get(kernel.outcome, "not judged")
    kinds = {q.answer for q in kernel.quantities if q.at_fault}
    for kind in ("nonfinite", "wrong", "lossy"):
        if kind in kinds:
            return f"{kind}{ended}"
    if kernel.faults:
        return f"biased{ended}"
    if "ill_conditioned" in kernel.labels:
        return f"fragile head{ended}"
    return f"{'undecided' if 'undecided' in kernel.labels else 'right'}{ended}"


def _bits(kernel: ReplayedKernel) -> str:
    if kernel.recipe is None:
        return DASH
    bits = "" if kernel.agreement is None else f" {share(kernel.agreement)}"
    return f"{kernel.recipe}{bits}" + ("" if kernel.schedule is None else f": {kernel.schedule}")


def _table(capture: ReplayedCapture) -> Table:
    figures = layout.figures([SYMBOLS[n] for n in _FIGURES])
    table = layout.table(Column("kernel", min_width=24), "verdict", *figures, collapse=True)
    for kernel in capture.kernels:
        name, version, verdict, *cells, bits, took = _cells(kernel)
        text = Text(name, style=_row_style(capture, kernel))
        more = [f" {version}", *([bits] if kernel.recipe else []), *([f"{took} ms"] if took != DASH else [])]
        text.append("\n".join(more), style="not bold dim")
        table.add_row(text, *map(Text, (verdict, *cells)))
    return table


def _row_style(capture: ReplayedCapture, kernel: ReplayedKernel) -> str:
    if kernel.name in capture.culprits or kernel.outcome in FAILED:
        return "bold red"
    return "bold" if kernel.captured else ""


def _ended(kernel: ReplayedKernel) -> str:
    where = "" if kernel.stage in (None, "start") else f" in its {kernel.stage}"
    return f"{kernel.name} {_ENDED[kernel.outcome]}{where}: {(kernel.message or '').rstrip('.')}"


def _notes(capture: ReplayedCapture) -> Iterator[str]:
    """How kernels ended that did not return everything, and errors that are known of published kernels."""
    yield from (f"{_ended(k)}." for k in capture.kernels if k.outcome in _ENDED)
    for kernel in capture.kernels:
        if kernel.deterministic is False:
            yield f"{kernel.name} returns other bits when called again."
        excused: dict[str, list[str]] = {}
        for q in kernel.quantities:
            if q.excused is not None:
                excused.setdefault(q.excused, []).append(SYMBOLS[q.quantity])
        for why, names in excused.items():
            yield f"{kernel.name}: {', '.join(names)} as documented: {why}."
        if kernel.biased and kernel.bias_excused is not None:
            yield f"{kernel.name}: a mean error is beyond chance, as documented: {kernel.bias_excused}."
    if capture.cause == "kernel" and not any(k.captured for k in capture.kernels):
        yield f"{plural(len(capture.right), 'kernel')} of those run are right; nothing was captured to compare with."
