"""All heads of a step beside each other: the finding in a sentence, tables for a terminal, charts for a page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby

from rich.console import ConsoleOptions, RenderableType
from rich.table import Column
from rich.text import Text

from attn_diag.reports import layout
from attn_diag.reports.head_map import log_levels
from attn_diag.results.attribution import HeadAttribution
from attn_diag.results.attributions import MOST, ErrorMap, HeadError, Placed, entry_of, error_maps
from attn_diag.results.diagnosis import Diagnosis
from attn_diag.results.finding_places import step_of
from attn_diag.results.wording import DASH, SYMBOLS, file_name, head_names, listed, percent, plural, ranges

# A site with a smaller share of its head's error does not make it alone, nor a head that of all.
ALONE = 0.5
# So many heads have a row of their own, so many sites and layers a part in a sentence.
_ROWS, _PARTS = 12, 4
# Parts below are not told in a sentence.
_TOLD = 0.005
# What in a reason differs from head to head.
_NUMBERS = re.compile(r"[:(\d]")
# Carriers beyond this part of the heads are no concentration.
_FEW = 0.25


def of_diagnosis(diagnosis: Diagnosis) -> dict[str, tuple[ErrorMap, ...]]:
    """By observation, the heads that were taken apart beside each other; none where there are fewer than two."""
    apart: dict[str, list[Placed]] = {}
    for capture, observation, head in diagnosis.entries():
        if head.attribution is not None:
            apart.setdefault(observation.name, []).append(Placed(capture.source, step_of(capture), head.attribution))
    return {name: error_maps(heads) for name, heads in apart.items() if len(heads) > 1}


def title(found: ErrorMap, *, stepped: bool) -> str:
    """What is compared, and at which step where there are several."""
    step = f"step {found.step}: " if stepped and found.step is not None else ""
    return f"{step}{SYMBOLS[found.quantity]}'s error, head by head"


def finding(found: ErrorMap) -> str:
    """Which heads and site carry the error, and how concentrated it is."""
    name, known, names = SYMBOLS[found.quantity], found.known, names_of(found)
    of = _count(known) + (" whose error is known" if len(known) < len(found.heads) else "")
    if not known:
        return f"the error of {name} is not known of any of {plural(len(found.heads), 'head')}: {found.heads[0].reason}"
    if not found.carry_most:
        return f"{name} has no error in {of}"
    top, carriers = known[0], known[: found.carry_most]
    most, largest = percent(top.share, ".0f"), names[id(top)]
    if len(known) == 1:
        return f"{name} of {largest} is {percent(top.relative)} off; {_site_there(found, top)}"
    if (top.share or 0.0) >= ALONE:
        few = "" if round(top.share or 0.0, 2) >= MOST else f" ({found.carry_most} carry {percent(MOST, '.0f')})"
        return f"{largest} carries {most} of {name}'s squared error over {of}{few}; {_site_there(found, top)}"
    layers = {h.layer for h in known}
    if found.carry_most <= _FEW * len(known) or (len(layers) > 1 and len({h.layer for h in carriers}) == 1):
        named = {(h.layer, h.head) for h in carriers}
        those = head_names(named)
        # With all their sequences, which the name does not tell apart.
        share = percent(sum(h.share or 0.0 for h in known if (h.layer, h.head) in named), ".0f")
        verb = "carries" if len(named) == 1 else "carry"
        said = f"{those} {verb} {share} of {name}'s squared error over {of}, {largest} the largest part ({most})"
        return f"{said}; {_site_there(found, top)}"
    most_of = f"{found.carry_most} of {of} carry {percent(MOST, '.0f')} of it"
    if found.carry_most == len(known):
        most_of = f"all {of} carry a part"
    said = f"{name}'s squared error is spread: {most_of}, {largest} the largest ({most})"
    return f"{said}; {_sites_of_all(found) if found.sites else _unnamed(top)}"


def _count(known: Sequence[HeadError]) -> str:
    """How many heads there are, and of which layers; sequences of one head count each."""
    # Captures that do not state their layer are of one each.
    heads = {(h.source if h.layer is None else h.layer, h.head) for h in known}
    each = f"{len(known)} sequences of " if len(known) > len(heads) else ""
    return f"{each}{plural(len(heads), 'head')}{_layers(known)}"


def _layers(heads: Sequence[HeadError]) -> str:
    layers = sorted({h.layer for h in heads if h.layer is not None})
    return f" of layer{'s' if len(layers) > 1 else ''} {ranges(layers)}" if layers else ""


def _words(found: ErrorMap, site: str) -> str:
    return next(s.words for s in found.sites if s.site == site).removeprefix("the ")


def _unnamed(head: HeadError) -> str:
    return f"no site is named there: {head.reason}"


def _site_there(found: ErrorMap, head: HeadError) -> str:
    if head.site is None or head.site_share is None:
        return _unnamed(head)
    first = f"the {_words(found, head.site)} ({percent(head.site_share, '.0f')})"
    if head.site_share >= ALONE or head.second is None:
        return f"{first} makes most of it there" if head.site_share >= ALONE else f"{first} comes first there"
    second = f"the {_words(found, head.second)} ({percent(head.second_share, '.0f')})"
    return f"no site alone makes it there: {first} and {second} come first"


def _sites_of_all(found: ErrorMap) -> str:
    first = found.sites[0]
    named = f"the {first.words.removeprefix('the ')}"
    share = percent(first.share, ".0f")
    said = (
        f"{named} makes {share} of it" if first.share >= ALONE else f"no site makes half of it, first {named} ({share})"
    )
    left = found.not_attributed
    if left >= ALONE:
        return f"{percent(left, '.0f')} of it lies in heads that are not attributed"
    return f"{said}; {percent(left, '.0f')} is not attributed" if left >= _TOLD else said


def sentences(found: ErrorMap) -> Iterator[str]:
    """How far off the heads are, which sites and layers carry how much, and what is not attributed."""
    name, known = SYMBOLS[found.quantity], found.known
    if len(known) > 1 and found.relative is not None:
        off = sorted(known, key=lambda h: -(h.relative or 0.0))
        middle, furthest = percent(found.median), names_of(found)[id(off[0])]
        yield (
            f"{name} of these heads together is {percent(found.relative)} off; by its own size {furthest} is "
            f"furthest off ({percent(off[0].relative)}), the median {middle}."
        )
    if any(not h.captured for h in known):
        yield _emulated(known)
    parts = [f"{s.site} {percent(s.share, '.0f')}" for s in found.sites if abs(s.share) >= _TOLD]
    if parts:
        yield f"By site: {listed(parts, _PARTS)}."
    layers = by_layer(known)
    if len(layers) > 1:
        ordered = sorted(layers.items(), key=lambda layer: -(part_of(layer[1]) or 0.0))
        yield "By layer: " + listed([f"{_layer(n)} {percent(part_of(h), '.0f')}" for n, h in ordered], _PARTS) + "."
    yield from unattributed(found)
    alike: dict[str, list[str]] = {}
    for note in found.notes:
        alike.setdefault(re.sub(r"[\d.]+(e[+-]?\d+)?", "", note), []).append(note)
    for first, *more in alike.values():
        yield f"{first.rstrip('.')}{f' (and {len(more)} likewise)' if more else ''}."


def _emulated(known: Sequence[HeadError]) -> str:
    which = [h for h in known if not h.captured]
    of = "" if len(which) == len(known) else f" of {plural(len(which), 'head')}"
    return f"The errors{of} are those of the emulated recipe: the kernel's own were not captured."


def unattributed(found: ErrorMap) -> Iterator[str]:
    """The heads of which no site is named, by the reason."""
    alike: dict[str, list[HeadError]] = {}
    for head in found.heads:
        if head.open:
            # Numbers differ from head to head.
            alike.setdefault(_NUMBERS.split(head.reason)[0], []).append(head)
    for heads in [*alike.values()][:_PARTS]:
        part = part_of(heads)
        size = "error not known" if part is None else f"{percent(part, '.2g')} of the error"
        such = "" if len(heads) == 1 else f" (the first of {len(heads)})"
        yield (
            f"Not attributed: {head_names({(h.layer, h.head) for h in heads})} ({size}): {heads[0].reason}"
            f"{such if len({h.reason for h in heads}) > 1 else ''}."
        )
    if left := sum(len(heads) for heads in [*alike.values()][_PARTS:]):
        yield f"Not attributed: {plural(left, 'head')} more; --json says why."


def tables(found: ErrorMap) -> Iterator[RenderableType]:
    """The heads that carry most, and all heads layer by layer, for a terminal."""
    name = SYMBOLS[found.quantity]
    shown = found.heads[: max(min(found.carry_most, _ROWS), 5)]
    if len(found.heads) <= _ROWS:
        shown = found.heads
    figures = layout.figures(["part", "so far", f"{name}\noff"])
    table = layout.table(Column("head", no_wrap=True), *figures, "site, with its part of that", collapse=False)
    reached, names = 0.0, names_of(found)
    for head in shown:
        reached += head.share or 0.0
        so_far = DASH if head.share is None else percent(reached, ".0f")
        table.add_row(names[id(head)], percent(head.share, ".2g"), so_far, percent(head.relative, ".2g"), _cell(head))
    yield layout.indented(table, expand=False)
    if rest := found.heads[len(shown) :]:
        known = [h.share for h in rest if h.share is not None]
        sites = Counter(h.site or _unattributed(h) for h in rest)
        counted = listed([f"{count} {site}" for site, count in sites.most_common()], _PARTS)
        yield layout.paragraph(f"  and {len(rest)} more, {percent(sum(known), '.2g')} together: {counted}", "dim")
    layers = by_layer(found.heads)
    if len(layers) > 1 or len(found.heads) > _ROWS:
        yield Text("")
        yield layout.Sized(partial(_layer_table, found))


def names_of(found: ErrorMap) -> dict[int, str]:
    """The heads by name, with their files where several captures have one of that name."""
    times = Counter(h.name for h in found.heads)
    return {id(h): h.name if times[h.name] == 1 else f"{h.name} {file_name(h.source)}" for h in found.heads}


def _layer_table(found: ErrorMap, options: ConsoleOptions) -> Iterator[RenderableType]:
    """A row a layer: its heads as blocks, by the logarithm of their part."""
    characters, layers = layout.blocks(options), by_layer(found.heads)
    cells = {(n, h): part_of(same) for n, heads in layers.items() for h, same in _by_head(heads).items()}
    levels = dict(zip(cells, log_levels(list(cells.values())), strict=True))
    columns = sorted({head for _, head in cells})
    table = layout.table(
        Column("layer", no_wrap=True), Column(f"heads {columns[0]}–{columns[-1]}", no_wrap=True),
        *layout.figures(["part"]), Column("largest", no_wrap=True), "first site of its heads",
    )  # fmt: skip
    for n, heads in layers.items():
        drawn = "".join(" " if (v := levels.get((n, h))) is None else characters[v] for h in columns)
        sites = Counter(h.site or _unattributed(h) for h in heads)
        said = ", ".join(f"{site} {count}" for site, count in sites.most_common(_PARTS))
        table.add_row(_layer(n), drawn, percent(part_of(heads), ".2g"), heads[0].name, said)
    yield layout.indented(table, expand=False)
    yield layout.indented(layout.note("blocks: a head's part of the squared error (height: logarithm)"))


def site_of(head: HeadAttribution) -> str:
    """The guilty site of one head, in a table."""
    found = entry_of(Placed("", None, head))
    return DASH if found.site is None else _cell(found)


def _cell(head: HeadError) -> str:
    if head.site is None or head.site_share is None:
        return f"{DASH} {_unattributed(head)}"
    said = f"{head.site} {percent(head.site_share, '.0f')}"
    return said if alone(head) else f"{said}, {head.second} {percent(head.second_share, '.0f')}"


def _unattributed(head: HeadError) -> str:
    return "not attributed" if head.open else "no error"


def by_layer(heads: Sequence[HeadError]) -> dict[int | None, list[HeadError]]:
    """The heads of each layer, the layers in order."""

    def of(head: HeadError) -> int:
        return -1 if head.layer is None else head.layer

    return {own[0].layer: own for _, same in groupby(sorted(heads, key=of), of) if (own := list(same))}


def _by_head(heads: Sequence[HeadError]) -> dict[int, list[HeadError]]:
    found: dict[int, list[HeadError]] = {}
    for head in heads:
        found.setdefault(head.head, []).append(head)
    return found


def part_of(heads: Sequence[HeadError]) -> float | None:
    """Their part of the error of all heads; None where the error of none is known."""
    known = [h.share for h in heads if h.share is not None]
    return sum(known) if known else None


def _layer(number: int | None) -> str:
    return DASH if number is None else f"L{number}"


def alone(head: HeadError) -> bool:
    """Whether its site makes most of its error."""
    return head.second is None or (head.site_share or 0.0) >= ALONE


def steps_table(maps: Sequence[ErrorMap]) -> tuple[tuple[str, ...], ...]:
    """A row a step of one quantity, the header first."""
    header = ("step", f"{SYMBOLS[maps[0].quantity]} error", "heads", "carry 90 %", "largest", "its part", "site there")
    rows = [header]
    for one in sorted(maps, key=lambda m: -1 if m.step is None else m.step):
        top = one.heads[0]
        rows.append((
            DASH if one.step is None else str(one.step), percent(one.relative), str(len(one.known)),
            str(one.carry_most), top.name, percent(top.share, ".0f"), _cell(top),
        ))  # fmt: skip
    return tuple(rows)
