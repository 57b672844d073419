"""What was predicted of every mitigation beside the fork that trained with it, and the check of the blamed site."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from forks import Fork

from attn_diag.kernels.recipe import BACKWARD


@dataclass(frozen=True)
class Row:
    """A mitigation, what was predicted of it, and its fork; None: not run.

    ``left``: error of dQ over dQ, median over sequences (``low``, ``high``: range); ``left_by``: "what-if", or
    "attribute" for a fork that repairs one site and is none of what-if's candidates; infinite where an output is not
    finite. ``rank``: median over sequences, None where what-if does not rank it in all of them. ``sites``: rounding
    sites that it repairs. ``repaired``: what attribution says the repair of that site leaves, where it is one.
    """

    mitigation: str
    kind: str
    left: float | None
    low: float | None
    high: float | None
    left_by: str | None
    removed: float | None
    left_dw_q: float | None
    rank: float | None
    equivalence: str | None
    sites: tuple[str, ...]
    repaired: float | None
    fork: Fork | None


@dataclass(frozen=True)
class SiteCheck:
    """Whether the repair of the blamed site removes the failure, and that of another does not; None: not known.

    Foreseen by ``attribute``, medians over the sequences: dQ's ``error``, with the site ``repaired``, with its errors'
    signs drawn at random (``sham``), and the largest ``inert_change`` that another site's repair makes which reaches
    nothing. ``repair``: the fork that repairs it, ``others``: those that repair other sites, and whether they failed in
    training.
    """

    guilty: str
    sequences: int
    of: int
    error: float
    repaired: float
    sham: float | None
    inert_change: float
    repair: str | None
    repair_failed: bool | None
    others: dict[str, bool | None]
    control_failed: bool | None
    holds: bool | None
    words: str


def rows_of(chain: Mapping[str, Any], forks: Mapping[str, Fork], headers: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Every candidate of what-if, the control and forks that are no candidates; the least predicted error first.

    ``headers``: of the forks' logs by mitigation, which say what a fork that what-if does not know changes.
    """
    candidates = dict(chain["what_if"]["candidates"])
    rows = [_row("control", chain["what_if"]["baseline"] | {"kind": "control"}, (), chain, forks.get("control"))]
    for name, candidate in candidates.items():
        rows.append(_row(name, candidate, repaired_sites(candidate["changes"], chain), chain, forks.get(name)))
    for name, fork in forks.items():
        if name not in candidates and name != "control":
            changes = changed_in(headers["control"], headers[name])
            rows.append(_row(name, None, repaired_sites(changes, chain), chain, fork))

    def order(row: Row) -> tuple[bool, float]:
        return row.rank is None and row.left_by != "attribute", math.inf if row.left is None else row.left

    return sorted(rows, key=order)


def _row(
    name: str, candidate: Mapping[str, Any] | None, sites: Collection[str], chain: Mapping[str, Any], fork: Fork | None
) -> Row:
    repaired = None
    if len(sites) == 1:
        repaired = median(chain["attribute"]["sites"][next(iter(sites))]["dq"]["repaired"])
    left, left_by, source = left_of(name, candidate, sites, chain)
    ranks = [None] if candidate is None else candidate["rank"]
    removed = None if candidate is None else candidate["removed"]
    dw_q = None if candidate is None else candidate["errors"]["dw_q"]
    return Row(
        mitigation=name,
        kind="fork" if candidate is None else candidate["kind"],
        left=left,
        low=None if source is None else min(source),
        high=None if source is None else max(source),
        left_by=left_by,
        removed=_median(removed),
        left_dw_q=_median(dw_q),
        rank=None if any(rank is None for rank in ranks) or name == "control" else median(ranks),
        equivalence=None if candidate is None else _worst(candidate["equivalence"]),
        sites=tuple(sites),
        repaired=repaired,
        fork=fork,
    )


def left_of(
    name: str, candidate: Mapping[str, Any] | None, sites: Collection[str], chain: Mapping[str, Any]
) -> tuple[float | None, str | None, list[float] | None]:
    """The predicted error of dQ, who predicted it, and its value in each sequence."""
    if candidate is not None:
        values = candidate["errors"]["dq"] if name == "control" else candidate["left"]
        found = [math.inf if math.isnan(v) else v for v in values if v is not None]
        return (median(found), "what-if", found) if found else (None, None, None)
    if len(sites) == 1:
        found = list(chain["attribute"]["sites"][next(iter(sites))]["dq"]["repaired"])
        return median(found), "attribute", found
    return None, None, None


def repaired_sites(changes: Mapping[str, str], chain: Mapping[str, Any]) -> tuple[str, ...]:
    """The rounding sites, of those that act, that changes of the form "bf16 -> fp32" make exact; empty where anything
    else changes too (a schedule, where delta comes from): that is no repair of sites alone."""
    acting = chain["attribute"]["sites"]
    exact = [field for field, words in changes.items() if words.endswith("-> fp32") and field in acting]
    return tuple(exact) if len(exact) == len(changes) else ()


def changed_in(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """What a fork's header says otherwise than the control's, forward and backward: field -> "before -> after"."""
    found: dict[str, str] = {}
    for way in ("forward", "backward"):
        old, new = before[way], after[way]
        if isinstance(old, dict) and isinstance(new, dict):
            for words in dict.fromkeys([*old, *new]):
                field = words.replace(" ", "_")
                # Each recipe is run one way only: the other way's fields do nothing.
                if (field in BACKWARD) == (way == "backward") and old.get(words) != new.get(words):
                    found[field] = f"{old.get(words)} -> {new.get(words)}"
    return found


def _median(values: Sequence[float | None] | None) -> float | None:
    known = [math.inf if math.isnan(v) else v for v in values or () if v is not None]
    return median(known) if known else None


def _worst(statuses: Sequence[str | None]) -> str | None:
    order = ("exact", "nearly exact", "changes the model", "breaks down")
    known = [s for s in statuses if s is not None]
    return max(known, key=order.index) if known else None


def separation(rows: Sequence[Row]) -> dict[str, Any]:
    """The most that a fork which kept its trend was predicted to leave, and the least of one that left it."""
    ran = [(row.left, row.mitigation, row.fork.failed) for row in rows if row.fork and row.left is not None]
    kept, failed = [r for r in ran if r[2] is False], [r for r in ran if r[2]]
    most, least = max(kept, default=None), min(failed, default=None)
    return {
        "kept_most": None if most is None else {"mitigation": most[1], "left": most[0]},
        "failed_least": None if least is None else {"mitigation": least[1], "left": least[0]},
        "separated": None if most is None or least is None else most[0] < least[0],
    }


def site_check(chain: Mapping[str, Any], rows: Sequence[Row]) -> SiteCheck:
    """The site that most sequences blame for dQ; its repair is the fork that repairs it and least besides."""
    attributed = chain["attribute"]
    blamed = attributed["guilty"]["dq"]
    guilty, count = Counter(blamed).most_common(1)[0]
    effects = attributed["sites"][guilty]["dq"]
    repairs = sorted((row for row in rows if guilty in row.sites), key=lambda row: len(row.sites))
    others = {row.mitigation: row for row in rows if row.sites and guilty not in row.sites}
    run = [row for row in repairs if row.fork is not None]
    # Without a run the simplest repair is named, as one that was not run.
    chosen = next(iter(run or repairs), None)
    control = next((row.fork for row in rows if row.mitigation == "control"), None)
    repair_failed = None if chosen is None or chosen.fork is None else chosen.fork.failed
    tried = {name: None if row.fork is None else row.fork.failed for name, row in others.items()}
    failed = [value for value in tried.values() if value is not None]
    holds = None
    if repair_failed is not None and failed and control is not None:
        holds = bool(control.failed) and not repair_failed and all(failed)
    return SiteCheck(
        guilty=guilty,
        sequences=count,
        of=len(blamed),
        error=median(attributed["totals"]["dq"]["error"]),
        repaired=median(effects["repaired"]),
        sham=_median(effects["sham"]),
        inert_change=median(attributed["inert"]["largest_change"]),
        repair=None if chosen is None else chosen.mitigation,
        repair_failed=repair_failed,
        others=tried,
        control_failed=None if control is None else control.failed,
        holds=holds,
        words=_site_words(guilty, count, len(blamed), chosen, others),
    )


def _site_words(guilty: str, count: int, of: int, chosen: Row | None, others: Mapping[str, Row]) -> str:
    def said(fork: Fork | None) -> str:
        if fork is None:
            return "not run"
        return f"cut off at {fork.until}" if fork.cut_off else "failed" if fork.failed else "kept its trend"

    words = f"attribute blames {guilty} in {count} of {of} sequences"
    if chosen is None:
        return f"{words}; no mitigation repairs it"
    words += f"; {chosen.mitigation} (repairs {', '.join(chosen.sites)}): {said(chosen.fork)}"
    tried = "; ".join(f"{name}: {said(row.fork)}" for name, row in others.items())
    return f"{words}. Repairs of other sites: {tried or 'none'}"
