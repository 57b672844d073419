"""Which observation, heads and batch items of a capture are looked at."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from attn_diag.captures.capture import Capture
from attn_diag.captures.ranges import Ranges
from attn_diag.errors import InputError

# So many missing heads are named; more are only hinted at.
_NAMED_MISSING = 4


@dataclass(frozen=True)
class Selection:
    """Which observation and which heads (the model's numbers) and batch items to look at; None for all."""

    observation: str | None = None
    heads: frozenset[int] | Ranges | None = None
    batches: frozenset[int] | Ranges | None = None


def select_observations(capture: Capture, wanted: str | None) -> list[str]:
    """The observation of that name, or all. Raises InputError where there is none of that name."""
    known = list(capture.observations)
    if wanted is None:
        return known
    if wanted not in known:
        raise InputError(f"{capture.source}: no observation {wanted!r}; it has {', '.join(known) or 'none'}")
    return [wanted]


def select_heads(capture: Capture, selection: Selection) -> tuple[list[int], list[int]]:
    """The heads (counted within the capture) and batch items selected. Raises InputError for what is not there."""
    heads = _select(capture, range(capture.q_heads), selection.heads, "head", capture.metadata.head_offset)
    return heads, _select(capture, range(capture.batch), selection.batches, "batch item", 0)


def _select(
    capture: Capture, available: range, wanted: frozenset[int] | Ranges | None, what: str, offset: int
) -> list[int]:
    if wanted is None:
        return list(available)
    numbers = range(available.start + offset, available.stop + offset)
    named = wanted if isinstance(wanted, Ranges) else sorted(wanted)
    # Ranges may be longer than memory: a few of the missing numbers will do.
    missing = [str(i) for i in islice((i for i in named if i not in numbers), _NAMED_MISSING + 1)]
    if missing:
        listed = ", ".join(missing if len(missing) <= _NAMED_MISSING else [*missing[:-1], "…"])
        asked = f" (got {wanted})" if isinstance(wanted, Ranges) else ""
        raise InputError(f"{capture.source}: no {what} {listed}; the capture has {numbers[0]} to {numbers[-1]}{asked}")
    return [i for i in available if i + offset in wanted]
