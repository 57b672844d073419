"""The page's section on other seeds: the site that attribute blames at each one's alarm, and what its repair does."""

from __future__ import annotations

import re
from typing import Any

from page_outcomes import trained_words_of
from page_record import Record
from values import at, middle, number, percent

from attn_diag.reports.charts import Section
from attn_diag.reports.words import DASH


def seeds(record: Record, arm: str, title: str) -> Section | None:
    """From ``outcomes.json``: "ARM" and every "ARM_seedN". None where only one seed was captured."""
    everything = at(record.documents.get("outcomes"), "chains") or {}
    chains = {name: chain for name, chain in everything.items() if re.fullmatch(rf"{re.escape(arm)}(_seed\d+)?", name)}
    if len(chains) < 2:
        return None
    trained = [
        {row["mitigation"]: row for row in chain["rows"] if row["fork"] is not None} for chain in chains.values()
    ]
    common = [name for name in trained[0] if name != "control" and all(name in rows for rows in trained)]
    said = (
        "Each seed was captured at its own first alarm, and went on from there unchanged and with these changes. The "
        "predictions are of that capture alone."
    )
    lines: list[tuple[str, ...]] = [("run", "captured", "attribute blames", "unchanged", *common)]
    for (name, chain), rows in zip(chains.items(), trained, strict=True):
        lines.append((
            chain["run"], f"step {chain['step']:,}, L{chain['layer']}H{chain['head']}", _blamed(record, name, chain),
            *(_cell(rows.get(change)) for change in ("control", *common)),
        ))  # fmt: skip
    return Section(title, (said,), tuple(lines))


def _blamed(record: Record, name: str, chain: dict[str, Any]) -> str:
    site = chain["site"]
    share = middle(at(record.documents.get(f"chain_{name}"), "attribute", "sites", site["guilty"], "dq", "share"))
    return f"{site['guilty']}, {percent(share)} of dQ's squared error ({site['sequences']} of {site['of']} sequences)"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return DASH
    return f"{trained_words_of(row)}; predicted {percent(number(row['left']))}"
