"""The page's section on the guilty rounding: what the tool said of the capture at the alarm (``chain_ARM.json``).

Lists in that file have one item a sequence of the capture; the page shows medians, and ranges beside them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from page_record import Record
from values import at, listed, middle, number, numbers, percent, spread

from attn_diag.reports.charts import Axis, Chart, Section, Series
from attn_diag.reports.words import DASH

_COLUMNS = (
    "Medians over the sequences, with their range. Alone: dQ's error with this site as the only one that rounds; "
    "all but it: with this site exact; random signs: with its own errors' signs drawn at random."
)
GRADIENTS = {"dq": "dQ", "dw_q": "dW_Q"}


def chain_of(record: Record, arm: str) -> Any:
    """The arm's document, None where there is none."""
    return record.documents.get(f"chain_{arm}")


def guilty(chain: Any, quantity: str = "dq") -> str | None:
    """The site that most sequences name, None where it is not known."""
    named = [site for site in at(chain, "attribute", "guilty", quantity) or () if isinstance(site, str)]
    return Counter(named).most_common(1)[0][0] if named else None


def sites(record: Record, arm: str, title: str) -> tuple[Section, ...]:
    """Empty without the arm's document, or where it attributes nothing."""
    chain = chain_of(record, arm)
    found = at(chain, "attribute", "sites")
    if not isinstance(found, dict) or not found:
        return ()
    order = sorted(found, key=lambda site: -(middle(at(found, site, "dq", "share")) or 0.0))
    charts = [_shares(arm, chain, order), *_sham(arm, chain), *_repairs(arm, chain)]
    return (
        Section(title, tuple(_said(chain)), charts=tuple(charts)),
        Section(f"{title}: site by site", (_COLUMNS,), _table(chain, order)),
    )


def where(chain: Any) -> str:
    """ "step 501, layer 1, head 5, 8 sequences of 1,024 tokens"."""
    parts = [f"{name} {at(chain, name)}" for name in ("step", "layer", "head") if at(chain, name) is not None]
    sequences, rows = at(chain, "sequences"), at(chain, "rows")
    if sequences:
        parts.append(f"{sequences} sequence{'s' if sequences != 1 else ''}" + (f" of {rows:,} tokens" if rows else ""))
    return ", ".join(parts)


def _said(chain: Any) -> list[str]:
    said = [
        f"One capture, taken right after the alarm: {where(chain)}. Nothing that follows has seen how training went on."
    ]
    labels = at(chain, "inspect", "labels") or ()
    factor, off, weights = (
        number(at(chain, "inspect", *path))
        for path in (
            ("noise_factor",),
            ("propagation", "dq", "relative_error"),
            ("propagation", "dw_q", "relative_error"),
        )
    )
    if factor is not None:
        said.append(
            f"inspect: {listed(labels) or 'no label'}; delta's error is {factor:.3g} times what one correct rounding "
            f"of O makes; dQ is {percent(off)} off, dW_Q {percent(weights)}."
        )
    said += _identified(chain)
    words = [
        f"{of} by {text}" for key, of in GRADIENTS.items() if (text := at(chain, "attribute", "guilty_words", key))
    ]
    if words:
        said.append(f"attribute: the largest part of the error of {'; of '.join(words)}.")
    biased = [site for site in at(chain, "attribute", "biased", "dq") or () if site]
    blamed = guilty(chain)
    sham = middle(at(chain, "attribute", "sites", blamed or "", "dq", "sham"))
    random = "" if sham is None else f" With random signs in place of the errors of {blamed} dQ is {percent(sham)} off."
    means = (
        f"Sites whose mean error of dQ is significant: {listed(sorted(set(biased)))}."
        if biased
        else "No site's mean error of dQ is significant."
    )
    said.append(f"Size or bias? {means}{random}")
    return said


def _identified(chain: Any) -> list[str]:
    """The recipe that most sequences name, or that they name none."""
    recipes = at(chain, "identify", "recipes")
    if not recipes:
        return []
    name, count = Counter(" or ".join(names) for names in recipes).most_common(1)[0]
    agreement = percent(middle(at(chain, "identify", "agreement")), 5)
    who = f"in {count} of {len(recipes)} sequences"
    if not name:
        verdict = next(iter(at(chain, "identify", "verdict") or ()), "no recipe that it knows.")
        return [f"identify, {who}, without being told: {verdict} (median {agreement})"]
    return [f"identify: {name} {who}, without being told; it reproduces {agreement} of O's elements bit for bit."]


def _shares(arm: str, chain: Any, order: list[str]) -> Chart:
    found = at(chain, "attribute", "sites")
    places = tuple(map(float, range(len(order))))
    series = []
    for key, of in GRADIENTS.items():
        shares = [middle(at(found, site, key, "share")) for site in order]
        if any(share is not None for share in shares):
            known = [(share, place) for share, place in zip(shares, places, strict=True) if share is not None]
            series.append(Series(f"of {of}'s error", tuple(x for x, _ in known), tuple(y for _, y in known), "bars"))
    return Chart(
        f"{arm}-sites", "Which rounding makes the error?",
        "Shapley values of the squared error, which add up to 1; medians over the capture's sequences.",
        Axis("share of the squared error"), Axis("", names=tuple(_words(found, site) for site in order)), tuple(series),
    )  # fmt: skip


def _sham(arm: str, chain: Any) -> list[Chart]:
    """dQ's error with the guilty site repaired, beside shams."""
    site = guilty(chain)
    effects = at(chain, "attribute", "sites", site or "", "dq")
    total = middle(at(chain, "attribute", "totals", "dq", "error"))
    inert = at(chain, "attribute", "inert", "site")
    change = middle(at(chain, "attribute", "inert", "largest_change"))
    bars = [
        ("as it is", total),
        (f"{site} exact", middle(at(effects, "repaired"))),
        (f"{site}: errors with random signs", middle(at(effects, "sham"))),
        # The largest change that repairing it makes is at most this.
        (f"sham repair: {inert} exact", None if total is None or change is None else total + change),
    ]
    known = [(name, value) for name, value in bars if value is not None]
    if len(known) < 2:
        return []
    caption = (
        f"‖error of dQ‖ / ‖dQ‖, medians. Repairing {site} removes what the repair of a site that reaches nothing does "
        "not. Random signs keep the size of its errors and take their bias."
    )
    series = Series(
        "dQ off by", tuple(v for _, v in known), tuple(map(float, range(len(known)))), "bars", tone="second"
    )
    return [Chart(f"{arm}-sham", "Repaired, and not", caption, Axis("relative error of dQ"),
                  Axis("", names=tuple(n for n, _ in known)), (series,))]  # fmt: skip


def _repairs(arm: str, chain: Any) -> list[Chart]:
    """What is left when sites are made exact one after the other, in each sequence the guiltiest first."""
    runs = [run for run in at(chain, "attribute", "repairs") or () if run]
    if not runs:
        return []
    names = ["nothing exact"]
    for i in range(max(map(len, runs))):
        site, count = Counter(at(run, i, "site") for run in runs if len(run) > i).most_common(1)[0]
        names.append(f"{i + 1}: {site}" + ("" if count == len(runs) else f" ({count} of {len(runs)})"))
    series = []
    for key, of in GRADIENTS.items():
        left = [middle([at(run, i, "left", key) for run in runs]) for i in range(len(names) - 1)]
        values = [middle(at(chain, "attribute", "totals", key, "error")), *left]
        known = [(value, float(i)) for i, value in enumerate(values) if value is not None]
        if known:
            series.append(Series(of, tuple(v for v, _ in known), tuple(i for _, i in known), "bars"))
    caption = (
        "What is left of the error when one site after the other becomes exact, in each sequence the one with the "
        "largest share first; medians over the sequences. Named: the site that most of them have at that place."
    )
    axes = Axis("relative error"), Axis("", names=tuple(names))
    return [Chart(f"{arm}-repairs", "Repaired one after the other", caption, *axes, tuple(series))] if series else []


def _words(found: Any, site: str) -> str:
    form = at(found, site, "format")
    return f"{at(found, site, 'words') or site} ({site}{f', {form}' if form else ''})"


def _table(chain: Any, order: list[str]) -> tuple[tuple[str, ...], ...]:
    found = at(chain, "attribute", "sites")
    head = ("site", "share of dQ's error", "share of dW_Q's", "dQ off: alone", "all but it", "random signs")
    rows = [
        (_words(found, site), spread(at(found, site, "dq", "share")), spread(at(found, site, "dw_q", "share")),
         *(spread(at(found, site, "dq", name)) if numbers(at(found, site, "dq", name)) else DASH
           for name in ("alone", "repaired", "sham")))
        for site in order
    ]  # fmt: skip
    return (head, *rows)
