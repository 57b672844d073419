"""Small readers of JSON results: what is missing or not a number is left out, never an error and never 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from attn_diag.reports.words import DASH

# Fractions below it are not told apart.
_NOTHING = 1e-5


def at(document: Any, *path: str | int) -> Any:
    """What lies at a path of keys and indices; None where something on it is missing."""
    for key in path:
        if isinstance(document, dict) and isinstance(key, str):
            document = document.get(key)
        elif isinstance(document, list) and isinstance(key, int) and key < len(document):
            document = document[key]
        else:
            return None
    return document


def number(value: Any) -> float | None:
    """A number, also one of "NaN", "Infinity", "-Infinity"; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    return float(value) if not isinstance(value, str) or value in ("NaN", "Infinity", "-Infinity") else None


def numbers(value: Any) -> list[float]:
    """The numbers of a list (or the one that stands for a list), without NaN."""
    found = [number(item) for item in (value if isinstance(value, list) else [value])]
    return [x for x in found if x is not None and not math.isnan(x)]


def middle(value: Any) -> float | None:
    """The median of a list's numbers, None of none."""
    found = numbers(value)
    return median(found) if found else None


def percent(value: float | None, digits: int = 3) -> str:
    """A fraction in percent; words for what is not finite."""
    if value is None:
        return DASH
    return f"{100 * value:.{digits}g} %" if math.isfinite(value) else "not finite"


def signed_percent(value: Any) -> str:
    """A fraction in percent with its sign."""
    found = number(value)
    return DASH if found is None else f"{100 * found:+.1f} %"


def spread(value: Any) -> str:
    """The median of fractions in percent, and their range where there are several: "98 % (97 to 99)"."""
    found = numbers(value)
    if found and max(map(abs, found)) < _NOTHING:
        return f"below {100 * _NOTHING:g} %"
    if len(found) < 2 or not all(map(math.isfinite, found)):
        return percent(middle(found))
    return f"{percent(median(found))} ({100 * min(found):.3g} to {100 * max(found):.3g})"


def listed(words: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
