"""The terminal report of an attribution; readable from 80 columns on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import RenderableType
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from attn_diag.reports import layout, words
from attn_diag.reports.lead import lead, on_head
from attn_diag.results.attribution import (
    CANCELLED,
    Attribution,
    Effect,
    HeadAttribution,
    MeanError,
    SiteAttribution,
)
from attn_diag.results.wording import (
    SYMBOLS,
    file_name,
    head_name,
    head_names,
    number,
    percent,
    signed,
    together,
)

# Smaller standard errors of a share are not shown.
_SHOWN = 0.001
# Smaller shares of what good kernels do not round are not named first.
_NAMED = 0.05
# What good kernels keep in fp32.
_KEPT = ("scores", "difference", "row_max", "row_sum", "range_pv", "accumulator")
# What every kernel of 16-bit inputs rounds.
_EVERYWHERE = ("probs", "out", "backward_probs", "dscores", "dq")
# Where a head's reason goes on with the recipe that is nearest to it.
_NEAREST = " (nearest: "
KINDS = {"COARSE": "bold red", "UNKNOWN": "bold yellow", "NORMAL": "bold green"}
"""What a report begins with, the gravest first, and its style."""
_UNITS = {
    "o": "O away from zero, ulp",
    "delta": "delta, noise floors (1: one rounding of O)",
    "dq": "dQ, ulp",
    "dw_q": "dW_Q along dW_Q",
}


def attribution_renderables(found: Attribution) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    yield from _first(found)
    yield Text("")
    yield Text(f"{found.source}: {found.observation or 'no captured O'}", style="bold")
    for head in found.heads:
        yield from _head(head)
    yield Rule(style="dim")
    yield Text(
        "share: the part of the squared error that goes with this site, on average over all orders of repairing the "
        "sites (Shapley value; shares add up to 1). alone: only this site rounds, besides fp32 arithmetic; repaired: "
        "only this site is exact; sham: its errors with random signs. Each is a run of its own of the emulated recipe; "
        f"what it shows of the captured kernel is as good as their agreement. {words.CAVEAT}\n"
        f"{found.backend}; {words.tool_line(found.tool)}",
        style="dim",
    )


def _first(found: Attribution) -> Iterator[RenderableType]:
    """Which site makes the error, of heads that share it together, the coarse ones first; and what to run next."""
    groups = grouped(found.heads)
    if not groups:
        yield from lead(f"NOTHING {file_name(found.source)}:", "no rounding site was found to err")
        return
    first = groups[0]
    command = "inspect" if _otherwise(first.heads[0], first.quantity) else "what-if"
    following = on_head(command, found.source, first.heads[0].head, found.observation)
    told = [group.sentence for group in groups[1:]]
    yield from lead(f"{first.kind} {file_name(found.source)}:", first.sentence, told, following, KINDS[first.kind])


@dataclass(frozen=True)
class MadeAlike:
    """Heads whose error is made alike."""

    kind: str
    """One of ``KINDS``."""
    quantity: str
    """By which they were put together."""
    heads: list[HeadAttribution]

    @property
    def sentence(self) -> str:
        """What makes their error."""
        return _sentence(self.kind, self.quantity, self.heads)


def grouped(all_heads: Iterable[HeadAttribution]) -> list[MadeAlike]:
    """The heads by what makes their error, the gravest first."""
    groups: dict[tuple[str, str, str], list[HeadAttribution]] = {}
    for head in all_heads:
        # Where dQ has no error, as dO is 0, O may have one.
        quantity = "dq" if "dq" in head.totals and _errs(head, "dq") else "o"
        known = [s for s in head.sites if quantity in s.effects]
        if not known or quantity not in head.totals or not _errs(head, quantity):
            continue
        if _otherwise(head, quantity):
            groups.setdefault(("UNKNOWN", "", quantity), []).append(head)
            if not _coarse(head) or _otherwise(head, "o"):
                continue
            quantity = "o"
        kind = "UNKNOWN" if head.unfit else "COARSE" if _coarse(head) else "NORMAL"
        first = ""
        if kind == "NORMAL" and quantity != "o" and _otherwise(head, "o"):
            # Nothing is called normal whose O is not the recipe's.
            groups.setdefault(("UNKNOWN", "", "o"), []).append(head)
            continue
        if kind == "COARSE":
            first = " ".join(site.site for site in _larger(_coarse(head), (quantity, "o")))
        elif kind == "UNKNOWN":
            # Of attention whose bits are known the reason says more than which recipe is nearest.
            first = max(known, key=lambda s: s.effects[quantity].share).site + head.unfit.partition(_NEAREST)[0]
        elif max(s.effects[quantity].share for s in known) > CANCELLED:
            first = "cancelled"
        groups.setdefault((kind, first, quantity), []).append(head)
    ordered = sorted(groups.items(), key=lambda item: list(KINDS).index(item[0][0]))
    return [MadeAlike(kind, quantity, heads) for (kind, _, quantity), heads in ordered]


def _errs(head: HeadAttribution, quantity: str) -> bool:
    """Whether the recipe or the captured kernel errs there at all."""
    return bool(head.totals[quantity].error or head.totals[quantity].captured)


def _otherwise(head: HeadAttribution, quantity: str) -> bool:
    """Whether the captured kernel makes a quantity otherwise than the recipe that has the bits of its O."""
    return not head.unfit and head.recipe_from != "given" and quantity in head.differences


def _coarse(head: HeadAttribution) -> list[SiteAttribution]:
    """The sites that published kernels keep in fp32 and this one does not, and casts that truncate."""
    return [
        site
        for site in head.sites
        if site.format not in (None, "fp32")
        and (site.site in _KEPT or str(site.format).partition(":")[2] in ("toward-zero", "up", "down"))
    ]


def _larger(sites: list[SiteAttribution], quantities: Iterable[str]) -> list[SiteAttribution]:
    """Those that make a part worth naming; all where none does."""
    return [
        site for site in sites if any(q in site.effects and site.effects[q].share >= _NAMED for q in quantities)
    ] or sites


def _sentence(kind: str, quantity: str, heads: list[HeadAttribution]) -> str:
    """What makes the error of heads that share it."""
    name = SYMBOLS[quantity]
    where = head_names({(h.layer, h.head) for h in heads})
    off = f"{name} {_range([h.totals[quantity].error for h in heads])} off"
    if _otherwise(heads[0], quantity):
        captured = _range([size for h in heads if (size := h.totals[quantity].captured) is not None])
        bits = "most of its bits" if quantity == "o" else "O's bits"
        return (
            f"{where}: the captured {name} is {captured} off, and not as the recipe that has {bits} makes it "
            f"({off}; emulated). No cause of its error is named"
        )
    if kind == "COARSE":
        shown = dict.fromkeys((quantity, "o"))
        named = [_larger(_coarse(h), shown) for h in heads]
        smaller = len(_coarse(heads[0])) - len(named[0])
        shares = [
            f"{_range([sum(s.effects[q].share for s in own) for own in named])} of {SYMBOLS[q]}'s"
            for q in shown
            if all(q in s.effects for own in named for s in own)
        ]
        made = together([f"the {site.words.removeprefix('the ')}" for site in named[0]])
        return (
            f"{where}: {made}, which good kernels do not do{f' ({smaller} smaller aside)' if smaller else ''}, "
            f"{'make' if len(named[0]) > 1 else 'makes'} {together(shares)} squared error "
            f"({off}; emulated with the recipe that has the kernel's bits)"
        )
    known = [[s for s in h.sites if quantity in s.effects] for h in heads]
    sites_of = [max(own, key=lambda s: s.effects[quantity].share) for own in known]
    parts = [s.effects[quantity].share for s in sites_of]
    most = _range(parts)
    made = " or the ".join(dict.fromkeys(s.words.removeprefix("the ") for s in sites_of))
    largest = f"the largest part of {name}'s squared error, {most}, comes from the {made}"
    cancelled = max(parts) > CANCELLED
    if cancelled:
        largest = f"the errors of several sites cancel in {name}, so that none makes it alone"
    if kind == "UNKNOWN":
        why, recipe = str(heads[0].unfit).partition(": no rounding")[0].rstrip("."), heads[0].recipe.partition(",")[0]
        if len({h.unfit for h in heads}) > 1:
            why = why.replace(_NEAREST, f" (nearest in {head_name(heads[0].layer, heads[0].head)}: ")
        return f"{where}: {why}. Nothing is attributed; in {recipe} itself {largest} ({off}; emulated)"
    how = "emulated" if heads[0].agreement is None else "emulated with the recipe that has the kernel's bits"
    common = ", as in good kernels" if not cancelled and all(s.site in _EVERYWHERE for s in sites_of) else ""
    return f"{where}: {largest}{common} ({off}; {how})"


def _range(values: list[float]) -> str:
    low, high = (percent(v, ".0f" if v >= 0.1 else ".2g") for v in (min(values), max(values)))
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def _head(head: HeadAttribution) -> Iterator[RenderableType]:
    name = head_name(head.layer, head.head)
    batch = "" if head.batch is None else f", batch {head.batch}"
    yield Rule(Text(f"{name}{batch}"), align="left")
    yield Text(f"recipe {head.recipe}")
    for reason in head.reasons:
        yield layout.bullet("-", reason)
    for note in head.notes:
        yield layout.bullet(" ", note)
    main = "dq" if "dq" in head.totals else "o"
    yield Text("")
    yield _sizes(head, main)
    for quantity, title in _UNITS.items():
        if any(s.effects[quantity].bias for s in head.sites if quantity in s.effects):
            yield Text("")
            yield _means(head, quantity, title)
    how = "all subsets of sites" if head.orders is None else f"{head.orders} sampled orders of the sites"
    yield Text(f"  {head.runs} runs over {head.rows} rows, {how}", style="dim")


def _sizes(head: HeadAttribution, main: str) -> Table:
    others = [q for q in ("dw_q", "delta", "o") if q in head.totals and q != main]
    figures = [f"share, %\nof {SYMBOLS[main]}", "alone", "repaired", "sham", *(f"of\n{SYMBOLS[q]}" for q in others)]
    table = _table(f"error of {SYMBOLS[main]} from", figures)
    for site in sorted(head.sites, key=lambda s: -s.effects[main].share):
        effect = site.effects[main]
        error = effect.share_error
        table.add_row(
            site.site if site.format is None else f"{site.site} ({site.format})",
            _share(effect) + (f" ± {100 * error:.1g}" if error and error >= _SHOWN else ""),
            *(_size(main, value) for value in (effect.alone, effect.repaired, effect.sham)),
            *(_share(site.effects[q]) for q in others),
        )
    table.add_row("all of them", "", _size(main, head.totals[main].error))
    return table


def _means(head: HeadAttribution, quantity: str, title: str) -> Table:
    table = _table(f"mean error of {title}", ["contribution", "adj. p", "repaired", "sham"])
    biases = [(s.site, s.effects[quantity], bias) for s in head.sites if (bias := s.effects[quantity].bias) is not None]
    acting = [found for found in biases if found[2].mean or found[2].standard_error]
    for site, effect, bias in sorted(acting, key=lambda found: -abs(found[2].mean)):
        shown = signed(effect.bias_repaired), signed(effect.bias_sham)
        table.add_row(site, _estimate(bias), number(bias.p_adjusted, 2), *shown)
    total, twin = head.totals[quantity].bias, head.twin.bias.get(quantity)
    if total is not None:
        table.add_row("all of them", _estimate(total), number(total.p_value, 2), "", "")
    if twin is not None:
        table.add_row("all, rounded stochastically", _estimate(twin), number(twin.p_value, 2), "", "")
    return table


def _estimate(estimate: MeanError) -> str:
    error = "" if estimate.standard_error is None else f" ± {estimate.standard_error:.1g}"
    return f"{signed(estimate.mean)}{error}"


def _share(effect: Effect) -> str:
    return f"{100 * effect.share + 0.0:.1f}"


def _size(quantity: str, value: float | None) -> str:
    return number(value) if quantity == "delta" else percent(value)


def _table(first: str, figures: list[str]) -> Table:
    return layout.table(Column(first, min_width=16), *layout.figures(figures))
