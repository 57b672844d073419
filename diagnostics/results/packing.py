"""Many JSON records of one shape as columns: every key once, like numbers side by side, a third smaller compressed.

A column is the list of its values; for objects of the same keys {"each": a column of every key}, for lists of the same
length {"items": a column of every place}. ``static/core.js`` reads it too.
"""

from __future__ import annotations

from typing import Any


def packed(records: list[Any]) -> Any:
    """The records as columns."""
    first = records[0] if records else None
    if isinstance(first, dict) and first and all(isinstance(r, dict) and r.keys() == first.keys() for r in records):
        return {"each": {key: packed([r[key] for r in records]) for key in first}}
    if isinstance(first, list) and first and all(isinstance(r, list) and len(r) == len(first) for r in records):
        return {"items": [packed([r[i] for r in records]) for i in range(len(first))]}
    return records


def unpacked(columns: Any) -> list[Any]:
    """The records that ``packed`` was given. Raises ValueError, KeyError or TypeError for what it never wrote."""
    if isinstance(columns, list):
        return columns
    if "each" in columns:
        parts = {key: unpacked(column) for key, column in columns["each"].items()}
        return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
    return [list(values) for values in zip(*map(unpacked, columns["items"]), strict=True)]
