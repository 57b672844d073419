"""Numbers as a user names them, such as "0,3-5", never written out: a range may be as long as it likes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain

from attn_diag.errors import InputError


@dataclass(frozen=True)
class Ranges(Collection[int]):
    """The whole numbers of several ranges, in their order. ``text`` is what the user wrote."""

    text: str
    parts: tuple[range, ...]

    @classmethod
    def parse(cls, option: str, value: str) -> Ranges:
        """From an option's value such as "0,3-5". Raises InputError naming both where it cannot be read."""
        text = f"{option} {value}"
        try:
            parts = tuple(_range(part.strip()) for part in value.split(","))
        except ValueError:
            raise InputError(f"{option} takes numbers and ranges such as 0,3-5, got {value!r}") from None
        return cls(text, tuple(sorted(parts, key=lambda part: part.start)))

    def __contains__(self, item: object) -> bool:
        # A range compares anything but an int with its numbers, one after the other.
        return isinstance(item, int) and any(item in part for part in self.parts)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __str__(self) -> str:
        return self.text


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
