"""The report of ``identify``: the verdict, the ranking in rows of equal bits, and what the numbers mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from attn_diag.reports import layout
from attn_diag.reports.lead import lead
from attn_diag.results.identification import Identification, Identifications, RankedRecipe
from attn_diag.results.wording import DASH, chance, file_name, head_name, listed, percent, source_argument, together

# What a report begins with, the gravest first, and its style.
_RANK = {"FAIL": "bold red", "UNKNOWN": "bold red", "UNNAMED": "bold yellow", "OK": "bold green"}
_OPTIONS = {"--causal": "mask", "--window": "window", "--scale": "scale", "--layout": "layout", "--softcap": "softcap"}
# Recipes that no good kernel has, and what they round.
_ALL = "the scores, the row maximum, the row sum and O's accumulator rounded"
_COARSE = {
    "bf16-scores": "the scores rounded",
    "bf16-forward": "the scores, the row sum and O's accumulator rounded",
    "qiu2025": _ALL, "qiu2025-stabilised": _ALL, "qiu2025-stabilised-unclamped": _ALL,
}  # fmt: skip
# Places that are named, of several with one finding.
_NAMED = 3
# Lines of the ranking, and recipes with the same bits that are named in one.
_MAX_LINES, _MAX_SAME = 8, 2
_EXP = {
    "exp2-fma": "exp2 of an FMA",
    "exp2-scaled": "exp2 of scaled scores",
    "exact": "exact exp",
    "exp2": "exp2 of a difference",
    "polynomial": "polynomial exp",
}


def identifications_renderables(found: Identifications) -> Iterator[RenderableType]:
    """The reports, one after the other, and once what the numbers mean."""
    if len(found.results) > 1:
        kinds: dict[tuple[str, str], list[Identification]] = {}
        for result in sorted(found.results, key=lambda r: list(_RANK).index(_what(r)[0])):
            kinds.setdefault(_what(result), []).append(result)
        told = [f"{_those(same, len(found.results))}: {said}" for (_, said), same in kinds.items()]
        verdict = next(iter(kinds))[0]
        yield from lead(verdict, told[0], told[1:], style=_RANK[verdict])
        yield Text("")
    for message in found.unreadable:
        yield Text(f"warning: not read: {message}", style="yellow")
    for result in found.results:
        yield from identification_renderables(result, legend=False)
    if found.results:
        yield from _legend(found.results[0])


def identification_renderables(found: Identification, *, legend: bool = True) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    verdict, said = _what(found)
    following, in_file = None, found.source != "memory"  # tensors have no command
    if found.options and in_file:
        following = f"attn-diag identify {source_argument(found.source)} {' '.join(found.options)}"
    elif in_file and (verdict in ("FAIL", "UNKNOWN") or {*found.recipes} & {*_COARSE}):
        following = f"attn-diag inspect {source_argument(found.source)}"
    what = f"{file_name(found.source)}, {found.observation}, {head_name(found.layer, found.head)}"
    yield from lead(verdict, f"{what}: {said}", [found.verdict], following, _RANK[verdict])
    yield Text("")
    yield layout.heading(found.source)
    place = f"head {found.head}" if found.layer is None else f"layer {found.layer} head {found.head}"
    sizes = " ".join(f"{name}={size}" for name, size in found.shape.items())
    yield Text(f"{found.observation}, batch item {found.batch}, {place}: {sizes}, {found.dtype}", style="bold")
    if found.margin is not None and found.margin_p_value is not None:
        yield Text(
            f"Margin to the next that is told apart: {100 * found.margin:.2g} percentage points of O's elements, "
            f"{chance(found.margin_p_value, 'p')}."
        )
    yield Text("")
    yield layout.indented(_ranking(found))
    if found.backward:
        yield Text("")
        yield layout.indented(_backward(found))
    if found.hardware:
        counts = ", ".join(f"{m.recipe} {m.missed}" for m in found.hardware)
        yield Text(
            f"Elements missed with sums of products as on a Hopper tensor core, of {found.hardware[0].elements} over "
            f"the heads of this sequence: {counts}."
        )
    yield Text(
        f"{found.rows} of {found.rows_all} query rows compared, {found.elements} elements; {found.tried} recipes tried "
        f"({found.backend}).",
        style="dim",
    )
    for note in [note for note in found.notes if note != found.misfit]:
        yield Text(f"note: {note}", style="yellow")
    if legend:
        yield from _legend(found)


def _those(same: Sequence[Identification], of: int) -> str:
    """Results that share a finding."""
    names = listed([f"{file_name(r.source)} {head_name(r.layer, r.head)}" for r in same], _NAMED)
    return f"{len(same)} of {of} ({names})"


def _what(found: Identification) -> tuple[str, str]:
    """The word that the report begins with, and what was found."""
    names = " or ".join(found.recipes)
    if found.misfit is not None:
        if not found.options:
            return "FAIL", "O is not the attention stated, nor that with another mask, scale or layout"
        wrong = dict.fromkeys(_OPTIONS.get(option.partition(" ")[0], option) for option in found.options)
        return "FAIL", f"wrong {together(list(wrong))}: with {' '.join(found.options)} it fits"
    if found.outcome == "flawed":
        return "FAIL", f"{found.verdict.partition(';')[0]}"
    if found.outcome == "unknown":
        return "UNKNOWN", f"no known recipe makes these bits ({percent(found.best.agreement, '.3g')} at best)"
    if found.outcome == "unnamed":
        if found.not_fused is not None:
            return "OK", f"attention that is not fused: {found.not_fused}"
        if found.loop is not None:
            return "UNNAMED", f"{found.loop}, which good kernels keep in fp32"
        return "UNNAMED", "its roundings are known, but no published kernel here has them so"
    known = [_COARSE[name] for name in found.recipes if name in _COARSE]
    coarse = f", with {known[0]}, which good kernels keep in fp32" if known else ""
    if found.outcome == "ambiguous":
        return "OK", f"made as {names} make it{coarse}; this input does not tell them apart"
    return "OK", f"made as {names} makes it{coarse}"


def _ranking(found: Identification) -> Table:
    table = layout.table(
        *layout.figures(["equal\nbits", "±"]),
        Column("recipe", no_wrap=True),
        Column("roundings, schedule, exponential", ratio=1),
        *layout.figures(["lost :\nwon", "p"]),
    )
    groups: dict[int, list[RankedRecipe]] = {}
    for recipe in found.candidates:
        groups.setdefault(recipe.group, []).append(recipe)
    for members in list(groups.values())[:_MAX_LINES]:
        first, names = members[0], dict.fromkeys(r.recipe for r in members if r.recipe is not None)
        style = "" if first.told_apart else "bold"
        table.add_row(
            percent(first.agreement, ".3f"),
            DASH if first.standard_error is None else f"{100 * first.standard_error:.3f}",
            Text("\n".join(names) or DASH, style=style),
            _words(members),
            "" if first.p_value is None else f"{first.lost} : {first.won}",
            "best" if first.p_value is None else f"{first.p_value:.1g}",
        )
    return table


def _words(members: list[RankedRecipe]) -> str:
    first = members[0]
    schedules = list(dict.fromkeys(r.schedule for r in members))
    more = f" (and {len(schedules) - _MAX_SAME} more)" if len(schedules) > _MAX_SAME else ""
    roundings = f"roundings of {first.roundings}: " if first.recipe is None else ""
    cast = ", l sums the cast P̄" if first.row_sum_of == "cast-probs" else ""
    return f"{roundings}{' = '.join(schedules[:_MAX_SAME])}{more}; {_EXP[first.exp]}{cast}"


def _backward(found: Identification) -> Table:
    bits, p = layout.figures(["dQ: equal\nbits", "p"])
    table = layout.table(bits, "presets that share the forward", p)
    for match in found.backward:
        p_value = "best" if match.p_value is None else f"{match.p_value:.1g}"
        table.add_row(
            percent(match.agreement, ".3f"), Text(match.recipe, style="" if match.told_apart else "bold"), p_value
        )
    return table


def _legend(found: Identification) -> Iterator[RenderableType]:
    yield Rule(style="dim")
    yield Text(
        "Equal bits: the share of O's elements that an emulated recipe reproduces exactly. On N(0,1) inputs the right "
        "one reaches 99.8 to 99.98 % (the order of additions and the tensor cores' truncation are not modelled), wrong "
        "schedules 65 to 94 %; on near one-hot rows many agree. "
        f"From {percent(found.threshold, '.2f')} on a recipe fits. "
        "lost : won counts the elements that only the best, or only this recipe, reproduces; p is the chance of such a "
        f"balance if this one is right at least as often (McNemar's test by rows, one-sided); above {found.level} "
        "(bold) they are not told apart. A recipe that fits rounds as this kernel does on this input; it need not be "
        "its code.",
        style="dim",
    )
