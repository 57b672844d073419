"""Which observation, heads and batch items of a capture are looked at."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

from attn_diag.errors import InputError
from attn_diag.results.wording import between

if TYPE_CHECKING:
    from attn_diag.captures.capture import Capture

# So many missing heads are named; more are only hinted at.
_NAMED_MISSING = 4


@dataclass(frozen=True)
class Ranges(Collection[int]):
    """The whole numbers of several ranges, in their order; never written out, a range may be as long as it likes."""

    text: str
    """What the user wrote."""
    parts: tuple[range, ...]
    """The ranges, by where they start."""

    @classmethod
    def parse(cls, option: str, value: str) -> Ranges:
        """From an option's value such as "0,3-5". Raises InputError naming both where it cannot be read."""
        try:
            parts = tuple(_range(part.strip()) for part in value.split(","))
        except ValueError:
            raise InputError(f"{option} takes numbers and ranges such as 0,3-5, got {value!r}") from None
        return cls(f"{option} {value}", tuple(sorted(parts, key=lambda part: part.start)))

    def __contains__(self, item: object) -> bool:
        # A range compares anything but an int with its numbers, one after the other.
        return isinstance(item, int) and any(item in part for part in self.parts)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Selection:
    """What of a capture to look at; None for all."""

    observation: str | None = None
    """Its name."""
    heads: frozenset[int] | Ranges | None = None
    """The model's numbers of the heads."""
    batches: frozenset[int] | Ranges | None = None
    """Indices of the batch items."""


def select_observations(capture: Capture, wanted: str | None) -> list[str]:
    """The observation of that name, or all. Raises InputError where there is none of that name."""
    known = list(capture.observations)
    if wanted is None:
        return known
    if wanted not in known:
        raise InputError(f"{capture.source}: no observation {wanted!r}; it has {', '.join(known) or 'none'}")
    return [wanted]


def select_heads(capture: Capture, selection: Selection) -> tuple[list[int], list[int]]:
    """The indices in the capture of the heads and batch items selected. Raises InputError for what is not there."""
    heads = _select(capture, range(capture.q_heads), selection.heads, "head", capture.metadata.head_offset)
    return heads, _select(capture, range(capture.batch), selection.batches, "batch item", 0)


def select_place(capture: Capture, batch: int, head: int | None) -> tuple[int, int]:
    """Where one head of one batch item lies in a capture.

    Args:
        capture: The capture that holds it.
        batch: Index of the batch item.
        head: The model's number of the head; None for the capture's first.

    Returns:
        The index of the batch item and that of the head, as ``Capture.read`` takes them.

    Raises:
        InputError: The capture lacks the head or the batch item; the message names those that it holds.
    """
    wanted = Selection(heads=None if head is None else frozenset({head}), batches=frozenset({batch}))
    heads, batches = select_heads(capture, wanted)
    return batches[0], heads[0]


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
        whose = f" (the model's numbers: its head_offset is {offset})" if offset else ""
        raise InputError(
            f"{capture.source}: no {what} {listed}; the capture has {between(numbers[0], numbers[-1])}{whose}{asked}"
        )
    return [i for i in available if i + offset in wanted]


def _range(text: str) -> range:
    first, dash, last = text.partition("-")
    last = last if dash else first
    if not (first.isdecimal() and last.isdecimal()):
        raise ValueError(text)
    # int() refuses thousands of digits with a ValueError of its own.
    numbers = range(int(first), int(last) + 1)
    if not numbers:
        raise ValueError(text)
    return numbers
