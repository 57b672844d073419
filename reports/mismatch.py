"""The report of ``mismatch``: where two runs part, what each layer adds, and what would be left; text and page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from attn_diag.reports import layout, words
from attn_diag.reports.charts import Axis, Chart, Gallery, Section, Series, Tone
from attn_diag.reports.html import gallery_document
from attn_diag.reports.lead import FAIL, OK, lead
from attn_diag.results.mismatch import (
    DifferencePart,
    LogprobSplit,
    Mismatch,
    MismatchLayer,
    MismatchSide,
    ProjectionSum,
    RingMerge,
)
from attn_diag.results.wording import DASH, SYMBOLS, listed, number, percent, plural, times

_PARTS = {"inputs": "came in with q, k, v", "semantics": "another semantics", "rounding": "rounding and schedule"}
_TONES: dict[str, Tone] = {"inputs": "second", "semantics": "third", "rounding": "accent"}
_MOST = 6
_PLACES = {
    "stream": "x", "projection": "q, k, v", "semantics": "semantics", "rounding": "O's rounding",
    "sum": "output's sum", "head": "LM head", "rest": "elsewhere",
}  # fmt: skip
_LEGEND = (
    "Sizes are norms over that of train's O in float64. Shares are parts of the squared difference: they add up to "
    "100 %, and one is below 0 where it works against the others. train×, rollout×: rms error over that of a "
    "well-rounded kernel; nearer (–: neither): to float64, each on its own inputs under what its capture states."
)


def _passed(found: Mismatch) -> str:
    return FAIL if found.outcome == "finding" else OK


def mismatch_renderables(found: Mismatch) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    yield from lead(_passed(found), f"{found.headline}.", [*_causes(found), *found.notes])
    yield Text("")
    yield layout.heading("mismatch of train and rollout")
    yield Text("\n".join(_side(side) for side in (found.train, found.rollout)), style="bold")
    yield Text("")
    yield layout.indented(layout.table(*layout.figures(_HEAD), rows=map(_row, found.layers), collapse=True))
    if found.merges:
        yield from layout.title("Hops of rings")
        yield layout.indented(layout.table(*layout.figures(_RING_HEAD), rows=_ring_rows(found), collapse=True))
        yield layout.paragraph(_RING_LEGEND)
    if found.sums:
        yield from layout.title("Output projections")
        for head, rows in ((_SUM_HEAD, _sum_rows(found)), (_output_head(found), _output_rows(found))):
            if rows:
                yield layout.indented(layout.table(*layout.figures(head), rows=rows, collapse=True))
        for sentence in (*_ways(found), _SUM_LEGEND):
            yield layout.paragraph(sentence)
    yield from layout.title("Log-probabilities")
    if found.logprobs is None:
        yield layout.paragraph(_NO_LOGPROBS)
    else:
        for sentence in _logprobs(found.logprobs):
            yield layout.paragraph(sentence)
        if found.logprobs.shares:
            yield layout.indented(layout.table(*layout.figures(_SHARE_HEAD), rows=_share_rows(found.logprobs)))
    if found.repairs:
        yield from layout.title("What would be left")
        figures = layout.figures(("layers", "removes", "left", "of"))
        yield layout.indented(layout.table("what is changed", *figures, rows=_repair_rows(found)))
    yield Text("")
    yield layout.note(_LEGEND)
    yield layout.note(words.tool_line(found.tool))


def mismatch_document(found: Mismatch) -> str:
    """The same as a self-contained page."""
    paragraphs = (*_causes(found), *(_side(side) for side in (found.train, found.rollout)), *found.notes)
    sections = [Section("By layer", paragraphs, (_HEAD, *map(_row, found.layers)), tuple(_charts(found)))]
    if found.merges:
        sections.append(Section("Hops of rings", (_RING_LEGEND,), (_RING_HEAD, *_ring_rows(found))))
    if found.sums:
        sections.append(Section("Output projections", (*_ways(found), _SUM_LEGEND), (_SUM_HEAD, *_sum_rows(found))))
        if found.outputs:
            sections.append(Section("What they return", (), (_output_head(found), *_output_rows(found))))
    if found.logprobs is None:
        sections.append(Section("Log-probabilities", (_NO_LOGPROBS,)))
    else:
        split = found.logprobs
        rows = (_SHARE_HEAD, *_share_rows(split)) if split.shares else ()
        sections.append(Section("Log-probabilities", tuple(_logprobs(split)), rows))
        metrics = (("metric", "value"), *((name, number(value, 4)) for name, value in split.metrics.items()))
        sections.append(Section("Under the names of verl and slime", (), metrics))
    if found.repairs:
        head = ("what is changed", "layers", "removes", "left", "of")
        sections.append(Section("What would be left", (), (head, *_repair_rows(found))))
    footer = f"{_LEGEND} {words.tool_line(found.tool)}"
    return gallery_document(Gallery(f"{_passed(found)} mismatch", f"{found.headline}.", tuple(sections), footer))


_NO_LOGPROBS = (
    "Not compared: give the log-probabilities of the sampled tokens in both runs, and for each layer's share of their "
    "difference the model (attn_diag.explain_logprobs)."
)
_HEAD = ("layer", "x", "q,k,v", "O", "came in", "semantics", "rounding", "train×", "rollout×", "nearer")


def _causes(found: Mismatch) -> Iterator[str]:
    for cause in found.causes[:_MOST]:
        beside = "" if cause.explained is None else f"; explains {percent(cause.explained)}"
        other = f" ({cause.alternative})" if cause.alternative and cause.label != "unnamed" else ""
        yield f"Layer {cause.layer}: {cause.words}{beside}{other}."
    if len(found.causes) > _MOST:
        yield f"And {len(found.causes) - _MOST} more causes, which the JSON lists."


def _side(side: MismatchSide) -> str:
    kernels = f"; {', '.join(side.kernels)}" if side.kernels else ""
    return (
        f"{side.name}: {side.source}, {plural(side.captures, 'capture')}, {plural(side.sequences, 'sequence')} from "
        f"{plural(side.calls, 'call')} a layer, {side.dtype}{kernels}"
    )


def _row(layer: MismatchLayer) -> tuple[str, ...]:
    parts: dict[str, DifferencePart] = {part.name: part for part in layer.parts}
    shares = [percent(parts[name].share, ".1f") for name in _PARTS] if layer.difference else [DASH] * 3
    errors, largest = layer.errors, max(layer.q, layer.k, layer.v)
    return (
        str(layer.layer), *(percent(value, ".2g") for value in (layer.x, largest, layer.difference)),
        *shares, times(errors.train_noise), times(errors.rollout_noise), errors.nearer.replace("neither", DASH),
    )  # fmt: skip


_RING_HEAD = ("layer", "run", "of", "ranks", "hops", "error", "merge", "hops'", "forward", "merge×", "put together")
_RING_LEGEND = (
    "Of the rank with the largest error: its error against float64, over the norm of what is right; what putting the "
    "hops' results together adds to it (merge), what the hops' own errors add up to (hops'), what a gradient has from "
    "the errors of O and LSE (forward); the merge's error over that of fp32 with one cast at the end; and the format "
    "and order whose bits the result has."
)


def _ring_rows(found: Mismatch) -> Iterator[tuple[str, ...]]:
    groups: dict[tuple[int, str, str], list[RingMerge]] = {}
    for one in found.merges:
        groups.setdefault((one.layer, one.run, one.output), []).append(one)
    for (layer, run, output), ranks in groups.items():
        most = max(ranks, key=lambda one: one.error)
        parts = (most.error, most.from_merge, most.from_hops, most.from_forward)
        count = len({one.rank for one in ranks})
        yield (
            str(layer), run, SYMBOLS[output], str(count), str(most.hops), *(percent(part, ".2g") for part in parts),
            times(most.merge_factor), most.way or DASH,
        )  # fmt: skip


_SUM_HEAD = ("layer", "run", "ranks", "calls", "off", "in fp32")
_OUTPUT_SHARES = {"inputs": "came in", "weights": "weights", "products": "products", "sum": "sum"}
_SUM_LEGEND = (
    "off: the sum from the exact sum of what the ranks give, over its norm; in fp32: what one cast at the end would "
    "leave. Of the difference of what both runs' projections return, the shares that came in with O, that other "
    "weights make (where these differ), that rounding each rank's product makes, and that adding up makes by its order "
    "and format; the last one's size, and its mean away from zero, over train's."
)


def _sum_rows(found: Mismatch) -> list[tuple[str, ...]]:
    figures = (
        (one, (percent(one.error, ".2g"), percent(one.in_fp32, ".2g")) if len(one.ranks) > 1 else (DASH, DASH))
        for one in _by_layer(found)
    )
    return [(str(one.layer), one.run, _ranks(one.ranks), str(one.calls), *both) for one, both in figures]


def _by_layer(found: Mismatch) -> list[ProjectionSum]:
    return sorted(found.sums, key=lambda one: (one.layer, one.run != "train"))


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return "one"
    run = list(range(ranks[0], ranks[0] + len(ranks)))
    return f"{ranks[0]}-{ranks[-1]}" if list(ranks) == run and len(ranks) > 2 else listed([str(r) for r in ranks], 8)


def _ways(found: Mismatch) -> Iterator[str]:
    """How each run adds up, a sentence for the layers that do it alike."""
    layers: dict[str, list[int]] = {}
    for one in sorted(found.sums, key=lambda one: (one.run != "train", one.layer)):
        if len(one.ranks) == 1:
            said = f"{one.run} adds nothing up: one rank makes the whole projection"
        else:
            who = f"{one.run} adds up what ranks {_ranks(one.ranks)} give, in {one.dtype} ({one.by})"
            as_near = "in an order that was not tried, as near as any in that format leaves it"
            said = f"{who}: {one.way or (as_near if one.within else 'not as any order and format would')}"
        layers.setdefault(said, []).append(one.layer)
    for said, those in layers.items():
        yield f"{said} (layer{'s' * (len(those) > 1)} {listed([str(n) for n in those], _MOST)})."


def _output_head(found: Mismatch) -> tuple[str, ...]:
    return "layer", "differ", *_output_parts(found).values(), "sum's size", "sum away", "± s.e."


def _output_parts(found: Mismatch) -> dict[str, str]:
    named = {part.name for one in found.outputs for part in one.parts}
    return {name: head for name, head in _OUTPUT_SHARES.items() if name in named}


def _output_rows(found: Mismatch) -> list[tuple[str, ...]]:
    rows, names = [], _output_parts(found)
    for one in found.outputs:
        parts = {part.name: part for part in one.parts}
        of, error = parts["sum"], parts["sum"].away_error
        shares = [percent(parts[n].share, ".1f") if one.difference and n in parts else DASH for n in names]
        away, by = f"{of.away:+.2g}", DASH if error is None else f"{error:.2g}"
        rows.append((str(one.layer), percent(one.difference, ".2g"), *shares, percent(of.size, ".2g"), away, by))
    return rows


_SHARE_HEAD = ("layer", "where", "share", "rms", "mean", "± s.e.")


def _share_rows(split: LogprobSplit) -> Iterator[tuple[str, ...]]:
    for share in split.shares:
        layer = DASH if share.layer is None else str(share.layer)
        yield (
            layer, _PLACES[share.place], percent(share.share, ".1f"), number(share.rms), f"{share.mean:+.2g}",
            number(share.mean_error, 2),
        )  # fmt: skip


def _logprobs(split: LogprobSplit) -> Iterator[str]:
    m = split.metrics
    error = "" if split.bias_error is None else f" ± {number(split.bias_error, 2)}"
    yield (
        f"{plural(split.tokens, 'token')}: rollout - train is {split.bias:+.3g}{error} on average (bias), with a "
        f"standard deviation of {number(split.noise)} (noise); KL k1 {m['rollout_corr/kl']:.3g}, "
        f"k3 {m['rollout_corr/k3_kl']:.3g}, chi^2 {m['rollout_corr/chi2_token']:.3g} a token; the ratio "
        f"leaves [0.9, 1.1] in {percent(m['attn_diag/ratio_outside_0.1'])} of tokens."
    )
    if split.missing:
        yield split.missing
    elif split.predicted is not None:
        yield f"The layers' shares explain {percent(split.predicted, '.1f')} of the squared difference together."
    if split.carried:
        first = ", ".join(f"{t.sequence}:{t.token} ({t.difference:+.2g})" for t in split.carried[:5])
        whole = sum(t.share for t in split.carried)
        yield f"{len(split.carried)} tokens carry {percent(whole)} of it; the largest (sequence:token): {first}."


def _repair_rows(found: Mismatch) -> Iterator[tuple[str, ...]]:
    for repair in found.repairs:
        layers = ", ".join(map(str, repair.layers[:4])) + (", …" if len(repair.layers) > 4 else "")
        layers = "all" if len(repair.layers) in (0, len(found.layers)) else layers
        yield repair.what, layers, percent(repair.removes), number(repair.left), repair.measure


def _charts(found: Mismatch) -> Iterator[Chart]:
    layers = tuple(float(layer.layer) for layer in found.layers)
    sizes = [
        Series(
            _PARTS[name],
            layers,
            tuple(next(p.size for p in layer.parts if p.name == name) or None for layer in found.layers),
            tone=_TONES[name],
        )
        for name in _PARTS
    ]
    whole = Series("O, all of it", layers, tuple(layer.difference or None for layer in found.layers), look="broad")
    yield Chart(
        "mismatch_by_layer",
        "What each layer's difference of O consists of",
        "Norm over that of train's O. What came in grows from layer to layer; a cause stands where another semantics "
        "or rounding rises.",
        Axis("layer"),
        Axis("relative size", log=True),
        (whole, *sizes),
    )
    if found.logprobs is not None and found.logprobs.shares:
        places = [s for s in found.logprobs.shares if s.layer is not None]
        series = tuple(
            Series(
                _PLACES[place],
                tuple(float(s.layer or 0) for s in places if s.place == place),
                tuple(100 * s.share for s in places if s.place == place),
                kind="bars",
            )
            for place in ("stream", "projection", "semantics", "rounding", "sum")
            if any(s.place == place for s in places)
        )
        yield Chart(
            "mismatch_logprob", "What each layer adds to the difference of log-probabilities",
            "Per cent of the squared difference.", Axis("layer"), Axis("share (%)"), series,
        )  # fmt: skip
