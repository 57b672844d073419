"""Reports on recipes of linear attention: which one it was, which sites make the errors, what others would leave."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from attn_diag.reports import layout, words
from attn_diag.reports.lead import OK, lead, on_head
from attn_diag.results.linear_recipes import LinearAttribution, LinearCandidate, LinearIdentification, LinearWhatIf
from attn_diag.results.wording import DASH, LINEAR_SYMBOLS, number, percent, plural

_MOST = 8


def identification_renderables(found: LinearIdentification) -> Iterator[RenderableType]:
    """The report, piece by piece."""
    verdict = OK if found.outcome == "identified" else found.outcome.upper()
    told = [f"{found.operator}, head {found.head} of {found.source}; {plural(found.tried, 'recipe')} were run."]
    following = on_head("attribute", found.source, found.head, found.observation)
    yield from lead(verdict, found.verdict, told, following if found.recipes else None)
    table = layout.table("recipe", "bits of O", "left of its error", "x the best")
    for match in found.candidates[:_MOST]:
        beside = (
            DASH if match.factor is None else number(match.factor) + ("" if match.told_apart else " (not told apart)")
        )
        table.add_row(match.recipe, percent(match.bits), percent(match.left), beside)
    yield layout.indented(table)
    yield layout.note(words.tool_line(found.tool))


def attribution_renderables(found: LinearAttribution) -> Iterator[RenderableType]:
    """The report, piece by piece."""
    first = found.reasons[0] if found.reasons else "No site makes half of any error."
    yield from lead("FOUND", first, found.reasons[1:4])
    for head in found.heads[:_MOST]:
        yield Text("")
        yield layout.heading(
            f"{found.operator} in {found.source}: head {head.head}, {found.recipe} ({found.recipe_from})"
        )
        table = layout.table("quantity", "captured", "recipe", *(site.site for site in head.sites), "fp32")
        for quantity, total in head.totals.items():
            captured = head.captured.get(quantity)
            table.add_row(
                LINEAR_SYMBOLS.get(quantity, quantity), DASH if captured is None else percent(captured), percent(total),
                *(percent(site.effects[quantity].share, ".2g") for site in head.sites),
                percent(head.arithmetic[quantity], ".2g"),
            )  # fmt: skip
        yield layout.indented(table)
    if len(found.heads) > _MOST:
        yield layout.note(f"… and {plural(len(found.heads) - _MOST, 'head')} more (--json)")
    yield layout.note(
        "A site's column: its share (Shapley value) of the squared error; fp32: that of fp32's arithmetic."
    )
    yield layout.note(words.tool_line(found.tool))


def what_if_renderables(found: LinearWhatIf) -> Iterator[RenderableType]:
    """The report, piece by piece."""
    yield from lead("FOUND", found.summary[0], found.summary[1:])
    yield Text("")
    yield layout.heading(f"{found.operator} in {found.source}: head {found.head}, {found.recipe} ({found.recipe_from})")
    quantities = list(found.baseline.errors)
    table = layout.table("change", "left", *quantities, "bytes a step")

    def row(name: str, one: LinearCandidate) -> None:
        cells = (percent(one.errors.get(q)) for q in quantities)
        table.add_row(name, number(one.left), *cells, number(one.state_bytes) if one.state_bytes else DASH)

    row("as it is", found.baseline)
    for candidate in found.candidates:
        row(candidate.name, candidate)
    yield layout.indented(table)
    yield layout.note("Left: the error over the baseline's, geometric mean over the quantities. Bytes: of states.")
    yield layout.note(words.tool_line(found.tool))
