"""What the first head of a capture shows of its kernel's rounding, which is tried first on the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, get_ident
from typing import NamedTuple

from attn_diag.head.fp32_in_bf16 import EXPLAINED

# Parts of the error, squared: so many times as much as of the first head, or so little.
_AS_LITTLE, _LITTLE = 2.0, 1 / 16


class Shown(NamedTuple):
    """A way of ``from_lse.unpublished`` that explains a quantity."""

    way: str
    """Which."""
    left: float
    """The part of the error that it leaves, squared."""
    reproducing: tuple[str, ...] | None
    """The ways and recipes that reproduce most of it; None: not asked, as nothing stands out."""

    @property
    def limit(self) -> float:
        """Another head is not compared with other ways where this one leaves so much at most."""
        return min(max(_AS_LITTLE * self.left, _LITTLE), EXPLAINED)


class ShownWays:
    """Of one capture, by observation and quantity; of several threads the others wait until its first head is done."""

    def __init__(self) -> None:
        self._found = dict[tuple[str, str], Shown]()
        self._done, self._thread = Event(), 0

    @contextmanager
    def shown_here(self) -> Iterator[None]:
        """This thread has the first head, and has done with it as the block ends."""
        self._thread = get_ident()
        self._done.clear()
        try:
            yield
        finally:
            self._done.set()

    def of(self, observation: str, *, first: bool) -> ShownOfHead:
        """What a head, the first or another, is told, or tells."""
        return ShownOfHead(self, observation, first)

    def look(self, observation: str, quantity: str) -> Shown | None:
        """What is known."""
        if get_ident() != self._thread:
            self._done.wait()
        return self._found.get((observation, quantity))

    def put(self, observation: str, quantity: str, shown: Shown) -> None:
        """Let others know."""
        self._found[observation, quantity] = shown


class ShownOfHead(NamedTuple):
    """The same for one observation of one head."""

    ways: ShownWays
    """Of its capture."""
    observation: str
    """Which observation."""
    first: bool
    """Whether it is the head that shows, and not one that looks."""

    def look(self, quantity: str) -> Shown | None:
        """What the first head showed; None for itself."""
        return None if self.first else self.ways.look(self.observation, quantity)

    def put(self, quantity: str, shown: Shown) -> None:
        """Of the first head: let others know."""
        if self.first:
            self.ways.put(self.observation, quantity, shown)
