"""The report of ``replay``: the kernel, the head or neither; then a line a kernel, and how those ended that failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from attn_diag.reports import layout, words
from attn_diag.reports.charts import Gallery, Section
from attn_diag.reports.html import gallery_document
from attn_diag.reports.lead import lead
from attn_diag.results.replay import CAUSES, FAILED, Replay, ReplayedCapture, ReplayedKernel, ReplayedQuantity
from attn_diag.results.wording import (
    DASH,
    EVERY_SYMBOL,
    LINEAR_SYMBOLS,
    SYMBOLS,
    file_name,
    listed,
    number,
    plural,
    share,
    source_argument,
    times,
)

_STYLES = {
    "kernel": "bold red", "metadata": "bold red", "head": "bold yellow", "undecided": "bold yellow",
    "pass": "bold green",
}  # fmt: skip
# How the report begins.
_SHOUTED = {
    "kernel": "KERNEL:", "metadata": "METADATA:", "head": "HEAD, not the kernel:", "undecided": "UNDECIDED:",
    "pass": "PASS:",
}  # fmt: skip
_KINDS = {"nonfinite": "NaN", "wrong": "wrong", "lossy": "lossy"}
_ENDED = {
    "refused": "refused", "unusable": "returned nothing usable", "raised": "raised", "crashed": "crashed",
    "timed-out": "timed out", "other-function": "computes another function",
}  # fmt: skip
# So many kernels are named in a page's title.
_TITLED = 3
# Errors below are of outputs that are rounded to a finer format.
_SMALL = 0.01
_LEGEND = (
    "Figures are errors in units of a well-rounded kernel's, or of the recipe's that a capture declares (1: as good; "
    "lossy above 1.25), of the worst head; ? is neither passed nor faulted; * a published kernel makes the same error, "
    "or it is so by design."
)
_BITS = "which known recipe has its O's bits, and that one's order of keys"
_TIMES = "the best of a few calls, forward and backward"
_RECIPES = (
    " A recipe is a published kernel's roundings, emulated here; delta-fp32 and delta-from-dp are fa2 with delta made "
    "of an O that was not rounded, or of P and dP instead of O."
)
_ON_CPU = " On a CPU these are torch's CPU kernels, which are others than a GPU's."


def replay_renderables(found: Replay) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    cause, said, *told = _opening(found)
    yield from lead(_SHOUTED[cause], said, told, _next(found), _STYLES[found.cause])
    for message in found.unreadable:
        yield Text(f"warning: not read: {message}", style="yellow")
    for capture in found.captures:
        yield Text("")
        yield layout.heading(capture.source)
        if len(found.captures) > 1:
            yield layout.paragraph(f"{_SHOUTED[capture.cause]} {capture.words}", _STYLES[capture.cause])
        sizes = " ".join(f"{name}={size}" for name, size in capture.shape.items())
        yield Text(f"{sizes}, {capture.dtype}", style="bold")
        yield layout.indented(_table(capture))
        for note in _notes(capture):
            yield layout.bullet("-", note)
    yield Text("")
    if found.not_here:
        yield layout.note(f"Not run: {', '.join(found.not_here)}.")
    yield layout.note(_legend(found, f"Beneath a kernel's name: its version; {_BITS}; its time, {_TIMES}."))
    yield layout.note(words.tool_line(found.tool))


def replay_document(found: Replay) -> str:
    """The same as a page of its own."""
    cause, said, *told = _opening(found)
    said = f"{said[:1].upper()}{said[1:]}" if cause in ("head", "pass", "metadata", "undecided") else said
    several = len(found.captures) > 1
    sections = [
        Section(
            f"{c.source}: {c.cause}" if several else c.source, (*([c.words] if several else []), *_notes(c)),
            table=(
                ("kernel", "version", "verdict", *map(_symbol, _figures(c)), "bits", "ms"),
                *(_cells(kernel, _figures(c)) for kernel in c.kernels),
            ),
        )
        for c in found.captures
    ]  # fmt: skip
    left = f"Not run: {', '.join(found.not_here)}. " if found.not_here else ""
    told_ = f"Bits: {_BITS}. ms: {_TIMES}."
    gravest = min(found.captures, key=lambda c: CAUSES.index(c.cause))
    title = _SHOUTED[cause].rstrip(":") + (f": {listed(gravest.culprits, _TITLED)}" if cause == "kernel" else "")
    return gallery_document(
        Gallery(
            title,
            " ".join([said, *told]),
            tuple(sections),
            f"{_legend(found, told_)} {left}{words.tool_line(found.tool)}",
        )
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
    if all(q.quantity not in ("dq", "dk", "dv") for c in worst for k in c.kernels for q in k.quantities):
        told.append("Gradients were not judged: that needs a capture with dO, and kernels that have a backward.")
    if found.failed:
        ended = {k.name: k for c in found.captures for k in c.kernels if k.outcome in FAILED}
        ways = dict.fromkeys(k.outcome for k in ended.values())
        said_ = [(_ENDED[way], [n for n, k in ended.items() if k.outcome == way]) for way in ways]
        told.append(f"{'; '.join(f'{listed(names, 4)} {how}' for how, names in said_)} (see below).")
    return [first.cause, said, *told]


def _next(found: Replay) -> str | None:
    capture = min(found.captures, key=lambda c: CAUSES.index(c.cause))
    own = any(k.captured and k.name in capture.culprits for k in capture.kernels)
    if capture.source == "memory" or capture.cause not in ("kernel", "metadata", "head"):
        return None
    if capture.cause == "head":
        return f"attn-diag what-if {source_argument(capture.source)}"
    return f"attn-diag inspect {source_argument(capture.source)}" if own or capture.cause == "metadata" else None


def _figures(capture: ReplayedCapture) -> list[str]:
    """The quantities that some kernel returned, in the order in which they are shown."""
    seen = {q.quantity for k in capture.kernels for q in k.quantities}
    order = ("o", "lse", "dq", "dk", "dv") if capture.operator is None else tuple(LINEAR_SYMBOLS)
    return [name for name in order if name in seen]


def _symbol(quantity: str) -> str:
    """The head of its column."""
    return SYMBOLS.get(quantity, "state" if quantity == "final_state" else quantity)


def _cells(kernel: ReplayedKernel, shown: Sequence[str]) -> tuple[str, ...]:
    by_name = {q.quantity: q for q in kernel.quantities}
    figures = [_figure(by_name.get(name)) for name in shown]
    version = (kernel.version or DASH).partition(" ")[0] if kernel.captured else kernel.version or DASH
    took = [number(ms, 2) for ms in (kernel.forward_ms, kernel.backward_ms) if ms is not None]
    return (kernel.name, version, _verdict(kernel), *figures, _bits(kernel), "+".join(took) or DASH)


def _figure(found: ReplayedQuantity | None) -> str:
    """A figure; what it means for the kernel is in the verdict."""
    if found is None:
        return DASH
    mark = "?" if found.answer == "undecided" else "*" if found.excused else ""
    if found.answer == "nonfinite":
        return f"NaN{mark}"
    if found.factor is None:
        return f"{'ok' if found.answer in ('good', 'stated') else found.answer}{mark}"
    return f"{times(found.factor) if found.factor >= _SMALL else f'<{_SMALL:g}'}{mark}"


def _verdict(kernel: ReplayedKernel) -> str:
    """What a kernel is, and in which outputs."""
    ended = "" if kernel.stage is None or not kernel.judged else f"; {kernel.stage} {_ENDED[kernel.outcome]}"
    if not kernel.judged:
        return _ENDED.get(kernel.outcome, "not judged")
    bad = {
        kind: [EVERY_SYMBOL[q.quantity] for q in kernel.quantities if q.at_fault and q.answer == kind]
        for kind in _KINDS
    }
    said = [f"{_KINDS[kind]}: {', '.join(names)}" for kind, names in bad.items() if names]
    if said or kernel.faults:
        return f"{'; '.join(said) or 'biased'}{ended}"
    if "ill_conditioned" in kernel.labels:
        return f"right, but the head is fragile{ended}"
    return f"{'undecided' if 'undecided' in kernel.labels else 'right'}{ended}"


def _bits(kernel: ReplayedKernel) -> str:
    if kernel.recipe is None:
        return DASH
    bits = "" if kernel.agreement is None else f" {share(kernel.agreement)}"
    return f"{kernel.recipe}{bits}" + ("" if kernel.schedule is None else f": {kernel.schedule}")


def _table(capture: ReplayedCapture) -> Table:
    shown = _figures(capture)
    figures = layout.figures([_symbol(name) for name in shown])
    table = layout.table(Column("kernel", min_width=24), Column("verdict", min_width=14), *figures, collapse=True)
    for kernel in capture.kernels:
        name, version, verdict, *cells, bits, took = _cells(kernel, shown)
        style = _row_style(capture, kernel)
        text = Text(name, style=style)
        more = [version] * (version != DASH) + [bits] * (kernel.recipe is not None) + [f"{took} ms"] * (took != DASH)
        text.append("".join(f"\n  {line}" for line in more), style="not bold dim")
        table.add_row(text, Text(verdict, style=style), *cells)
    return table


def _row_style(capture: ReplayedCapture, kernel: ReplayedKernel) -> str:
    if kernel.name in capture.culprits or kernel.outcome in FAILED:
        return "bold red"
    return "bold" if kernel.captured else ""


def _legend(found: Replay, more: str) -> str:
    if all(c.operator is not None for c in found.captures):
        return f"{_LEGEND} Beneath a function's name: its version. The recipe is a well-rounded kernel, emulated here."
    kernels = [k for c in found.captures for k in c.kernels]
    recipes = any(k.backend.startswith("emulation") for k in kernels)
    on_cpu = any(k.backend == "cpu" and not k.captured for k in kernels)
    return f"{_LEGEND} {more}{_RECIPES if recipes else ''}{_ON_CPU if on_cpu else ''}"


def _ways(capture: ReplayedCapture) -> Iterator[str]:
    """How kernels ended that did not return everything; those that said the same together."""
    alike: dict[str, list[str]] = {}
    for kernel in (k for k in capture.kernels if k.outcome in _ENDED):
        where = "" if kernel.stage in (None, "start") else f" in its {kernel.stage}"
        how = f"{_ENDED[kernel.outcome]}{where}: {(kernel.message or '').rstrip('.')}"
        alike.setdefault(how, []).append(kernel.name)
    yield from (f"{listed(names, len(names))} {how}." for how, names in alike.items())


def _notes(capture: ReplayedCapture) -> Iterator[str]:
    """How kernels ended that did not return everything, and errors that are known of published kernels."""
    yield from _ways(capture)
    yield from (f"{k.name}: {k.message}." for k in capture.kernels if k.outcome == "ran" and k.message is not None)
    for kernel in capture.kernels:
        if kernel.deterministic is False:
            yield f"{kernel.name} returns other bits when called again."
        excused: dict[str, list[str]] = {}
        for q in kernel.quantities:
            if q.excused is not None:
                excused.setdefault(q.excused, []).append(_symbol(q.quantity))
        for why, names in excused.items():
            yield f"{kernel.name}: {', '.join(names)} as documented: {why}."
        if kernel.biased and kernel.bias_excused is not None:
            yield f"{kernel.name}: a mean error is beyond chance, as documented: {kernel.bias_excused}."
    if capture.cause == "kernel" and not any(k.captured for k in capture.kernels):
        yield f"{plural(len(capture.right), 'kernel')} of those run are right; nothing was captured to compare with."
